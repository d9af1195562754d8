"""Opening and closing weight-update process groups. No engine joins before everything that can be checked was checked."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from sglang_rollout.api.weights_spec import Transport
from sglang_rollout.coordinator.update.commit import commit_open_update
from sglang_rollout.coordinator.update.events import Result
from sglang_rollout.coordinator.update.membership import absent_sentence, require_members
from sglang_rollout.coordinator.update.model import Fleet
from sglang_rollout.coordinator.update.nccl import check_nccl
from sglang_rollout.coordinator.update.outcome import abandon
from sglang_rollout.coordinator.update.phases import Phase
from sglang_rollout.coordinator.update.ranks import Group, GroupSpec, check_group
from sglang_rollout.coordinator.update.requests import Answer, Body, CloseGroup, Master, OpenGroup
from sglang_rollout.coordinator.update.steps import (
    FENCE_DEADLINE_SECONDS,
    GRACE_SECONDS,
    PREFLIGHT_MARGIN_SECONDS,
    Results,
    failures,
    reply,
    results_by_engine,
    same_body,
    send,
)
from sglang_rollout.coordinator.update.store import STORE, describe_peer, leave_path, preflight_path
from sglang_rollout.coordinator.update.trainer import probe_store, witnesses
from sglang_rollout.sglang.api import ControlCall
from sglang_rollout.wire.agent import PreflightRequest
from sglang_rollout.wire.ports import STORE_JOIN
from sglang_rollout.wire.reasons import Refusal, RefusalCode, RefusedError
from sglang_rollout.wire.record import MAX_RECENT_CHARACTERS, GroupFailure, UpdateReason

GONE_SECONDS = 0.5
"""A store that listened before and accepts no connection for this long counts as gone."""
MIN_JOIN_SECONDS = 5.0
"""Least time for joining, however long the trainer took to listen."""
MAX_GROUPS = 64
"""A trainer that opens process groups under new names and closes none would fill the engines."""
DISK_ONLY = (
    "This fleet takes weights from disk only (weights.transport is Disk): write a checkpoint where the engines can read it, and call"
    " /update_weights_from_disk."
)
UNUSABLE_MASTER = (
    "The engines cannot use this master_address and master_port: they find no trainer's store there, or may not connect to it."
    " Use the address of your own pod and the port of rank 0. No engine has joined anything."
)
"""The only answer for callers that may not learn which addresses engines reach."""
UNKNOWN_GROUP = "The group to be destroyed does not exist."


@dataclass(frozen=True)
class CheckedGroup:
    """A request for a process group that every pod can fulfil."""

    spec: GroupSpec
    backend: str
    boots: Mapping[str, str]
    """The engines that will join, and their boot IDs."""
    asked_at: float
    """When the check began."""


@contextmanager
def _noting_refusal(fleet: Fleet) -> Iterator[None]:
    """Note a refusal of the block for the log and the status, because trainers may wait in the collective and never read the answer."""
    try:
        yield
    except RefusedError as refused:
        if refused.status != RefusalCode.UNAVAILABLE.status:  # the trainer tries again
            _note_failure(fleet, refused.refusal.code, str(refused))
        raise


def _note_failure(fleet: Fleet, code: str, message: str) -> None:
    fleet.membership.group_failure = GroupFailure(code=code, message=message[:MAX_RECENT_CHARACTERS])


async def check_group_request(fleet: Fleet, ask: OpenGroup) -> CheckedGroup:
    """Check the request, and ask every pod whether it reaches the trainer."""
    with _noting_refusal(fleet):
        return await _check_group_request(fleet, ask)


async def _check_group_request(fleet: Fleet, ask: OpenGroup) -> CheckedGroup:
    if fleet.policy.transport is Transport.DISK:
        raise RefusedError(DISK_ONLY)
    asked_at, boots = fleet.now, require_members(fleet)
    spec = _check_request(fleet, ask.body)
    backend = spec.backend or fleet.policy.backend.value
    _refuse_without_gpu(fleet, backend)
    check_nccl(fleet, boots, backend, ask.body)
    master = ask.master or Master(spec.host)
    spec = replace(spec, host=_allowed_address(fleet, master))
    await _preflight(fleet, spec, boots, fleet.policy.deadlines.group_seconds, hides_reasons=master.hides_reasons)
    return CheckedGroup(spec, backend, boots, asked_at)


async def open_group(fleet: Fleet, _ask: OpenGroup, checked: CheckedGroup) -> Answer:
    """Let all engines join at once.

    The checks and closing old groups may take minutes. So the members are compared again after each.
    """
    spec, backend, boots = checked.spec, checked.backend, checked.boots
    with _noting_refusal(fleet):
        _refuse_changed(fleet, boots)
        await _close_same_name(fleet, spec.name)
        await _close_dead(fleet)
        _refuse_changed(fleet, boots)
        if len(fleet.groups) >= MAX_GROUPS:
            raise RefusedError(f"{MAX_GROUPS} process groups are open: close some with {ControlCall.DESTROY_GROUP.path} first.")
    remaining = max(MIN_JOIN_SECONDS, fleet.policy.deadlines.group_seconds - (fleet.now - checked.asked_at))
    fleet.enter(Phase.OPEN)
    fleet.transaction.joining = master = f"{spec.host}:{spec.port}"
    path = STORE_JOIN if fleet.is_staged else ControlCall.INIT_GROUP.path
    results = await send(path, _join_bodies(fleet, boots, spec, backend, remaining), remaining, grace=GRACE_SECONDS)
    fleet.transaction.joining = None
    if failures(results):
        return await _undo_join(fleet, spec, results)
    fleet.membership.group_failure = None
    fleet.hold()
    fleet.groups[spec.name] = Group(spec.name, fleet.epoch, spec.world_size, master, backend, boots, fleet.caller)
    return Answer(200, "Succeeded to initialize custom process group.", {**fleet.advice(), "engines": results_by_engine(results)})


def _refuse_changed(fleet: Fleet, boots: Mapping[str, str]) -> None:
    """Raise RefusedError if the members changed: the ranks of a process group are those of the members that are there when it opens."""
    if require_members(fleet) != boots:
        raise RefusedError(
            "The engines of this fleet changed while the process group was being opened; no engine has joined anything."
            f" Open the process group again with world_size={fleet.table.world_size}.",
            fleet=fleet.advice(),
        )


def _check_request(fleet: Fleet, body: Body) -> GroupSpec:
    """Check the trainer's request against the members. A refusal also names the engines that are not counted."""
    try:
        return check_group(body, fleet.table)
    except RefusedError as refusal:
        away = absent_sentence(fleet)
        message = f"{refusal} {away}" if away else str(refusal)
        raise RefusedError(Refusal(refusal.refusal.code, message), status=refusal.status, fleet=fleet.advice()) from None


