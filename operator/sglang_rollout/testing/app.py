"""The HTTP routes of one life, with SGLang's status codes and bodies."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from aiohttp import web

from sglang_rollout.sglang.api import MEMORY_TAGS, ControlCall
from sglang_rollout.testing import adapters, infos, samples, updates
from sglang_rollout.testing.faults import Phase
from sglang_rollout.testing.life import Life
from sglang_rollout.testing.web import Handler, Invalid, always, body_of, errors, json_reply, while_connected

_FLUSHED = (
    "Cache flushed.\nPlease check backend logs for more details. "
    "(When there are running or waiting requests, the operation will not be performed.)\n"
)
_GROUP_FIELDS = ("master_address", "master_port", "rank_offset", "world_size")
_UPDATE_FIELDS = ("names", "dtypes", "shapes")
_MODES = ("abort", "retract", "in_place")
_HEALTH_STEP_SECONDS = 1.0
"""SGLang looks for an answer of its scheduler every so often, first after a whole step: a healthy /health_generate takes a second."""

Control = Callable[[Life, Mapping[str, Any]], Awaitable[updates.Outcome]]


class App:
    """Answers for one life."""

    def __init__(self, life: Life) -> None:
        self._life = life

    def make(self) -> web.Application:
        """The aiohttp application."""
        app = web.Application(middlewares=[self._counted, errors], client_max_size=1 << 30)
        app.add_routes(
            [
                *self._info_routes(),
                *self._both(ControlCall.FLUSH_CACHE.path, self._flush),
                web.post("/generate", self._generate),
                web.put("/generate", self._generate),
                web.post(ControlCall.ABORT_REQUEST.path, self._abort),
                web.post(ControlCall.PAUSE.path, self._pause),
                web.post(ControlCall.CONTINUE.path, self._continue),
                web.post(ControlCall.SET_VERSION.path, self._set_version),
                *self._both(ControlCall.CHECK_WEIGHTS.path, self._check),
                *self._both(ControlCall.RELEASE_MEMORY.path, self._release),
                *self._both(ControlCall.RESUME_MEMORY.path, self._resume_memory),
                web.post(ControlCall.LOAD_ADAPTER.path, self._adapter(adapters.load, "lora_name", "lora_path")),
                web.post(ControlCall.UNLOAD_ADAPTER.path, self._adapter(adapters.unload, "lora_name")),
                *self._control_routes(),
            ]
        )
        return app

    @web.middleware
    async def _counted(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """A kill must find every call: aiohttp forgets those whose connection is gone."""
        task = asyncio.current_task()
        if task is None:
            raise RuntimeError("a request is handled outside of a task")
        self._life.calls.add(task)
        try:
            return await handler(request)
        finally:
            self._life.calls.discard(task)

    def _info_routes(self) -> list[web.RouteDef]:
        life = self._life
        routes = [
            web.get("/model_info", always(lambda: infos.model_info(life))),
            web.get("/get_model_info", always(lambda: infos.model_info(life))),
            web.get("/server_info", self._server_info),
            web.get("/get_server_info", self._server_info),
            web.get("/v1/models", always(lambda: infos.models(life))),
            web.get("/v1/loads", always(lambda: infos.loads(life))),
            web.get("/metrics", self._metrics),
            web.get("/health", self._health),
            web.get("/health_generate", self._health_generate),
            web.get("/ready", self._ready),
            web.get("/ping", self._ping),
        ]
        if not life.setup.sessions:
            routes.append(web.get("/get_load", always(lambda: infos.old_load(life))))
        return routes

    def _control_routes(self) -> list[web.RouteDef]:
        routes = [
            web.post(ControlCall.INIT_GROUP.path, self._control(updates.init_group, *_GROUP_FIELDS)),
            web.post(ControlCall.DESTROY_GROUP.path, self._control(updates.destroy_group)),
            web.post(ControlCall.UPDATE_DISTRIBUTED.path, self._control(updates.from_group, *_UPDATE_FIELDS)),
            web.post(ControlCall.UPDATE_DISK.path, self._from_disk),
        ]
        if self._life.setup.sessions:
            routes.append(web.post(ControlCall.BEGIN_UPDATE.path, self._control(updates.begin)))
            routes.append(web.post(ControlCall.END_UPDATE.path, self._control(updates.end)))
        return routes

    @staticmethod
    def _both(path: str, handler: Handler) -> list[web.RouteDef]:
        return [web.get(path, handler), web.post(path, handler)]

    def _control(self, call: Control, *needed: str) -> Handler:
        async def handle(request: web.Request) -> web.Response:
            success, message = await call(self._life, await body_of(request, *needed))
            return json_reply({"success": success, "message": message}, 200 if success else 400)

        return handle

    def _adapter(self, call: Callable[[Life, Mapping[str, Any]], dict[str, Any]], *needed: str) -> Handler:
        async def handle(request: web.Request) -> web.Response:
            body = await body_of(request, *needed)
            async with self._life.scheduler():
                reply = call(self._life, body)
            return json_reply(reply, 200 if reply["success"] else 400)

        return handle

    async def _from_disk(self, request: web.Request) -> web.Response:
        success, message = await updates.from_disk(self._life, await body_of(request, "model_path"))
        return json_reply({"success": success, "message": message, "num_paused_requests": 0}, 200 if success else 400)

    async def _server_info(self, _: web.Request) -> web.Response:
        async with self._life.scheduler():  # it asks the scheduler, and so it hangs with it
            return json_reply(infos.server_info(self._life))

    async def _metrics(self, _: web.Request) -> web.Response:
        return web.Response(body=infos.metrics(self._life), headers={"Content-Type": "text/plain; version=0.0.4; charset=utf-8"})

    async def _health(self, _: web.Request) -> web.Response:
        """As with SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION=false: 200 while the HTTP server lives."""
        await self._life.reach(Phase.HEALTH)
        return web.Response()

    async def _health_generate(self, _: web.Request) -> web.Response:
        life = self._life
        await life.reach(Phase.HEALTH)
        end, before = time.monotonic() + life.setup.health_seconds, life.generated
        while time.monotonic() < end:
            await asyncio.sleep(_HEALTH_STEP_SECONDS)
            if life.generated > before or not (life.paused or life.frozen or life.busy):
                life.healthy = True
                return web.Response()
        life.healthy = False
        return web.Response(status=503)

    async def _ready(self, _: web.Request) -> web.Response:
        return web.Response(status=200 if self._life.healthy and not self._life.paused else 503)

    async def _ping(self, _: web.Request) -> web.Response:
        healthy = self._life.healthy or not self._life.setup.sessions  # an old one says so as soon as it listens
        return web.Response(status=200 if healthy else 503)

    async def _flush(self, request: web.Request) -> web.Response:
        try:
            timeout = float(request.query.get("timeout", 0))
        except ValueError:
            raise Invalid("float_parsing", ("query", "timeout")) from None
        if timeout < 0:
            raise Invalid("greater_than_equal", ("query", "timeout"))
        end = time.monotonic() + timeout
        async with self._life.scheduler():
            await self._life.reach(Phase.FLUSH)
        while not (flushed := self._life.flush()) and time.monotonic() < end:  # noqa: ASYNC110 - SGLang polls too
            await asyncio.sleep(0.05)
        return web.Response(text=_FLUSHED) if flushed else web.Response(text="Flush cache failed.\n", status=400)

    async def _pause(self, request: web.Request) -> web.Response:
        body = await body_of(request)
        mode = body.get("mode", "abort")
        if mode not in _MODES:
            raise Invalid("literal_error", ("body", "mode"))
        await self._life.pause(mode)
        return json_reply({"message": "Generation paused successfully.", "status": "ok"})

    async def _continue(self, request: web.Request) -> web.Response:
        await body_of(request)
        await self._life.resume()
        return json_reply({"message": "Generation continued successfully.", "status": "ok"})

    async def _abort(self, request: web.Request) -> web.Response:
        body = await body_of(request)
        if body.get("abort_all"):
            self._life.abort(None)
        elif body.get("rid"):
            self._life.abort(str(body["rid"]))
        return web.Response()

    async def _set_version(self, request: web.Request) -> web.Response:
        body = await body_of(request, "new_version")
        await updates.set_version(self._life, body)
        new = body["new_version"]
        return json_reply({"success": True, "message": f"Weight version updated to {new}", "new_version": new})

    async def _check(self, request: web.Request) -> web.Response:
        raw = await request.read()
        action = (json.loads(raw) if raw else {}).get("action", "checksum")
        async with self._life.scheduler():
            await self._life.reach(Phase.CHECK)
            if action != "checksum":
                return json_reply({"success": False, "message": f"Unsupported {action=}"}, 400)
            return json_reply(infos.checksums(self._life))

    async def _release(self, request: web.Request) -> web.Response:
        tags = (await body_of(request)).get("tags") or MEMORY_TAGS
        async with self._life.scheduler():
            if not self._life.flush():
                await self._life.died("release_memory_occupation should be called only when server is idle")
            self._life.released.update(tags)
        return json_reply(None)

    async def _resume_memory(self, request: web.Request) -> web.Response:
        tags = (await body_of(request)).get("tags") or MEMORY_TAGS
        async with self._life.scheduler():
            if not self._life.released.issuperset(tags):
                await self._life.died("resume_memory_occupation of a tag that is not released")
            self._life.released.difference_update(tags)
            if "weights" in tags and self._life.setup.memory_saver and not self._life.setup.weights_backup:
                self._life.weights.lose()
        return json_reply(None)

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        body = await body_of(request)
        try:
            wanted = samples.parse(self._life, body)
        except samples.BadRequest as error:
            return json_reply(error.body, 400)
        await self._life.reach(Phase.GENERATE)
        if wanted.stream:
            return await self._stream(request, wanted)
        replies = await asyncio.gather(*(self._last(request, prompt) for prompt in wanted.prompts))
        return json_reply(replies[0] if wanted.single else replies)

    async def _last(self, request: web.Request, prompt: samples.Prompt) -> dict[str, Any]:
        last: dict[str, Any] = {}
        async for reply in while_connected(request, samples.produce(self._life, prompt)):
            last = reply
        return last

    async def _stream(self, request: web.Request, wanted: samples.Wanted) -> web.StreamResponse:
        reply = web.StreamResponse(headers={"Content-Type": "text/event-stream; charset=utf-8"})
        await reply.prepare(request)

        async def send(number: int, prompt: samples.Prompt) -> None:
            async for part in while_connected(request, samples.produce(self._life, prompt)):
                numbered = part if wanted.single else {**part, "index": number}
                await reply.write(b"data: " + json.dumps(numbered).encode() + b"\n\n")

        await asyncio.gather(*(send(number, prompt) for number, prompt in enumerate(wanted.prompts)))
        await reply.write(b"data: [DONE]\n\n")
        return reply
