"""Member pod of an engine of several pods: it reports to the head pod and carries out the verdicts.

A member pod serves no requests and accepts no control calls, because SGLang only answers health checks there.
"""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import os
import socket
import time
from collections.abc import Callable, Sequence

import aiohttp
from aiohttp import web
from prometheus_client import CollectorRegistry, Gauge
from prometheus_client.aiohttp import make_aiohttp_handler

from sglang_rollout.agent.checkpoint import CheckpointCheck
from sglang_rollout.agent.engine import StartBarrier, replace_file
from sglang_rollout.agent.engine_model import EngineModel
from sglang_rollout.agent.launch.rank_lifecycle import GRACE_SECONDS, Link
from sglang_rollout.bounded import MESSAGE_BYTES, open_session
from sglang_rollout.credentials import Credentials
from sglang_rollout.internal.proven_calls import Peer, require_proof, take_proven_calls
from sglang_rollout.internal.reachability import is_cut, preflight
from sglang_rollout.internal.refusals import log_refusals
from sglang_rollout.internal.requests import answer_refusals, read_message, refuse
from sglang_rollout.proxy.address import Address
from sglang_rollout.sglang.client import EngineClient, EngineError
from sglang_rollout.wire import ports
from sglang_rollout.wire.agent import CheckpointRequest, GroupReply, MemberHealth, MemberReport, PreflightRequest, Verdict
from sglang_rollout.wire.states import StagedCopy

log = logging.getLogger(__name__)

_PING_SECONDS = 2.0
_REPORT_SECONDS = 3.0
_NAME_SECONDS = 5.0


class MemberPod:
    """Agent of a member pod: reports to the head pod and carries out its verdicts."""

    def __init__(
        self, engine: EngineClient, barrier: StartBarrier, *, rank: int, head: Address, own: Address, credentials: Credentials
    ) -> None:
        self.rank = rank
        self.head = head
        self.up = False
        """SGLang's part in this pod has finished loading."""
        self.down_reason = "it has not answered yet"
        self.unreachable = ""
        """Why the head pod cannot be reached; empty if it can."""
        self._engine = engine
        self._barrier = barrier
        self._own = own
        self._head_pod = Peer(credentials)
        self._address = head if _is_ip(head.host) else None
        """IP address of the head pod. A name server that is down must not look like a lost pod."""
        self._unresolved = ""
        """Why the last attempt to resolve the head pod's name failed."""
        self._link = Link()
        self.proved_schedulers = 0
        """Number of schedulers in the pod in which the plug-in has proved that it is active."""
        self.list_copies: Callable[[], list[StagedCopy]] = list
        """Return the versions in the memory of the pod."""
        self.data_address: Address | None = None
        """Where other pods copy these versions; None with another transport."""

    async def resolve(self) -> None:
        """Resolve the head pod's address once; keep the last known address if that fails."""
        if _is_ip(self.head.host):
            return
        try:
            async with asyncio.timeout(_NAME_SECONDS):
                found = await asyncio.get_running_loop().getaddrinfo(self.head.host, self.head.port, type=socket.SOCK_STREAM)
        except OSError as error:  # includes TimeoutError
            self._unresolved = f"{self.head.host}: {error.strerror or f'no name server answers within {_NAME_SECONDS:g} s'}"
            return
        self._unresolved = ""
        self._address = Address(str(found[0][4][0]), self.head.port)

    def boot_id(self) -> str | None:
        """Return the boot ID of the engine's container in this pod; None while it does not run."""
        return self._barrier.boot_id()

    async def observe(self) -> None:
        """Poll SGLang once. On a node without tokenizer SGLang listens only after its schedulers have loaded."""
        try:
            reply = await self._engine.get("/ping", timeout=_PING_SECONDS)
            self.up, self.down_reason = reply.status == 200, f"it says HTTP {reply.status}"
        except EngineError as error:
            self.up, self.down_reason = False, str(error)

    async def report(self) -> None:
        """Report to the head pod and carry out its verdict. If the network path to the head pod is cut, end this run."""
        files, boot_id = self._barrier.files, self._barrier.boot_id()
        started, draining = self._barrier.is_started(boot_id), files.is_drain_requested()
        report = MemberReport(
            rank=self.rank,
            address=str(self._own),
            boot_id=boot_id,
            released=started,
            up=self.up and started,
            draining=draining,
            schedulers=self.proved_schedulers,
            staged=self.list_copies(),
            data_address=str(self.data_address or ""),
        )
        reply = await self._send(report)
        if draining and (not started or (reply is not None and reply.drained)):
            replace_file(files.drained)
        if reply is not None:
            self._link = Link()
            self._barrier.carry_out(reply.verdict, boot_id, reply.message)
        elif self._address is not None:
            self._link = self._link.after_attempt(time.monotonic(), cut=await is_cut(self._address))
            if started and self._link.is_lost(time.monotonic()):
                self._barrier.carry_out(Verdict.END, boot_id, f"pod 0 of the engine could not be reached for {GRACE_SECONDS:.0f} s.")

    async def _send(self, report: MemberReport) -> GroupReply | None:
        if self._address is None:
            self._note_reachability(self._unresolved)
            return None
        limit = aiohttp.ClientTimeout(total=_REPORT_SECONDS)
        url = self._address.url + ports.AGENT_GROUP
        try:
            async with open_session(timeout=limit) as http:
                answer = await self._head_pod.call(http, "POST", url, report.model_dump_json().encode(), limit=MESSAGE_BYTES)
            if answer.status == 200:
                reply = GroupReply.model_validate_json(answer.body)
                self._note_reachability("")
                return reply
            problem = f"it answers HTTP {answer.status}"
        except (aiohttp.ClientError, OSError, ValueError) as error:
            problem = (str(error) or f"no answer within {_REPORT_SECONDS:g} s").splitlines()[0]
        unresolved = f" ({self._unresolved})" if self._unresolved else ""
        self._note_reachability(f"{self._address}: {problem}{unresolved}")
        return None

    def _note_reachability(self, problem: str) -> None:
        """Log a change only once."""
        unreachable = f"it cannot reach pod 0: {problem}" if problem else ""
        if unreachable and unreachable != self.unreachable:
            log.warning("Pod %d of the engine: %s.", self.rank, unreachable)
        if self.unreachable and not unreachable and self._address is not None:
            log.info("Pod 0 receives the reports of this pod.")
        self.unreachable = unreachable


