"""Load a staged version into the engine, one at a time: for a coordinator, or by the agent itself.

After a success the gate stays closed until the version is committed, and the engine stays paused unless the request says otherwise.
:mod:`.load` has the steps of a load, and what they leave after a failure.
"""

from __future__ import annotations

import asyncio
import logging
import time
from dataclasses import dataclass

from sglang_rollout.agent import state as s
from sglang_rollout.agent.agent import Agent
from sglang_rollout.agent.own_model import OwnModel
from sglang_rollout.agent.record import RecordError
from sglang_rollout.agent.staged.attempts import Attempts
from sglang_rollout.agent.staged.load import ANSWER_SECONDS, LABEL_SECONDS, ActivationError, Load, as_list, restore
from sglang_rollout.agent.staged.saved import SavedVersion, SavedVersions
from sglang_rollout.agent.staged.ways import LoadWay
from sglang_rollout.agent.staged.written import WrittenTensors, find_left, hash_names, tensors_of
from sglang_rollout.agent.update import acknowledge
from sglang_rollout.sglang.api import ControlCall
from sglang_rollout.sglang.checksums import Checksums
from sglang_rollout.sglang.client import EngineError
from sglang_rollout.staging.copies import Copies, Copy
from sglang_rollout.staging.index import StagedError
from sglang_rollout.wire.reasons import Refusal, RefusalCode, RefusedError
from sglang_rollout.wire.staged import ActivateReply, ActivateRequest
from sglang_rollout.wire.states import EngineState, FleetState

log = logging.getLogger(__name__)

_RESUME_SECONDS = 10.0
"""Time for the engine to generate again after a load. If it takes longer, the coordinator resumes or fences it."""


@dataclass(frozen=True, slots=True)
class _Running:
    """A load in progress."""

    update: str
    is_own: bool
    task: asyncio.Task[ActivateReply]


@dataclass(frozen=True, slots=True)
class _Start:
    """What is known before a load."""

    copy: Copy
    live_label: str
    """Version label that the engine reports."""
    attempt: str
    tensors: frozenset[str]
    """The tensors of the copy: all of the model that earlier loads may have written, and perhaps more."""
    compares: bool
    """True if only checksums can tell whether the copy's new names belong to the model."""


class LeftTensorsError(ActivationError):
    """A version was refused because the engine may hold tensors that the version does not have. A restart of the engine removes them."""

    def __init__(self, message: str) -> None:
        super().__init__(
            Refusal(RefusalCode.RESTART_NEEDED, f"{message} The engine has to restart, or a version with them has to come."), wrote=False
        )


