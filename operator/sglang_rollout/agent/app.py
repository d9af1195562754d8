"""HTTP routes of an agent. ``state`` and ``guards`` decide what is allowed; ``agent`` and ``update`` carry it out."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from aiohttp import web
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.aiohttp import make_aiohttp_handler

from sglang_rollout.agent import events as ev
from sglang_rollout.agent import guards
from sglang_rollout.agent import state as s
from sglang_rollout.agent.access import RELAYED, Access, Relay
from sglang_rollout.agent.agent import Agent
from sglang_rollout.agent.checkpoint import CheckpointCheck
from sglang_rollout.agent.engine_model import EngineModel
from sglang_rollout.agent.launch.head_pod import HeadPod
from sglang_rollout.agent.own_model import OwnModel
from sglang_rollout.agent.record import RecordError
from sglang_rollout.agent.staged.service import StagedService
from sglang_rollout.agent.update import Fence, acknowledge
from sglang_rollout.credentials import Credentials
from sglang_rollout.internal.proven_calls import requires_proof, take_proven_calls
from sglang_rollout.internal.reachability import preflight
from sglang_rollout.internal.refusals import log_refusals
from sglang_rollout.internal.requests import Handler, answer_refusals, deadline_of, json_body, read_message, refuse
from sglang_rollout.sglang.api import DATA_PATHS, MODEL_INFO, MODELS, ControlCall
from sglang_rollout.sglang.client import EngineError, Reply
from sglang_rollout.wire import ports
from sglang_rollout.wire.agent import AckRequest, CheckpointRequest, FenceRequest, MemberReport, PreflightRequest, SyncRequest
from sglang_rollout.wire.reasons import RefusedError
from sglang_rollout.wire.staged import DropRequest
from sglang_rollout.wire.states import EngineState

MAX_BODY = 16 * 1024 * 1024
_READ_SECONDS = 5.0
_GENERATE_SECONDS = 30.0
_ACK_SECONDS = 30.0
_CALL_SECONDS = 600.0
_MODEL_INFOS = (MODEL_INFO, "/get_model_info")
_READS = (*_MODEL_INFOS, MODELS, "/v1/loads", "/get_load", "/ready", "/ping", "/metrics")
"""Read-only paths of SGLang, which need no proof."""


class Routes:
    """Handlers of one agent's requests.

    Args:
        agent: The agent.
        fence: Gives up updates.
        model_path: Model that the engine was started with; None if only the engine knows it.
        head_pod: The agent's role in an engine with several pods; None for an engine with one pod.
        takes_tensors: True if the trainer sends handles of its tensors to the engine.
        own_model: The tensors of the engine's model.
        staged: Copies of staged versions; None if the fleet has another transport.
    """

    def __init__(
        self,
        agent: Agent,
        *,
        fence: Fence,
        model_path: str | None,
        head_pod: HeadPod | None,
        takes_tensors: bool,
        own_model: OwnModel,
        staged: StagedService | None = None,
    ) -> None:
        self._agent = agent
        self._head_pod = head_pod
        self._model_path = model_path
        self._not_offered = guards.NOT_OFFERED if takes_tensors else {**guards.NOT_OFFERED, **guards.NO_TENSORS}
        self._checkpoints = CheckpointCheck()
        self._own_model = own_model
        self._fence = fence
        self._staged = staged
        self._metrics = make_aiohttp_handler(make_metrics(agent))

    def public(self) -> dict[str, Handler]:
        """Return the handlers of GET requests that need no proof, by path."""
        return {
            ports.AGENT_HEALTH: self.health,
            ports.AGENT_ENGINE: self.engine,
            ports.AGENT_GATE: self.gate,
            ports.AGENT_METRICS: self._metrics,
            "/health": self.engine,
            "/health_generate": self.health_generate,
            "/server_info": self.server_info,
            "/get_server_info": self.server_info,
            **dict.fromkeys(_READS, self.read),
        }

    def protected(self) -> dict[str, Handler]:
        """Return the handlers of the coordinator's calls, by path."""
        staged: dict[str, Handler] = {}
        if self._staged is not None:
            staged = {ports.AGENT_STAGE: self.stage, ports.AGENT_DROP: self.drop, ports.AGENT_ACTIVATE: self.activate}
        return {
            **staged,
            ports.AGENT_SYNC: self.sync,
            ports.AGENT_RUN: self.run,
            ports.AGENT_PREFLIGHT: self.preflight,
            ports.AGENT_CHECKPOINT: self.checkpoint,
            ports.AGENT_ACK: self.ack,
            ports.AGENT_FENCE: self.fence,
            ControlCall.ABORT_REQUEST.path: self.abort,
            **{f"/{call}": self.control for call in guards.FORWARDED},
            **{f"/{call}": self.not_offered for call in self._not_offered},
        }

    # Without a proof

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

    async def read(self, request: web.Request) -> web.StreamResponse:
        """Forward a read-only path of SGLang."""
        reply = await self._agent.engine.get(request.path_qs, timeout=_READ_SECONDS)
        name = self._agent.state.record.served_name
        if request.path == MODELS:
            reply = with_name(reply, name)
        elif request.path in _MODEL_INFOS and self._staged is not None:
            reply = with_launched_model(reply, name, self._agent.engine.info.get("model_path"))
        return to_response(reply)

    async def server_info(self, _: web.Request) -> web.StreamResponse:
        """Return SGLang's launch configuration without API keys; during a control call, when its scheduler is busy, the last known one."""
        engine = self._agent.engine
        if not engine.info or not self._agent.state.record.pending:
            await engine.read_info(timeout=_READ_SECONDS)
        name = self._agent.state.record.served_name
        return web.json_response({**engine.info, "served_model_name": name} if name else engine.info)

    async def health_generate(self, _: web.Request) -> web.StreamResponse:
        """Forward SGLang's generating health check if the engine can generate."""
        state = self._agent.state
        if not state.up or state.record.interruption.is_pause or state.record.pending:
            return refuse(503, "The engine cannot generate now: " + (s.closed_message(state) or "it is paused."))
        return to_response(await self._agent.engine.get("/health_generate", timeout=_GENERATE_SECONDS))

    # For the coordinator

    async def sync(self, request: web.Request) -> web.StreamResponse:
        """Apply the committed version, move the gate, and return the status."""
        self._apply_sync(request, await read_message(request, SyncRequest))
        return await self._status()

    async def run(self, request: web.Request) -> web.StreamResponse:
        """Apply a sync and end the pause of an update. The gate follows the committed version even if the engine does not resume.

        It opens first. Otherwise the next request of a session whose request was paused could find a closed gate, and the router would
        send it to another engine.
        """
        self._apply_sync(request, await read_message(request, SyncRequest))
        await self._agent.gate.settle_if_due()
        reply = await self._agent.control(ControlCall.CONTINUE, {}, deadline_of(request, _CALL_SECONDS))
        return await self._status_if_settled() if reply.ok else to_response(reply)

    async def preflight(self, request: web.Request) -> web.StreamResponse:
        """Check that the engine's pods reach the trainer's store."""
        wanted = await read_message(request, PreflightRequest)
        reply = await (preflight(wanted) if self._head_pod is None else self._head_pod.preflight(wanted))
        return web.json_response(reply.model_dump(mode="json"))

    async def checkpoint(self, request: web.Request) -> web.StreamResponse:
        """Check that the engine can load a folder."""
        wanted = await read_message(request, CheckpointRequest)
        engine, path = self._agent.engine, self._model_path
        if wanted.path:
            own = EngineModel(wanted.model_path) if wanted.model_path else EngineModel.reported(path, engine.info, engine.model_info)
            reply = await self._checkpoints.run(wanted, own)
        else:
            reply = await self._own_model.read(wanted)
        if self._head_pod is not None:
            reply = await self._head_pod.checkpoint(wanted, reply)
        return web.json_response(reply.model_dump(mode="json"))

    async def ack(self, request: web.Request) -> web.StreamResponse:
        """Acknowledge a version."""
        await acknowledge(self._agent, await read_message(request, AckRequest), deadline_of(request, _ACK_SECONDS))
        return await self._status_if_settled()

    async def fence(self, request: web.Request) -> web.StreamResponse:
        """Give up an update."""
        await self._fence.give_up(await read_message(request, FenceRequest))
        return await self._status()

    async def stage(self, request: web.Request) -> web.StreamResponse:
        """Copy a version into the pod."""
        if self._staged is None:
            raise web.HTTPNotFound
        return await self._staged.stage(request, self._status_if_settled)

    async def activate(self, request: web.Request) -> web.StreamResponse:
        """Load a staged version into the engine."""
        if self._staged is None:
            raise web.HTTPNotFound
        return await self._staged.activate(request, partial(self._apply_sync, request))

    async def drop(self, request: web.Request) -> web.StreamResponse:
        """Delete the copy of an update that failed."""
        if self._staged is None:
            raise web.HTTPNotFound
        await self._staged.drop(await read_message(request, DropRequest))
        return await self._status_if_settled()

    async def control(self, request: web.Request) -> web.StreamResponse:
        """Forward one of SGLang's control calls."""
        call, body = request.path.removeprefix("/"), await json_body(request)
        if call == ControlCall.GET_WEIGHTS:
            body = {**request.query, **body}
        reply = await self._agent.control(call, body, deadline_of(request, _CALL_SECONDS))
        if call == ControlCall.UPDATE_DISK:
            self._release_checkpoint()
        return to_response(reply)

    def _release_checkpoint(self) -> None:
        """Release the held snapshot once the engine has loaded it, which may be long after the caller's deadline."""
        loading = self._agent.running
        if loading is None or loading.done():
            self._checkpoints.release()
        else:
            loading.add_done_callback(lambda _: self._checkpoints.release())

    async def abort(self, request: web.Request) -> web.StreamResponse:
        """Abort requests, also during another call: a pause may wait for them."""
        return to_response(await self._agent.engine.post(ControlCall.ABORT_REQUEST.path, await json_body(request), timeout=_READ_SECONDS))

    async def not_offered(self, request: web.Request) -> web.StreamResponse:
        """Refuse a call of SGLang that cannot work here."""
        call = request.path.removeprefix("/")
        return refuse(501, f"{call} is not offered: {self._not_offered[ControlCall(call)]}.")

    async def member_report(self, request: web.Request) -> web.StreamResponse:
        """Accept a report of a member pod, which knows no term."""
        report = await read_message(request, MemberReport)
        if self._head_pod is None or report.rank >= self._head_pod.ranks.size:
            size = 1 if self._head_pod is None else self._head_pod.ranks.size
            raise RefusedError(f"{request.path}: this engine has {size} pods, so none of rank {report.rank}.")
        return web.json_response(self._head_pod.report(report).model_dump(mode="json"))

    def _apply_sync(self, request: web.Request, sync: SyncRequest) -> None:
        # Use the request's own term: a coordinator with a higher term may have called while the body arrived.
        term = int(request.headers[ports.TERM_HEADER])
        self._agent.limits = sync
        tolerated = tuple(sync.tolerated)
        self._agent.dispatch(ev.CoordinatorCalled(term, sync.committed, tolerated, sync.spec_state, sync.sender, sync.seq, sync.staged))

    async def _status(self) -> web.Response:
        await self._agent.gate.settle()
        return web.json_response(self._agent.status().model_dump(mode="json"))

    async def _status_if_settled(self) -> web.Response:
        """Return the status once the gate is as the state requires."""
        await self._agent.gate.settle_if_due()
        return web.json_response(self._agent.status().model_dump(mode="json"))


