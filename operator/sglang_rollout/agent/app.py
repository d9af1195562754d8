"""HTTP routes of an agent. ``state`` and ``guards`` decide what is allowed; ``agent`` and ``update`` carry it out."""

from __future__ import annotations

import asyncio

from aiohttp import web
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from sglang_rollout.agent import events as ev
from sglang_rollout.agent import guards
from sglang_rollout.agent import state as s
from sglang_rollout.agent.access import Access, Handler, check_token, deadline_of, json_body, message, refuse
from sglang_rollout.agent.agent import Agent
from sglang_rollout.agent.checkpoint import CheckpointCheck, EngineModel
from sglang_rollout.agent.engine import EngineError, Reply
from sglang_rollout.agent.launch.head_pod import Leader
from sglang_rollout.agent.reachability import preflight
from sglang_rollout.agent.record import RecordError
from sglang_rollout.agent.relay import RELAYED, Relay
from sglang_rollout.agent.state import gate_may_open
from sglang_rollout.agent.update import Fence, acknowledge
from sglang_rollout.sglang.api import DATA_PATHS, ControlCall
from sglang_rollout.wire import ports
from sglang_rollout.wire.agent import AckRequest, CheckpointRequest, FenceRequest, MemberReport, PreflightRequest, SyncRequest
from sglang_rollout.wire.reasons import RefusedError
from sglang_rollout.wire.states import EngineState

MAX_BODY = 16 * 1024 * 1024
_READ_DEADLINE = 5.0
_GENERATE_DEADLINE = 30.0
_ACK_DEADLINE = 30.0
_CALL_DEADLINE = 600.0
_READS = ("/model_info", "/get_model_info", "/v1/models", "/v1/loads", "/get_load", "/ready", "/ping", "/metrics")
"""Read-only paths of SGLang, which need no token."""