class Activator:
    """Loads one version at a time.

    Args:
        agent: The agent.
        copies: The copies of this pod.
        saved: What is remembered of each version.
        written: The tensors that loads have written since the engine's start.
        verdicts: The verdicts of the loader in all ranks.
        model: The tensors of the engine's own model.
        way: How the engine loads versions.
        pipeline_size: Pipeline stages of the engine; each of its tensor-parallel ranks exists once for each stage.
    """

    def __init__(
        self,
        agent: Agent,
        copies: Copies,
        saved: SavedVersions,
        written: WrittenTensors,
        verdicts: Attempts,
        *,
        model: OwnModel,
        way: LoadWay,
        pipeline_size: int = 1,
    ) -> None:
        self._agent = agent
        self._way = way
        self._copies = copies
        self._saved = saved
        self._written = written
        self._verdicts = verdicts
        self._model = model
        self._pipeline_size = pipeline_size
        self._running: _Running | None = None
        self.failed_at: float | None = None
        """When the last load failed; None if it did not."""

    @property
    def updates_in_use(self) -> set[str]:
        """The update whose copy is being loaded."""
        running = self._current()
        return set() if running is None else {running.update}

    @property
    def is_running(self) -> bool:
        """True while a version is being loaded."""
        return self._current() is not None

    async def activate(self, request: ActivateRequest, deadline: float) -> ActivateReply:
        """Load a version for a coordinator, and resume the engine if the request has a sync.

        A repeated call joins the load in progress; a load of the agent's own ends first.

        Raises:
            ActivationError: The version was not loaded, or the load has not ended within ``deadline`` seconds and continues.
        """
        reply = await self._load_for_coordinator(request, time.monotonic() + deadline)
        if request.sync is None:
            return reply
        is_running = await self._resume(_RESUME_SECONDS)
        await self._agent.gate.settle_if_due()
        return reply.model_copy(update={"running": is_running})

    async def _load_for_coordinator(self, request: ActivateRequest, end: float) -> ActivateReply:
        while (running := self._current()) is not None:
            if not running.is_own and running.update != request.update:
                raise _refused(RefusalCode.CONFLICT, f"The engine is loading the version of update {running.update}.")
            if not running.is_own:
                return await _join(running, end)
            await asyncio.wait({running.task}, timeout=max(0.0, end - time.monotonic()))
            if not running.task.done():
                raise _late(running.update)
        return await _join(self._begin(request, is_own=False), end)

    async def load_own(self, request: ActivateRequest) -> ActivateReply:
        """Load a version without a coordinator, and resume the engine. Raises ActivationError."""
        if self._current() is not None:
            raise _refused(RefusalCode.CONFLICT, "The engine is loading a version already.")
        return await _join(self._begin(request, is_own=True), time.monotonic() + ANSWER_SECONDS)

    async def close(self) -> None:
        """End the load in progress. The engine completes its current call, which the record names."""
        running = self._current()
        if running is not None:
            running.task.cancel()
            await asyncio.wait({running.task})

    async def undo_interrupted(self) -> bool:
        """Restore what the engine held before a load that the agent's restart interrupted, if every rank has refused the version.

        Return True if that is done.
        """
        agent, activation = self._agent, self._agent.state.record.activation
        if activation is None or not self._way.has_verdicts or self._current() is not None:
            return False
        verdicts = await self._verdicts.read(activation.attempt, self._ranks)
        if not verdicts.is_refused or agent.attempt or agent.state.record.activation != activation:
            return False
        log.info("The load that the agent's restart interrupted was refused: %s", verdicts.message)
        agent.attempt = activation.attempt
        try:
            is_undone = await restore(agent, activation.attempt)
            if is_undone:
                self._written.undo(activation.attempt)
            return is_undone
        finally:
            agent.attempt = ""

    @property
    def _ranks(self) -> int:
        return self._tensor_size * self._pipeline_size

    @property
    def _tensor_size(self) -> int:
        facts = self._agent.state.facts
        return (facts.tensor_size if facts is not None else None) or 1

    def _current(self) -> _Running | None:
        return self._running if self._running is not None and not self._running.task.done() else None

    def _begin(self, request: ActivateRequest, *, is_own: bool) -> _Running:
        task = asyncio.create_task(self._run(request, is_own=is_own), name=f"load of update {request.update}")
        task.add_done_callback(self._note_end)
        if is_own:
            self._agent.own_load = task
        self._running = _Running(request.update, is_own, task)
        return self._running

    def _note_end(self, task: asyncio.Task[ActivateReply]) -> None:
        if self._agent.own_load is task:
            self._agent.own_load = None
        error = None if task.cancelled() else task.exception()
        self.failed_at = time.monotonic() if error is not None else None
        if isinstance(error, ActivationError):
            log.warning("The %s failed; the engine is %s: %s", task.get_name(), "changed" if error.wrote else "unchanged", error)
        elif error is not None:
            log.error("A defect in the %s.", task.get_name(), exc_info=error)
        else:
            spent = ", ".join(f"{step} {1000 * seconds:.0f} ms" for step, seconds in task.result().seconds.items())
            log.info("The %s has ended: %s.", task.get_name(), spent or "the engine had loaded it before")

    async def _run(self, request: ActivateRequest, *, is_own: bool) -> ActivateReply:
        agent, record, ack = self._agent, self._agent.state.record, request.ack
        try:
            if record.boot_id == ack.boot_id and record.state is EngineState.CLEAN and record.version == ack.version:
                found = await acknowledge(agent, ack, ANSWER_SECONDS, checksums=request.checksums)  # a repeated call
                return ActivateReply(checksums=as_list(found))
            start = await self._prepare(request)
        except ActivationError:
            raise
        except RefusedError as error:
            raise ActivationError(error.refusal, wrote=False, status=error.status) from None
        except EngineError as error:
            raise _refused(RefusalCode.UNAVAILABLE, f"The engine cannot be asked for its state: {error}.") from None
        except OSError as error:
            raise _refused(RefusalCode.INTERNAL_ERROR, f"The folder of verdicts cannot be written: {error.strerror or error}.") from None
        record = agent.state.record
        known = self._saved.load(request.update)
        checksums = known.checksums if known is not None and known.digest == request.digest else None
        version = SavedVersion(ack=ack, digest=request.digest, checksums=checksums)
        if not is_own:
            self._saved.save(request.update, version)
        reply = await self._load(request, start, checksums if is_own else _expected(request))
        self._name_version(start.copy, request)
        if reply.checksums is not None:
            self._saved.save(request.update, version.model_copy(update={"checksums": tuple(reply.checksums)}))
        # A dirty engine is paused because of an update that has ended. Any other pause ends with the side that began it.
        if is_own and (record.state is EngineState.DIRTY or not record.interruption.is_pause):
            await self._resume(ANSWER_SECONDS)
        return reply

    async def _prepare(self, request: ActivateRequest) -> _Start:
        """Check the request, the copy and the engine. Raises RefusedError, EngineError and OSError."""
        agent = self._agent
        copy = self._check(request)
        await self._way.check_copy(copy)
        tensors = await asyncio.to_thread(tensors_of, copy)
        compares = await self._check_tensors(request.ack.boot_id, tensors)
        live_label = await agent.engine.read_label(timeout=LABEL_SECONDS)
        await agent.confirm_process()
        attempt = await self._verdicts.open(request)
        self._check(request)  # another call may have come meanwhile
        return _Start(copy, live_label, attempt, tensors, compares)

    async def _check_tensors(self, boot_id: str, tensors: frozenset[str]) -> bool:
        """Raise LeftTensorsError if a version would leave tensors of another version in the engine.

        Return True if the version has tensors that no load has written, and that nothing tells to be tensors of the model.
        """
        written = self._written.read(boot_id)
        if written is None and self._agent.state.record.written:
            raise LeftTensorsError("It is not known which tensors were written since the engine's start.")
        shapes, written = await self._model.read_shapes(), written or frozenset()
        left = find_left(written, tensors, None if shapes is None else hash_names(shapes))
        if left:
            message = f"Loads since the engine's start may have written tensors that this version does not have ({len(left)})."
            raise LeftTensorsError(message)
        return shapes is None and not tensors <= written

    async def _load(self, request: ActivateRequest, start: _Start, expected: Checksums | None) -> ActivateReply:
        """Load the version, and remember before the first write which tensors it writes. Raises ActivationError."""
        body = self._way.body(start.copy, start.attempt, self._tensor_size)
        load = Load(
            self._agent,
            request,
            self._way,
            body,
            self._verdicts,
            attempt=start.attempt,
            ranks=self._ranks,
            stages=self._pipeline_size,
            compares=start.compares,
        )
        try:
            reply = await load.run(
                start.live_label, expected, lambda: self._written.begin(request.ack.boot_id, start.attempt, start.tensors)
            )
        except ActivationError as error:
            if not error.wrote:
                self._written.undo(start.attempt)
            raise
        if not reply.changed:
            self._written.undo(start.attempt)
        return reply

    @staticmethod
    def _name_version(copy: Copy, request: ActivateRequest) -> None:
        """Note which version the copy is. A coordinator without its record finds the contents of the committed version by this."""
        try:
            copy.seal(request.ack.version)
        except (StagedError, OSError) as error:
            log.warning("The version of the copy of update %s cannot be noted: %s", request.update, error)

    async def _resume(self, seconds: float) -> bool:
        """Let the engine generate again, unless ``spec.state`` pauses it. Return True if it does, within these seconds.

        The gate opens first. Otherwise the next request of a session whose request was paused could find a closed gate, and the router
        would send it to an engine that still serves an older version.
        """
        agent, record = self._agent, self._agent.state.record
        if not record.interruption.is_pause or record.applied_state is not FleetState.ACTIVE:
            return not record.interruption.is_pause
        await agent.gate.settle_if_due()
        try:
            reply = await agent.control(ControlCall.CONTINUE, {}, seconds)
        except RecordError as error:
            log.warning("The engine has loaded its copy and stays paused: %s", error)
            return False
        if not reply.ok:
            log.warning("The engine has loaded its copy and stays paused: HTTP %d.", reply.status)
        return reply.ok

    def _check(self, request: ActivateRequest) -> Copy:
        """Return the complete copy. Raise ActivationError if it is missing, or if the engine must not load it now."""
        agent = self._agent
        refused = s.activation_refusal(agent.state, request.ack.boot_id)
        if refused is None and agent.giving_up_since is not None:
            refused = Refusal(RefusalCode.CONFLICT, "The agent is giving up an update (/agent/fence).")
        refused = refused or self._way.engine_refusal(agent.engine.info)
        if refused is not None:
            raise ActivationError(refused, wrote=False, status=409)
        copy = self._copies.get(request.update)
        if copy is None:
            raise _refused(RefusalCode.NOT_FOUND, f"The pod has no copy of update {request.update}: /agent/stage comes first.")
        if copy.index.end is None:
            raise _refused(RefusalCode.CONFLICT, f"The copy of update {request.update} is not complete.")
        if copy.index.end.digest != request.digest:
            found = copy.index.end.digest
            message = f"The copy of update {request.update} has the digest {found[:12]}…, not {request.digest[:12]}…."
            raise _refused(RefusalCode.CONFLICT, message)
        return copy


async def _join(running: _Running, end: float) -> ActivateReply:
    """Return the result of a load. It continues if the caller disconnects, or if the time is over."""
    await asyncio.wait({running.task}, timeout=max(0.0, end - time.monotonic()))
    if not running.task.done():
        raise _late(running.update)
    return running.task.result()


def _expected(request: ActivateRequest) -> Checksums | None:
    return tuple(request.expected) if request.expected is not None else None


def _late(update: str) -> ActivationError:
    message = f"The load of update {update} has not ended in time; it continues."
    return ActivationError(Refusal(RefusalCode.UNAVAILABLE, message), wrote=True, status=504)


def _refused(code: RefusalCode, message: str) -> ActivationError:
    return ActivationError(Refusal(code, message), wrote=False)
