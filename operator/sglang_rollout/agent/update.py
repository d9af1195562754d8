"""End of a weight update on one engine: the agent acknowledges the update, or gives it up when the coordinator is silent or asks for it."""

from __future__ import annotations

import asyncio
import logging
import time
from pathlib import Path

from sglang_rollout.agent import events as ev
from sglang_rollout.agent import state as s
from sglang_rollout.agent.agent import Agent
from sglang_rollout.agent.engine import replace_file, request_restart
from sglang_rollout.sglang.api import ControlCall
from sglang_rollout.sglang.checksums import CHECKSUM, Checksums, find_difference, find_unequal_replicas, parse_checksums
from sglang_rollout.sglang.client import EngineError, Reply
from sglang_rollout.wire.agent import AckRequest, FenceRequest
from sglang_rollout.wire.reasons import Refusal, RefusalCode, RefusedError
from sglang_rollout.wire.states import EngineState

log = logging.getLogger(__name__)

_IDLE_SECONDS = 5.0
FENCE_ANSWER_SECONDS = 8.0
"""Time after which the agent answers a fence call, finished or not. The engine may be stuck in a collective that only SIGKILL ends."""


async def acknowledge(
    agent: Agent,
    request: AckRequest,
    deadline: float,
    *,
    attempt: str = "",
    checksums: bool = False,
    expected: Checksums | None = None,
) -> Checksums | None:
    """Record that the engine holds a version completely, once the engine reports the version's label. Raise RefusedError otherwise.

    The engine has ``deadline`` seconds to answer, because without its answer the whole update fails.

    Args:
        agent: The agent.
        request: The version.
        deadline: Seconds to wait for each answer of the engine.
        attempt: Attempt to load a staged version, if the agent acknowledges its own load.
        checksums: Return the checksums of the engine's weights; None if the engine cannot compute them.
        expected: Checksums that the weights must have; None: any.
    """
    _check_ack(agent, request, attempt)
    record, label = agent.state.record, request.version.label
    if record.state is EngineState.CLEAN and record.version == request.version:  # a repeated call
        return await read_checksums(agent, deadline, attempt) if checksums else None
    try:
        reported = await agent.engine.read_label(timeout=deadline)
    except EngineError as error:
        raise RefusedError(f"The engine does not report its version: {error}.", status=409) from error
    if reported != label:
        reply = await agent.control(ControlCall.SET_VERSION, {"new_version": label}, deadline, attempt=attempt)
        if not reply.ok:
            raise RefusedError(f"The engine did not take the version's label {label!r}: HTTP {reply.status}.", status=409)
    found = await _compare_checksums(agent, expected, deadline, attempt) if checksums or expected is not None else None
    _check_ack(agent, request, attempt)  # the engine may have restarted meanwhile
    agent.dispatch(ev.UpdateAcknowledged(request.version, tuple(request.cohort)))
    return found


def _check_ack(agent: Agent, request: AckRequest, attempt: str) -> None:
    refused = s.ack_refusal(agent.state, request.boot_id, request.version, verified=request.verified)
    if refused is None and agent.giving_up_since is not None:
        refused = Refusal(RefusalCode.CONFLICT, "The update is being given up.")
    if refused is None and agent.attempt != attempt:
        refused = Refusal(RefusalCode.CONFLICT, "The agent is loading a staged version, and acknowledges it afterwards.")
    if refused is not None:
        raise RefusedError(refused)


async def _compare_checksums(agent: Agent, expected: Checksums | None, deadline: float, attempt: str) -> Checksums | None:
    """Return the checksums of the engine's weights. Raise RefusedError unless they are the expected ones.

    If none are expected, the engine need not be able to compute them.
    """
    calls = agent.state.calls
    found = await read_checksums(agent, deadline, attempt, is_needed=expected is not None)
    if expected is not None and found is not None and found != expected:
        difference = find_difference(expected, found)
        raise RefusedError(Refusal(RefusalCode.FORBIDDEN, f"The engine holds other weights than this version has: {difference}."))
    if agent.state.calls != calls + 2:  # the call's begin and end
        raise RefusedError("Another call reached the engine after its weights were compared.", status=409)
    return found


async def read_checksums(agent: Agent, deadline: float, attempt: str, *, is_needed: bool = False) -> Checksums | None:
    """Return the checksums of the engine's weights; None if it does not report them, unless they are needed: then raise RefusedError.

    Raise RefusedError also if data-parallel replicas differ, whatever the checksums should be.
    """
    reply = await agent.control(ControlCall.CHECK_WEIGHTS, dict(CHECKSUM), deadline, attempt=attempt)
    found = parse_checksums(reply.document) if reply.ok else None
    difference = find_unequal_replicas(reply.document) if found is not None else ""
    if difference:
        raise RefusedError(Refusal(RefusalCode.FORBIDDEN, f"The replicas of the model in the engine hold different weights: {difference}."))
    if found is None and is_needed:
        raise RefusedError(f"The engine did not report the checksums of its weights: HTTP {reply.status}.", status=409)
    return found


