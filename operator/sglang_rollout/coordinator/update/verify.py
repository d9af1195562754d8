"""Checks before a commit: does each engine hold every tensor of the version, and do all engines hold the same bytes? Pure.

Names. Engines write the tensors that come and keep the rest, and no call says whether more belong to the version. So an engine that does
not hold the committed version joins only a complete push: every tensor that any update of this run has announced, unless all engines
refused it. All engines of one update must receive the same tensors. Handles (``spec.mode: Hybrid``) name no tensors, so such updates are
not checked by name.

Checksums. SGLang computes them (``/weights_checker``, action ``checksum``): one per rank, over the model's own tensors, fused and sharded
as the engine holds them. So they are comparable only among engines of equal shape.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import replace

from sglang_rollout.api.weights_spec import Verify
from sglang_rollout.coordinator.update.events import Result
from sglang_rollout.coordinator.update.model import Fleet
from sglang_rollout.coordinator.update.phases import Update
from sglang_rollout.coordinator.update.requests import Body
from sglang_rollout.coordinator.update.steps import ANSWER_MARGIN_SECONDS, PATIENCE_SECONDS, Results, same_body, send, sync
from sglang_rollout.coordinator.update.versions import AnnouncedTensors
from sglang_rollout.sglang.api import ControlCall
from sglang_rollout.sglang.checksums import CHECKSUM, Checksums, find_difference
from sglang_rollout.wire.agent import CheckpointRequest
from sglang_rollout.wire.ports import AGENT_CHECKPOINT
from sglang_rollout.wire.states import BASE, EngineState, FleetMode, Version

WAY_OUT_STAGED = "push all of them in one update"
WAY_OUT = f"{WAY_OUT_STAGED}, or load a checkpoint with update_weights_from_disk"


def announced_names(body: Body) -> frozenset[str]:
    """Return the tensors that an update call brings. The names are the same whether they come one by one or as a flat bucket."""
    return frozenset(str(name) for name in body["names"])


def note_held_weights(fleet: Fleet, update: Update, names: Iterable[str]) -> None:
    """Note what engines hold before they join an update: the committed version, what ``model.path`` holds, or nothing known."""
    for name in names:
        if fleet.committed is not None and fleet.engines[name].holds(fleet.committed):
            update.held_committed.add(name)
        if fleet.engines[name].holds(BASE):
            update.held_base.add(name)
        if fleet.engines[name].blank:
            update.blank.add(name)


def note_received(fleet: Fleet, update: Update, names: frozenset[str], new: Iterable[str], results: Results) -> None:
    """Note after an update call which tensors came, also if the update fails later.

    If all engines refused the call, the new names are forgotten: a tensor that the model does not have must not be required afterwards.
    """
    if all(not result.ok and result.status for result in results.values()):
        fleet.weights.announced.remove(new)
        return
    update.tensors.setdefault(tuple(results), set()).update(names)


async def announce_model_tensors(fleet: Fleet, update: Update, engines: Iterable[str]) -> None:
    """Announce the tensors of the model if blank engines may commit. They also need tensors that no trainer has sent.

    Args:
        fleet: The fleet.
        update: The open update.
        engines: The engines that may commit.
    """
    blank = sorted(update.blank & set(engines))
    if blank and not update.names_unknown:
        fleet.weights.announced.add((await read_model_tensors(fleet, blank[0])).names or ())


async def read_model_tensors(fleet: Fleet, name: str) -> Result:
    """Return names and shapes of the tensors of the model that an engine runs, as its pod reads them."""
    limit = fleet.policy.deadlines.pause_seconds
    body = CheckpointRequest(path="", names=True, deadline=limit).model_dump(mode="json")
    bodies = same_body([name], body)
    results = await send(AGENT_CHECKPOINT, bodies, limit + ANSWER_MARGIN_SECONDS, patience=PATIENCE_SECONDS, idempotent=True)
    return results[name]


def find_incomplete(fleet: Fleet, update: Update) -> dict[str, str]:
    """Return the engines whose commit would leave a mixture of versions, and why."""
    if update.names_unknown:
        return {}
    sent = sent_tensors(update)
    lacking = "" if starts_from_base(fleet, update) else fleet.weights.announced.missing_from(sent)
    found: dict[str, str] = {}
    for name in update.remaining():
        missing = sorted(sent - received_tensors(update, name))
        if missing:
            found[name] = (
                f"lacks {len(missing)} of {len(sent)} tensors that other engines got in this update, the first is {missing[0]}: {WAY_OUT}"
            )
        elif lacking and name not in update.held_committed:
            found[name] = f"did not hold version {fleet.committed} before and lacks {lacking}: {WAY_OUT}"
    return found


def received_tensors(update: Update, name: str) -> frozenset[str]:
    """Return the tensors that this engine has received in the update."""
    return frozenset[str]().union(*(names for engines, names in update.tensors.items() if name in engines))


def sent_tensors(update: Update) -> frozenset[str]:
    """Return the tensors that came in the update, at any engine."""
    return frozenset[str]().union(*update.tensors.values())


def starts_from_base(fleet: Fleet, update: Update) -> bool:
    """Return True if a new run begins on engines that all hold what ``model.path`` holds, so that earlier tensors are gone.

    While one engine still holds tensors of the run before, an update without these would be a mixture of both runs.
    """
    before = fleet.committed
    new = before is None or before.is_base or fleet.target().run > before.run
    return new and update.held_base >= set(fleet.engines)


def commit_tensors(fleet: Fleet, update: Update, version: Version) -> None:
    """Commit the version. Forget earlier tensors if none of them is left in any engine."""
    if update.checkpoint is not None:
        fleet.weights.announced = AnnouncedTensors(update.checkpoint)
    elif not update.names_unknown and starts_from_base(fleet, update):
        fleet.weights.announced = AnnouncedTensors(sent_tensors(update))
    fleet.commit(version, update.author)


# --- checksums -------------------------------------------------------------------------------------------------------


def should_verify(fleet: Fleet) -> bool:
    """Return True if the update that ends now is verified.

    Always if the trainer says what its weights are, and where nothing else tells that the tensors of all engines were one push.
    """
    policy, update = fleet.policy, fleet.update
    if update is not None and (update.checksums or (fleet.mode is FleetMode.HYBRID and update.label is None)):
        return True
    if policy.verify is Verify.EVERY_N:
        return fleet.weights.commits % policy.verify_every == 0
    return policy.verify is Verify.ALWAYS


async def verify(fleet: Fleet, names: list[str]) -> dict[str, str]:
    """Compare these engines. Returns those that differ or could not be asked, and why.

    Every supported SGLang knows the call. A custom build without it is not trusted.
    """
    expected = fleet.update.checksums if fleet.update is not None else {}
    results = await send(
        ControlCall.CHECK_WEIGHTS.path, same_body(names, CHECKSUM), fleet.policy.deadlines.update_seconds, patience=PATIENCE_SECONDS
    )
    wrong = {
        name: f"could not be verified: {result.message or 'no checksum in its answer'} (weights.verify Off commits without)"
        for name, result in results.items()
        if result.checksums is None
    }
    by_shape: dict[int, dict[str, Checksums]] = {}
    for name, checksums in _known_checksums(results).items():
        by_shape.setdefault(_tensor_size(fleet, name), {})[name] = checksums
    for size, alike in by_shape.items():
        wrong |= _find_unexpected(alike, expected[size]) if size in expected else find_differing(alike)
    return wrong


async def checksums_of_holders(fleet: Fleet, names: Iterable[str], version: Version) -> dict[str, Result]:
    """Return the checksums of a version, from engines that hold it.

    Syncs their agents afterwards: an engine that restarted meanwhile would return the checksums of its initial weights.
    """
    boots = {name: fleet.boot(name) for name in names}
    results = await send(ControlCall.CHECK_WEIGHTS.path, same_body(boots, CHECKSUM), fleet.policy.deadlines.update_seconds)
    heard = await sync(fleet, [name for name in boots if results[name].checksums is not None])
    found = {}
    for name, result in results.items():
        agent = heard[name].agent if name in heard else None
        same_boot = agent is not None and agent.boot_id == boots[name]
        holds = same_boot and agent is not None and agent.state is EngineState.CLEAN and agent.version == version
        found[name] = (
            result if holds else replace(result, checksums=None, message=result.message or "it does not hold that version any more")
        )
    return found


def _tensor_size(fleet: Fleet, name: str) -> int:
    return fleet.engines[name].tensor_size


def _find_unexpected(alike: Mapping[str, Checksums], right: Checksums) -> dict[str, str]:
    """Return the engines whose checksums differ from the trainer's, and why."""
    return {
        name: f"holds other weights than the trainer says ({find_difference(right, sums)})" for name, sums in alike.items() if sums != right
    }


def find_differing(alike: Mapping[str, Checksums]) -> dict[str, str]:
    """Return the engines that differ from most engines of their shape; all of them if no majority agrees."""
    if not alike:
        return {}
    (right, count), *_ = Counter(alike.values()).most_common()
    if count == len(alike):
        return {}
    if 2 * count <= len(alike):
        others = f"{len(set(alike.values()))} different contents among {len(alike)} engines"
        return dict.fromkeys(alike, f"cannot be trusted: {others}, and no majority tells which is right")
    return {
        name: f"holds other weights than {count} engines of its shape (rank {_first_difference(right, sums)})"
        for name, sums in alike.items()
        if sums != right
    }


def _first_difference(right: Checksums, sums: Checksums) -> str:
    ranks = [str(rank) for rank, (a, b) in enumerate(zip(right, sums, strict=False)) if a != b]
    return ranks[0] if ranks else f"count {len(sums)} instead of {len(right)}"


def _known_checksums(results: Mapping[str, Result]) -> dict[str, Checksums]:
    return {name: result.checksums for name, result in results.items() if result.checksums is not None}
