"""A small server with SGLang's HTTP API and without weights, for tests that need no real engine."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

from tests.support.ports import free_port


@dataclass
class StubEngine:
    """Has a version, records calls, and can be slow, old or broken."""

    port: int = field(default_factory=free_port)
    label: str = "base"
    old: bool = False
    """True to have no update sessions, as SGLang before 0.5.21."""
    generates: bool = True
    """False if the model returns embeddings or rewards."""
    version: str = "0.5.23"
    session: bool = False
    calls: list[str] = field(default_factory=list)
    bodies: dict[str, Any] = field(default_factory=dict)
    failing: set[str] = field(default_factory=set)
    held: dict[str, asyncio.Event] = field(default_factory=dict)
    """Calls that do not answer until their event is set."""
    model_info_after: float = 0.0
    """Delay of /model_info in seconds."""
    running: int = 0
    headers: list[str] = field(default_factory=list)
    """Names of the headers of the last request for tokens, in lower case."""
    asked: asyncio.Event = field(default_factory=asyncio.Event)
    """Set by the first request for tokens."""
    hold_answers: asyncio.Event | None = None
    """Requests for tokens wait for this event."""
    runner: web.AppRunner | None = None
    born: str = ""

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def start(self) -> None:
        """Start with a new boot identity and base weights."""
        self.label, self.session, self.born = "base", False, uuid.uuid4().hex
        app = web.Application()
        app.add_routes(
            [
                web.get("/model_info", self._model_info),
                web.get("/ready", self._ready),
                web.get("/health_generate", self._health_generate),
                web.get("/v1/loads", self._loads),
                web.get("/begin_weight_update", self._wrong_method),
                web.get("/server_info", self._server_info),
                web.post("/generate", self._generate),
                web.post("/{call}", self._call),
            ]
        )
        self.runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
        await self.runner.setup()
        await web.TCPSite(self.runner, "127.0.0.1", self.port, reuse_address=True).start()

    async def stop(self) -> None:
        if self.runner is not None:
            await self.runner.cleanup()
            self.runner = None

    async def _model_info(self, _: web.Request) -> web.Response:
        await asyncio.sleep(self.model_info_after)
        return web.json_response({"weight_version": self.label, "is_generation": self.generates})

    async def _ready(self, _: web.Request) -> web.Response:
        return web.Response()

    async def _health_generate(self, _: web.Request) -> web.Response:
        self.calls.append("health_generate")
        if "health_generate" in self.held:
            await self.held["health_generate"].wait()
        return web.Response()

    async def _loads(self, _: web.Request) -> web.Response:
        return web.json_response({"loads": [{"num_running_reqs": self.running, "num_waiting_reqs": 0}]})

    async def _wrong_method(self, _: web.Request) -> web.Response:
        return web.Response(status=404 if self.old else 405)

    async def _server_info(self, _: web.Request) -> web.Response:
        version = "0.5.20" if self.old else self.version
        info = {"version": version, "tp_size": 1, "weight_version": "base", "startup_time": {"all": self.born}}
        return web.json_response(info | {"admin_api_key": "hush", "launch_command": "--admin-api-key hush --port 1"})

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        self.headers = [name.lower() for name in request.headers]
        body = await request.json()
        if "logit_bias" in body["sampling_params"]:
            return web.json_response({"error": {"message": "logit_bias must has keys in [0, 2047], got -1."}}, status=400)
        self.asked.set()
        if self.hold_answers is not None:
            await self.hold_answers.wait()
        tokens = body["sampling_params"]["max_new_tokens"]
        if not body.get("stream"):
            return web.json_response({"text": "x", "meta_info": {"weight_version": self.label}})
        reply = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await reply.prepare(request)
        for _ in range(tokens):
            await reply.write(b'data: {"text": "x"}\n\n')
            await asyncio.sleep(0.05)
        await reply.write(b"data: [DONE]\n\n")
        return reply

    async def _call(self, request: web.Request) -> web.Response:
        call = request.match_info["call"]
        if self.old and call in ("begin_weight_update", "end_weight_update"):
            raise web.HTTPNotFound
        self.calls.append(call)
        self.bodies[call] = await request.json()
        if call in self.held:
            await self.held[call].wait()
        if call in self.failing:
            return web.json_response({"success": False, "message": f"{call} failed on purpose"}, status=400)
        if call == "begin_weight_update":
            if self.session:
                return web.json_response({"success": False, "message": "A weight update session is already open"}, status=400)
            self.session = True
        elif call == "end_weight_update":
            self.session = False
        elif call == "update_weight_version":
            self.label = self.bodies[call]["new_version"]
        return web.json_response({"success": True, "message": "Success"})


@asynccontextmanager
async def stub_engine(*, old: bool = False) -> AsyncIterator[StubEngine]:
    """Run a stub for the length of the block."""
    engine = StubEngine(old=old)
    await engine.start()
    try:
        yield engine
    finally:
        for event in engine.held.values():
            event.set()
        await engine.stop()