class Routes:
    """Handlers, bound to one agent."""

    def __init__(self, agent: Agent, *, fence: Fence, metrics: Metrics, model_path: str | None, leader: Leader | None) -> None:
        self._agent = agent
        self._leader = leader
        self._model_path = model_path
        self._checkpoints = CheckpointCheck()
        self._own_model = CheckpointCheck()
        self._own_model_lock = asyncio.Lock()
        self._fence = fence
        self._metrics = metrics

    # Open

    async def health(self, _: web.Request) -> web.StreamResponse:
        """Answer that the agent runs."""
        return web.json_response({"status": "ok"})

    async def engine(self, _: web.Request) -> web.StreamResponse:
        """Answer whether the engine is up and warm. Also serves /health, because SGLang's own may generate a token."""
        state = self._agent.state
        return web.json_response({"status": "ok"}) if state.up else refuse(503, f"The engine is not up: {state.down.message}.")

    async def gate(self, _: web.Request) -> web.StreamResponse:
        """Answer haproxy whether the gate may be open."""
        if self._agent.may_open():
            return web.json_response({"open": True})
        return refuse(503, s.closed_message(self._agent.state))

    async def metrics(self, _: web.Request) -> web.StreamResponse:
        """Return metrics in Prometheus' text format."""
        return web.Response(body=self._metrics.text(), headers={"Content-Type": "text/plain; version=0.0.4; charset=utf-8"})

    async def read(self, request: web.Request) -> web.StreamResponse:
        """Forward a read-only path of SGLang."""
        reply = await self._agent.engine.get(request.path_qs, timeout=_READ_DEADLINE)
        return passed_on(with_name(reply, self._agent.state.record.served_name) if request.path == "/v1/models" else reply)

    async def server_info(self, _: web.Request) -> web.StreamResponse:
        """Return SGLang's launch configuration without API keys; during a control call, when its scheduler is busy, the last known one."""
        engine = self._agent.engine
        if not engine.info or not self._agent.state.record.pending:
            await engine.refresh_info(timeout=_READ_DEADLINE)
        name = self._agent.state.record.served_name
        return web.json_response({**engine.info, "served_model_name": name} if name else engine.info)

    async def health_generate(self, _: web.Request) -> web.StreamResponse:
        """Forward SGLang's generating health check if the engine can generate."""
        state = self._agent.state
        if not state.up or state.record.interruption.is_pause or state.record.pending:
            return refuse(503, "The engine cannot generate now: " + (s.closed_message(state) or "it is paused."))
        return passed_on(await self._agent.engine.get("/health_generate", timeout=_GENERATE_DEADLINE))

    # For the coordinator

    async def sync(self, request: web.Request) -> web.StreamResponse:
        """Apply the committed version, move the gate, and return the status."""
        self._take_over(request, await message(request, SyncRequest))
        return await self._status()

    async def run(self, request: web.Request) -> web.StreamResponse:
        """Apply a sync and end the pause of an update. The gate follows the committed version even if the engine does not resume."""
        self._take_over(request, await message(request, SyncRequest))
        reply = await self._agent.control(ControlCall.CONTINUE, {}, deadline_of(request, _CALL_DEADLINE))
        return await self._report_settled() if reply.ok else passed_on(reply)

    async def preflight(self, request: web.Request) -> web.StreamResponse:
        """Check that the pod reaches the trainer's store."""
        wanted = await message(request, PreflightRequest)
        reply = await (preflight(wanted) if self._leader is None else self._leader.preflight(wanted))
        return web.json_response(reply.model_dump(mode="json"))

    async def checkpoint(self, request: web.Request) -> web.StreamResponse:
        """Check that the engine can load a folder."""
        wanted = await message(request, CheckpointRequest)
        engine = self._agent.engine
        own = (
            EngineModel(wanted.model_path) if wanted.model_path else EngineModel.reported(self._model_path, engine.info, engine.model_info)
        )
        if wanted.path:
            reply = await self._checkpoints.run(wanted, own)
        else:
            # Trainers may list the model's tensors at any time, which must not delay the check of a checkpoint.
            async with self._own_model_lock:
                reply = await self._own_model.run(wanted, own)
        if self._leader is not None:
            reply = await self._leader.checkpoint(wanted, reply)
        return web.json_response(reply.model_dump(mode="json"))

    async def ack(self, request: web.Request) -> web.StreamResponse:
        """Acknowledge a version."""
        await acknowledge(self._agent, await message(request, AckRequest), deadline_of(request, _ACK_DEADLINE))
        return await self._report_settled()

    async def fence(self, request: web.Request) -> web.StreamResponse:
        """Give up an update."""
        await self._fence.give_up(await message(request, FenceRequest))
        return await self._status()

    async def control(self, request: web.Request) -> web.StreamResponse:
        """Forward one of SGLang's control calls."""
        call = request.path.removeprefix("/")
        body = await json_body(request)
        if call == ControlCall.GET_WEIGHTS:
            body = {**request.query, **body}
        reply = await self._agent.control(call, body, deadline_of(request, _CALL_DEADLINE))
        if call == ControlCall.UPDATE_DISK:
            self._release_checkpoint()
        return passed_on(reply)

    def _release_checkpoint(self) -> None:
        """Release the held snapshot once the engine has loaded it, which may be long after the caller's deadline."""
        loading = self._agent.running
        if loading is None or loading.done():
            self._checkpoints.release()
        else:
            loading.add_done_callback(lambda _: self._checkpoints.release())

    async def abort(self, request: web.Request) -> web.StreamResponse:
        """Abort requests, also during another call: a pause may wait for them."""
        return passed_on(await self._agent.engine.post(ControlCall.ABORT_REQUEST.path, await json_body(request), timeout=_READ_DEADLINE))

    async def not_offered(self, request: web.Request) -> web.StreamResponse:
        """Refuse a call of SGLang that cannot work here."""
        call = request.path.removeprefix("/")
        return refuse(501, f"{call} is not offered: {guards.NOT_OFFERED[call]}.")

    def _take_over(self, request: web.Request, told: SyncRequest) -> None:
        # Use the request's own term: a coordinator with a higher term may have called while the body arrived.
        term = int(request.headers[ports.TERM_HEADER])
        self._agent.lease, self._agent.silent, self._agent.drain = told.lease, told.silent, told.drain
        self._agent.dispatch(ev.CoordinatorCalled(term, told.committed, tuple(told.tolerated), told.spec_state, told.sender, told.seq))

    async def _status(self) -> web.Response:
        await self._agent.settle_gate()
        return self._report()

    async def _report_settled(self) -> web.Response:
        """Return the status once the gate is as the state requires."""
        await self._agent.settle_gate_if_due()
        return self._report()

    def _report(self) -> web.Response:
        return web.json_response(self._agent.status().model_dump(mode="json"))


