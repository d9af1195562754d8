"""Watches over one engine: ends an update that no coordinator leads, restarts a hung engine, and drains one that is about to stop.

Each watch looks about twice a second; ``cli`` runs them.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from pathlib import Path

from sglang_rollout.agent import events as ev
from sglang_rollout.agent import state as s
from sglang_rollout.agent.agent import Agent
from sglang_rollout.agent.engine import EngineError
from sglang_rollout.agent.interruption import next_call
from sglang_rollout.agent.run_files import RunFiles
from sglang_rollout.agent.update import Fence
from sglang_rollout.sglang.api import MEMORY_TAGS, ControlCall
from sglang_rollout.wire.agent import FenceRequest
from sglang_rollout.wire.reasons import GateReason, Refusal
from sglang_rollout.wire.states import EngineState, FleetState

log = logging.getLogger(__name__)

_LEAST_PROBES = 4
"""Failed checks in a row before a restart. Time alone is no proof, because an agent that was suspended itself also sees time pass."""
_MEMORY_SECONDS = 60.0
"""Seconds to wait for a release or a restore of memory."""
_ABORT_SECONDS = 5.0
_HEALTH_SECONDS = 25.0
"""SGLang's own limit on a health check that generates is 20 s."""


class Hang:
    """Requests the restart of an engine that was up, has no call to answer, and has been silent for too long."""

    def __init__(self, agent: Agent, kill_file: Path) -> None:
        self._agent = agent
        self._kill_file = kill_file
        self._asked_at = 0.0
        self._failed = 0
        self._silent_since: float | None = None
        self._asked_to_kill = False

    async def watch(self) -> None:
        """Check the engine once: a live engine generates a token."""
        agent, now = self._agent, time.monotonic()
        if not _should_answer(agent):
            self._failed, self._silent_since = 0, None
            return
        if now - self._asked_at < agent.silent / (_LEAST_PROBES + 1):
            return
        self._asked_at = now
        try:
            await agent.engine.prove_alive(timeout=max(1.0, min(agent.silent / _LEAST_PROBES, _HEALTH_SECONDS)))
        except EngineError as error:
            if _should_answer(agent):  # otherwise a call has begun meanwhile that may keep it busy
                await self._silent(str(error), now)
            return
        self._failed, self._silent_since = 0, None
        if self._asked_to_kill:  # the engine answered again before the kubelet noticed the file
            self._kill_file.unlink(missing_ok=True)
            self._asked_to_kill = False

    async def _silent(self, why: str, asked_at: float) -> None:
        self._failed += 1
        self._silent_since = asked_at if self._silent_since is None else self._silent_since
        silence = time.monotonic() - self._silent_since
        log.warning("The engine has not answered for %.0f s: %s.", silence, why)
        if self._failed < _LEAST_PROBES or silence < self._agent.silent:
            return
        log.error("The engine has not answered for %.0f s although no call keeps it busy: requesting its restart.", silence)
        self._kill_file.touch()
        self._asked_to_kill = True
        self._failed, self._silent_since = 0, None  # request the restart once, then count again


def _should_answer(agent: Agent) -> bool:
    """Return whether the known engine process still runs and can answer: not paused, in no call and in no update."""
    record = agent.state.record
    boot = agent.engine.container_boot()
    if boot is None or boot != record.boot_id:
        return False  # it starts, which the startup probe watches
    busy = record.pending or record.interruption.is_pause or record.session or record.interruption.released
    return not (busy or agent.fencing or (record.state is EngineState.DIRTY and not record.failed))


class Lease:
    """Gives up an update after the lease: the time without a coordinator's call that the last sync allows."""

    def __init__(self, agent: Agent, fence: Fence) -> None:
        self._agent = agent
        self._fence = fence

    async def watch(self) -> None:
        """Check the lease once; return when an expired update is given up."""
        agent = self._agent
        silence = time.monotonic() - agent.heard_at
        if silence < agent.lease or agent.fencing or not in_the_middle(agent.state):
            return
        agent.heard_at = time.monotonic()  # once for each lease
        reason = f"no coordinator has called for {silence:.0f} s"
        log.warning("The engine is paused or half updated, and %s: giving up the update.", reason)
        await self._fence.give_up(FenceRequest(message=reason, stuck_after=agent.lease))


def in_the_middle(state: s.State) -> bool:
    """Return whether the engine waits for a coordinator: it is paused, or an update is open on it."""
    record, interruption = state.record, state.record.interruption
    # A pause by the spec, or for released memory, waits for something else.
    waits = interruption.is_pause and record.applied_state is FleetState.ACTIVE and not interruption.released
    unfinished = record.state is EngineState.DIRTY and not record.failed
    return state.up and (waits or record.session or unfinished)


class SpecState:
    """Leads the engine to the applied ``spec.state``: releases its memory for Asleep, and restores it afterwards."""

    def __init__(self, agent: Agent) -> None:
        self._agent = agent
        self._since: float | None = None
        """When the agent began to wait for running requests."""

    async def watch(self) -> None:
        """Make the next call towards ``spec.state``."""
        agent, record = self._agent, self._agent.state.record
        if not agent.state.up or agent.fencing or record.pending:
            return
        if record.applied_state is not FleetState.ASLEEP:
            self._since, agent.release_failure = None, None
        call = next_call(record.applied_state, record.interruption)
        if call is ControlCall.RELEASE_MEMORY:
            await self._release()
        elif call is ControlCall.RESUME_MEMORY:
            await self._restore()

    async def _release(self) -> None:
        agent, now = self._agent, time.monotonic()
        if self._since is None:
            self._since = now
            log.info("Releasing the memory for spec.state Asleep: running requests have %g s to finish.", agent.drain)
        if agent.state.record.interruption.is_pause or now - self._since >= agent.drain:
            # A paused engine finishes no request, and after the release the weights of unfinished requests would be unknown.
            await agent.engine.post(ControlCall.ABORT_REQUEST.path, {"rid": "", "abort_all": True}, timeout=_ABORT_SECONDS)
        elif await agent.engine.running():
            return
        tags = [tag for tag in MEMORY_TAGS if tag not in agent.state.record.interruption.released]
        reply = await agent.control(ControlCall.RELEASE_MEMORY, {"tags": tags}, _MEMORY_SECONDS, by_spec=True)
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


async def watch_drain(agent: Agent, files: RunFiles, others: Callable[[], bool] = lambda: False) -> None:
    """Check the files once: close the gate if a drain is requested, report an idle engine, end the drain after a restart.

    ``others`` returns whether another pod of the engine drains.
    """
    wanted = files.drain_wanted() or others()
    if wanted != agent.state.draining:
        agent.dispatch(ev.DrainingChanged(wanted))
        log.info("Draining: no new requests." if wanted else "The drained engine has been replaced.")
        if not wanted:
            files.drain.unlink(missing_ok=True)
            files.drained.unlink(missing_ok=True)
        return  # the gate closes first; the next check asks whether the engine is idle
    if wanted and not files.drained.exists() and await _idle(agent):
        files.drained.touch()
        log.info("Drained: no request runs on the engine.")


async def _idle(agent: Agent) -> bool:
    if not agent.state.up:
        return True
    if agent.view is not None and agent.view.ready:
        return False
    record = agent.state.record
    if record.pending or (record.state is EngineState.DIRTY and not record.failed):
        return False  # stopping this engine would end the update for all engines
    if record.interruption.is_pause and record.applied_state is not FleetState.ACTIVE:
        return True  # paused requests wait for the spec and would never finish
    try:
        return await agent.engine.running() == 0
    except EngineError:
        return False  # silent is not idle; polls notice an engine that has ended
