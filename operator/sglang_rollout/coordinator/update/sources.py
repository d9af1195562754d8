"""Where weights come from: a process group with the trainer, a checkpoint on a shared volume, or handles of GPU memory. Pure.

A source turns a request into a :class:`Delivery`, and :func:`deliver` carries it out inside the open update. The transaction (pause,
session, verify, commit, abandon) is the same for every source: :mod:`.transaction` and :mod:`.outcome` know no source, and a new source
needs only its own delivery. Handles come to one engine at a time, with session rules of their own: :mod:`.hybrid`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

from sglang_rollout.checkpoints.format import DTYPE_OF_TORCH, ITEM_BITS
from sglang_rollout.coordinator.update.complete_push import (
    Tensors,
    announced_names,
    announced_tensors,
    describe_misfits,
    note_checked,
    note_held_weights,
    note_names,
    read_model,
)
from sglang_rollout.coordinator.update.completeness import Model
from sglang_rollout.coordinator.update.events import Result
from sglang_rollout.coordinator.update.membership import refuse_asleep, require_members
from sglang_rollout.coordinator.update.model import Fleet
from sglang_rollout.coordinator.update.named_folders import check_folder
from sglang_rollout.coordinator.update.outcome import fail_update, reply_and_fence_dropped, verify_and_commit
from sglang_rollout.coordinator.update.phases import Phase
from sglang_rollout.coordinator.update.phases import Update as OpenUpdate
from sglang_rollout.coordinator.update.proof import note_before
from sglang_rollout.coordinator.update.requests import Answer, Body, FromDisk, Update
from sglang_rollout.coordinator.update.steps import (
    GRACE_SECONDS,
    Results,
    failures,
    results_by_engine,
    same_body,
    send,
    send_and_mark_dirty,
)
from sglang_rollout.coordinator.update.transaction import find_group, open_sessions, pause_for_update, refuse_stale_group
from sglang_rollout.sglang.api import ControlCall, PauseMode
from sglang_rollout.wire.arguments import is_shape
from sglang_rollout.wire.reasons import RefusedError
from sglang_rollout.wire.record import OnDisk, UpdateReason

MAX_COUNTED_BYTES = 2**53
"""Every JSON parser reads integers up to this one exactly. A push is never as large."""
UNRECORDED = (
    "the names of these tensors are new, and they cannot be recorded, because the API server does not answer. Engines received nothing of"
    " this call"
)
DISK_PATIENCE_SECONDS = 60.0
"""How much later than half of the engines another one may have loaded a checkpoint, at least: its node may have to read files that the
nodes of the others have in memory."""


@dataclass(frozen=True)
class Delivery:
    """One call that brings weights to engines."""

    path: str
    bodies: Mapping[str, Body]
    """What each engine receives."""
    label: str | None = None
    """The trainer's label for the version."""
    names: frozenset[str] | None = None
    """The tensors that come; None: not known."""
    group: str | None = None
    """The process group that they come from."""
    bytes: int | None = None
    """Bytes of the tensors; None: not known."""
    has_session: bool = True
    """False: this call is the first that may modify weights."""
    grace: float | None = None
    patience: float | None = None


async def deliver(fleet: Fleet, delivery: Delivery) -> Results:
    """Bring weights to engines in the open update, and note which engines took them.

    What the caller does about engines that failed depends on the source: one engine of a process group blocks the others, one that cannot
    read a checkpoint does not.
    """
    update = fleet.require_update()
    fleet.enter(Phase.TRANSFER)
    update.label = delivery.label or update.label  # a failure, too, is reported under the trainer's label
    if delivery.group is not None:
        # Before the call: engines may hold these tensors even if no answer comes, or if they refuse the call after some of them.
        update.tensors.setdefault(tuple(delivery.bodies), set()).update(delivery.names or ())
    update.bytes = None if update.bytes is None or delivery.bytes is None else update.bytes + delivery.bytes
    limit, grace, patience = fleet.policy.deadlines.update_seconds, delivery.grace, delivery.patience
    if delivery.has_session:
        results = await send(delivery.path, delivery.bodies, limit, grace=grace, patience=patience)
    else:
        results = await send_and_mark_dirty(fleet, delivery.path, delivery.bodies, limit, grace=grace, patience=patience)
    failed = failures(results)
    if delivery.group is not None and not failed:
        update.data.add(delivery.group)
    for name in delivery.bodies.keys() - failed.keys():
        update.received.add(name)
        update.flushed.discard(name)
        if delivery.bodies[name].get("flush_cache", True):  # SGLang flushes its cache unless the body says otherwise
            update.flushed.add(name)
    return results


