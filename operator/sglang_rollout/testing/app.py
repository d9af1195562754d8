"""HTTP routes of one boot with SGLang's status codes and bodies, and control routes for tests under ``/stand_in/``."""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from aiohttp import web
from pydantic import ValidationError

from sglang_rollout.sglang.api import DEFAULT_PAUSE_MODE, MEMORY_TAGS, PAUSE_MODES, ControlCall
from sglang_rollout.testing import info, staged, updates
from sglang_rollout.testing.boot import Boot, Unavailable
from sglang_rollout.testing.faults import Fault, Phase
from sglang_rollout.testing.generation import Generation
from sglang_rollout.testing.replies import Invalid, RefusedBody, Undecodable, Unhandled, body_of, json_reply

_FLUSHED = (
    "Cache flushed.\nPlease check backend logs for more details. "
    "(When there are running or waiting requests, the operation will not be performed.)\n"
)
_GROUP_FIELDS = ("master_address", "master_port", "rank_offset", "world_size")
_UPDATE_FIELDS = ("names", "dtypes", "shapes")
_HEALTH_STEP_SECONDS = 1.0
"""SGLang polls its scheduler at this interval, first after one interval. So a healthy /health_generate takes a second."""

Control = Callable[[Boot, Mapping[str, Any]], Awaitable[updates.Outcome]]
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class App:
    """The HTTP interface of one boot."""

    def __init__(self, boot: Boot) -> None:
        self._boot = boot

    def make(self) -> web.Application:
        """Return the aiohttp application."""
        app = web.Application(middlewares=[self._counted, errors], client_max_size=1 << 30)
        app.add_routes(
            [
                *self._info_routes(),
                *self._both(ControlCall.FLUSH_CACHE.path, self._flush),
                *Generation(self._boot).routes(),
                web.post(ControlCall.ABORT_REQUEST.path, self._abort),
                web.post(ControlCall.PAUSE.path, self._pause),
                web.post(ControlCall.CONTINUE.path, self._continue),
                web.post(ControlCall.SET_VERSION.path, self._set_version),
                *self._both(ControlCall.CHECK_WEIGHTS.path, self._check),
                *self._both(ControlCall.RELEASE_MEMORY.path, self._release),
                *self._both(ControlCall.RESUME_MEMORY.path, self._resume_memory),
                web.post(ControlCall.LOAD_ADAPTER.path, self._adapter(updates.load_adapter, "lora_name", "lora_path")),
                web.post(ControlCall.UNLOAD_ADAPTER.path, self._adapter(updates.unload_adapter, "lora_name")),
                *self._control_routes(),
            ]
        )
        return app

    @web.middleware
    async def _counted(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Register each call, so that a kill finds it. aiohttp forgets calls whose connection is gone."""
        task = asyncio.current_task()
        if task is None:
            raise RuntimeError("a request is handled outside of a task")
        self._boot.calls.add(task)
        try:
            return await handler(request)
        finally:
            self._boot.calls.discard(task)

    def _info_routes(self) -> list[web.RouteDef]:
        boot = self._boot
        routes = [
            web.get("/model_info", always(lambda: info.model_info(boot))),
            web.get("/get_model_info", always(lambda: info.model_info(boot))),
            web.get("/server_info", self._server_info),
            web.get("/get_server_info", self._server_info),
            web.get("/v1/models", always(lambda: info.models(boot))),
            web.get("/v1/loads", always(lambda: info.loads(boot))),
            web.get("/metrics", self._metrics),
            web.get("/health", self._health),
            web.get("/health_generate", self._health_generate),
            web.get("/ready", self._ready),
            web.get("/ping", self._ping),
        ]
        if not boot.setup.sessions:
            routes.append(web.get("/get_load", always(lambda: info.old_load(boot))))
        return routes

    def _control_routes(self) -> list[web.RouteDef]:
        routes = [
            web.post(ControlCall.INIT_GROUP.path, self._control(updates.init_group, *_GROUP_FIELDS)),
            web.post(ControlCall.DESTROY_GROUP.path, self._control(updates.destroy_group)),
            web.post(ControlCall.UPDATE_DISTRIBUTED.path, self._control(updates.from_group, *_UPDATE_FIELDS)),
            web.post(ControlCall.UPDATE_TENSOR.path, self._control(staged.from_tensor, "serialized_named_tensors")),
            web.post(ControlCall.UPDATE_DISK.path, self._from_disk),
        ]
        if self._boot.setup.sessions:
            routes.append(web.post(ControlCall.BEGIN_UPDATE.path, self._control(updates.begin)))
            routes.append(web.post(ControlCall.END_UPDATE.path, self._control(updates.end)))
        return routes

    @staticmethod
    def _both(path: str, handler: Handler) -> list[web.RouteDef]:
        return [web.get(path, handler), web.post(path, handler)]

    def _control(self, call: Control, *needed: str) -> Handler:
        async def handle(request: web.Request) -> web.Response:
            body = await body_of(request, *needed)
            if self._boot.setup.data_size > 1 and call in _ONE_REPLICA:
                return web.Response(text="Internal Server Error", status=500)
            success, message = await call(self._boot, body)
            return json_reply({"success": success, "message": message}, 200 if success else 400)

        return handle

    def _adapter(self, call: Callable[[Boot, Mapping[str, Any]], dict[str, Any]], *needed: str) -> Handler:
        async def handle(request: web.Request) -> web.Response:
            body = await body_of(request, *needed)
            async with self._boot.scheduler():
                reply = call(self._boot, body)
            return json_reply(reply, 200 if reply["success"] else 400)

        return handle

    async def _from_disk(self, request: web.Request) -> web.Response:
        success, message = await updates.from_disk(self._boot, await body_of(request, "model_path"))
        return json_reply({"success": success, "message": message, "num_paused_requests": 0}, 200 if success else 400)

    async def _server_info(self, _: web.Request) -> web.Response:
        async with self._boot.scheduler():  # /server_info asks the scheduler, so it hangs with the scheduler
            return json_reply(info.server_info(self._boot))

    async def _metrics(self, _: web.Request) -> web.Response:
        return web.Response(body=info.metrics(self._boot), headers={"Content-Type": "text/plain; version=0.0.4; charset=utf-8"})

    async def _health(self, _: web.Request) -> web.Response:
        """Answer 200 while the HTTP server runs, as with SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION=false."""
        await self._boot.reach(Phase.HEALTH)
        return web.Response()

    async def _health_generate(self, _: web.Request) -> web.Response:
        boot = self._boot
        await boot.reach(Phase.HEALTH)
        end, before = time.monotonic() + boot.setup.health_seconds, boot.generated
        while time.monotonic() < end:
            await asyncio.sleep(_HEALTH_STEP_SECONDS)
            if boot.generated > before or not (boot.paused or boot.frozen or boot.busy):
                boot.healthy = True
                return web.Response()
        boot.healthy = False
        return web.Response(status=503)

    async def _ready(self, _: web.Request) -> web.Response:
        return web.Response(status=200 if self._boot.healthy and not self._boot.paused else 503)

    async def _ping(self, _: web.Request) -> web.Response:
        healthy = self._boot.healthy or not self._boot.setup.sessions  # SGLang 0.5.20 answers 200 as soon as it listens
        return web.Response(status=200 if healthy else 503)

    async def _flush(self, request: web.Request) -> web.Response:
        try:
            timeout = float(request.query.get("timeout", 0))
        except ValueError:
            raise Invalid("float_parsing", ("query", "timeout")) from None
        if timeout < 0:
            raise Invalid("greater_than_equal", ("query", "timeout"))
        end = time.monotonic() + timeout
        async with self._boot.scheduler():
            await self._boot.reach(Phase.FLUSH)
        while not (flushed := self._boot.flush()) and time.monotonic() < end:  # noqa: ASYNC110 - SGLang polls too
            await asyncio.sleep(0.05)
        return web.Response(text=_FLUSHED) if flushed else web.Response(text="Flush cache failed.\n", status=400)

    async def _pause(self, request: web.Request) -> web.Response:
        body = await body_of(request)
        mode = body.get("mode", DEFAULT_PAUSE_MODE)
        if mode not in PAUSE_MODES:
            raise Invalid("literal_error", ("body", "mode"))
        await self._boot.pause(mode)
        return json_reply({"message": "Generation paused successfully.", "status": "ok"})

    async def _continue(self, request: web.Request) -> web.Response:
        await body_of(request)
        await self._boot.resume()
        return json_reply({"message": "Generation continued successfully.", "status": "ok"})

    async def _abort(self, request: web.Request) -> web.Response:
        body = await body_of(request)
        if body.get("abort_all"):
            self._boot.abort(None)
        elif body.get("rid"):
            self._boot.abort(str(body["rid"]))
        return web.Response()

    async def _set_version(self, request: web.Request) -> web.Response:
        body = await body_of(request, "new_version")
        await updates.set_version(self._boot, body)
        new = body["new_version"]
        return json_reply({"success": True, "message": f"Weight version updated to {new}", "new_version": new})

    async def _check(self, request: web.Request) -> web.Response:
        raw = await request.read()
        action = (json.loads(raw) if raw else {}).get("action", "checksum")
        async with self._boot.scheduler():
            await self._boot.reach(Phase.CHECK)
            if action != "checksum":
                return json_reply({"success": False, "message": f"Unsupported {action=}"}, 400)
            return json_reply(info.checksums(self._boot))

    async def _release(self, request: web.Request) -> web.Response:
        tags = (await body_of(request)).get("tags") or MEMORY_TAGS
        async with self._boot.scheduler():
            if not self._boot.flush():
                await self._boot.died("release_memory_occupation should be called only when server is idle")
            self._boot.released.update(tags)
        return json_reply(None)

    async def _resume_memory(self, request: web.Request) -> web.Response:
        tags = (await body_of(request)).get("tags") or MEMORY_TAGS
        async with self._boot.scheduler():
            if not self._boot.released.issuperset(tags):
                await self._boot.died("resume_memory_occupation of a tag that is not released")
            self._boot.released.difference_update(tags)
            if "weights" in tags and self._boot.setup.memory_saver and not self._boot.setup.weights_backup:
                self._boot.weights.lose()
        return json_reply(None)


def always(document: Callable[[], Any]) -> Handler:
    """Return a route whose answer needs no scheduler."""

    async def handle(_: web.Request) -> web.Response:
        return json_reply(document())

    return handle


@web.middleware
async def errors(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Answer refused requests with SGLang's bodies."""
    try:
        return await handler(request)
    except (Invalid, Undecodable, RefusedBody) as error:
        return json_reply(error.body, 400)
    except Unavailable:
        return json_reply({"error": {"message": "The request queue is full."}}, 503)
    except Unhandled:
        return web.Response(text="Internal Server Error", status=500)
    except web.HTTPNotFound:
        return json_reply({"detail": "Not Found"}, 404)
    except web.HTTPMethodNotAllowed:
        return json_reply({"detail": "Method Not Allowed"}, 405)


_ONE_REPLICA = (updates.init_group, updates.from_group, staged.from_tensor)
"""Calls that SGLang answers with 500 if the engine has several replicas of the model."""
FAULTS = "/stand_in/faults"
STATE = "/stand_in/state"
KILL = "/stand_in/kill"
RESTART = "/stand_in/restart"
_SOON_SECONDS = 0.05
"""Delay before a kill, so that the answer to the call is sent first."""


def add_control(app: web.Application, boot: Boot, *, kill: Callable[[], None], restart: Callable[[], None]) -> None:
    """Add the control routes of one engine."""

    async def add(request: web.Request) -> web.Response:
        try:
            number = boot.faults.arm(Fault.model_validate_json(await request.read()))
        except ValidationError as error:
            return web.json_response({"success": False, "message": str(error)}, status=400)
        return web.json_response({"success": True, "number": number})

    async def show(_: web.Request) -> web.Response:
        return web.json_response(boot.faults.describe())

    async def remove(request: web.Request) -> web.Response:
        number = request.query.get("number")
        if number is None:
            boot.faults.clear()
        elif not number.isdigit() or not boot.faults.remove(int(number)):
            return web.json_response({"success": False, "message": f"no fault {number} is armed"}, status=404)
        return web.json_response({"success": True})

    async def state(_: web.Request) -> web.Response:
        return web.json_response(describe(boot))

    def soon(act: Callable[[], None]) -> Callable[[web.Request], Any]:
        async def handle(_: web.Request) -> web.Response:
            asyncio.get_running_loop().call_later(_SOON_SECONDS, act)
            return web.json_response({"success": True})

        return handle

    app.add_routes([web.post(FAULTS, add), web.get(FAULTS, show), web.delete(FAULTS, remove), web.get(STATE, state)])
    app.add_routes([web.post(KILL, soon(kill)), web.post(RESTART, soon(restart))])


def describe(boot: Boot) -> dict[str, Any]:
    """Return the engine's internal state, which SGLang does not expose."""
    return {
        "boot_id": boot.boot_id,
        "pid": os.getpid(),
        "weight_version": boot.weight_version,
        "policy": boot.weights.policy.hex(),
        "paused": boot.paused,
        "session": boot.session,
        "groups": list(boot.groups),
        "released": sorted(boot.released),
        "busy": boot.busy,
        "requests": len(boot.requests),
    }
