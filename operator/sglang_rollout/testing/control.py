"""What a stand-in answers beside SGLang's wire, under ``/stand_in/``: faults, its state, kill and restart. For tests in other processes."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from typing import Any

from aiohttp import web
from pydantic import ValidationError

from sglang_rollout.testing.faults import Fault
from sglang_rollout.testing.life import Life

FAULTS = "/stand_in/faults"
STATE = "/stand_in/state"
KILL = "/stand_in/kill"
RESTART = "/stand_in/restart"
_SOON_SECONDS = 0.05
"""The answer is on its way before the engine is gone."""


def add_control(app: web.Application, life: Life, *, kill: Callable[[], None], restart: Callable[[], None]) -> None:
    """Add the routes of one engine."""

    async def add(request: web.Request) -> web.Response:
        try:
            number = life.faults.arm(Fault.model_validate_json(await request.read()))
        except ValidationError as error:
            return web.json_response({"success": False, "message": str(error)}, status=400)
        return web.json_response({"success": True, "number": number})

    async def show(_: web.Request) -> web.Response:
        return web.json_response(life.faults.describe())

    async def remove(request: web.Request) -> web.Response:
        number = request.query.get("number")
        if number is None:
            life.faults.clear()
        elif not number.isdigit() or not life.faults.remove(int(number)):
            return web.json_response({"success": False, "message": f"no fault {number} is armed"}, status=404)
        return web.json_response({"success": True})

    async def state(_: web.Request) -> web.Response:
        return web.json_response(describe(life))

    def soon(act: Callable[[], None]) -> Callable[[web.Request], Any]:
        async def handle(_: web.Request) -> web.Response:
            asyncio.get_running_loop().call_later(_SOON_SECONDS, act)
            return web.json_response({"success": True})

        return handle

    app.add_routes([web.post(FAULTS, add), web.get(FAULTS, show), web.delete(FAULTS, remove), web.get(STATE, state)])
    app.add_routes([web.post(KILL, soon(kill)), web.post(RESTART, soon(restart))])


def describe(life: Life) -> dict[str, Any]:
    """What the engine knows of itself and SGLang would not say."""
    return {
        "boot_id": life.boot_id,
        "pid": os.getpid(),
        "weight_version": life.weight_version,
        "policy": life.weights.policy.hex(),
        "paused": life.paused,
        "session": life.session,
        "groups": list(life.groups),
        "released": sorted(life.released),
        "busy": life.busy,
        "requests": len(life.requests),
    }
