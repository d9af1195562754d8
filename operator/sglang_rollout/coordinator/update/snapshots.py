"""Snapshots of the weight store: when it receives a commit, and what to do when no pod holds the committed version. Pure.

The weight store receives the commit after the update has ended, beside other operations, so no update waits for a snapshot. After its
restart it receives the commit again. A version older than the committed one is served only if a trainer pushes it.
"""

from __future__ import annotations

from sglang_rollout.coordinator.update.engine import retry_pause
from sglang_rollout.coordinator.update.model import Fleet
from sglang_rollout.coordinator.update.requests import Answer
from sglang_rollout.coordinator.update.staging import holders, kept_updates
from sglang_rollout.coordinator.update.steps import send
from sglang_rollout.coordinator.update.store import STORE
from sglang_rollout.wire.ports import STORE_COMMIT
from sglang_rollout.wire.record import StoreReport, StoreState
from sglang_rollout.wire.staged import StoreCommitRequest
from sglang_rollout.wire.states import StagedVersion

COMMIT_SECONDS = 10.0
"""Deadline of the call. The store answers before it writes."""
MAX_NAMED_SNAPSHOTS = 5
"""Snapshots that a message names."""


def find_unsent_commit(fleet: Fleet) -> StagedVersion | None:
    """Return the committed version if the weight store holds it and does not know that it is committed; None if there is none."""
    store, version = fleet.store, fleet.weights.staged
    if not fleet.is_staged or store is None or store.status is None or version is None or fleet.committed is None:
        return None
    if not store.is_up or store.is_sending_commit or fleet.now < store.commit_at or not store.holds(version):
        return None
    return version if store.status.committed != version.update else None


async def send_commit(fleet: Fleet, version: StagedVersion) -> Answer:
    """Send the weight store the committed version. The caller has set ``is_sending_commit`` of the store."""
    store, committed = fleet.store, fleet.committed
    if store is None or committed is None:
        raise RuntimeError("there is no weight store, or no committed version")
    body = StoreCommitRequest(
        update=version.update, version=committed, author=fleet.weights.author, epoch=fleet.epoch, fleet_id=fleet.weights.fleet_id
    )
    try:
        result = (await send(STORE_COMMIT, {STORE: body.model_dump(mode="json")}, COMMIT_SECONDS))[STORE]
    finally:
        store.is_sending_commit = False
    if result.store is not None and result.store.committed == version.update:
        store.commit_tries = 0
        return Answer(200, f"The weight store knows that version {committed} is committed.")
    store.commit_at = fleet.now + retry_pause(store.commit_tries)
    store.commit_tries += 1
    return Answer(500, f"the weight store does not know the committed version: {result.message or 'its answer names another one'}")


def report_store(fleet: Fleet) -> StoreReport | None:
    """Return what the weight store has of the committed version; None if there is no store, or if it was not asked yet."""
    store, version = fleet.store, fleet.weights.staged
    if not fleet.is_staged or store is None or store.is_new:
        return None
    if not store.is_up:
        return StoreReport(state=StoreState.AWAY)
    if version is None or store.holds(version) or version.update not in kept_updates(fleet):
        return StoreReport(state=StoreState.COMPLETE)
    state = StoreState.FETCHING if store.is_fetching else StoreState.LACKING
    return StoreReport(state=state, message=why_lost(fleet) or store.note)


def why_lost(fleet: Fleet) -> str:
    """Return that no pod and no usable snapshot has the committed version, and what to do, as sentences; empty if one has it."""
    store, version = fleet.store, fleet.weights.staged
    if not fleet.is_staged or store is None or store.status is None or version is None or not store.is_up:
        return ""
    if store.holds(version) or store.is_fetching or store.has_snapshot(version) or holders(fleet, version):
        return ""
    usable = [each for each in (store.status.snapshots.snapshots if store.status.snapshots else []) if not each.problem]
    named = ", ".join(f"{each.version} (label {each.version.label})" for each in usable[: -MAX_NAMED_SNAPSHOTS - 1 : -1])
    lost = f"No pod and no usable snapshot has the committed version {fleet.committed}: push again"
    return (
        f"{lost}, or write an earlier version into a folder with sglang-rollout weights export, and push it. Snapshots: {named}."
        if named
        else f"{lost}."
    )
