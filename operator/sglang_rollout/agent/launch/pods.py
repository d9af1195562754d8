"""Pods of an engine of several pods: member pods report to the head pod, which decides with ``rank_lifecycle``.

The head pod answers for the engine. A member pod serves no requests and accepts no control calls, because SGLang only answers health
checks there.
"""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import os
import socket
import time
from pathlib import Path
from typing import TypeVar

import aiohttp
from aiohttp import web
from prometheus_client import CollectorRegistry, Gauge, generate_latest
from pydantic import ValidationError

from sglang_rollout.agent.access import answer_refusals, check_token, read_message, refuse
from sglang_rollout.agent.agent import Agent
from sglang_rollout.agent.checkpoint import CheckpointCheck
from sglang_rollout.agent.engine import RunFiles, read_text
from sglang_rollout.agent.engine_model import EngineModel
from sglang_rollout.agent.launch import rank_lifecycle
from sglang_rollout.agent.launch.rank_lifecycle import GRACE_SECONDS, GenerationRecord, Link, Member, Ranks
from sglang_rollout.agent.reachability import is_cut, preflight
from sglang_rollout.agent.record import load, save
from sglang_rollout.proxy.address import Address
from sglang_rollout.sglang.client import EngineClient, EngineError
from sglang_rollout.wire import ports
from sglang_rollout.wire.agent import (
    CheckpointReply,
    CheckpointRequest,
    GroupReply,
    MemberHealth,
    MemberReport,
    PreflightReply,
    PreflightRequest,
    Verdict,
    termination_message,
)
from sglang_rollout.wire.reasons import Refusal, RefusalCode

log = logging.getLogger(__name__)

_Request = PreflightRequest | CheckpointRequest
_Reply = TypeVar("_Reply", PreflightReply, CheckpointReply)
_REQUEST_ERRORS = (aiohttp.ClientError, OSError, ValueError, ValidationError)
_HEALTH_SECONDS = 3.0
_PING_SECONDS = 2.0
_REPORT_SECONDS = 3.0
_NAME_SECONDS = 5.0
_MARGIN_SECONDS = 2.0
"""Time that a member pod's answer may take beyond its deadline."""


class StartBarrier:
    """Carries out verdicts on the engine's container of this pod, by files."""

    def __init__(self, files: RunFiles) -> None:
        self.files = files
        self._go = files.boot.parent / "go"
        self._ended: str | None = None
        """Boot ID of the run that was ended."""

    def boot_id(self) -> str | None:
        """Return the boot ID of the engine's container; None while it does not run."""
        boot_id = self.files.boot_id()
        if self._ended is not None and boot_id not in (None, self._ended):
            # The start script deletes the kill file, but the agent may have written it again just afterwards.
            self.files.kill.unlink(missing_ok=True)
            self._ended = None
        return boot_id

    def is_started(self, boot_id: str | None) -> bool:
        """Return whether SGLang was started in this run of the container."""
        return boot_id is not None and read_text(self._go) == boot_id

    def carry_out(self, verdict: Verdict, boot_id: str | None, reason: str) -> None:
        """Carry out the verdict on the run ``boot_id`` of the container; ``reason`` is a sentence."""
        if boot_id is None:
            return
        if verdict is Verdict.GO and not self.is_started(boot_id):
            log.info("All pods of the engine are ready: starting SGLang.")
            new = self._go.with_suffix(".new")
            new.write_text(boot_id)
            os.replace(new, self._go)
        if verdict is Verdict.END and self._ended != boot_id:
            log.warning("Requesting the restart of this pod's engine container: %s", reason)
            self.files.kill.write_text(termination_message(f"This pod restarts with the other pods of its engine: {reason}"))
            self._ended = boot_id


