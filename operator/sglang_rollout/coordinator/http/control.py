"""Routes that change something: bodies in, requests to the machine, answers in SGLang's shape."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import Any

from aiohttp import web

from sglang_rollout.coordinator.http import dialects as compat
from sglang_rollout.coordinator.http.parts import PARTS, refuse
from sglang_rollout.coordinator.update.events import Send
from sglang_rollout.coordinator.update.hybrid import AT_ENGINES
from sglang_rollout.coordinator.update.requests import NewRun, Request
from sglang_rollout.sglang.api import ControlCall
from sglang_rollout.wire.ports import FLEET_LEASE, FLEET_RUN, VERSION_HEADER
from sglang_rollout.wire.states import KEEPS_WEIGHTS, FleetMode

ABORT_DEADLINE = 10.0
Parser = Callable[[Mapping[str, Any]], Request]

ONE_PROCESS = (
    "{path} is not for a fleet: its payload belongs to the GPUs of one process on one machine."
    " Open a group with init_weights_update_group and send the tensors with update_weights_from_distributed."
)


async def ask(request: web.Request, wanted: Request) -> web.Response:
    """Put a request to the machine, and its answer into SGLang's shape."""
    parts = request.app[PARTS]
    answer = await parts.driver.ask(wanted)
    if not answer.success:
        return refuse(answer.status, answer.message, dict(answer.fleet) or None)
    headers = {}
    committed = parts.machine.fleet.committed
    if committed is not None:
        headers[VERSION_HEADER] = compat.reason_phrase(committed.label)
    return web.json_response(compat.shape(wanted, answer), headers=headers)


def _control(parse: Parser) -> Callable[[web.Request], Any]:
    async def handle(request: web.Request) -> web.Response:
        return await ask(request, parse(compat.parse(await request.read())))

    return handle


async def flush_cache(request: web.Request) -> web.Response:
    """``GET`` and ``POST /flush_cache``: trainers use both; a POST may carry anything."""
    await request.read()
    return await ask(request, compat.flush(request.query))


async def lease(request: web.Request) -> web.Response:
    """``POST /fleet/lease``: the heartbeat of a trainer that holds a group. Says whether the group is still good."""
    body = compat.parse(await request.read())
    parts = request.app[PARTS]
    parts.driver.beat()
    fleet = parts.machine.fleet
    group = fleet.groups.get(str(body.get("group_name")))
    live = group is not None and fleet.is_live(group)
    return web.json_response(
        {"success": True, "message": "", "epoch": fleet.epoch, "group_open": live, "lease": fleet.policy.trainer_lease.ttl_seconds}
    )


async def abort_request(request: web.Request) -> web.Response:
    """``/abort_request`` on every engine, or the one that the path names, at once: it must work while an update waits for running
    requests."""
    body = compat.parse(await request.read())
    parts = request.app[PARTS]
    at = request.match_info.get("engine")
    names = [name for name in parts.machine.fleet.up() if at is None or name == at]
    send = Send(ControlCall.ABORT_REQUEST.path, dict.fromkeys(names, body), ABORT_DEADLINE)
    results = await asyncio.shield(parts.agents.fan_out(send)) if names else {}
    failed = {name: result.message for name, result in results.items() if not result.ok}
    if failed:
        name, reason = next(iter(failed.items()))
        return refuse(502, f"engine {name} did not abort: {reason}", {"engines": failed})
    return web.json_response({"success": True, "message": f"Aborted on {len(names)} engines."})


async def add_worker(request: web.Request) -> web.Response:
    """``POST /workers``: several trainers register servers with what they take for a router. The fleet knows its own."""
    body = compat.parse(await request.read())
    url = str(body.get("url") or request.query.get("url") or "")
    message = "The fleet registers its own engines; nothing was changed."
    return web.json_response({"status": "accepted", "success": True, "message": message, "url": url}, status=202)


async def _one_process(request: web.Request) -> web.Response:
    fleet = request.app[PARTS].machine.fleet
    if fleet.keeps_weights:
        return refuse(400, KEEPS_WEIGHTS)
    if fleet.mode is FleetMode.HYBRID and request.path == ControlCall.UPDATE_TENSOR.path:
        return refuse(400, f"{request.path}: {AT_ENGINES}")
    return refuse(501, ONE_PROCESS.format(path=request.path))


routes = [
    web.post(ControlCall.INIT_GROUP.path, _control(compat.open_group)),
    web.post(ControlCall.DESTROY_GROUP.path, _control(compat.close_group)),
    web.post(ControlCall.BEGIN_UPDATE.path, _control(compat.begin)),
    web.post(ControlCall.UPDATE_DISTRIBUTED.path, _control(compat.update)),
    web.post(ControlCall.END_UPDATE.path, _control(compat.end)),
    web.post(ControlCall.PAUSE.path, _control(compat.pause)),
    web.post(ControlCall.CONTINUE.path, _control(compat.resume)),
    web.post(ControlCall.SET_VERSION.path, _control(compat.set_label)),
    web.post(ControlCall.FLUSH_CACHE.path, flush_cache),
    web.get(ControlCall.FLUSH_CACHE.path, flush_cache, allow_head=False),
    web.post(ControlCall.ABORT_REQUEST.path, abort_request),
    web.post(FLEET_LEASE, lease),
    web.post(FLEET_RUN, _control(lambda body: NewRun())),
    web.post("/workers", add_worker),
    web.post("/add_worker", add_worker),
    web.post(ControlCall.UPDATE_TENSOR.path, _one_process),
    web.post(ControlCall.UPDATE_IPC.path, _one_process),
    web.post(ControlCall.UPDATE_DISK.path, _control(compat.from_disk)),
    web.post(ControlCall.LOAD_ADAPTER.path, _control(compat.load_adapter)),
    web.post(ControlCall.UNLOAD_ADAPTER.path, _control(compat.unload_adapter)),
    web.post(ControlCall.LOAD_ADAPTER_FROM_TENSORS.path, _one_process),
    web.post(ControlCall.RELEASE_MEMORY.path, _control(compat.release_memory)),
    web.post(ControlCall.RESUME_MEMORY.path, _control(compat.resume_memory)),
]