class Fence:
    """Gives up updates, one at a time. A repeated call waits for the current one."""

    def __init__(self, agent: Agent, *, kill_file: Path | None) -> None:
        self._agent = agent
        self._kill_file = kill_file
        self._stuck_after = 0.0
        self._restarts = False
        """True if the engine must restart, unless it is clean."""
        self._task: asyncio.Task[None] | None = None

    async def give_up(self, request: FenceRequest) -> None:
        """Close the gate of a dirty engine and cut its connections; then end the session, abort requests, and resume the engine.

        A dirty engine restarts if ``request.restart`` is set.
        """
        agent = self._agent
        log.info("Giving up the update: %s", request.message)
        self._stuck_after, self._restarts = request.stuck_after, request.restart
        agent.dispatch(ev.UpdateGivenUp())
        if agent.state.record.state is EngineState.DIRTY:
            await agent.gate.close()
            await agent.gate.cut_connections()
        if self._task is None or self._task.done():
            agent.giving_up_since = time.monotonic()
            self._task = asyncio.create_task(self._clean_up(), name="fence")
        await asyncio.wait({self._task}, timeout=FENCE_ANSWER_SECONDS)

    async def watch_lease(self) -> None:
        """Give up an update if no coordinator has called for the lease of the last sync."""
        agent, lease = self._agent, self._agent.limits.lease
        silence = time.monotonic() - agent.last_call_at
        if silence < lease or agent.giving_up_since is not None or not s.waits_for_coordinator(agent.state):
            return
        if time.monotonic() < agent.own_load_until:
            return  # no coordinator is needed
        agent.last_call_at = time.monotonic()  # give up once per lease
        reason = f"no coordinator has called for {silence:.0f} s"
        log.warning("The engine is paused or half updated, and %s: giving up the update.", reason)
        await self.give_up(FenceRequest(message=reason, stuck_after=lease))

    async def _clean_up(self) -> None:
        try:
            if self._agent.running is not None:
                await self._wait_for_answer(self._agent.running)
            await self._free_engine()
            await self._restart_engine()
        except EngineError as error:
            log.warning("Giving up the update failed: %s.", error)
        finally:
            self._agent.giving_up_since = None

    async def _wait_for_answer(self, running: asyncio.Task[Reply]) -> None:
        """Wait until the engine has answered this call. An engine that takes too long is restarted, which ends the call."""
        if running.done():
            return
        done, _ = await asyncio.wait({running}, timeout=self._stuck_after)
        if done:
            return
        call = running.get_name()
        todo = "it has to be restarted" if self._kill_file is None else "requesting its restart"
        log.error("The engine has not answered %s for %g s after the update was given up: %s.", call, self._stuck_after, todo)
        if self._kill_file is not None:
            await asyncio.to_thread(replace_file, self._kill_file)
        await asyncio.wait({running})
        if self._kill_file is not None:  # the engine has answered or restarted
            await asyncio.to_thread(self._kill_file.unlink, missing_ok=True)

    async def _restart_engine(self) -> None:
        """Let the kubelet restart a dirty engine that must not keep what it holds. The agent refuses calls until the engine has ended."""
        record = self._agent.state.record
        if not self._restarts or record.state is not EngineState.DIRTY or not self._agent.state.up:
            return
        if self._kill_file is None:
            log.error("The engine may hold tensors that no later push is known to replace: restart it. Its gate stays closed until then.")
            return
        log.warning("The engine may hold tensors that no later push is known to replace: requesting its restart.")
        await request_restart(self._agent.engine, self._kill_file)

    async def _free_engine(self) -> None:
        """End the session. Abort the requests of a dirty engine. Resume the engine unless another interruption pauses it."""
        agent = self._agent
        if not agent.state.up:
            return
        if agent.state.record.session:
            await self._wait_for_answer(agent.start(ControlCall.END_UPDATE, {}))
        if agent.state.record.state is EngineState.DIRTY:
            await agent.engine.abort_requests(timeout=_IDLE_SECONDS)
        if agent.state.record.interruption.is_pause and not s.stays_paused(agent.state.record):
            await self._wait_for_answer(agent.start(ControlCall.CONTINUE, {}))
        if agent.state.record.state is EngineState.DIRTY:
            await self._wait_until_idle()

    async def _wait_until_idle(self) -> None:
        """Abort requests until none runs, because some reach the engine late."""
        for _ in range(10):
            if await self._agent.engine.count_requests() == 0:
                return
            await self._agent.engine.abort_requests(timeout=_IDLE_SECONDS)
            await asyncio.sleep(_IDLE_SECONDS / 10)
        log.warning("Requests still run on the engine %g s after they were aborted; their connections are closed.", _IDLE_SECONDS)
