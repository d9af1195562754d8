"""One attempt to load a staged version into the engine.

    pause → begin → load (custom loader) → verdicts of all ranks → end → flush → checksums → acknowledge
    pause → load (folder) → flush → checksums → acknowledge           for engines with data-parallel replicas, see ways.py

If every rank refuses before its first write, the engine gets its label back and holds what it held. After any other failure the engine is
dirty.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from http import HTTPStatus

from sglang_rollout.agent import events as ev
from sglang_rollout.agent.agent import Agent
from sglang_rollout.agent.engine import refusal_reply
from sglang_rollout.agent.record import RecordError
from sglang_rollout.agent.staged.attempts import Attempts
from sglang_rollout.agent.staged.verdicts import Verdicts
from sglang_rollout.agent.staged.ways import LoadWay
from sglang_rollout.agent.update import acknowledge, read_checksums
from sglang_rollout.sglang.api import ControlCall
from sglang_rollout.sglang.checksums import Checksums
from sglang_rollout.sglang.client import EngineError, Reply
from sglang_rollout.wire.reasons import Refusal, RefusalCode, RefusedError
from sglang_rollout.wire.staged import ActivateReply, ActivateRequest

log = logging.getLogger(__name__)

ANSWER_SECONDS = 3600.0
"""Time for each answer of the engine. The caller's deadline, the lease and /agent/fence end a load earlier."""
LABEL_SECONDS = 30.0
"""Timeout for the engine's version label. A busy engine may need more than the 2 s of a poll, and a load takes longer anyway."""
_STAGE_SECONDS, _STAGE_FACTOR = 30.0, 2.0
"""Time for the load of each later pipeline stage: so many seconds, and so many times as long as the first stage took."""
_NO_SESSION = b"no weight-update session is open"
"""SGLang's answer to the end of a session that is not open; SGLang has no codes."""


class ActivationError(RefusedError):
    """A version was not loaded. ``wrote`` is False if the engine still holds what it held before."""

    def __init__(self, refusal: Refusal, *, wrote: bool, status: int | None = None) -> None:
        super().__init__(refusal, status=status)
        self.wrote = wrote


