"""Agent of a member pod: any pod but pod 0 of an engine of several pods.

It serves no requests and accepts no control calls, because SGLang only answers health checks there."""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import os
import socket
import time

import aiohttp
from aiohttp import web
from prometheus_client import CollectorRegistry, Gauge, generate_latest
from pydantic import ValidationError

from sglang_rollout.agent.access import Handler, check_token, message, refuse
from sglang_rollout.agent.checkpoint import CheckpointCheck, EngineModel
from sglang_rollout.agent.engine import Engine, EngineError
from sglang_rollout.agent.launch.barrier import Barrier
from sglang_rollout.agent.launch.rank_lifecycle import GRACE_SECONDS, Link
from sglang_rollout.agent.reachability import is_cut, preflight
from sglang_rollout.proxy.address import Address
from sglang_rollout.wire import ports
from sglang_rollout.wire.agent import CheckpointRequest, GroupReply, MemberHealth, MemberReport, PreflightRequest, Verdict
from sglang_rollout.wire.reasons import RefusedError

log = logging.getLogger(__name__)

_PING_SECONDS = 2.0
_REPORT_SECONDS = 3.0
_NAME_SECONDS = 5.0


class Follower:
    """Reports to the head pod and carries out its verdicts."""

    def __init__(self, engine: Engine, barrier: Barrier, *, rank: int, leader: Address, own: Address, token: str) -> None:
        self.rank = rank
        self.leader = leader
        self.up = False
        """SGLang's part in this pod has finished loading."""
        self.down_reason = "it has not answered yet"
        self.unheard = ""
        """Why the head pod cannot be reached; empty if it can."""
        self._engine = engine
        self._barrier = barrier
        self._own = own
        self._headers = {"Authorization": f"Bearer {token}"}
        self._address = leader if _is_ip(leader.host) else None
        """IP address of the head pod. A name server that is down must not look like a lost pod."""
        self._nameless = ""
        """Why the last attempt to resolve its name failed."""
        self._link = Link()

    async def resolve(self) -> None:
        """Resolve the head pod's address once; keep the last known one if that fails."""
        if _is_ip(self.leader.host):
            return
        try:
            async with asyncio.timeout(_NAME_SECONDS):
                found = await asyncio.get_running_loop().getaddrinfo(self.leader.host, self.leader.port, type=socket.SOCK_STREAM)
        except OSError as error:  # includes TimeoutError
            self._nameless = f"{self.leader.host}: {error.strerror or f'no name server answers within {_NAME_SECONDS:g} s'}"
            return
        self._nameless = ""
        self._address = Address(str(found[0][4][0]), self.leader.port)

    async def observe(self) -> None:
        """Poll SGLang once. On a node without tokenizer it listens only after its schedulers have loaded."""
        try:
            reply = await self._engine.get("/ping", timeout=_PING_SECONDS)
            self.up, self.down_reason = reply.status == 200, f"it says HTTP {reply.status}"
        except EngineError as error:
            self.up, self.down_reason = False, str(error)

    async def report(self) -> None:
        """Report to the head pod and carry out its verdict. If the network path to the head pod is cut, end this run."""
        files, boot = self._barrier.files, self._barrier.boot()
        released, draining = self._barrier.released(boot), files.drain_wanted()
        reply = await self._said(
            MemberReport(
                rank=self.rank, address=str(self._own), boot_id=boot, released=released, up=self.up and released, draining=draining
            )
        )
        if draining and (not released or (reply is not None and reply.drained)):
            files.drained.touch()
        if reply is not None:
            self._link = Link()
            self._barrier.obey(reply.verdict, boot, reply.message)
        elif self._address is not None:
            self._link = self._link.tried(time.monotonic(), cut=await is_cut(self._address))
            if released and self._link.is_lost(time.monotonic()):
                self._barrier.obey(Verdict.END, boot, f"pod 0 of the engine could not be reached for {GRACE_SECONDS:.0f} s.")

    async def _said(self, report: MemberReport) -> GroupReply | None:
        if self._address is None:
            self._heard(self._nameless)
            return None
        limit = aiohttp.ClientTimeout(total=_REPORT_SECONDS)
        try:
            async with (
                aiohttp.ClientSession(timeout=limit, headers=self._headers) as http,
                http.post(self._address.url + ports.AGENT_GROUP, json=report.model_dump(mode="json")) as answer,
            ):
                if answer.status == 200:
                    reply = GroupReply.model_validate(await answer.json(content_type=None))
                    self._heard("")
                    return reply
                why = f"it answers HTTP {answer.status}"
        except (aiohttp.ClientError, OSError, ValueError, ValidationError) as error:
            why = (str(error) or f"no answer within {_REPORT_SECONDS:g} s").splitlines()[0]
        name = f" ({self._nameless})" if self._nameless else ""
        self._heard(f"{self._address}: {why}{name}")
        return None

    def _heard(self, why_not: str) -> None:
        """Log a change only once."""
        unheard = f"it cannot reach pod 0: {why_not}" if why_not else ""
        if unheard and unheard != self.unheard:
            log.warning("Pod %d of the engine: %s.", self.rank, unheard)
        if self.unheard and not unheard and self._address is not None:
            log.info("Pod 0 hears this pod.")
        self.unheard = unheard


