"""The real coordinator and batch server with simulated agents behind real HTTP, a fake smg, and files for the state."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
from aiohttp import web

from sglang_rollout.api.intent import Intent, WantedEngine
from sglang_rollout.api.limits_spec import Limits
from sglang_rollout.api.security_spec import Security
from sglang_rollout.api.weights_spec import Deadlines, Weights
from sglang_rollout.batches import main as batches
from sglang_rollout.batches.memory import DEFAULT_LIMIT_BYTES
from sglang_rollout.coordinator.main import Options, serve
from sglang_rollout.credentials import CredentialFile, Credentials
from sglang_rollout.internal.proven_calls import is_proven, take_proven_calls
from sglang_rollout.internal.refusals import log_refusals
from sglang_rollout.internal.requests import answer_refusals
from sglang_rollout.proxy.address import Address, Endpoint
from sglang_rollout.sglang.api import DATA_PATHS
from sglang_rollout.wire.ports import AGENT_CHECKPOINT, AGENT_PREFLIGHT, BATCHES_METRICS, TERM_HEADER
from sglang_rollout.wire.reasons import RefusalCode
from sglang_rollout.wire.states import FleetMode, FleetState
from tests.properties.support.simulated_agent import SimulatedAgent
from tests.support.ports import free_port

TOKEN = "secret"
QUICK = Deadlines(group_seconds=3, update_seconds=3, idle_seconds=5, pause_seconds=3)


@dataclass
class HttpAgent:
    """A SimulatedAgent behind HTTP. Calls to ``slow`` paths wait these seconds; calls to ``broken`` paths fail with this message."""

    agent: SimulatedAgent
    port: int = field(default_factory=free_port)
    broken: dict[str, str] = field(default_factory=dict)
    slow: dict[str, float] = field(default_factory=dict)
    calls: list[tuple[str, dict[str, Any]]] = field(default_factory=list)
    attempts: int = 0
    answer_tokens: Callable[[web.Request], Awaitable[web.StreamResponse]] | None = None
    """Answers requests for tokens, as the engine behind an open gate does."""
    runner: web.AppRunner | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def bodies_of(self, path: str) -> list[dict[str, Any]]:
        return [body for called, body in self.calls if called == path]

    async def handle(self, request: web.Request) -> web.StreamResponse:
        if request.method == "GET":
            await asyncio.sleep(self.slow.get(request.path, 0))
            return self.read(request.path)
        if request.path in DATA_PATHS and self.answer_tokens is not None:
            return await self.answer_tokens(request)
        if not is_proven(request):
            return web.json_response({"success": False, "message": "no token"}, status=401)
        term = int(request.headers[TERM_HEADER])
        if term < self.agent.term:
            headers = {TERM_HEADER: str(self.agent.term)}
            return web.json_response({"success": False, "message": "old term"}, status=409, headers=headers)
        self.agent.term = term
        body = await request.json()
        if request.path != "/agent/sync":
            self.calls.append((request.path, body))
        if request.path in self.slow:
            await asyncio.sleep(self.slow[request.path])
        if request.path in self.broken:
            return self.answer(request.path, {"success": False, "message": self.broken[request.path]}, 400)
        if request.path == "/abort_request":
            return web.Response()
        self.attempts += 1
        result = self.agent.call(request.path, body, f"update-{body.get('version')}", works=True)
        if result.agent is not None:
            return web.json_response(result.agent.model_dump(mode="json"))
        if result.checksums is not None:
            ranks = [
                {"per_gpu_checksum": sums, "parallelism_info": [{"role": "target", "rank": rank}]}
                for rank, sums in enumerate(result.checksums)
            ]
            return web.json_response({"success": True, "message": "", "ranks": ranks})
        if request.path == AGENT_CHECKPOINT:
            reply = {
                "refusal": _refusal(ok=result.ok, message=result.message),
                "digest": result.digest,
                "path": result.path,
                "compared": result.compared,
                "unchecked": result.unchecked,
                "why_unchecked": result.why_unchecked,
            }
            return web.json_response(reply)
        return self.answer(request.path, {"success": result.ok, "message": result.message}, result.status)

    def answer(self, path: str, body: dict[str, Any], status: int) -> web.Response:
        if path == AGENT_PREFLIGHT:
            return web.json_response({"refusal": _refusal(ok=body["success"], message=body["message"])})
        return web.json_response(body, status=status)

    def read(self, path: str) -> web.Response:
        replies: dict[str, Any] = {
            "/server_info": {"tp_size": 1, "dp_size": 1, "model_path": "m", "admin_api_key": "k", "enable_memory_saver": False},
            "/model_info": {"model_path": "m", "weight_version": "whatever"},
            "/v1/models": {"object": "list", "data": [{"id": "m"}]},
            "/v1/loads": {"loads": [{"dp_rank": 0, "num_running_reqs": 2, "num_waiting_reqs": 1}]},
        }
        return web.json_response(replies[path]) if path in replies else web.Response(status=404)

    async def start(self) -> None:
        app = web.Application()
        app.middlewares.append(answer_refusals)
        log_refusals(app)
        take_proven_calls(app, Credentials(TOKEN).derive(self.agent.name))
        app.router.add_route("*", "/{tail:.*}", self.handle)
        self.runner = web.AppRunner(app, shutdown_timeout=0.1)
        await self.runner.setup()
        await web.TCPSite(self.runner, "127.0.0.1", self.port).start()

    async def stop(self) -> None:
        if self.runner is not None:
            await self.runner.cleanup()
            self.runner = None


def _refusal(*, ok: bool, message: str) -> dict[str, str] | None:
    return None if ok else {"code": RefusalCode.UNAVAILABLE, "message": message}


class FakeSmg:
    """Simulates smg: its list of workers, and answers to requests for tokens that a test defines."""

    def __init__(self) -> None:
        self.port = free_port()
        self.answer_tokens: Callable[[web.Request], Awaitable[web.StreamResponse]] | None = None
        self.workers: dict[str, str] = {}
        self.seen: list[set[str]] = []
        self.reaches_engines = True
        """False: smg accepts workers and does not list them, because it cannot read their descriptions."""
        self.runner: web.AppRunner | None = None

    async def list_workers(self, request: web.Request) -> web.Response:
        self.seen.append(set(self.workers.values()))
        return web.json_response({"workers": [{"id": name, "url": url, "status": "ready"} for name, url in self.workers.items()]})

    async def add(self, request: web.Request) -> web.Response:
        url = (await request.json())["url"]
        if url in self.workers.values():
            return web.json_response({"code": "WORKER_ALREADY_EXISTS"}, status=409)
        if self.reaches_engines:
            self.workers[f"w{len(self.seen)}-{len(self.workers)}"] = url
        return web.json_response({"status": "accepted"}, status=202)

    async def remove(self, request: web.Request) -> web.Response:
        gone = self.workers.pop(request.match_info["id"], None)
        return web.json_response({}, status=202 if gone else 404)

    async def tokens(self, request: web.Request) -> web.StreamResponse:
        if self.answer_tokens is None:
            return web.json_response({"error": {"code": "model_not_found"}}, status=404)
        return await self.answer_tokens(request)

    async def stop(self) -> None:
        if self.runner is not None:
            await self.runner.cleanup()
            self.runner = None

    async def start(self) -> None:
        app = web.Application(client_max_size=2**28)
        app.add_routes([web.post(path, self.tokens) for path in DATA_PATHS])
        app.add_routes([web.get("/workers", self.list_workers), web.post("/workers", self.add), web.delete("/workers/{id}", self.remove)])
        runner = web.AppRunner(app, shutdown_timeout=0.1, handler_cancellation=True)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", self.port, reuse_address=True).start()
        self.runner = runner


@dataclass
class Lab:
    """A coordinator, a batch server, agents and smg, with the calls of a trainer."""

    folder: Path
    agents: list[HttpAgent]
    smg: FakeSmg
    port: int
    session: aiohttp.ClientSession
    deadlines: Deadlines = QUICK
    mode: FleetMode | None = None
    policy: dict[str, Any] = field(default_factory=dict)
    """Further fields of ``spec.weights``."""
    security: Security = field(default_factory=Security)
    coordinator: asyncio.Task[None] | None = None
    batches: asyncio.Task[None] | None = None
    batches_port: int = field(default_factory=free_port)
    generation: int = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def url_of(self, path: str) -> str:
        """Return the URL of a path, as the front selects the process."""
        return (f"http://127.0.0.1:{self.batches_port}" if path in DATA_PATHS else self.url) + path

    @property
    def record(self) -> Path:
        return self.folder / "record.json"

    def write_intent(self, sizes: dict[str, int] | None = None) -> None:
        self.generation += 1
        engines = [
            WantedEngine(name=agent.agent.name, tensor_size=(sizes or {}).get(agent.agent.name, 1), url=agent.url) for agent in self.agents
        ]
        intent = Intent(
            generation=self.generation, name="demo", namespace="default", engines=engines,
            weights=Weights(backend="gloo", deadlines=self.deadlines, **self.policy), mode=self.mode, security=self.security,
        )  # fmt: skip
        (self.folder / "intent.json").write_text(intent.model_dump_json())

    def start(self, listen: Endpoint | None = None, pod_listen: Address | None = None) -> None:
        options = Options(
            name="demo", namespace="default",
            listen=listen or Address("127.0.0.1", self.port), pod_listen=pod_listen, smg_url=f"http://127.0.0.1:{self.smg.port}",
            batches_url=f"http://127.0.0.1:{self.batches_port}",
            token_file=self.folder / "token", public_url=self.url, kubernetes=False,
            intent_file=self.folder / "intent.json", record_file=self.record,
        )  # fmt: skip
        self.coordinator = asyncio.create_task(serve(options, CredentialFile(self.folder / "token")))

    async def start_batches(
        self, memory: int = DEFAULT_LIMIT_BYTES, limits: Limits | None = None, *, check_data_callers: bool = False
    ) -> None:
        address, smg = Address("127.0.0.1", self.batches_port), f"http://127.0.0.1:{self.smg.port}"
        options = batches.Options(
            address, smg, self.url, memory, limits or Limits(), check_data_callers=check_data_callers, shutdown_seconds=0.1
        )
        self.batches = asyncio.create_task(batches.serve(options))

        async def are_up() -> bool:
            return bool(await self.metrics_of_batches())

        await self.until("the batch server answers", are_up)

    async def kill(self) -> None:
        """End the coordinator."""
        if self.coordinator is not None:
            self.coordinator.cancel()
            await asyncio.gather(self.coordinator, return_exceptions=True)

    async def end_batches(self) -> None:
        if self.batches is not None:
            self.batches.cancel()
            await asyncio.gather(self.batches, return_exceptions=True)

    async def call(
        self, method: str, path: str, body: Any = None, data: bytes | None = None, headers: dict[str, str] | None = None
    ) -> tuple[int, str, Any]:
        """Return status, reason phrase and body. ``data`` is JSON unless ``headers`` say otherwise."""
        payload: dict[str, Any] = {"json": body} if body is not None else {"headers": headers}
        if data is not None:
            payload = {"data": data, "headers": {"Content-Type": "application/json"} | (headers or {})}
        async with self.session.request(method, self.url_of(path), **payload) as reply:
            text = await reply.text()
            try:
                return reply.status, reply.reason or "", json.loads(text)
            except ValueError:
                return reply.status, reply.reason or "", text

    async def post(self, path: str, body: Any = None) -> tuple[int, str, Any]:
        return await self.call("POST", path, body)

    async def get(self, path: str) -> tuple[int, str, Any]:
        return await self.call("GET", path)

    async def metrics_of_batches(self) -> str:
        async with self.session.get(f"http://127.0.0.1:{self.batches_port}{BATCHES_METRICS}") as reply:
            return await reply.text()

    async def document(self) -> dict[str, Any]:
        status, _, body = await self.get("/fleet")
        return body if status == 200 else {}

    async def until(self, what: str, check: Any, within: float = 30.0) -> None:
        end = asyncio.get_running_loop().time() + within
        while True:
            try:
                if await check():
                    return
            except aiohttp.ClientError:
                pass
            assert asyncio.get_running_loop().time() < end, f"not within {within} s: {what}; {await self.document()}"
            await asyncio.sleep(0.05)

    async def serving(self, number: int, within: float = 30.0) -> None:
        async def check() -> bool:
            return (await self.document()).get("serving") == number

        await self.until(f"{number} engines serve", check, within)

    async def set_state(self, state: FleetState) -> None:
        """Write the intent as the operator does after a change of ``spec.state``, and wait until it is in effect."""
        path = self.folder / "intent.json"
        intent = Intent.model_validate_json(path.read_text())
        path.write_text(intent.model_copy(update={"state": state, "generation": intent.generation + 1}).model_dump_json())

        async def in_effect() -> bool:
            return bool((await self.document())["state"] == state.value)

        await self.until(f"the fleet is {state}", in_effect)

    async def open_group(self, name: str = "g", **changes: Any) -> tuple[int, str, Any]:
        body = {
            "master_address": "127.0.0.1", "master_port": "29500", "rank_offset": 1, "group_name": name,
            "world_size": 1 + len(self.agents), **changes,
        }  # fmt: skip
        return await self.post("/init_weights_update_group", body)


@asynccontextmanager
async def fleet_lab(
    folder: Path, engines: int = 2, deadlines: Deadlines = QUICK, mode: FleetMode | None = None, **policy: Any
) -> AsyncIterator[Lab]:
    """Run a coordinator over simulated agents. All engines serve when the block begins, except in a mode with a co-located trainer."""
    async with AsyncExitStack() as stack:
        agents = [HttpAgent(SimulatedAgent(f"e{index}")) for index in range(engines)]
        for agent in agents:
            await agent.start()
            stack.push_async_callback(agent.stop)
        smg = FakeSmg()
        await smg.start()
        stack.push_async_callback(smg.stop)
        session = await stack.enter_async_context(aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=30)))
        lab = Lab(folder, agents, smg, free_port(), session, deadlines, mode, policy)
        (folder / "token").write_text(TOKEN)
        lab.write_intent()
        lab.start()
        stack.push_async_callback(lab.kill)
        stack.push_async_callback(lab.end_batches)
        await lab.start_batches()
        if mode is None:
            await lab.serving(engines)
        yield lab