def make_app(
    agent: Agent,
    *,
    credentials: Credentials,
    fence: Fence,
    model_path: str | None = None,
    head_pod: HeadPod | None = None,
    relay: Relay | None = None,
    takes_tensors: bool = False,
    own_model: OwnModel | None = None,
    staged: StagedService | None = None,
) -> web.Application:
    """Return the application with all routes of an agent.

    Args:
        agent: The agent.
        credentials: Credentials of the coordinator and of the engine's other pods.
        fence: Gives up updates.
        model_path: Model that the engine was started with; None if only the engine knows it.
        head_pod: The agent's role in an engine with several pods.
        relay: For an engine on its trainer's GPUs, forwards calls without a token.
        takes_tensors: True if the trainer sends handles of its tensors to the engine.
        own_model: The tensors of the engine's model; None: read from the model's files.
        staged: Copies of staged versions; None if the fleet has another transport.
    """
    own_model = own_model or OwnModel(agent.engine, model_path)
    routes = Routes(
        agent, fence=fence, model_path=model_path, head_pod=head_pod, takes_tensors=takes_tensors, own_model=own_model, staged=staged
    )
    access = Access(agent, relay.hint if relay is not None else "")
    app = web.Application(client_max_size=MAX_BODY, middlewares=[_answer_errors, answer_refusals])
    log_refusals(app)
    take_proven_calls(app, credentials)
    protected = routes.protected()

    def checked(path: str) -> Handler:
        handler = access.protected(protected[path])
        return relay.before(handler) if relay is not None and path.removeprefix("/") in RELAYED else handler

    app.add_routes(web.get(path, handler) for path, handler in routes.public().items())
    app.add_routes(web.post(path, checked(path)) for path in protected)
    # SGLang answers these to GET as well.
    gets = (ControlCall.FLUSH_CACHE.path, ControlCall.GET_WEIGHTS.path, ControlCall.CHECK_WEIGHTS.path)
    app.add_routes(web.get(path, checked(path), allow_head=False) for path in gets)
    if head_pod is not None:
        app.router.add_post(ports.AGENT_GROUP, requires_proof(routes.member_report))
    return app