def _refuse_without_gpu(fleet: Fleet, backend: str) -> None:
    """Raise RefusedError for a process group with the weight store that needs a GPU there, and the weight store has none."""
    store = fleet.policy.store
    if fleet.is_staged and backend == "nccl" and (store is None or store.gpu is None):
        message = (
            "The weight store has no GPU, so it joins no process group with backend nccl. Set weights.store.gpu, or open the process group"
            " with backend gloo. A trainer that names no backend gets weights.backend."
        )
        raise RefusedError(Refusal(RefusalCode.BACKEND_UNAVAILABLE, message), fleet=fleet.advice())


def _allowed_address(fleet: Fleet, master: Master) -> str:
    """Return the address to which engines connect. Raises RefusedError if they may not connect to it."""
    if master.refusal is None:
        return master.address
    if master.hides_reasons:
        raise _unreachable(UNUSABLE_MASTER)
    raise RefusedError(master.refusal, fleet=fleet.advice())


def _unreachable(message: str, fleet: Mapping[str, Any] | None = None) -> RefusedError:
    return RefusedError(Refusal(RefusalCode.MASTER_UNREACHABLE, message), fleet=fleet)


async def _preflight(fleet: Fleet, spec: GroupSpec, names: Mapping[str, str], limit: float, *, hides_reasons: bool) -> None:
    """Let the trainer's store answer every pod. Several trainers call before they listen, so agents try until the limit."""
    body = PreflightRequest(host=spec.host, port=spec.port, deadline=limit, handshake=True).model_dump(mode="json")
    path = preflight_path(names)
    results = await send(path, same_body(names, body), limit + PREFLIGHT_MARGIN_SECONDS, grace=GRACE_SECONDS, idempotent=True)
    failed = failures(results)
    if failed and hides_reasons:
        raise _unreachable(UNUSABLE_MASTER)
    if failed:
        name, result = next(iter(failed.items()))
        raise _unreachable(
            f"{describe_peer(name)} cannot reach the trainer at {spec.host}:{spec.port}: {result.message.rstrip('.')}."
            " No engine has joined anything.",
            fleet={**fleet.advice(), "engine": name, "phase": Phase.PREPARE.value, "engines": results_by_engine(results)},
        )