def keep_cache_in_place(fleet: Fleet, body: Body) -> Body:
    """Return the body of a call that brings tensors.

    In pause mode ``in_place`` it asks for no flush: running requests keep their cache, so SGLang would write the tensors and then answer
    400.
    """
    in_place = fleet.pause is not None and fleet.pause.mode == PauseMode.IN_PLACE.sglang
    return {**body, "flush_cache": False} if in_place else body


# --- process group --------------------------------------------------------------------------------------------------


async def receive_from_group(fleet: Fleet, ask: Update) -> Answer:
    """Send tensors to every member of the process group. If one member fails, the update fails."""
    group = find_group(fleet, ask.group)
    refuse_stale_group(fleet, group)
    refuse_asleep(fleet)
    model, tensors = await read_model(fleet), announced_tensors(ask.body)
    failed = await _refuse_misfits(fleet, model, ask, tensors)
    session = {key: ask.body[key] for key in ("selector",) if key in ask.body}
    failed = failed or await open_sessions(fleet, group.boots, session)
    if failed is not None:
        return failed
    update, names = fleet.require_update(), announced_names(ask.body)
    note_checked(update, model, tensors)
    await note_before(fleet, update, model, names)
    if not await note_names(fleet, names):
        return await fail_update(fleet, UpdateReason.OTHER, UNRECORDED)
    body = keep_cache_in_place(fleet, {**ask.body, "group_name": group.name})
    bodies, size = same_body(group.boots, body), count_bytes(ask.body)
    delivery = Delivery(ControlCall.UPDATE_DISTRIBUTED.path, bodies, ask.label, names, group.name, size, grace=GRACE_SECONDS)
    results = await deliver(fleet, delivery)
    broken = failures(results)
    if broken:
        name, result = next(iter(broken.items()))
        why = f"engine {name} did not take the tensors: {result.message}"
        return await fail_update(fleet, UpdateReason.ENGINE_FAILED, why, results, engine=name)
    message = next(iter(results.values())).message or "Succeeded to update parameter online."
    return Answer(200, message, {"engines": results_by_engine(results), "version": str(fleet.target())})


async def _refuse_misfits(fleet: Fleet, model: Model, ask: Update, tensors: Tensors) -> Answer | None:
    """Refuse tensors that the model does not have. An update that is open fails, because it lacks them."""
    problem = describe_misfits(model, tensors) if ask.check_model else ""
    if problem and fleet.update is not None:
        return await fail_update(fleet, UpdateReason.MISFIT, problem)
    if problem:
        raise RefusedError(f"{problem} No engine has received anything.", fleet=fleet.advice())
    return None


def count_bytes(body: Body) -> int | None:
    """Return the bytes of the tensors that an update call announces; None if a type or a shape is not known."""
    dtypes, shapes = body.get("dtypes", []), body.get("shapes", [])
    if not len(dtypes) == len(shapes) == len(body["names"]):
        return None
    total = 0
    for dtype, shape in zip(dtypes, shapes, strict=True):
        bits = ITEM_BITS.get(DTYPE_OF_TORCH.get(dtype, ""))
        if bits is None or not is_shape(shape):
            return None
        total += math.prod(shape) * bits // 8
    return total if total <= MAX_COUNTED_BYTES else None


# --- disk -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class CheckedFolder:
    """What the agents found in a checkpoint."""

    boots: Mapping[str, str]
    """The engines whose pods read it, and their boot IDs."""
    by_engine: Mapping[str, Result]
    names: frozenset[str] | None
    """Its tensors, if they are known."""
    bytes: int | None
    """Bytes of its tensors; None: not known."""
    digest: str | None
    """What distinguishes its contents from others."""

    @property
    def is_compared(self) -> bool:
        """True if it has all tensors of the engines' model."""
        return all(result.compared for result in self.by_engine.values())