def member_app(
    member: MemberPod, *, name: str, credentials: Credentials, model_path: str | None, more_routes: Sequence[web.RouteDef] = ()
) -> web.Application:
    """Return the application of a member pod's agent.

    Args:
        member: The member pod.
        name: Name of the engine.
        credentials: Credentials of the engine.
        model_path: Model with which checkpoints are compared.
        more_routes: The calls of transport Staged.
    """
    checkpoints = CheckpointCheck()
    registry = CollectorRegistry()
    up = Gauge("sglang_rollout_agent_engine_up", "1 while this pod's part of the engine has loaded.", registry=registry)
    up.set_function(lambda: float(member.up))
    copies = Gauge(
        "sglang_rollout_agent_staged_bytes", "Bytes of the versions in the memory of the pod (transport Staged).", registry=registry
    )
    copies.set_function(lambda: float(sum(copy.bytes for copy in member.list_copies())))

    async def health(_: web.Request) -> web.StreamResponse:
        return web.json_response(MemberHealth(unheard=member.unreachable).model_dump(mode="json"))

    async def engine(_: web.Request) -> web.StreamResponse:
        if member.up:
            return web.json_response({"status": "ok"})
        why = "; ".join(filter(None, (member.down_reason, member.unreachable)))
        return refuse(503, f"SGLang is not up in this pod: {why}.")

    async def preflight_trainer(request: web.Request) -> web.StreamResponse:
        require_proof(request)
        return web.json_response((await preflight(await read_message(request, PreflightRequest))).model_dump(mode="json"))

    async def checkpoint(request: web.Request) -> web.StreamResponse:
        require_proof(request)
        wanted = await read_message(request, CheckpointRequest)
        own = wanted.model_path or model_path
        # The head pod compares with a model on the hub, because SGLang reports the revision only there.
        readable = EngineModel(own if own and os.path.isabs(own) else None)
        return web.json_response((await checkpoints.run(wanted, readable)).model_dump(mode="json"))

    async def misdirected(request: web.Request) -> web.StreamResponse:
        place = f"this pod holds rank {member.rank} of engine {name}; only its pod 0 answers, at {member.head}."
        return refuse(421, f"{request.path}: {place}")

    app = web.Application(middlewares=[answer_refusals])
    log_refusals(app)
    take_proven_calls(app, credentials)
    app.add_routes([web.get(ports.AGENT_HEALTH, health), web.get(ports.AGENT_ENGINE, engine), web.get("/health", engine)])
    app.add_routes([web.get(ports.AGENT_METRICS, make_aiohttp_handler(registry)), web.post(ports.AGENT_PREFLIGHT, preflight_trainer)])
    app.add_routes([web.post(ports.AGENT_CHECKPOINT, checkpoint), *more_routes])
    # haproxy asks ports.AGENT_GATE whether the gate may be open, and gets this refusal: the gate of a member pod never opens.
    app.add_routes([web.route("*", "/{path:.*}", misdirected)])
    return app


def _is_ip(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True