class Load:
    """One attempt to load a version."""

    def __init__(
        self,
        agent: Agent,
        request: ActivateRequest,
        way: LoadWay,
        body: dict[str, object],
        verdicts: Attempts,
        *,
        attempt: str,
        ranks: int,
        stages: int,
        compares: bool = False,
    ) -> None:
        """Prepare an attempt. ``compares``: find out by checksums whether the load changes a tensor."""
        self._agent = agent
        self._request = request
        self._way = way
        self._verdicts = verdicts
        self._attempt = attempt
        self._ranks = ranks
        self._stages = stages
        self._body = {**body, "flush_cache": False, "weight_version": request.ack.version.label}
        self._before = agent.state.record
        self._is_sent = False
        """The engine may have received the call that writes."""
        self._is_flushed = True
        self._compares = compares
        self._sums_before: Checksums | None = None
        self._seconds: dict[str, float] = {}

    async def run(self, live_label: str, expected: Checksums | None, before_write: Callable[[], None]) -> ActivateReply:
        """Load and acknowledge the version. ``before_write`` may raise RecordError. Raises ActivationError."""
        agent = self._agent
        agent.attempt = self._attempt
        try:
            agent.dispatch(ev.ActivationBegan(self._attempt, self._request.update, live_label))
            found = await self._load(expected, before_write)
            is_changed = self._sums_before is None or found != self._sums_before
            checksums = as_list(found) if self._request.checksums else None
            return ActivateReply(checksums=checksums, flushed=self._is_flushed, changed=is_changed, seconds=self._seconds)
        except (RefusedError, EngineError, RecordError) as error:
            raise await self._fail(error) from None
        finally:
            agent.attempt = ""

    async def _load(self, expected: Checksums | None, before_write: Callable[[], None]) -> Checksums | None:
        request = self._request
        await self._step("pause", ControlCall.PAUSE, {"mode": request.mode})
        if self._way.has_verdicts:
            await self._step("load", ControlCall.BEGIN_UPDATE, {})
        if self._compares:
            self._sums_before = await read_checksums(self._agent, ANSWER_SECONDS, self._attempt)
        before_write()
        self._is_sent = True
        await self._step("load", self._way.call, self._body)
        if self._way.has_verdicts:
            await self._step("load", ControlCall.END_UPDATE, {})
        else:
            await self._verdicts.check(self._attempt)
        await self._step("flush", ControlCall.FLUSH_CACHE, {})
        await self._agent.confirm_process()
        began = time.monotonic()
        wants = request.checksums or expected is not None or self._sums_before is not None
        found = await acknowledge(
            self._agent,
            request.ack,
            ANSWER_SECONDS,
            attempt=self._attempt,
            checksums=wants,
            expected=expected,
        )
        self._seconds["verify"] = time.monotonic() - began
        return found

    async def _step(self, name: str, call: ControlCall, body: dict[str, object]) -> None:
        """Make one call. Raise RefusedError if it fails."""
        began = time.monotonic()
        judge = self._judge if call is self._way.call and self._way.has_verdicts else None
        reply = await self._agent.control(call, dict(body), ANSWER_SECONDS, attempt=self._attempt, judge=judge)
        self._seconds[name] = self._seconds.get(name, 0.0) + time.monotonic() - began
        if call is ControlCall.FLUSH_CACHE and reply.status == HTTPStatus.BAD_REQUEST:
            # SGLang refuses while requests exist: paused in place, or in releases up to 0.5.20 also while they wait.
            self._is_flushed = False
        elif not reply.ok:
            document = reply.document
            said = document.get("message") if isinstance(document, dict) else None
            code = RefusalCode.CONFLICT if reply.status < 500 else RefusalCode.UPSTREAM_FAILED
            raise RefusedError(Refusal(code, f"{call} failed: {said or f'HTTP {reply.status}'}"))

    async def _judge(self, reply: Reply) -> Reply:
        """Return a failure in place of a success that not every rank confirms."""
        agent, seconds = self._agent, time.monotonic() - self._agent.running_since
        limit = (self._stages - 1) * (_STAGE_SECONDS + _STAGE_FACTOR * seconds)
        verdicts = await self._verdicts.read_ended(self._attempt, self._ranks, limit, lambda: agent.state.up)
        return reply if not reply.ok or verdicts.is_loaded else refusal_reply(409, verdicts.message)

    async def _read_verdicts(self) -> Verdicts:
        if not self._way.has_verdicts:
            return Verdicts((), self._ranks)
        return await self._verdicts.read(self._attempt, self._ranks)

    async def _fail(self, error: Exception) -> ActivationError:
        """Restore what the engine held, or mark it dirty until a complete load, and return the error to raise."""
        agent = self._agent
        refusal = error.refusal if isinstance(error, RefusedError) else Refusal(RefusalCode.UPSTREAM_FAILED, str(error))
        verdicts = await self._read_verdicts()
        if verdicts.found and not verdicts.is_loaded and verdicts.message not in refusal.message:
            refusal = Refusal(refusal.code, f"{refusal.message} {verdicts.message}")
        try:
            if not self._is_sent or verdicts.is_refused:
                if await restore(agent, self._attempt):
                    await self._resume()
                    return ActivationError(refusal, wrote=False, status=409)
            elif agent.state.record.session:
                await agent.control(ControlCall.END_UPDATE, {}, ANSWER_SECONDS, attempt=self._attempt)
        except (EngineError, RecordError) as second:
            log.warning("The engine cannot be led back to its state before the load: %s", second)
        if agent.state.up:
            await agent.await_end()  # the coordinator asks next whether the engine is lost
        if agent.state.record.activation is not None:
            agent.dispatch(ev.UpdateGivenUp(), durable=False)
        return ActivationError(refusal, wrote=not self._is_unchanged, status=409 if refusal.status < 500 else refusal.status)

    async def _resume(self) -> None:
        """Resume an engine that was not paused before the load."""
        agent = self._agent
        agent.attempt = ""
        if self._before.interruption.is_pause or not agent.state.record.interruption.is_pause:
            return
        reply = await agent.control(ControlCall.CONTINUE, {}, ANSWER_SECONDS)
        if not reply.ok:
            log.warning("The engine stays paused after it has refused a version: HTTP %d.", reply.status)

    @property
    def _is_unchanged(self) -> bool:
        """True if no call that writes was made, so that the record still says what the engine holds."""
        before, now = self._before, self._agent.state.record
        is_same = (before.boot_id, before.state, before.version) == (now.boot_id, now.state, now.version)
        return is_same and self._agent.state.up and not self._is_sent


async def restore(agent: Agent, attempt: str) -> bool:
    """Return the engine to what it held before an attempt in which no rank wrote: end the session, and set the label back.

    Return False if that fails, or if the attempt was given up; then the record stays as it is. Raises EngineError and RecordError.
    """
    activation = agent.state.record.activation
    if activation is None or activation.attempt != attempt or not agent.state.up:
        return False
    if agent.state.record.session:
        reply = await agent.control(ControlCall.END_UPDATE, {}, ANSWER_SECONDS, attempt=attempt)
        if not reply.ok and _NO_SESSION not in reply.body:
            return False
    # SGLang takes over the label of a version that its loader has refused.
    if await agent.engine.read_label(timeout=LABEL_SECONDS) != activation.live_label:
        body = {"new_version": activation.live_label}
        if not (await agent.control(ControlCall.SET_VERSION, body, ANSWER_SECONDS, attempt=attempt)).ok:
            return False
    agent.dispatch(ev.ActivationRefused(attempt))
    return True


def as_list(checksums: Checksums | None) -> list[str] | None:
    """Return checksums as they are sent."""
    return None if checksums is None else list(checksums)