class HeadPod:
    """Agent of the head pod in its role towards the member pods."""

    def __init__(self, agent: Agent, barrier: StartBarrier, *, size: int, own: Address, folder: Path, token: str) -> None:
        self._agent = agent
        self._barrier = barrier
        self._own = own
        self._token = token
        self._record_path = folder / "group.json"
        record, problem = load(self._record_path, GenerationRecord)
        if problem:
            log.warning("%s: all pods of the engine restart.", problem)
        self.ranks = Ranks(agent.name, size, record)

    def report(self, report: MemberReport) -> GroupReply:
        """Record a member's report and return its verdict."""
        member = Member(report.boot_id, time.monotonic(), report.address, started=report.released, up=report.up, draining=report.draining)
        verdict = self._decide(report.rank, member)
        return GroupReply(verdict=verdict, message=self._reason(), drained=self._barrier.files.drained.exists())

    async def watch(self) -> None:
        """Check this pod and the silent members once."""
        boot_id, draining = self._barrier.boot_id(), self._barrier.files.is_drain_requested()
        started = self._barrier.is_started(boot_id)
        own = Member(boot_id, time.monotonic(), started=started, up=self._agent.state.up, draining=draining)
        self._barrier.carry_out(self._decide(0, own), boot_id, self._reason())
        silent = rank_lifecycle.silent_addresses(self.ranks, time.monotonic())
        cut = await asyncio.gather(*(is_cut(Address.parse(address)) for address in silent.values()))
        for rank, is_rank_cut in zip(silent, cut, strict=True):
            self.ranks = rank_lifecycle.record_attempt(self.ranks, rank, time.monotonic(), cut=is_rank_cut)

    async def question_silent_pods(self) -> None:
        """Ask silent members why they cannot reach this pod."""
        awaited = rank_lifecycle.awaited_ranks(self.ranks, time.monotonic())
        gates = [(rank, gate) for rank in awaited if (gate := self._gate_of(rank))]
        for (rank, _), why in zip(gates, await asyncio.gather(*(_why_silent(gate) for _, gate in gates)), strict=True):
            if rank in rank_lifecycle.awaited_ranks(self.ranks, time.monotonic()):
                self.ranks = rank_lifecycle.record_answer(self.ranks, rank, why)

    def _gate_of(self, rank: int) -> Address | None:
        """Return the gate of a member by its name, because a member that never reported has sent no address."""
        pod, dot, domain = self._own.host.partition(".")
        return Address(f"{self.ranks.pod(rank)}.{domain}", self._own.port) if dot and pod == self.ranks.pod(0) else None

    def explain_down(self) -> Refusal | None:
        """Return why the engine is not up; None if its pods are not the cause."""
        return rank_lifecycle.explain_down(self.ranks, time.monotonic())

    def is_other_pod_draining(self) -> bool:
        """Return whether a pod of the running generation drains, which ends the whole engine."""
        return bool(self.ranks.draining)

    async def preflight(self, request: PreflightRequest) -> PreflightReply:
        """Check that every pod of the engine reaches the trainer; the refusal names a pod that does not."""
        own, others = await asyncio.gather(preflight(request), self._ask_members(ports.AGENT_PREFLIGHT, request, PreflightReply))
        for rank, reply in {0: own, **others}.items():
            if reply.refusal is not None:
                return PreflightReply(refusal=self._name_pod(rank, reply.refusal))
        return PreflightReply(refusal=None)

    async def checkpoint(self, request: CheckpointRequest, own: CheckpointReply) -> CheckpointReply:
        """Check that the member pods see the same folder as the head pod."""
        if own.refusal is not None or not request.path:
            return own
        # Only the head pod finds and holds a snapshot; the members check its folder.
        folder = request.model_copy(update={"path": own.path or request.path, "snapshot": None})
        for rank, reply in (await self._ask_members(ports.AGENT_CHECKPOINT, folder, CheckpointReply)).items():
            if reply.refusal is not None:
                return CheckpointReply(refusal=self._name_pod(rank, reply.refusal))
            if reply.digest != own.digest:
                difference = f"{folder.path} differs between pod {self.ranks.pod(rank)} and pod {self.ranks.pod(0)}."
                return CheckpointReply(refusal=Refusal(RefusalCode.INVALID_REQUEST, difference))
        return own

    def _name_pod(self, rank: int, refusal: Refusal) -> Refusal:
        return Refusal(refusal.code, f"from pod {self.ranks.pod(rank)}: {refusal.message}")

    async def _ask_members(self, path: str, request: _Request, reply: type[_Reply]) -> dict[int, _Reply]:
        """Send a request to every member pod and return the replies by rank."""
        addresses = {rank: member.address for rank, member in self.ranks.members.items() if rank}
        replies = await asyncio.gather(*(self._ask(address, path, request, reply) for address in addresses.values()))
        return dict(zip(addresses, replies, strict=True))

    async def _ask(self, address: str, path: str, request: _Request, reply: type[_Reply]) -> _Reply:
        url = Address.parse(address).url + path
        limit = aiohttp.ClientTimeout(total=request.deadline + _MARGIN_SECONDS)
        headers = {"Authorization": f"Bearer {self._token}"}
        try:
            async with (
                aiohttp.ClientSession(timeout=limit, headers=headers) as http,
                http.post(url, json=request.model_dump(mode="json")) as answer,
            ):
                return reply.model_validate(await answer.json(content_type=None))
        except _REQUEST_ERRORS as error:
            message = f"its agent does not answer ({str(error) or type(error).__name__})"
            return reply(refusal=Refusal(RefusalCode.UPSTREAM_FAILED, message))

    def _decide(self, rank: int, member: Member) -> Verdict:
        """Record a report, advance the engine's state, and return the verdict. The record is saved before any pod acts on it."""
        self.ranks = rank_lifecycle.record_report(self.ranks, rank, member)
        new, old = rank_lifecycle.advance(self.ranks, time.monotonic()), self.ranks.record
        if new.record != old:
            save(self._record_path, new.record)
            if new.record.loss and not old.loss:
                log.warning("All pods of the engine restart: %s.", new.record.loss)
            if new.record.number != old.number:
                log.info("All %d pods are ready: start %d of the engine.", new.size, new.record.number)
            self.ranks = new
        return rank_lifecycle.decide_verdict(self.ranks, rank, member.boot_id, started=member.started)

    def _reason(self) -> str:
        return f"{self.ranks.record.loss or 'pod 0 was recreated'}."


