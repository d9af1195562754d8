"""Version rules. Pure.

A version is (run, n) plus the trainer's own label. n never goes back within a run: a trainer that starts lower (it
resumed from an older checkpoint, or a new experiment begins) opens a new run.
"""

from __future__ import annotations

from sglang_rollout.wire.models import Version

LONGEST_LABEL = 256
HIGHEST_N = 10**15
"""Above this a number is taken for a name (a hash, nanoseconds): n is then counted by the fleet."""


def key(version: Version) -> tuple[int, int]:
    """What versions are ordered by."""
    return (version.run, version.n)


def newest(*versions: Version | None) -> Version | None:
    """The highest of those that are known."""
    known = [version for version in versions if version is not None]
    return max(known, key=key) if known else None


def next_version(committed: Version, label: str | None, burned: Version | None = None) -> Version:
    """The version that an update with this label becomes.

    ``burned`` is the highest version of an update that failed after some engine had acknowledged it: that engine still
    says it holds (run, n), so the pair must never name other weights.
    """
    last = newest(committed, burned) or committed
    number = _number(label)
    if number is None:
        # No label, or a name: the fleet counts.
        run, n = (1, 1) if last.is_base else (last.run, last.n + 1)
    elif last.is_base or number <= last.n:
        run, n = last.run + 1, number
    else:
        run, n = last.run, number
    return Version(run=run, n=n, label=label if label is not None else str(n))


def _number(label: str | None) -> int | None:
    if label is None or len(label) > 16 or not (label.isascii() and label.isdigit()):
        return None
    number = int(label)
    return number if number <= HIGHEST_N else None