def follower_app(follower: Follower, *, name: str, token: str, model_path: str | None) -> web.Application:
    """Return the application of a member pod's agent. Checkpoints are compared with the model at ``model_path``."""
    checkpoints = CheckpointCheck()
    registry = CollectorRegistry()
    up = Gauge("sglang_rollout_agent_engine_up", "1 while this pod's part of the engine has loaded.", registry=registry)

    async def health(_: web.Request) -> web.StreamResponse:
        return web.json_response(MemberHealth(unheard=follower.unheard).model_dump(mode="json"))

    async def engine(_: web.Request) -> web.StreamResponse:
        if follower.up:
            return web.json_response({"status": "ok"})
        why = "; ".join(filter(None, (follower.down_reason, follower.unheard)))
        return refuse(503, f"SGLang is not up in this pod: {why}.")

    async def metrics(_: web.Request) -> web.StreamResponse:
        up.set(follower.up)
        return web.Response(body=generate_latest(registry), headers={"Content-Type": "text/plain; version=0.0.4; charset=utf-8"})

    async def reaches(request: web.Request) -> web.StreamResponse:
        check_token(request, token)
        return web.json_response((await preflight(await message(request, PreflightRequest))).model_dump(mode="json"))

    async def checkpoint(request: web.Request) -> web.StreamResponse:
        check_token(request, token)
        wanted = await message(request, CheckpointRequest)
        own = wanted.model_path or model_path
        # The head pod compares with a model on the hub, because SGLang reports the revision only there.
        readable = EngineModel(own if own and os.path.isabs(own) else None)
        return web.json_response((await checkpoints.run(wanted, readable)).model_dump(mode="json"))

    async def elsewhere(request: web.Request) -> web.StreamResponse:
        return refuse(
            421, f"{request.path}: this pod holds rank {follower.rank} of engine {name}; only its pod 0 answers, at {follower.leader}."
        )

    app = web.Application(middlewares=[_sentences])
    app.add_routes([web.get(ports.AGENT_HEALTH, health), web.get(ports.AGENT_ENGINE, engine), web.get("/health", engine)])
    app.add_routes([web.get(ports.AGENT_METRICS, metrics), web.post(ports.AGENT_PREFLIGHT, reaches)])
    app.add_routes([web.post(ports.AGENT_CHECKPOINT, checkpoint)])
    # haproxy asks ports.AGENT_GATE whether the gate may be open: it never may.
    app.add_routes([web.route("*", "/{path:.*}", elsewhere)])
    return app


@web.middleware
async def _sentences(request: web.Request, handler: Handler) -> web.StreamResponse:
    try:
        return await handler(request)
    except RefusedError as error:
        return refuse(error.status, str(error), error.headers)


def _is_ip(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True