async def _close_same_name(fleet: Fleet, name: str) -> None:
    """Close the process group of the same name, also one that this coordinator never knew: the trainer gets a new one."""
    old = fleet.groups.pop(name, None)
    up = [peer for peer in ([STORE] if fleet.is_staged else fleet.engines) if fleet.is_up(peer)]
    joined = [peer for peer in up if (old is not None and old.boots.get(peer) == fleet.boot(peer)) or name in _groups_of(fleet, peer)]
    results = await send(leave_path(joined), same_body(joined, {"group_name": name}), FENCE_DEADLINE_SECONDS)
    for peer, result in failures(results).items():
        if not _is_unknown(result):
            raise RefusedError(
                f"{describe_peer(peer)} could not close the old process group {name}: {result.message.rstrip('.')}."
                " No engine has joined the new one. Use another group_name.",
                fleet=fleet.advice(),
            )


def _groups_of(fleet: Fleet, peer: str) -> list[str]:
    """Return the process groups that an engine, or the weight store, reports."""
    if peer == STORE:
        return fleet.store.status.groups if fleet.store is not None and fleet.store.status is not None else []
    status = fleet.engines[peer].status
    return status.groups if status is not None else []


def _is_unknown(result: Result) -> bool:
    """Return True if a peer is in no process group of that name. SGLang answers with a sentence, the weight store with a code."""
    return UNKNOWN_GROUP in result.message or result.code is RefusalCode.NOT_FOUND


async def _close_dead(fleet: Fleet) -> None:
    """Close process groups of earlier trainers, whose stores accept no connection any more.

    Not while the fleet is idle: leaving a process group whose peer is gone may block an engine that serves. Now all engines are about to
    be updated anyway. A process group of the same trainer, of another stage or process, has a store that answers.
    """
    if fleet.update is not None:
        return
    for group in list(fleet.groups.values()):
        if await probe_store(group.master, witnesses(fleet)[:1], GONE_SECONDS):
            fleet.groups.pop(group.name, None)
            await _leave(fleet, group)


def _join_bodies(fleet: Fleet, boots: Mapping[str, str], spec: GroupSpec, backend: str, deadline: float) -> dict[str, Body]:
    offsets = fleet.table.offsets()
    return {
        name: {
            **(spec.extra if name != STORE else {"deadline": deadline}),
            "master_address": spec.host,
            "master_port": spec.port,
            "rank_offset": offsets[name],
            "world_size": spec.world_size,
            "group_name": spec.name,
            "backend": backend,
        }
        for name in boots
    }


async def _undo_join(fleet: Fleet, spec: GroupSpec, results: Results) -> Answer:
    """Answer the trainer that an engine could not join, then let the others leave.

    Its end releases engines that wait in the rendezvous.
    """
    name, result = next(iter(failures(results).items()))
    message = (
        f"{describe_peer(name)} could not join process group {spec.name}: {result.message.rstrip('.')}. The others have left it."
        " Open a new process group with another port and name."
    )
    _note_failure(fleet, result.code or RefusalCode.UPSTREAM_FAILED, message)
    details = {**fleet.advice(), "engine": name, "phase": Phase.OPEN.value, "engines": results_by_engine(results)}
    answer = Answer(400, message, details, result.code)
    await reply(answer)
    await send(leave_path(results), same_body(results, {"group_name": spec.name}), FENCE_DEADLINE_SECONDS)
    return answer


async def close_group(fleet: Fleet, ask: CloseGroup) -> Answer:
    """Close a process group everywhere. Commits the update of a trainer that has no session and has not paused."""
    name = ask.name
    if name is None and len(fleet.groups) == 1:
        name = next(iter(fleet.groups))
    group = fleet.groups.get(name) if name is not None else None
    if group is None:
        raise RefusedError(UNKNOWN_GROUP, fleet={"groups": list(fleet.groups)})
    update, commit = fleet.update, Answer(200, "Nothing to commit.")
    if update is not None and group.name in update.data:
        if not update.trainer_session:
            commit = await commit_open_update(fleet)
        else:
            commit = await abandon(fleet, UpdateReason.UNEXPECTED_CALL, f"process group {group.name} was closed inside an open session")
        if not commit.success:
            fleet.groups.pop(group.name, None)
            await _leave(fleet, group)
            return commit
    fleet.groups.pop(group.name, None)
    results = await _leave(fleet, group)
    failed = {engine: result for engine, result in failures(results).items() if not _is_unknown(result)}
    if failed:
        engine, result = next(iter(failed.items()))
        reason = f"{describe_peer(engine)} could not close process group {group.name}: {result.message}"
        return Answer(400, reason, {"engines": results_by_engine(results), **commit.fleet})
    return Answer(200, "Succeeded to destroy custom process group.", {"engines": results_by_engine(results), **commit.fleet})


async def _leave(fleet: Fleet, group: Group) -> Results:
    """Let the members that still run in the boot that joined leave the process group."""
    gone = set(fleet.lost_engines(group.boots))
    names = [name for name in group.boots if name not in gone and fleet.is_up(name)]
    return await send(leave_path(names), same_body(names, {"group_name": group.name}), fleet.policy.deadlines.pause_seconds)