def with_name(reply: Reply, name: str | None) -> Reply:
    """Return ``/v1/models`` with the name that clients know. After an update from disk SGLang reports the model's path."""
    document = reply.document
    models = document.get("data") if isinstance(document, dict) else None
    if name is None or not isinstance(models, list):
        return reply
    # Adapters have a parent; the model itself has none.
    renamed = [{**model, "id": name, "root": name} if not model.get("parent") else {**model, "parent": name} for model in models]
    return Reply.json(reply.status, {**document, "data": renamed})


def with_launched_model(reply: Reply, name: str | None, path: object) -> Reply:
    """Return ``/model_info`` with the model that the engine was started with.

    SGLang reports the folder that it has loaded, which is deleted with its version.
    """
    document = reply.document
    if not isinstance(document, dict) or "model_path" not in document:
        return reply
    launched = {key: value for key, value in (("model_path", path), ("served_model_name", name)) if isinstance(value, str)}
    return Reply.json(reply.status, {**document, **launched})


def to_response(reply: Reply) -> web.Response:
    """Return the engine's answer. The reason phrase of a failure repeats its message (for adapters, ``error_message``)."""
    document = reply.document if reply.status >= 400 else None
    message = (document.get("message") or document.get("error_message")) if isinstance(document, dict) else None
    if isinstance(message, str):
        refused = refuse(reply.status, message)
        refused.body = reply.body
        return refused
    return web.Response(status=reply.status, body=reply.body, content_type=reply.content_type)


