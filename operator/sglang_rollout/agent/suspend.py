"""Release and restore of the engine's memory, for a trainer or for ``spec.state: Asleep``.

SGLang dies of a release while a request runs, and of restoring memory that is not released. So the gate closes first, a pause in the
mode *abort* ends earlier requests, and the record of released tags is written before the call is sent.
"""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING

from sglang_rollout.agent import state as s
from sglang_rollout.agent.engine import EngineError
from sglang_rollout.sglang.api import MEMORY_TAGS, ControlCall
from sglang_rollout.wire.reasons import GateReason, Refusal, RefusalCode
from sglang_rollout.wire.states import FleetState

if TYPE_CHECKING:
    from sglang_rollout.agent.agent import Agent

log = logging.getLogger(__name__)

_CALL_SECONDS = 60.0
_ABORT_SECONDS = 5.0
NO_SAVER = "the engine was started without --enable-memory-saver (engine.memorySaver), so nothing would be released."


async def release_refusal(agent: Agent) -> Refusal | None:
    """Return why the engine must not release memory now; None if it may."""
    memory = agent.state.memory
    if not memory.paused or memory.pause_mode == "in_place":  # in the other modes SGLang releases while requests wait
        try:
            running = await agent.engine.running()
        except EngineError as error:
            return Refusal(RefusalCode.UNAVAILABLE, f"{ControlCall.RELEASE_MEMORY}: cannot tell whether the engine is idle: {error}.")
        if running:
            sentence = f"{running} requests run or wait; releasing memory under them ends the engine's process. Pause first."
            return Refusal(RefusalCode.CONFLICT, f"{ControlCall.RELEASE_MEMORY}: {sentence}")
    if agent.engine.info.get("enable_memory_saver") is False:
        return Refusal(RefusalCode.CONFLICT, f"{ControlCall.RELEASE_MEMORY}: {NO_SAVER}")
    return None


async def quiet(agent: Agent) -> None:
    """Close the gate, and pause the engine unless it is paused. No request runs until all memory is restored."""
    await agent.shut_gate()
    if agent.state.memory.paused_for_release:
        reply = await agent.engine.call(ControlCall.PAUSE, {"mode": "abort"})
        if not reply.ok:
            raise EngineError("it could not be paused before its memory was released")


async def after_resume(agent: Agent) -> None:
    """Resume the engine if all memory is restored and the engine was paused only for the release."""
    memory = agent.state.memory
    if memory.paused_for_release and memory.paused and not memory.released and memory.hold is FleetState.ACTIVE:
        await agent.control(ControlCall.CONTINUE, {}, _CALL_SECONDS)


class Sleep:
    """Releases the engine's memory while ``spec.state`` is Asleep, and restores it afterwards."""

    def __init__(self, agent: Agent) -> None:
        self._agent = agent
        self._since: float | None = None
        """When the agent began to wait for running requests."""

    async def watch(self) -> None:
        """Take the next step towards the applied ``spec.state``."""
        agent, memory = self._agent, self._agent.state.memory
        if not agent.state.up or agent.fencing or memory.pending:
            return
        if memory.hold is not FleetState.ASLEEP:
            self._since, agent.release_failure = None, None
            if memory.asleep:
                await self._wake()
        elif set(MEMORY_TAGS) - set(memory.released):
            await self._fall_asleep()

    async def _fall_asleep(self) -> None:
        agent, now = self._agent, time.monotonic()
        if self._since is None:
            self._since = now
            log.info("Releasing the memory for spec.state Asleep: running requests have %g s to finish.", agent.drain)
        if agent.state.memory.paused or now - self._since >= agent.drain:
            # A paused engine finishes no request, and after the release the weights of unfinished requests would be unknown.
            await agent.engine.post(ControlCall.ABORT_REQUEST.path, {"rid": "", "abort_all": True}, timeout=_ABORT_SECONDS)
        elif await agent.engine.running():
            return
        tags = [tag for tag in MEMORY_TAGS if tag not in agent.state.memory.released]
        reply = await agent.control(ControlCall.RELEASE_MEMORY, {"tags": tags, s.BY_SPEC: True}, _CALL_SECONDS)
        document = reply.document
        refused = not reply.ok and isinstance(document, dict)
        message = f"The engine cannot release its memory: {document.get('message')}" if refused else ""
        agent.release_failure = Refusal(GateReason.RELEASE_FAILED, message) if refused else None

    async def _wake(self) -> None:
        agent = self._agent
        if agent.state.memory.released:
            reply = await agent.control(ControlCall.RESUME_MEMORY, {}, _CALL_SECONDS)
            if not reply.ok:
                log.error("The engine's memory could not be restored: HTTP %d %s", reply.status, reply.body[:300].decode(errors="replace"))
                return
        log.info("The memory is restored. The gate opens when the engine's version is verified.")
        agent.awake()
        if agent.state.memory.paused and agent.state.memory.hold is FleetState.ACTIVE:
            await agent.control(ControlCall.CONTINUE, {}, _CALL_SECONDS)
