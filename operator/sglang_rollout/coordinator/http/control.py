"""Control routes, at the fleet's URL and, through an engine's agent, at one engine's own URL."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import Any

from aiohttp import web

from sglang_rollout.coordinator.callers.check import caller_address
from sglang_rollout.coordinator.callers.master import find_master
from sglang_rollout.coordinator.http import dialects
from sglang_rollout.coordinator.http.app import CALLER, PARTS, fail, refuse
from sglang_rollout.coordinator.update.control_calls import AT_ENGINES
from sglang_rollout.coordinator.update.lease import is_holder
from sglang_rollout.coordinator.update.requests import Answer, AtEngine, Call, Continue, NewRun, OpenGroup, Request
from sglang_rollout.sglang.api import ControlCall
from sglang_rollout.wire.ports import FLEET_CLAIM, FLEET_ENGINES, FLEET_LEASE, FLEET_RUN, VERSION_HEADER
from sglang_rollout.wire.reasons import RefusedError, reason_phrase
from sglang_rollout.wire.states import KEEPS_WEIGHTS, FleetMode

Parser = Callable[[Mapping[str, Any]], Request]

ONE_PROCESS = (
    "{path} does not work for a fleet: its payload belongs to the GPUs of one process on one machine."
    " Open a process group with init_weights_update_group and send the tensors with update_weights_from_distributed."
)


async def reply_to(request: web.Request, asked: Request) -> web.Response:
    """Ask the state machine and return its answer in SGLang's shape."""
    return answer_to(request, asked, await request.app[PARTS].ask(asked, str(request[CALLER])))


def answer_to(request: web.Request, asked: Request, answer: Answer) -> web.Response:
    """Return an answer of the state machine in SGLang's shape."""
    parts = request.app[PARTS]
    if not answer.success:
        return fail(answer.status, answer.message, dict(answer.fleet) or None, answer.code)
    headers = {}
    committed = parts.machine.fleet.committed
    if committed is not None:
        headers[VERSION_HEADER] = reason_phrase(committed.label)
    return web.json_response(dialects.format_answer(asked, answer), headers=headers)


def _handler(parse: Parser) -> Callable[[web.Request], Any]:
    async def handle(request: web.Request) -> web.Response:
        return await reply_to(request, parse(dialects.parse(await request.read())))

    return handle


async def open_group(request: web.Request) -> web.Response:
    """``POST /init_weights_update_group``. Engines receive the address of the trainer's store, never a name."""
    body = dialects.parse(await request.read())
    master = await find_master(request.app[PARTS].callers, body.get("master_address"), caller_address(request.headers, request.remote))
    return await reply_to(request, OpenGroup(body, master))


async def flush_cache(request: web.Request) -> web.Response:
    """``GET`` and ``POST /flush_cache``: trainers use both. The body of a POST is ignored."""
    await request.read()
    return await reply_to(request, dialects.flush(request.query))


async def lease(request: web.Request) -> web.Response:
    """``POST /fleet/lease``: heartbeat of a trainer with an open process group. The reply says whether the group is still usable."""
    body = dialects.parse(await request.read())
    parts = request.app[PARTS]
    fleet = parts.machine.fleet
    caller, group = str(request[CALLER]), fleet.groups.get(str(body.get("group_name")))
    if is_holder(fleet, caller):
        parts.driver.note_heartbeat()
    elif group is None or group.author != caller:
        raise RefusedError(f"{FLEET_LEASE}: another trainer holds this fleet: {fleet.holder}.", status=403)
    live = group is not None and fleet.is_live(group)
    return web.json_response(
        {"success": True, "message": "", "epoch": fleet.epoch, "group_open": live, "lease": fleet.policy.trainer_lease.ttl_seconds}
    )


async def abort_request(request: web.Request) -> web.Response:
    """``/abort_request`` on all engines and in the batch server, or on the engine that the path names.

    An abort is not queued behind other operations, because it must work while an update waits for running requests. As all calls that
    change what engines do, it is refused while another trainer holds the fleet.
    """
    body = dialects.parse(await request.read())
    parts = request.app[PARTS]
    parts.driver.refuse_other_trainer(str(request[CALLER]))
    engine = request.match_info.get("engine")
    names = [name for name in parts.machine.fleet.up() if engine is None or name == engine]
    abort = parts.aborts.abort if engine is None else parts.aborts.abort_at_engines
    results = await asyncio.shield(abort(names, body))
    failed = {name: result.message for name, result in results.items() if not result.ok}
    if failed:
        name, reason = next(iter(failed.items()))
        return refuse(502, f"engine {name} did not abort: {reason}", {"engines": failed})
    return web.json_response({"success": True, "message": f"Aborted on {len(names)} engines."})


