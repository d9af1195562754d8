"""Opening and closing weight-update groups. No engine is told to join before everything that can be checked is."""

from __future__ import annotations

from collections.abc import Mapping

from sglang_rollout.api.weights_spec import Transport
from sglang_rollout.coordinator.update import nccl
from sglang_rollout.coordinator.update.membership import absent_sentence, present
from sglang_rollout.coordinator.update.model import Fleet
from sglang_rollout.coordinator.update.outcome import abandon, finish
from sglang_rollout.coordinator.update.phases import Phase
from sglang_rollout.coordinator.update.progress import Group
from sglang_rollout.coordinator.update.ranks import GroupSpec, Refusal, check_group
from sglang_rollout.coordinator.update.requests import Answer, Body, CloseGroup, OpenGroup
from sglang_rollout.coordinator.update.rules import apply_rule, take_turn
from sglang_rollout.coordinator.update.steps import FENCE_DEADLINE, GRACE, Results, failures, reply, same, send, told, turn
from sglang_rollout.coordinator.update.trainer import knock
from sglang_rollout.sglang.api import ControlCall
from sglang_rollout.wire.agent import PreflightRequest
from sglang_rollout.wire.ports import AGENT_PREFLIGHT

MARGIN = 2.0
"""What a preflight call may take longer than the time it is told to try."""
GONE = 0.5
"""Seconds without a connection after which a store that listened before counts as gone."""
LEAST = 5.0
"""What joining may take at least, however long the trainer took to listen."""
MOST_GROUPS = 64
"""A trainer that opens groups under ever new names and closes none would fill the engines."""
DISK_ONLY = (
    "This fleet takes weights from disk only (weights.transport is Disk): write a checkpoint where the engines can read it, and call"
    " /update_weights_from_disk."
)
UNKNOWN = "The group to be destroyed does not exist."


async def open_group(fleet: Fleet, ask: OpenGroup) -> Answer:
    """Check, ask every pod whether it reaches the trainer, then let all engines join at once."""
    if fleet.policy.transport is Transport.DISK:
        raise Refusal(DISK_ONLY)
    started = fleet.now
    boots = present(fleet)
    spec = _spec(fleet, ask.body)
    limit = fleet.policy.deadlines.group_seconds
    backend = spec.backend or fleet.policy.backend.value
    nccl.check(fleet, boots, backend, ask.body)
    await _preflight(fleet, spec, boots, limit)
    await turn()
    # The preflight may have taken minutes and ran beside other calls, and so may closing: the fleet may be another one now.
    _refuse_changed(fleet, boots)
    await apply_rule(fleet, ask)
    await _close_same_name(fleet, spec.name)
    await _close_dead(fleet)
    _refuse_changed(fleet, boots)
    if len(fleet.groups) >= MOST_GROUPS:
        raise Refusal(f"{MOST_GROUPS} groups are open: close some with {ControlCall.DESTROY_GROUP.path} first.")
    remaining = max(LEAST, limit - (fleet.now - started))
    fleet.enter(Phase.OPEN)
    fleet.transaction.joining = master = f"{spec.host}:{spec.port}"
    results = await send(ControlCall.INIT_GROUP.path, _bodies(fleet, boots, spec, backend), remaining, grace=GRACE)
    fleet.transaction.joining = None
    if failures(results):
        return await _undo(fleet, spec, results)
    fleet.groups[spec.name] = Group(spec.name, fleet.epoch, spec.world_size, master, backend, boots)
    return Answer(200, "Succeeded to initialize custom process group.", {**fleet.advice(), "engines": told(results)})


def _refuse_changed(fleet: Fleet, boots: Mapping[str, str]) -> None:
    """The ranks of a group are those of the members that are there when it opens."""
    if present(fleet) != boots:
        raise Refusal(
            "The engines of this fleet changed while the group was being opened; no engine has joined anything."
            f" Open the group again with world_size={fleet.table.world_size}.",
            fleet=fleet.advice(),
        )


def _spec(fleet: Fleet, body: Body) -> GroupSpec:
    """The trainer's request, checked against the members; a refusal also names who is not counted."""
    try:
        return check_group(body, fleet.table)
    except Refusal as refusal:
        away = absent_sentence(fleet)
        raise Refusal(f"{refusal} {away}" if away else str(refusal), status=refusal.status, fleet=fleet.advice()) from None


