"""Version rules. Pure.

A version is (run, step) plus the trainer's own label. The step never goes back within a run: a trainer that starts lower (it
resumed from an older checkpoint, or a new experiment begins) opens a new run.
"""

from __future__ import annotations

from sglang_rollout.wire.weights import Version

LONGEST_LABEL = 256
HIGHEST_STEP = 10**15
"""Above this a number is taken for a name (a hash, nanoseconds): the fleet then counts the step."""


def key(version: Version) -> tuple[int, int]:
    """What versions are ordered by."""
    return (version.run, version.step)


def newest(*versions: Version | None) -> Version | None:
    """The highest of those that are known."""
    known = [version for version in versions if version is not None]
    return max(known, key=key) if known else None


def next_version(committed: Version, label: str | None, burned: Version | None = None, next_run: int = 0) -> Version:
    """The version that an update with this label becomes.

    ``burned`` is the highest version of an update that failed after some engine had acknowledged it: that engine still
    says it holds (run, step), so the pair must never name other weights. ``next_run``: the run that somebody asked for.
    """
    last = newest(committed, burned) or committed
    number = _number(label)
    if next_run > last.run:
        run, step = next_run, 1 if number is None else number
    elif number is None:
        # No label, or a name: the fleet counts.
        run, step = (1, 1) if last.is_base else (last.run, last.step + 1)
    elif last.is_base or number <= last.step:
        run, step = last.run + 1, number
    else:
        run, step = last.run, number
    return Version(run=run, step=step, label=label if label is not None else str(step))


def history(before: list[Version], committed: Version, keep: int) -> list[Version]:
    """The versions that may be served after a commit, oldest first: ``keep`` older ones beside it. What another run
    left is of another experiment; only base, from which the first run begins, is comparable."""
    comparable = [version for version in before if key(version) < key(committed) and (version.run in (0, committed.run))]
    if committed.run > 1:
        comparable = [version for version in comparable if not version.is_base]
    older = sorted(comparable, key=key)
    return [*(older[-keep:] if keep else []), committed]


def _number(label: str | None) -> int | None:
    if label is None or len(label) > 16 or not (label.isascii() and label.isdigit()):
        return None
    number = int(label)
    return number if number <= HIGHEST_STEP else None