async def check_checkpoint(fleet: Fleet, ask: FromDisk) -> CheckedFolder:
    """Have every pod read the checkpoint; refuse it if one cannot load it, or if they see different ones.

    SGLang dies of truncated files and of wrong shapes, and loads a wrong architecture with equal shapes without an error. So no engine
    receives the call before all pods can read the checkpoint.
    """
    boots = require_members(fleet)
    results = await check_folder(fleet, ask.path, boots)
    first = results[next(iter(boots))]
    return CheckedFolder(boots, results, first.names, first.bytes, first.digest)


async def load_from_disk(fleet: Fleet, ask: FromDisk, checked: CheckedFolder) -> Answer:
    """Load a checkpoint on every engine and commit. The answer names what a pod could not compare.

    An engine that fails is fenced alone if ``weights.minCommitted`` lets the others commit.
    """
    boots, names = checked.boots, checked.names
    if require_members(fleet) != boots:
        raise RefusedError("The engines of this fleet changed while the checkpoint was read; nothing was loaded. Try again.", status=503)
    released = [name for name in boots if fleet.engines[name].released]
    if released:
        raise RefusedError(
            f"engine {released[0]} has released memory: call resume_memory_occupation first.", status=409, fleet=fleet.advice()
        )
    failed = await pause_for_update(fleet, boots)
    if failed is not None:
        return failed
    update = fleet.transaction.update = OpenUpdate(dict(boots), fleet.now, ask.label or fleet.transaction.label, fleet.caller)
    fleet.hold()
    note_held_weights(fleet, update, boots)
    if checked.is_compared or names is None:
        update.names_unknown, update.checkpoint = True, names
    else:
        # No pod could compare the checkpoint with the model, so it brings the tensors that it has, like a trainer.
        update.tensors[tuple(boots)] = set(names)
    if not await note_names(fleet, names or ()):
        return await fail_update(fleet, UpdateReason.OTHER, UNRECORDED)
    bodies = same_body(boots, _body(ask))
    results = await deliver(
        fleet,
        Delivery(ControlCall.UPDATE_DISK.path, bodies, names=names, bytes=checked.bytes, has_session=False, patience=DISK_PATIENCE_SECONDS),
    )
    failed_loads = {name: f"did not load {ask.path}: {result.message}" for name, result in failures(results).items()}
    update.drop(failed_loads, UpdateReason.ENGINE_FAILED)
    fleet.enter(Phase.VERIFY)
    answer = await verify_and_commit(fleet, update, results, answer_now=False)
    if answer.success and fleet.committed is not None:
        fleet.weights.disk = OnDisk(version=fleet.committed, path=ask.path, digest=checked.digest)
        answer = _with_unchecked(answer, checked.by_engine)
    return await reply_and_fence_dropped(fleet, answer)


def _with_unchecked(answer: Answer, by_engine: Mapping[str, Result]) -> Answer:
    """Name what no agent could compare with the engine's model. SGLang loads a checkpoint of another model without an error."""
    lacking = {name: result for name, result in by_engine.items() if not result.compared}
    if not lacking:
        return answer
    first = next(iter(lacking.values()))
    what, why = first.unchecked, first.why_unchecked
    sentence = f"Not compared with the model that engine {next(iter(lacking))} runs: {'; '.join(what)}, because {why}."
    more = f" The same on {len(lacking) - 1} more." if len(lacking) > 1 else ""
    unchecked = {"what": list(what), "why": why, "engines": list(lacking)}
    return replace(answer, message=f"{answer.message.rstrip('.')}. {sentence}{more}", fleet={**answer.fleet, "unchecked": unchecked})


def _body(ask: FromDisk) -> Body:
    """Return the body of the call. The coordinator pauses, flushes and names the version by calls of its own."""
    ours = {"model_path": ask.path, "flush_cache": False, "abort_all_requests": False, "is_async": False}
    kept = {key: ask.body[key] for key in ("load_format", "torch_empty_cache", "recapture_cuda_graph") if key in ask.body}
    return {**kept, **ours}
