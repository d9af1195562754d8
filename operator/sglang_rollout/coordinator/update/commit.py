"""The commit of the open update: one call for every transport. Pure."""

from __future__ import annotations

from sglang_rollout.coordinator.update.activation import commit_staged
from sglang_rollout.coordinator.update.model import Fleet
from sglang_rollout.coordinator.update.outcome import end_sessions_and_commit
from sglang_rollout.coordinator.update.requests import Answer
from sglang_rollout.wire.ports import FLEET_UPDATES
from sglang_rollout.wire.reasons import RefusedError


async def commit_open_update(fleet: Fleet, *, answer_now: bool = True) -> Answer:
    """Commit the open update, or give it up.

    Args:
        fleet: The fleet, with an open update.
        answer_now: False: the caller does more before the trainer may hear of a commit, and then calls ``reply_and_fence_dropped``.

    Raises:
        RefusedError: The update is an upload, which only its own call commits.
    """
    staged = fleet.require_update().staged
    if staged is None:
        return await end_sessions_and_commit(fleet, answer_now=answer_now)
    if staged.is_upload:
        path = f"{FLEET_UPDATES}/{staged.id}"
        raise RefusedError(f"An upload is open: commit it with POST {path}/commit, or withdraw it with DELETE {path}.", status=409)
    return await commit_staged(fleet, answer_now=answer_now)