async def _why_silent(gate: Address) -> str:
    """Return why the pod behind this gate cannot reach the head pod; empty if it does not answer."""
    try:
        async with (
            aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=_HEALTH_SECONDS)) as http,
            http.get(gate.url + ports.AGENT_HEALTH) as answer,
        ):
            return MemberHealth.model_validate(await answer.json(content_type=None)).unheard if answer.status == 200 else ""
    except aiohttp.ClientConnectorDNSError as error:
        return f"pod 0 does not find {gate.host}: {error.os_error.strerror or error.os_error}"
    except _REQUEST_ERRORS:
        return ""


class MemberPod:
    """Agent of a member pod: reports to the head pod and carries out its verdicts."""

    def __init__(self, engine: EngineClient, barrier: StartBarrier, *, rank: int, head: Address, own: Address, token: str) -> None:
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
        self._headers = {"Authorization": f"Bearer {token}"}
        self._address = head if _is_ip(head.host) else None
        """IP address of the head pod. A name server that is down must not look like a lost pod."""
        self._unresolved = ""
        """Why the last attempt to resolve the head pod's name failed."""
        self._link = Link()

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
        up, address = self.up and started, str(self._own)
        reply = await self._send(MemberReport(rank=self.rank, address=address, boot_id=boot_id, released=started, up=up, draining=draining))
        if draining and (not started or (reply is not None and reply.drained)):
            files.drained.touch()
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
        try:
            async with (
                aiohttp.ClientSession(timeout=limit, headers=self._headers) as http,
                http.post(self._address.url + ports.AGENT_GROUP, json=report.model_dump(mode="json")) as answer,
            ):
                if answer.status == 200:
                    reply = GroupReply.model_validate(await answer.json(content_type=None))
                    self._note_reachability("")
                    return reply
                problem = f"it answers HTTP {answer.status}"
        except _REQUEST_ERRORS as error:
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


def member_app(member: MemberPod, *, name: str, token: str, model_path: str | None) -> web.Application:
    """Return the application of a member pod's agent. Checkpoints are compared with the model at ``model_path``."""
    checkpoints = CheckpointCheck()
    registry = CollectorRegistry()
    up = Gauge("sglang_rollout_agent_engine_up", "1 while this pod's part of the engine has loaded.", registry=registry)

    async def health(_: web.Request) -> web.StreamResponse:
        return web.json_response(MemberHealth(unheard=member.unreachable).model_dump(mode="json"))

    async def engine(_: web.Request) -> web.StreamResponse:
        if member.up:
            return web.json_response({"status": "ok"})
        why = "; ".join(filter(None, (member.down_reason, member.unreachable)))
        return refuse(503, f"SGLang is not up in this pod: {why}.")

    async def metrics(_: web.Request) -> web.StreamResponse:
        up.set(member.up)
        return web.Response(body=generate_latest(registry), headers={"Content-Type": "text/plain; version=0.0.4; charset=utf-8"})

    async def preflight_trainer(request: web.Request) -> web.StreamResponse:
        check_token(request, token)
        return web.json_response((await preflight(await read_message(request, PreflightRequest))).model_dump(mode="json"))

    async def checkpoint(request: web.Request) -> web.StreamResponse:
        check_token(request, token)
        wanted = await read_message(request, CheckpointRequest)
        own = wanted.model_path or model_path
        # The head pod compares with a model on the hub, because SGLang reports the revision only there.
        readable = EngineModel(own if own and os.path.isabs(own) else None)
        return web.json_response((await checkpoints.run(wanted, readable)).model_dump(mode="json"))

    async def misdirected(request: web.Request) -> web.StreamResponse:
        place = f"this pod holds rank {member.rank} of engine {name}; only its pod 0 answers, at {member.head}."
        return refuse(421, f"{request.path}: {place}")

    app = web.Application(middlewares=[answer_refusals])
    app.add_routes([web.get(ports.AGENT_HEALTH, health), web.get(ports.AGENT_ENGINE, engine), web.get("/health", engine)])
    app.add_routes([web.get(ports.AGENT_METRICS, metrics), web.post(ports.AGENT_PREFLIGHT, preflight_trainer)])
    app.add_routes([web.post(ports.AGENT_CHECKPOINT, checkpoint)])
    # haproxy asks ports.AGENT_GATE whether the gate may be open, and gets this refusal: the gate of a member pod never opens.
    app.add_routes([web.route("*", "/{path:.*}", misdirected)])
    return app


def _is_ip(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True