@web.middleware
async def _answer_errors(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Answer every other error with a message in SGLang's shape."""
    try:
        return await handler(request)
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


def make_metrics(agent: Agent) -> CollectorRegistry:
    """Return the agent's metrics. Gauges read the agent at each scrape."""
    registry, prefix = CollectorRegistry(), "sglang_rollout_agent_"

    def add_gauge(name: str, text: str, read: Callable[[s.EngineRecord], float]) -> None:
        Gauge(prefix + name, text, registry=registry).set_function(lambda: float(read(agent.state.record)))

    add_gauge("engine_up", "1 while the engine answers and has warmed up.", lambda _: agent.state.up)
    add_gauge("gate_may_open", "1 while the agent lets requests pass.", lambda _: s.gate_may_open(agent.state))
    add_gauge("gate_open", "1 while the gate reports that requests pass.", lambda _: agent.gate.view is not None and agent.gate.view.up)
    add_gauge("weights_dirty", "1 while the engine holds a mixture of weights.", lambda record: record.state is EngineState.DIRTY)
    add_gauge("paused", "1 while the engine is paused.", lambda record: record.interruption.is_pause)
    add_gauge(
        "committed_step",
        "Step of the committed version within its run.",
        lambda record: record.committed.step if record.committed else 0,
    )
    add_gauge(
        "version_step",
        "Step of the version that the engine holds, -1 if it holds none.",
        lambda record: record.version.step if record.version else -1,
    )
    add_gauge("term", "Highest coordinator term seen.", lambda record: record.term)
    copies = Gauge(prefix + "staged_bytes", "Bytes of the versions in the memory of the pod (transport Staged).", registry=registry)
    copies.set_function(lambda: float(sum(copy.bytes for copy in agent.list_copies())))
    _observe_calls(agent, registry)
    return registry


def _observe_calls(agent: Agent, registry: CollectorRegistry) -> None:
    """Count control calls and pauses when they end."""
    prefix = "sglang_rollout_agent_"
    calls = Counter(prefix + "control_calls", "Control calls by name and HTTP status.", ["call", "status"], registry=registry)
    seconds = Histogram(
        prefix + "control_seconds",
        "Seconds until the engine answered a control call.",
        ["call"],
        buckets=(0.01, 0.05, 0.25, 1, 5, 30, 120, 600),
        registry=registry,
    )

    def count_call(call: str, reply: Reply, duration: float) -> None:
        calls.labels(call, str(reply.status)).inc()
        seconds.labels(call).observe(duration)

    agent.on_call_ended = count_call
    pauses = Histogram(
        prefix + "pause_seconds",
        "Seconds that the engine was paused, observed when it generates again.",
        registry=registry,
        buckets=(0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 15, 60, 300),
    )
    agent.on_pause_ended = pauses.observe
