"""What the agent does without a call: restart a hung engine, follow ``spec.state``, and drain an engine that is about to stop.

:mod:`.cli` runs each watch about twice a second. The file ``kill`` makes the kubelet restart the engine.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from pathlib import Path

from sglang_rollout.agent import events as ev
from sglang_rollout.agent import state as s
from sglang_rollout.agent.agent import Agent
from sglang_rollout.agent.engine import RunFiles, replace_file
from sglang_rollout.agent.interruption import next_call
from sglang_rollout.sglang.api import ControlCall
from sglang_rollout.sglang.client import HEALTH_SECONDS, EngineError
from sglang_rollout.wire.reasons import GateReason, Refusal
from sglang_rollout.wire.states import FleetState

log = logging.getLogger(__name__)

_MIN_FAILED_CHECKS = 4
"""Failed checks in a row before a restart. Elapsed time alone is no proof: time also passes while the agent itself is suspended."""
_MEMORY_SECONDS = 60.0
"""Time to wait for a release or a restore of memory."""
_ABORT_SECONDS = 5.0


class HangWatch:
    """Requests the restart of an engine that was up, has no call to answer, and has been silent for too long."""

    def __init__(self, agent: Agent, kill_file: Path) -> None:
        self._agent = agent
        self._kill_file = kill_file
        self._checked_at = 0.0
        self._failed_checks = 0
        self._silent_since: float | None = None
        self._is_restart_requested = False

    async def watch(self) -> None:
        """Check the engine once: a live engine generates a token."""
        agent, now, limit = self._agent, time.monotonic(), self._agent.limits.silent
        if not _should_answer(agent):
            self._failed_checks, self._silent_since = 0, None
            return
        if now - self._checked_at < limit / (_MIN_FAILED_CHECKS + 1):
            return
        self._checked_at = now
        try:
            await agent.engine.check_alive(timeout=max(1.0, min(limit / _MIN_FAILED_CHECKS, HEALTH_SECONDS)))
        except EngineError as error:
            if _should_answer(agent):  # otherwise a call that may keep the engine busy has begun meanwhile
                self._count_failure(str(error), now, limit)
            return
        self._failed_checks, self._silent_since = 0, None
        if self._is_restart_requested:  # the engine answered again before the kubelet noticed the file
            self._kill_file.unlink(missing_ok=True)
            self._is_restart_requested = False

    def _count_failure(self, why: str, checked_at: float, limit: float) -> None:
        self._failed_checks += 1
        self._silent_since = checked_at if self._silent_since is None else self._silent_since
        silence = time.monotonic() - self._silent_since
        log.warning("The engine has not answered for %.0f s: %s.", silence, why)
        if self._failed_checks < _MIN_FAILED_CHECKS or silence < limit:
            return
        log.error("The engine has not answered for %.0f s although no call keeps it busy: requesting its restart.", silence)
        replace_file(self._kill_file)
        self._is_restart_requested = True
        self._failed_checks, self._silent_since = 0, None  # request the restart once, then count again


def _should_answer(agent: Agent) -> bool:
    """Return whether the known engine process still runs and can answer: not paused, in no call and in no update."""
    record = agent.state.record
    boot_id = agent.engine.container_boot_id()
    if boot_id is None or boot_id != record.boot_id:
        return False  # the engine is starting, and the startup probe watches the start
    is_busy = record.pending or record.session or record.interruption.is_pause or record.interruption.released
    return not (is_busy or agent.giving_up_since is not None or s.is_update_open(record))


class SpecStateWatch:
    """Leads the engine to the applied ``spec.state``: releases its memory for Asleep, and restores it afterwards."""

    def __init__(self, agent: Agent) -> None:
        self._agent = agent
        self._since: float | None = None
        """When the agent began to wait for running requests."""

    async def watch(self) -> None:
        """Make the next call towards ``spec.state``."""
        agent, record = self._agent, self._agent.state.record
        if not agent.state.up or agent.giving_up_since is not None or record.pending or agent.attempt:
            return
        if record.applied_state is not FleetState.ASLEEP:
            self._since, agent.release_failure = None, None
        match next_call(record.applied_state, record.interruption):
            case ControlCall.RELEASE_MEMORY:
                await self._release()
            case ControlCall.RESUME_MEMORY:
                await self._restore()

    async def _release(self) -> None:
        agent, now, drain = self._agent, time.monotonic(), self._agent.limits.drain
        if self._since is None:
            self._since = now
            log.info("Releasing the memory for spec.state Asleep: running requests have %g s to finish.", drain)
        if agent.state.record.interruption.is_pause or now - self._since >= drain:
            # A paused engine finishes no request, and after the release the weights of unfinished requests would be unknown.
            await agent.engine.abort_requests(timeout=_ABORT_SECONDS)
        elif await agent.engine.count_requests():
            return
        reply = await agent.control(ControlCall.RELEASE_MEMORY, {}, _MEMORY_SECONDS, by_spec=True)
        document = reply.document
        refused = not reply.ok and isinstance(document, dict)
        message = f"The engine cannot release its memory: {document.get('message')}" if refused else ""
        agent.release_failure = Refusal(GateReason.RELEASE_FAILED, message) if refused else None

    async def _restore(self) -> None:
        reply = await self._agent.control(ControlCall.RESUME_MEMORY, {}, _MEMORY_SECONDS)
        if reply.ok:
            log.info("The memory is restored. The gate opens when the engine's version is verified.")
        else:
            log.error("The engine's memory could not be restored: HTTP %d %s", reply.status, reply.body[:300].decode(errors="replace"))


async def watch_drain(agent: Agent, files: RunFiles, is_other_pod_draining: Callable[[], bool]) -> None:
    """Check the files once: close the gate if a drain is requested, report when the engine is idle, end the drain after a restart."""
    wanted = files.is_drain_requested() or is_other_pod_draining()
    if wanted != agent.state.draining:
        agent.dispatch(ev.DrainingChanged(wanted))
        log.info("Draining: no new requests." if wanted else "The drained engine has been replaced.")
        if not wanted:
            files.drain.unlink(missing_ok=True)
            files.drained.unlink(missing_ok=True)
        return  # the gate closes first; the next check asks whether the engine is idle
    if wanted and not files.drained.exists() and await _is_idle(agent):
        replace_file(files.drained)
        log.info("Drained: no request runs on the engine.")


async def _is_idle(agent: Agent) -> bool:
    if not agent.state.up:
        return True
    if agent.gate.view is not None and agent.gate.view.ready:
        return False
    record = agent.state.record
    if record.pending or s.is_update_open(record):
        return False  # stopping this engine would end the update for all engines
    if record.interruption.is_pause and record.applied_state is not FleetState.ACTIVE:
        return True  # paused requests wait for the spec and would never finish
    try:
        return await agent.engine.count_requests() == 0
    except EngineError:
        return False  # a silent engine may still run requests; polls notice an engine that has ended