def make_app(
    agent: Agent, *, token: str, fence: Fence, model_path: str | None = None, leader: Leader | None = None, relay: Relay | None = None
) -> web.Application:
    """All routes of an agent. ``model_path``: what the engine was started with, if known; ``leader``: of an engine with several pods;
    ``relay``: of an engine on its trainer's GPUs."""
    routes = Routes(agent, fence=fence, metrics=Metrics(agent), model_path=model_path, leader=leader)
    access = Access(agent, token, relay.hint if relay is not None else "")
    app = web.Application(client_max_size=MAX_BODY, middlewares=[_sentences])
    opened: dict[str, Handler] = {
        ports.AGENT_HEALTH: routes.health,
        ports.AGENT_ENGINE: routes.engine,
        ports.AGENT_GATE: routes.gate,
        ports.AGENT_METRICS: routes.metrics,
        "/health": routes.engine,
        "/health_generate": routes.health_generate,
        "/server_info": routes.server_info,
        "/get_server_info": routes.server_info,
        **dict.fromkeys(_READS, routes.read),
    }
    guarded: dict[str, Handler] = {
        ports.AGENT_SYNC: routes.sync,
        ports.AGENT_RUN: routes.run,
        ports.AGENT_PREFLIGHT: routes.preflight,
        ports.AGENT_CHECKPOINT: routes.checkpoint,
        ports.AGENT_ACK: routes.ack,
        ports.AGENT_FENCE: routes.fence,
        ControlCall.ABORT_REQUEST.path: routes.abort,
        **{f"/{call}": routes.control for call in guards.FORWARDED},
        **{f"/{call}": routes.not_offered for call in guards.NOT_OFFERED},
    }
    app.add_routes(web.get(path, handler) for path, handler in opened.items())

    def entrance(path: str, handler: Handler) -> Handler:
        checked = access.protected(handler)
        return relay.before(checked) if relay is not None and path.removeprefix("/") in RELAYED else checked

    app.add_routes(web.post(path, entrance(path, handler)) for path, handler in guarded.items())
    if leader is not None:
        app.router.add_post(ports.AGENT_GROUP, _member_route(leader, token))
    # SGLang answers these to GET as well.
    app.add_routes(
        web.get(path, entrance(path, routes.control))
        for path in (ControlCall.FLUSH_CACHE.path, ControlCall.GET_WEIGHTS.path, ControlCall.CHECK_WEIGHTS.path)
    )
    return app


def _member_route(leader: Leader, token: str) -> Handler:
    async def member(request: web.Request) -> web.StreamResponse:
        """Accept a report of a member pod, which knows no term."""
        check_token(request, token)
        report = await message(request, MemberReport)
        if report.rank >= leader.group.size:
            raise RefusedError(f"{request.path}: this engine has {leader.group.size} pods, so none of rank {report.rank}.")
        return web.json_response(leader.report(report).model_dump(mode="json"))

    return member


