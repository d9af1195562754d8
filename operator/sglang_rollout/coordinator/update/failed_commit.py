"""The calls that commit an update, and the answer that they repeat after the update has failed. Pure.

Some trainers repeat a call that failed, and take a success of the repetition for the commit. Others did not hear that their update was
given up before they committed it. So the failure is the answer until the trainer begins again: :class:`.phases.Transaction` forgets it with
the next pause, and when the next update ends.
"""

from __future__ import annotations

from typing import get_args

from sglang_rollout.coordinator.update import requests as rq
from sglang_rollout.coordinator.update.interruption import Cause, Interruption
from sglang_rollout.coordinator.update.phases import FailedCommit, Transaction, Update
from sglang_rollout.wire.record import FailedCommitRow, UpdateReason

RESTARTED = "the coordinator was restarted in the middle of the update"


def commits_by_flush(update: Update, pause: Interruption | None) -> bool:
    """Return True if a flush of all engines commits the update: its trainer has neither paused nor opened a session."""
    if update.trainer_session:
        return False
    if update.staged is not None:
        return not update.staged.is_upload and pause is None and bool(update.data)
    return pause is not None and pause.cause is Cause.UPDATE


def describe_failed_update(update: Update, pause: Interruption | None, answer: rq.Answer) -> FailedCommit:
    """Return the failure of an update for the calls that would have committed it.

    Args:
        update: The update.
        pause: The pause that a trainer or the update has requested; None: no pause.
        answer: The failure.
    """
    upload = update.staged.id if update.staged is not None and update.staged.is_upload else ""
    if update.trainer_session:
        calls: tuple[type[rq.Call], ...] = (rq.End, rq.SetLabel)
    elif upload:
        calls = (rq.CommitUpload,)
    elif commits_by_flush(update, pause):
        calls = (rq.Flush, rq.Continue, rq.CloseGroup, rq.SetLabel)
    else:
        calls = (rq.Continue, rq.CloseGroup, rq.SetLabel)
    return FailedCommit(frozenset(calls), answer, update.author, upload, frozenset(update.data))


def make_row(failed: FailedCommit | None, update: Update | None, pause: Interruption | None) -> FailedCommitRow | None:
    """Return the failure for the record; None for an upload, because the commit of an upload names its update.

    The failure of an open update is that of a coordinator that ends now.
    """
    if update is not None:
        cause = f"{RESTARTED}, and the update was given up."
        details = {"cause": cause, "reason": UpdateReason.COORDINATOR_RESTARTED.value}
        failed = describe_failed_update(update, pause, rq.Answer(400, f"{cause} Push again.", details))
    if failed is None or failed.upload:
        return None
    calls, groups = sorted(call.__name__ for call in failed.calls), sorted(failed.groups)
    answer, code = failed.answer, failed.answer.fleet.get("reason")
    return FailedCommitRow(
        calls=calls, message=answer.message, cause=str(answer.fleet.get("cause", "")), reason=UpdateReason(code) if code else None,
        author=failed.author, groups=groups,
    )  # fmt: skip


def read_row(row: FailedCommitRow) -> FailedCommit:
    """Return the failure that a record has."""
    calls = frozenset(call for call in get_args(rq.Call) if call.__name__ in row.calls)
    details = {"cause": row.cause} | ({"reason": row.reason.value} if row.reason is not None else {})
    return FailedCommit(calls, rq.Answer(400, row.message, details), row.author, groups=frozenset(row.groups))


def find_repeated_failure(transaction: Transaction, call: rq.Call, caller: str, committed: str | None) -> rq.Answer | None:
    """Return the answer to a call that would commit an update that has failed; None if there is no such update.

    Args:
        transaction: The weight update.
        call: The call.
        caller: Who calls.
        committed: Label of the committed version; None: not known.
    """
    failed = transaction.failed
    if failed is None or transaction.update is not None or type(call) not in failed.calls:
        return None
    is_other = bool(failed.author) and caller not in ("", failed.author)
    is_other |= isinstance(call, rq.CommitUpload) and call.update != failed.upload
    is_other |= isinstance(call, rq.SetLabel) and call.label == committed
    is_other |= isinstance(call, rq.CloseGroup) and call.name is not None and call.name not in failed.groups
    return None if is_other else failed.answer
