"""Version rules. Pure.

A version is (run, step) plus the trainer's own label. The step never goes back within a run: a trainer that starts lower (it resumed from
an older checkpoint, or starts a new experiment) opens a new run.
"""

from __future__ import annotations

from sglang_rollout.wire.states import Version

MAX_LABEL_CHARACTERS = 256
HIGHEST_STEP = 10**15
"""Above this a number is taken for a name (a hash, nanoseconds): the fleet then counts the step."""


def order_key(version: Version) -> tuple[int, int]:
    """Return what versions are ordered by."""
    return (version.run, version.step)


def newest(*versions: Version | None) -> Version | None:
    """Return the highest of the versions that are known."""
    known = [version for version in versions if version is not None]
    return max(known, key=order_key) if known else None


def next_version(committed: Version, label: str | None, reserved: Version | None = None, next_run: int = 0) -> Version:
    """Return the version that an update with this label becomes.

    Args:
        committed: The committed version.
        label: The trainer's label; None, or a label that is no number: the fleet counts.
        reserved: Highest version of an update that failed after an engine had acknowledged it. That engine still says that it holds
            (run, step), so the pair must never name other weights.
        next_run: The run that a trainer asked for.
    """
    last = newest(committed, reserved) or committed
    number = _number(label)
    if next_run > last.run:
        run, step = next_run, 1 if number is None else number
    elif number is None:
        # No label, or one that is no number: the fleet counts.
        run, step = (1, 1) if last.is_base else (last.run, last.step + 1)
    elif last.is_base or number <= last.step:
        run, step = last.run + 1, number
    else:
        run, step = last.run, number
    return Version(run=run, step=step, label=label if label is not None else str(step))


def history(before: list[Version], committed: Version, keep: int) -> list[Version]:
    """Return the versions that may be served after a commit, oldest first: ``keep`` older ones and the committed one.

    Versions of another run belong to another experiment. Only base, from which the first run begins, is comparable.
    """
    comparable = [version for version in before if order_key(version) < order_key(committed) and (version.run in (0, committed.run))]
    if committed.run > 1:
        comparable = [version for version in comparable if not version.is_base]
    older = sorted(comparable, key=order_key)
    return [*(older[-keep:] if keep else []), committed]


def _number(label: str | None) -> int | None:
    if label is None or len(label) > 16 or not (label.isascii() and label.isdigit()):
        return None
    number = int(label)
    return number if number <= HIGHEST_STEP else None
