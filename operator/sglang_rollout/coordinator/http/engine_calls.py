"""Calls at one engine's own URL, of a trainer that shares its GPUs: the engine's agent hands them on to here."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from aiohttp import web

from sglang_rollout.coordinator.http import dialects as compat
from sglang_rollout.coordinator.http.control import abort_request, ask
from sglang_rollout.coordinator.update.ranks import Refusal
from sglang_rollout.coordinator.update.requests import AtEngine, Call
from sglang_rollout.sglang.api import ControlCall
from sglang_rollout.wire.ports import FLEET_ENGINES

_CALLS: dict[str, Callable[[Mapping[str, Any]], Call]] = {
    ControlCall.BEGIN_UPDATE: compat.begin,
    ControlCall.UPDATE_TENSOR: compat.tensors,
    ControlCall.END_UPDATE: compat.end,
    ControlCall.SET_VERSION: compat.set_label,
    ControlCall.RELEASE_MEMORY: compat.release_memory,
    ControlCall.RESUME_MEMORY: compat.resume_memory,
}


async def at_engine(request: web.Request) -> web.Response:
    """``POST /fleet/engines/{engine}/{call}``."""
    engine, call = request.match_info["engine"], request.match_info["call"]
    parse = _CALLS.get(call)
    if parse is None:
        raise Refusal(f"{call} is no call of one engine: {', '.join([*_CALLS, 'flush_cache', 'abort_request'])} are.", status=404)
    return await ask(request, AtEngine(engine, parse(compat.parse(await request.read()))))


async def flush_cache(request: web.Request) -> web.Response:
    """``POST /fleet/engines/{engine}/flush_cache``."""
    await request.read()
    return await ask(request, AtEngine(request.match_info["engine"], compat.flush(request.query)))


routes = [
    web.post(f"{FLEET_ENGINES}/{{engine}}/flush_cache", flush_cache),
    web.post(f"{FLEET_ENGINES}/{{engine}}/abort_request", abort_request),
    web.post(f"{FLEET_ENGINES}/{{engine}}/{{call}}", at_engine),
]