def with_name(reply: Reply, name: str | None) -> Reply:
    """Return ``/v1/models`` with the name that clients know. After an update from disk SGLang reports the model's path."""
    document = reply.document
    models = document.get("data") if isinstance(document, dict) else None
    if name is None or not isinstance(models, list):
        return reply
    # Adapters have a parent; the model itself has none.
    renamed = [{**model, "id": name, "root": name} if not model.get("parent") else {**model, "parent": name} for model in models]
    return Reply.json(reply.status, {**document, "data": renamed})


def passed_on(reply: Reply) -> web.Response:
    """Return the engine's answer. The reason phrase of a failure repeats its message (for adapters, ``error_message``)."""
    document = reply.document if reply.status >= 400 else None
    said = (document.get("message") or document.get("error_message")) if isinstance(document, dict) else None
    if isinstance(said, str):
        refused = refuse(reply.status, said)
        refused.body = reply.body
        return refused
    return web.Response(status=reply.status, body=reply.body, content_type=reply.content_type)


@web.middleware
async def _sentences(request: web.Request, handler: Handler) -> web.StreamResponse:  # noqa: PLR0911 - one per kind
    """Answer every error with a message in SGLang's shape."""
    try:
        return await handler(request)
    except RefusedError as error:
        return refuse(error.status, str(error), error.headers)
    except EngineError as error:
        return refuse(503, f"{request.path}: {error}.")
    except RecordError as error:
        return refuse(500, f"{request.path}: {error} Nothing was done.")
    except web.HTTPNotFound:
        return refuse(404, f"An engine's agent offers no {request.path}. Data paths: {', '.join(DATA_PATHS)}.")
    except web.HTTPRequestEntityTooLarge:
        return refuse(413, f"{request.path}: the body is larger than {MAX_BODY >> 20} MiB.")
    except web.HTTPMethodNotAllowed as error:
        return refuse(405, f"{request.path} does not take {request.method}, only {', '.join(sorted(error.allowed_methods))}.")


class Metrics:
    """The agent's metrics; gauges are read off the agent when they are asked for."""

    def __init__(self, agent: Agent) -> None:
        self._agent = agent
        self._registry = CollectorRegistry()
        prefix = "sglang_rollout_agent_"
        self._gauges = {
            name: Gauge(prefix + name, text, registry=self._registry)
            for name, text in {
                "engine_up": "1 while the engine answers and has warmed up.",
                "gate_may_open": "1 while the engine holds the committed version.",
                "gate_open": "1 while the gate itself says that requests pass.",
                "weights_dirty": "1 while the engine holds a mixture of weights.",
                "paused": "1 while the engine is paused.",
                "committed_step": "Step of the committed version within its run.",
                "version_step": "Step of the version that the engine holds, -1 if it holds none.",
                "term": "Highest coordinator term seen.",
            }.items()
        }
        self._calls = Counter(
            prefix + "control_calls", "Control calls by name and HTTP status.", ["call", "status"], registry=self._registry
        )
        self._seconds = Histogram(
            prefix + "control_seconds",
            "Seconds until the engine answered a control call.",
            ["call"],
            buckets=(0.01, 0.05, 0.25, 1, 5, 30, 120, 600),
            registry=self._registry,
        )
        agent.observer = self.observe

    def observe(self, call: str, reply: Reply, seconds: float) -> None:
        """Count one control call."""
        self._calls.labels(call, str(reply.status)).inc()
        self._seconds.labels(call).observe(seconds)

    def text(self) -> bytes:
        """The present values in Prometheus' text format."""
        state, record, view = self._agent.state, self._agent.state.record, self._agent.view
        values: dict[str, float] = {
            "engine_up": state.up,
            "gate_may_open": gate_may_open(state),
            "gate_open": view is not None and view.up,
            "weights_dirty": record.state is EngineState.DIRTY,
            "paused": record.interruption.is_pause,
            "committed_step": record.committed.step if record.committed else 0,
            "version_step": record.version.step if record.version else -1,
            "term": record.term,
        }
        for name, value in values.items():
            self._gauges[name].set(float(value))
        return generate_latest(self._registry)
