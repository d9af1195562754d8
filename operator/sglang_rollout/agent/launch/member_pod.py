"""The agent of a pod that is not pod 0 of its engine. It serves nobody and takes no control calls: SGLang only says there that it runs."""

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
from sglang_rollout.wire.agent import CheckpointRequest, PreflightRequest
from sglang_rollout.wire.launch import GroupReply, MemberHealth, MemberReport, Verdict
from sglang_rollout.wire.reasons import RefusedError

log = logging.getLogger(__name__)

_PING_SECONDS = 2.0
_REPORT_SECONDS = 3.0
_NAME_SECONDS = 5.0


class Follower:
    """Tells pod 0 how this pod is, and does what it answers."""

    def __init__(self, engine: Engine, barrier: Barrier, *, rank: int, leader: Address, own: Address, token: str) -> None:
        self.rank = rank
        self.leader = leader
        self.up = False
        """This pod's part of SGLang has finished loading."""
        self.down_reason = "it has not answered yet"
        self.unheard = ""
        """Why pod 0 does not hear this one; empty while it does."""
        self._engine = engine
        self._barrier = barrier
        self._own = own
        self._headers = {"Authorization": f"Bearer {token}"}
        self._address = leader if _is_ip(leader.host) else None
        """Of pod 0, as an IP: a name server that is away must not look like a pod that is away."""
        self._nameless = ""
        """Why its name could not be resolved when that was tried last."""
        self._link = Link()

    async def resolve(self) -> None:
        """One look at pod 0's address; the last known one stays when its name cannot be resolved."""
        if _is_ip(self.leader.host):
            return
        try:
            async with asyncio.timeout(_NAME_SECONDS):
                found = await asyncio.get_running_loop().getaddrinfo(self.leader.host, self.leader.port, type=socket.SOCK_STREAM)
        except OSError as error:  # of which TimeoutError is one
            self._nameless = f"{self.leader.host}: {error.strerror or f'no name server answers within {_NAME_SECONDS:g} s'}"
            return
        self._nameless = ""
        self._address = Address(str(found[0][4][0]), self.leader.port)

    async def observe(self) -> None:
        """Ask SGLang once. Where it has no tokenizer it listens only after its schedulers have loaded."""
        try:
            reply = await self._engine.get("/ping", timeout=_PING_SECONDS)
            self.up, self.down_reason = reply.status == 200, f"it says HTTP {reply.status}"
        except EngineError as error:
            self.up, self.down_reason = False, str(error)

    async def report(self) -> None:
        """One word to pod 0, and its verdict. Silence is a verdict too, if nothing comes back from its machine at all."""
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
            self._barrier.obey(reply.verdict, boot, reply.reason)
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
        """Say it once, however often it is tried."""
        unheard = f"it cannot reach pod 0: {why_not}" if why_not else ""
        if unheard and unheard != self.unheard:
            log.warning("Pod %d of the engine: %s.", self.rank, unheard)
        if self.unheard and not unheard and self._address is not None:
            log.info("Pod 0 hears this pod.")
        self.unheard = unheard


def follower_app(follower: Follower, *, name: str, token: str, model_path: str | None) -> web.Application:
    """All routes of such an agent. ``model_path``: what the engine was started with; checkpoints are compared with it."""
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
        # Pod 0 compares with a model on the hub: only there SGLang says its revision.
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