async def add_worker(request: web.Request) -> web.Response:
    """``POST /workers``: some trainers register servers with the router. This changes nothing: the fleet registers its own engines."""
    body = dialects.parse(await request.read())
    url = str(body.get("url") or request.query.get("url") or "")
    message = "The fleet registers its own engines; nothing was changed."
    return web.json_response({"status": "accepted", "success": True, "message": message, "url": url}, status=202)


async def refuse_one_process(request: web.Request) -> web.Response:
    """Refuse a call whose payload only a process on the engine's node can use."""
    fleet = request.app[PARTS].machine.fleet
    if fleet.keeps_weights:
        return refuse(400, KEEPS_WEIGHTS)
    if fleet.mode is FleetMode.HYBRID and request.path == ControlCall.UPDATE_TENSOR.path:
        return refuse(400, f"{request.path}: {AT_ENGINES}")
    return refuse(501, ONE_PROCESS.format(path=request.path))


_ENGINE_CALLS: dict[str, Callable[[Mapping[str, Any]], Call]] = {
    ControlCall.BEGIN_UPDATE: dialects.begin,
    ControlCall.UPDATE_TENSOR: dialects.tensors,
    ControlCall.END_UPDATE: dialects.end,
    ControlCall.SET_VERSION: dialects.set_label,
    ControlCall.RELEASE_MEMORY: dialects.release_memory,
    ControlCall.RESUME_MEMORY: dialects.resume_memory,
}
"""Calls of a co-located trainer at one engine's own URL; the engine's agent relays them."""


async def call_engine(request: web.Request) -> web.Response:
    """``POST /fleet/engines/{engine}/{call}``."""
    engine, call = request.match_info["engine"], request.match_info["call"]
    parse = _ENGINE_CALLS.get(call)
    if parse is None:
        known = ", ".join([*_ENGINE_CALLS, ControlCall.FLUSH_CACHE, ControlCall.ABORT_REQUEST])
        raise RefusedError(f"{call} is no call for one engine: use {known}.", status=404)
    return await reply_to(request, AtEngine(engine, parse(dialects.parse(await request.read()))))


async def allow_caller(request: web.Request) -> web.Response:
    """``GET /fleet/engines/{engine}/{call}``: an agent asks whether a trainer may call, before it reads a large body.

    A caller that may not has been refused before.
    """
    return web.Response(status=204)


async def flush_engine(request: web.Request) -> web.Response:
    """``POST /fleet/engines/{engine}/flush_cache``."""
    await request.read()
    return await reply_to(request, AtEngine(request.match_info["engine"], dialects.flush(request.query)))


routes = [
    web.post(ControlCall.INIT_GROUP.path, open_group),
    web.post(ControlCall.DESTROY_GROUP.path, _handler(dialects.close_group)),
    web.post(ControlCall.BEGIN_UPDATE.path, _handler(dialects.begin)),
    web.post(ControlCall.UPDATE_DISTRIBUTED.path, _handler(dialects.update)),
    web.post(ControlCall.END_UPDATE.path, _handler(dialects.end)),
    web.post(ControlCall.PAUSE.path, _handler(dialects.pause)),
    web.post(ControlCall.CONTINUE.path, _handler(Continue)),
    web.post(ControlCall.SET_VERSION.path, _handler(dialects.set_label)),
    web.post(ControlCall.FLUSH_CACHE.path, flush_cache),
    web.get(ControlCall.FLUSH_CACHE.path, flush_cache, allow_head=False),
    web.post(ControlCall.ABORT_REQUEST.path, abort_request),
    web.post(FLEET_LEASE, lease),
    web.post(FLEET_RUN, _handler(lambda body: NewRun())),
    web.post(FLEET_CLAIM, _handler(dialects.claim)),
    web.post("/workers", add_worker),
    web.post("/add_worker", add_worker),
    web.post(ControlCall.UPDATE_TENSOR.path, refuse_one_process),
    web.post(ControlCall.UPDATE_IPC.path, refuse_one_process),
    web.post(ControlCall.UPDATE_DISK.path, _handler(dialects.from_disk)),
    web.post(ControlCall.LOAD_ADAPTER.path, _handler(dialects.load_adapter)),
    web.post(ControlCall.UNLOAD_ADAPTER.path, _handler(dialects.unload_adapter)),
    web.post(ControlCall.LOAD_ADAPTER_FROM_TENSORS.path, refuse_one_process),
    web.post(ControlCall.RELEASE_MEMORY.path, _handler(dialects.release_memory)),
    web.post(ControlCall.RESUME_MEMORY.path, _handler(dialects.resume_memory)),
    web.post(f"{FLEET_ENGINES}/{{engine}}/flush_cache", flush_engine),
    web.post(f"{FLEET_ENGINES}/{{engine}}/abort_request", abort_request),
    web.post(f"{FLEET_ENGINES}/{{engine}}/{{call}}", call_engine),
    web.get(f"{FLEET_ENGINES}/{{engine}}/{{call}}", allow_caller, allow_head=False),
]
