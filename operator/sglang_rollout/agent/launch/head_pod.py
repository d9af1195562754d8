"""Head pod of an engine of several pods: it receives the reports of the member pods and answers for the engine.

``rank_lifecycle`` decides when the ranks start and end.
"""

from __future__ import annotations

import asyncio
import logging
import time
from pathlib import Path
from typing import TypeVar

import aiohttp

from sglang_rollout.agent.agent import Agent
from sglang_rollout.agent.engine import StartBarrier
from sglang_rollout.agent.launch import rank_lifecycle
from sglang_rollout.agent.launch.rank_lifecycle import GenerationRecord, Member, Ranks
from sglang_rollout.agent.record import load, save
from sglang_rollout.bounded import ERROR_BYTES, MESSAGE_BYTES, open_session, read_answer
from sglang_rollout.credentials import Credentials
from sglang_rollout.internal.proven_calls import Peer
from sglang_rollout.internal.reachability import is_cut, preflight
from sglang_rollout.proxy.address import Address
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
)
from sglang_rollout.wire.reasons import Refusal, RefusalCode
from sglang_rollout.wire.staged import AttemptReply, AttemptRequest, DropRequest, MemberStageReply, StagedCopy, StageRequest
from sglang_rollout.wire.states import StagedVersion

log = logging.getLogger(__name__)

_Request = PreflightRequest | CheckpointRequest | StageRequest | DropRequest | AttemptRequest
_Reply = TypeVar("_Reply", PreflightReply, CheckpointReply, MemberStageReply, AttemptReply)
_HEALTH_SECONDS = 3.0
_CONNECT_SECONDS = 5.0
_MARGIN_SECONDS = 2.0
"""Time that a member pod's answer may take beyond its deadline."""


class HeadPod:
    """Agent of the head pod in its role towards the member pods."""

    def __init__(
        self,
        agent: Agent,
        barrier: StartBarrier,
        *,
        size: int,
        own: Address,
        folder: Path,
        credentials: Credentials,
        start_seconds: float = rank_lifecycle.START_SECONDS,
    ) -> None:
        self._agent = agent
        self._barrier = barrier
        self._own = own
        self._credentials = credentials
        self._peers: dict[str, Peer] = {}
        """Member pods by address."""
        self._record_path = folder / "group.json"
        record, problem = load(self._record_path, GenerationRecord)
        if problem:
            log.warning("%s: all pods of the engine restart.", problem)
        self.ranks = Ranks(agent.name, size, record, start_seconds)
        self._reports: dict[int, MemberReport] = {}

    def report(self, report: MemberReport) -> GroupReply:
        """Record a member's report and return its verdict."""
        self._reports[report.rank] = report
        member = Member(report.boot_id, time.monotonic(), report.address, started=report.released, up=report.up, draining=report.draining)
        verdict = self._decide(report.rank, member)
        return GroupReply(verdict=verdict, message=self._reason(), drained=self._barrier.files.drained.exists())

    def recent_report(self, rank: int) -> MemberReport | None:
        """Return the last report of a member pod; None if its agent is silent."""
        member = self.ranks.members.get(rank)
        is_silent = member is None or time.monotonic() - member.reported_at >= rank_lifecycle.SILENT_AFTER_SECONDS
        return None if is_silent else self._reports.get(rank)

    def count_proved_schedulers(self) -> int:
        """Return the number of schedulers in member pods in which the plug-in has proved that it is active."""
        return sum(report.schedulers for report in self._reports.values())

    @property
    def committed_copy(self) -> StagedVersion | None:
        """Contents of the committed version; None with another transport, or if the coordinator has not named them."""
        return self._agent.state.record.staged

    def note_copies(self, rank: int, copies: list[StagedCopy]) -> None:
        """Record which versions a member pod holds before its next report."""
        if rank in self._reports:
            self._reports[rank] = self._reports[rank].model_copy(update={"staged": copies})

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
        asked = self.ask_members(ports.AGENT_PREFLIGHT, request, PreflightReply, request.deadline)
        own, others = await asyncio.gather(preflight(request), asked)
        for rank, reply in {0: own, **others}.items():
            if reply.refusal is not None:
                return PreflightReply(refusal=self.name_pod(rank, reply.refusal))
        return PreflightReply(refusal=None)

    async def checkpoint(self, request: CheckpointRequest, own: CheckpointReply) -> CheckpointReply:
        """Check that the member pods see the same folder as the head pod."""
        if own.refusal is not None or not request.path:
            return own
        # Only the head pod finds and holds a snapshot; the members check its folder.
        folder = request.model_copy(update={"path": own.path or request.path, "snapshot": None})
        replies = await self.ask_members(ports.AGENT_CHECKPOINT, folder, CheckpointReply, folder.deadline)
        for rank, reply in replies.items():
            if reply.refusal is not None:
                return CheckpointReply(refusal=self.name_pod(rank, reply.refusal))
            if reply.digest != own.digest:
                difference = f"{folder.path} differs between pod {self.ranks.pod(rank)} and pod {self.ranks.pod(0)}."
                return CheckpointReply(refusal=Refusal(RefusalCode.INVALID_REQUEST, difference))
        return own

    def name_pod(self, rank: int, refusal: Refusal) -> Refusal:
        """Return the refusal of a pod with the name of the pod in its message."""
        return Refusal(refusal.code, f"from pod {self.ranks.pod(rank)}: {refusal.message}")

    async def ask_members(self, path: str, request: _Request, reply: type[_Reply], seconds: float) -> dict[int, _Reply]:
        """Send a request to every member pod that has reported, and return the replies by rank.

        Args:
            path: Path of the call.
            request: The message.
            reply: Type of the replies. A pod that does not answer gets a reply with a refusal.
            seconds: Time for the answers, without the time that the network takes.
        """
        addresses = {rank: member.address for rank, member in self.ranks.members.items() if rank}
        replies = await asyncio.gather(*(self._ask(address, path, request, reply, seconds) for address in addresses.values()))
        return dict(zip(addresses, replies, strict=True))

    async def _ask(self, address: str, path: str, request: _Request, reply: type[_Reply], seconds: float) -> _Reply:
        url = Address.parse(address).url + path
        limit = aiohttp.ClientTimeout(total=seconds + _MARGIN_SECONDS, sock_connect=_CONNECT_SECONDS)
        try:
            async with open_session(timeout=limit) as http:
                peer = self._peers.setdefault(address, Peer(self._credentials))
                answer = await peer.call(http, "POST", url, request.model_dump_json().encode(), limit=MESSAGE_BYTES)
            return reply.model_validate_json(answer.body)
        except (aiohttp.ClientError, OSError, ValueError) as error:
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
            open_session(timeout=aiohttp.ClientTimeout(total=_HEALTH_SECONDS)) as http,
            http.get(gate.url + ports.AGENT_HEALTH) as answer,
        ):
            found = await read_answer(answer, ERROR_BYTES)
            return MemberHealth.model_validate_json(found).unheard if answer.status == 200 else ""
    except aiohttp.ClientConnectorDNSError as error:
        return f"pod 0 does not find {gate.host}: {error.os_error.strerror or error.os_error}"
    except (aiohttp.ClientError, OSError, ValueError):
        return ""