async def _preflight(fleet: Fleet, spec: GroupSpec, names: Mapping[str, str], limit: float) -> None:
    """Several trainers call before they listen, so the agents keep trying until the limit."""
    body = PreflightRequest(host=spec.host, port=spec.port, deadline=limit).model_dump(mode="json")
    results = await send(AGENT_PREFLIGHT, same(names, body), limit + MARGIN, grace=GRACE, idempotent=True)
    failed = failures(results)
    if failed:
        name, result = next(iter(failed.items()))
        raise Refusal(
            f"engine {name} cannot reach the trainer at {spec.host}:{spec.port}: {result.message.rstrip('.')}."
            " No engine has joined anything.",
            fleet={**fleet.advice(), "engine": name, "phase": Phase.PREPARE.value, "engines": told(results)},
        )


async def _close_same_name(fleet: Fleet, name: str) -> None:
    """A trainer that opens its group again gets a new one; also when this coordinator never knew the old one."""
    old = fleet.groups.pop(name, None)
    up = [engine for engine in fleet.engines.values() if engine.up]
    joined = [
        engine.wanted.name
        for engine in up
        if (old is not None and old.boots.get(engine.wanted.name) == engine.boot)
        or (engine.status is not None and name in engine.status.groups)
    ]
    results = await send(ControlCall.DESTROY_GROUP.path, same(joined, {"group_name": name}), FENCE_DEADLINE)
    for engine_name, result in failures(results).items():
        if UNKNOWN not in result.message:
            raise Refusal(
                f"engine {engine_name} could not close the old group {name}: {result.message.rstrip('.')}."
                " No engine has joined the new one. Use another group_name.",
                fleet=fleet.advice(),
            )


async def _close_dead(fleet: Fleet) -> None:
    """Close groups that trainers before this one left behind: their stores take no connection any more.

    Not while the fleet is idle: leaving a group whose peer is gone may block an engine that serves. Now all engines are about to
    be updated anyway. A group of the same trainer, of another stage or process, has a store that answers.
    """
    if fleet.update is not None:
        return
    for group in list(fleet.groups.values()):
        if await knock(group.master, list(fleet.members())[:1], GONE):
            fleet.groups.pop(group.name, None)
            await _leave(fleet, group)


def _bodies(fleet: Fleet, boots: Mapping[str, str], spec: GroupSpec, backend: str) -> dict[str, Body]:
    offsets = fleet.table.offsets()
    return {
        name: {
            **spec.extra,
            "master_address": spec.host,
            "master_port": spec.port,
            "rank_offset": offsets[name],
            "world_size": spec.world_size,
            "group_name": spec.name,
            "backend": backend,
        }
        for name in boots
    }


async def _undo(fleet: Fleet, spec: GroupSpec, results: Results) -> Answer:
    """One engine could not join: the trainer first, whose end releases those that wait in the rendezvous."""
    name, result = next(iter(failures(results).items()))
    answer = Answer(
        400,
        f"engine {name} could not join group {spec.name}: {result.message.rstrip('.')}. The others have left it."
        " Open a new group with another port and name.",
        {**fleet.advice(), "engine": name, "phase": Phase.OPEN.value, "engines": told(results)},
    )
    await reply(answer)
    await send(ControlCall.DESTROY_GROUP.path, same(results, {"group_name": spec.name}), FENCE_DEADLINE)
    return answer


async def close_group(fleet: Fleet, ask: CloseGroup) -> Answer:
    """Close a group everywhere. Commits the update of a trainer that has no session and has not paused."""
    await take_turn(fleet, ask)
    name = ask.name
    if name is None and len(fleet.groups) == 1:
        name = next(iter(fleet.groups))
    group = fleet.groups.get(name) if name is not None else None
    if group is None:
        return Answer(400, UNKNOWN, {"groups": list(fleet.groups)})
    update, commit = fleet.update, Answer(200, "Nothing to commit.")
    if update is not None and group.name in update.data:
        if not update.trainer_session:
            commit = await finish(fleet)
        else:
            commit = await abandon(fleet, f"group {group.name} was closed inside an open session")
        if not commit.success:
            fleet.groups.pop(group.name, None)
            await _leave(fleet, group)
            return commit
    fleet.groups.pop(group.name, None)
    results = await _leave(fleet, group)
    failed = {engine: result for engine, result in failures(results).items() if UNKNOWN not in result.message}
    if failed:
        engine, result = next(iter(failed.items()))
        reason = f"engine {engine} could not close group {group.name}: {result.message}"
        return Answer(400, reason, {"engines": told(results), **commit.fleet})
    return Answer(200, "Succeeded to destroy custom process group.", {"engines": told(results), **commit.fleet})


async def _leave(fleet: Fleet, group: Group) -> Results:
    """Those members that are still the processes that joined leave the group."""
    gone = set(fleet.changed(group.boots))
    names = [name for name in group.boots if name not in gone and fleet.engines[name].up]
    return await send(ControlCall.DESTROY_GROUP.path, same(names, {"group_name": group.name}), fleet.policy.deadlines.pause_seconds)
