"""The head pod of an engine of several pods: it reads the other pods, decides with ``rank_lifecycle``, and answers for the engine."""

from __future__ import annotations

import asyncio
import logging
import time
from pathlib import Path
from typing import TypeVar

import aiohttp
from pydantic import ValidationError

from sglang_rollout.agent.agent import Agent
from sglang_rollout.agent.launch import rank_lifecycle as g
from sglang_rollout.agent.launch.barrier import Barrier
from sglang_rollout.agent.reachability import is_cut, preflight
from sglang_rollout.agent.record import load, save
from sglang_rollout.proxy.address import Address
from sglang_rollout.wire.agent import (
    CheckpointReply,
    CheckpointRequest,
    GroupReply,
    MemberHealth,
    MemberReport,
    PreflightReply,
    PreflightRequest,
)
from sglang_rollout.wire.ports import AGENT_CHECKPOINT, AGENT_HEALTH, AGENT_PREFLIGHT
from sglang_rollout.wire.reasons import Refusal, RefusalCode

log = logging.getLogger(__name__)

_Asking = PreflightRequest | CheckpointRequest
_Reply = TypeVar("_Reply", PreflightReply, CheckpointReply)
_HEALTH_SECONDS = 3.0
_MARGIN = 2.0
"""Seconds that a member pod's answer may take beyond its deadline."""


class Leader:
    """Agent of the head pod in its role towards the member pods."""

    def __init__(self, agent: Agent, barrier: Barrier, *, size: int, own: Address, folder: Path, token: str) -> None:
        self._agent = agent
        self._barrier = barrier
        self._own = own
        self._token = token
        self._record = folder / "group.json"
        record, why = load(self._record, g.GroupRecord)
        if why:
            log.warning("%s: all pods of the engine restart.", why)
        self.group = g.Group(agent.name, size, record)

    def report(self, report: MemberReport) -> GroupReply:
        """Record a member's report and return its verdict."""
        member = g.Member(
            report.boot_id, time.monotonic(), report.address, released=report.released, up=report.up, draining=report.draining
        )
        self.group = g.heard(self.group, report.rank, member)
        self._decide()
        verdict = g.verdict(self.group, report.rank, report.boot_id, released=report.released)
        return GroupReply(verdict=verdict, message=self._reason(), drained=self._barrier.files.drained.exists())

    async def watch(self) -> None:
        """Check this pod and the silent members once."""
        boot = self._barrier.boot()
        released = self._barrier.released(boot)
        own = g.Member(boot, time.monotonic(), released=released, up=self._agent.state.up, draining=self._barrier.files.drain_wanted())
        self.group = g.heard(self.group, 0, own)
        self._decide()
        verdict = g.verdict(self.group, 0, boot, released=released)
        self._barrier.obey(verdict, boot, self._reason())
        silent = g.silent(self.group, time.monotonic())
        cut = await asyncio.gather(*(is_cut(Address.parse(address)) for address in silent.values()))
        for rank, is_so in zip(silent, cut, strict=True):
            self.group = g.tried(self.group, rank, time.monotonic(), cut=is_so)

    async def inquire(self) -> None:
        """Ask silent members why they cannot reach this pod."""
        wanted = [(rank, where) for rank in g.awaited(self.group, time.monotonic()) if (where := self._gate_of(rank))]
        for (rank, _), why in zip(wanted, await asyncio.gather(*(_why_silent(where) for _, where in wanted)), strict=True):
            if rank in g.awaited(self.group, time.monotonic()):
                self.group = g.asked(self.group, rank, why)

    def _gate_of(self, rank: int) -> Address | None:
        """Return the gate of a member by its name, because a member that never reported has sent no address."""
        pod, dot, domain = self._own.host.partition(".")
        return Address(f"{self.group.pod(rank)}.{domain}", self._own.port) if dot and pod == self.group.pod(0) else None

    def why_down(self) -> Refusal | None:
        """Return why the engine is not up; None if its pods are not the cause."""
        return g.why_down(self.group, time.monotonic())

    def draining(self) -> bool:
        """Return whether another pod of the engine drains, which ends the whole engine."""
        return bool(self.group.draining)

    async def preflight(self, request: PreflightRequest) -> PreflightReply:
        """Check that every pod of the engine reaches the trainer; the reason names a pod that does not."""
        own, others = await asyncio.gather(preflight(request), self._ask(AGENT_PREFLIGHT, request, PreflightReply))
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
        for rank, reply in (await self._ask(AGENT_CHECKPOINT, folder, CheckpointReply)).items():
            if reply.refusal is not None:
                return CheckpointReply(refusal=self._name_pod(rank, reply.refusal))
            if reply.digest != own.digest:
                what = f"{folder.path} holds something else in pod {self.group.pod(rank)} than in pod {self.group.pod(0)}."
                return CheckpointReply(refusal=Refusal(RefusalCode.INVALID_REQUEST, what))
        return own

    def _name_pod(self, rank: int, refusal: Refusal) -> Refusal:
        return Refusal(refusal.code, f"from pod {self.group.pod(rank)}: {refusal.message}")

    async def _ask(self, path: str, request: _Asking, reply: type[_Reply]) -> dict[int, _Reply]:
        """Send a request to every member pod and return the replies by rank."""
        addresses = {rank: member.address for rank, member in self.group.members.items() if rank}
        replies = await asyncio.gather(*(self._asked(address, path, request, reply) for address in addresses.values()))
        return dict(zip(addresses, replies, strict=True))

    async def _asked(self, address: str, path: str, request: _Asking, reply: type[_Reply]) -> _Reply:
        url = Address.parse(address).url + path
        limit = aiohttp.ClientTimeout(total=request.deadline + _MARGIN)
        headers = {"Authorization": f"Bearer {self._token}"}
        try:
            async with (
                aiohttp.ClientSession(timeout=limit, headers=headers) as http,
                http.post(url, json=request.model_dump(mode="json")) as answer,
            ):
                return reply.model_validate(await answer.json(content_type=None))
        except (aiohttp.ClientError, OSError, ValueError, ValidationError) as error:
            message = f"its agent does not answer ({str(error) or type(error).__name__})"
            return reply(refusal=Refusal(RefusalCode.UPSTREAM_FAILED, message))

    def _decide(self) -> None:
        """Advance the group's state. It is saved before any pod acts on it."""
        new = g.step(self.group, time.monotonic())
        if new.record == self.group.record:
            return
        save(self._record, new.record)
        if new.record.lost and not self.group.record.lost:
            log.warning("All pods of the engine restart: %s.", new.record.lost)
        if new.record.number != self.group.record.number:
            log.info("All %d pods are ready: start %d of the engine.", new.size, new.record.number)
        self.group = new

    def _reason(self) -> str:
        return f"{self.group.record.lost or 'pod 0 was recreated'}."


async def _why_silent(gate: Address) -> str:
    """Return why the pod behind this gate cannot reach the head pod; empty if it does not answer."""
    try:
        async with (
            aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=_HEALTH_SECONDS)) as http,
            http.get(gate.url + AGENT_HEALTH) as answer,
        ):
            return MemberHealth.model_validate(await answer.json(content_type=None)).unheard if answer.status == 200 else ""
    except aiohttp.ClientConnectorDNSError as error:
        return f"pod 0 does not find {gate.host}: {error.os_error.strerror or error.os_error}"
    except (aiohttp.ClientError, OSError, ValueError, ValidationError):
        return ""
