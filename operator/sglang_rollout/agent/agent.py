"""The agent: keeps the state, the record, the gate and the engine consistent.

The agent carries out what the pure modules :mod:`.state`, :mod:`.events`, :mod:`.guards` and :mod:`.interruption` decide.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import replace
from typing import Any

from sglang_rollout.agent import events as ev
from sglang_rollout.agent import guards
from sglang_rollout.agent import state as s
from sglang_rollout.agent.engine import Engine, refusal_reply
from sglang_rollout.agent.gate import Gate, GateKeeper
from sglang_rollout.agent.interruption import should_resume
from sglang_rollout.agent.record import RecordError, RecordFile
from sglang_rollout.proxy.gate_map import gate_entries
from sglang_rollout.sglang.api import ControlCall, PauseMode
from sglang_rollout.sglang.client import EngineError, EngineGoneError, Reply
from sglang_rollout.wire.agent import AgentStatus, SyncRequest
from sglang_rollout.wire.reasons import GateReason, Refusal, RefusalCode
from sglang_rollout.wire.states import EngineState, StagedCopy

log = logging.getLogger(__name__)

Judge = Callable[[Reply], Awaitable[Reply]]

_UNANSWERED_POLLS = 3
"""Polls in a row without an answer after which the engine is down. A refused connection counts at once."""
_ENDING_SECONDS = 2.0
"""Time to see whether an engine that failed a load ends. The coordinator waits 5 s longer than the load for the answer."""
_NO_ADAPTER = b"does not exist"
"""Text of SGLang's answer, which has no code, to a request to unload an unknown adapter."""


class Agent:
    """Controls one engine and its gate; :mod:`.app` offers it over HTTP.

    Args:
        name: Name of the engine.
        engine: Client of the engine.
        gate: Client of the gate.
        record_file: File of the persisted state.
        tensor_size: Tensor parallel size that the fleet expects; None accepts every size.
        requires_plugin: True if the gate opens only while the plug-in inside SGLang has proved that it is active.
    """

    def __init__(
        self,
        *,
        name: str,
        engine: Engine,
        gate: Gate,
        record_file: RecordFile,
        tensor_size: int | None = None,
        requires_plugin: bool = False,
    ) -> None:
        self.name = name
        self.engine = engine
        self.gate = GateKeeper(gate, may_open=lambda: s.gate_may_open(self.state), entries=self._gate_entries)
        self._record_file = record_file
        self._tensor_size = tensor_size
        record, warning = record_file.load()
        if warning:
            log.warning("%s", warning)
        self.state = ev.restore_state(record, is_readable=not warning, requires_plugin=requires_plugin)
        self.running: asyncio.Task[Reply] | None = None
        """The last control call; the engine may have answered it."""
        self.running_since = 0.0
        self.giving_up_since: float | None = None
        """When the agent began to give up an update; None while it does not."""
        self.last_call_at = time.monotonic()
        """When the last call of a coordinator arrived."""
        self.limits = SyncRequest(committed=None)
        """The last sync, for its time limits."""
        self.release_failure: Refusal | None = None
        """Why the engine could not release its memory for ``spec.state: Asleep``."""
        self.on_call_ended: Callable[[str, Reply, float], None] = lambda call, reply, seconds: None
        """Called after each control call with its name, answer and duration in seconds."""
        self.on_pause_ended: Callable[[float], None] = lambda seconds: None
        """Called when the engine generates again, with the seconds that it was paused."""
        self._paused_at = time.monotonic()
        self.attempt = ""
        """The running attempt to load a staged version, whose calls are the only ones; empty if there is none."""
        self.own_load: asyncio.Task[Any] | None = None
        """The load of the committed version from the pod's own copy, until it has ended. Control calls wait for it."""
        self.own_load_until = 0.0
        """End of the time in which the agent may load a version without a call of the coordinator."""
        self.takes_copies = False
        """True in a pod for transport Staged."""
        self.restarts_engine = False
        """True if the kubelet restarts the engine's container when the agent asks for it."""
        self.list_copies: Callable[[], list[StagedCopy]] = list
        """Return the versions in the memory of the pod."""
        self.explain_down: Callable[[], Refusal | None] = lambda: None
        """Return why the engine's pods have not started SGLang; None if they are not the cause."""
        self._unanswered_polls = 0

    # State

    def dispatch(self, event: ev.Event, *, durable: bool = True) -> None:
        """Apply an event. If the record cannot be written, raise RecordError and change nothing, unless ``durable`` is False."""
        new, effects = ev.step(self.state, event)
        if new is self.state:
            return
        for effect in effects:
            match effect:
                case ev.Save(record):
                    try:
                        self._record_file.save(record)
                    except RecordError as error:
                        if durable:
                            raise
                        log.error("%s", error)  # noqa: TRY400 - a message without traceback
                case ev.SetGate():
                    self.gate.due.set()
        self._note_pause(self.state.record.interruption.is_pause, new.record.interruption.is_pause)
        before, after = s.closed_reason(self.state), s.closed_reason(new)
        self.state = new
        if before != after:
            opened = f"The engine holds the committed version {new.record.version}: the gate may open."
            log.info("%s", opened if after is None else after.message)

    def _note_pause(self, was_paused: bool, is_paused: bool) -> None:
        if is_paused and not was_paused:
            self._paused_at = time.monotonic()
        elif was_paused and not is_paused:
            self.on_pause_ended(time.monotonic() - self._paused_at)

    def may_open(self) -> bool:
        """Return whether the gate may be open. A new boot ID closes it, before the restarted engine listens."""
        self._check_boot_id()
        return s.gate_may_open(self.state)

    def status(self) -> AgentStatus:
        """Return the status message of this moment."""
        gate_open = self.gate.view is not None and self.gate.view.up
        status = s.status(self.state, name=self.name, gate_open=gate_open)
        status = status.model_copy(
            update={"takes_copies": self.takes_copies, "staged": self.list_copies(), "restarts_engine": self.restarts_engine}
        )
        if self.release_failure is not None:
            status = status.model_copy(update={"reason": self.release_failure.code, "message": self.release_failure.message})
        if self.giving_up_since is None:
            return status
        return status.model_copy(update={"giving_up": max(time.monotonic() - self.giving_up_since, 0.001)})

    # The engine

    async def observe(self) -> None:
        """Poll the engine once."""
        self._check_boot_id()
        calls = self.state.calls
        try:
            label = await self.engine.read_label()
            self._unanswered_polls = 0
            self._check_boot_id()
            if self.state.up:
                self.dispatch(ev.LabelPolled(label, calls))
            else:
                self.dispatch(ev.EngineIdentified(await self._identify(label)))
        except EngineGoneError as error:
            self._mark_down(error)
        except EngineError as error:
            self._unanswered_polls += 1
            if not self.state.up or self._unanswered_polls >= _UNANSWERED_POLLS:
                self._mark_down(error)
        except RecordError as error:
            self.dispatch(ev.EngineDown(str(error)))

    async def watch_connection(self) -> None:
        """Wait until the engine's process ends, then identify its successor. Polls alone would miss a quick restart."""
        try:
            await self.engine.wait_until_gone()
        except EngineGoneError:
            return  # the next poll reports it
        if not self.state.up:
            return
        try:
            facts = await self._identify(await self.engine.read_label())
            self.dispatch(ev.EngineIdentified(facts))
        except (EngineError, RecordError) as error:
            self.dispatch(ev.EngineDown(str(error)))

    async def await_end(self) -> None:
        """After a failed call, find out whether the engine fails because it ends: wait until it is gone, or has not ended in time."""
        with suppress(TimeoutError):
            async with asyncio.timeout(_ENDING_SECONDS):
                await self.watch_connection()
        await self.observe()

    def _mark_down(self, error: EngineError) -> None:
        known = self.explain_down()
        self.dispatch(ev.EngineDown(str(error)) if known is None else ev.EngineDown(known.message, GateReason(known.code)))

    async def _identify(self, label: str) -> s.EngineFacts:
        boot_id, facts = self.engine.container_boot_id(), self.state.facts
        if boot_id is not None and facts is not None and facts.boot_id == boot_id:
            # The same process was silent for a while. /server_info could take as long as the call that kept the engine busy.
            return replace(facts, live_label=label)
        facts = await self.engine.identify(label, self.state.record.boot_id)
        size, wanted = facts.tensor_size, self._tensor_size
        if wanted is not None and size is not None and size != wanted:
            # Process groups would be refused or hang.
            raise EngineError(
                f"it runs with tensor parallel size {size}, and the fleet expects {wanted}: start the engine with --tp-size {wanted},"
                " or correct the size that the fleet was given"
            )
        return facts

    async def confirm_process(self) -> None:
        """Raise EngineError unless the process that the record describes still answers. A poll may not have noticed its successor yet."""
        if await self.engine.read_boot_id() != self.state.record.boot_id:
            self.dispatch(ev.EngineDown("its process has been replaced"))
            raise EngineError("its process has been replaced")

    def _check_boot_id(self) -> None:
        boot_id = self.engine.container_boot_id()
        if self.state.up and boot_id is not None and boot_id != self.state.record.boot_id:
            self.dispatch(ev.EngineDown("its container has been restarted"))

    def _gate_entries(self) -> dict[str, str]:
        version = self.state.record.version
        return gate_entries(
            label=version.label if version is not None else "",
            has_tokenizer=not self.engine.info.get("skip_tokenizer_init"),
            generates=self.engine.generates,
        )

    # Control calls

    async def control(
        self, call: str, body: dict[str, Any], deadline: float, *, by_spec: bool = False, attempt: str = "", judge: Judge | None = None
    ) -> Reply:
        """Send a control call to the engine unless a guard refuses it. It waits until a load of the agent's own has ended.

        Args:
            call: Name of the call.
            body: JSON body.
            deadline: Seconds to wait for the answer. The engine completes the call also after the deadline.
            by_spec: True for a release of memory that ``spec.state`` asks for.
            attempt: Attempt to load a staged version that the call belongs to.
            judge: Returns the true answer of a call whose answer from the engine does not say whether it succeeded.
        """
        if (own_load := self.own_load) is not None and own_load is not asyncio.current_task():
            began = time.monotonic()
            await asyncio.wait({own_load}, timeout=deadline)
            deadline = max(0.0, deadline - (time.monotonic() - began))
        refused = self._refusal(call, body, attempt)
        if refused is None and call == ControlCall.RELEASE_MEMORY:
            refused = await self._release_refusal() or self._refusal(call, body)
        if refused is None and call == ControlCall.UPDATE_TENSOR and not attempt:
            refused = await asyncio.to_thread(guards.handles_refusal, body) or self._refusal(call, body)
        if refused is not None:
            return refusal_reply(refused.status, refused.message)
        if call == ControlCall.RELEASE_MEMORY and not guards.tags_of(call, body, self.state.record.interruption.released):
            return Reply.json(200, None)  # all memory is already released
        task = self.start(call, body, by_spec=by_spec, attempt=attempt, judge=judge)
        await asyncio.wait({task}, timeout=deadline)
        if not task.done():
            return refusal_reply(504, f"{call}: the engine has not answered within {deadline:g} s; the call continues.")
        reply = task.result()
        record = self.state.record
        if call == ControlCall.RESUME_MEMORY and reply.ok and should_resume(record.applied_state, record.interruption):
            await self.control(ControlCall.CONTINUE, {}, deadline)
        return reply

    def start(
        self, call: str, body: dict[str, Any], *, by_spec: bool = False, attempt: str = "", judge: Judge | None = None
    ) -> asyncio.Task[Reply]:
        """Record that a call begins and send it to the engine. The call continues if the caller disconnects."""
        record = self.state.record
        name, details = guards.name_of(call, body), guards.details_of(call, body, record.interruption.released)
        self.dispatch(ev.CallBegan(call, name, details, by_spec, attempt))
        self.running_since = time.monotonic()
        ended = ev.CallEnded(call, ok=False, boot_id=record.boot_id, name=name, details=details)
        self.running = asyncio.create_task(
            self._perform(ended, guards.prepare_body(call, body, record, self.state.facts), judge), name=call
        )
        return self.running

    async def _perform(self, ended: ev.CallEnded, body: dict[str, Any], judge: Judge | None) -> Reply:
        call, is_gone = ended.call, False
        try:
            if call == ControlCall.RELEASE_MEMORY:
                await self._pause_for_release()
            elif self.state.record.state is EngineState.DIRTY:
                await self.gate.close()
            reply = await self.engine.call(call, body)
            if call == ControlCall.FLUSH_CACHE and not reply.ok and await self.engine.wait_for_check():
                reply = await self.engine.call(call, body)
            if judge is not None:
                reply = await judge(reply)
            is_unknown = self.state.record.adapters.get(ended.name) == s.UNKNOWN_PATH
            if call == ControlCall.UNLOAD_ADAPTER and is_unknown and _NO_ADAPTER in reply.body:
                reply = Reply.json(200, {"success": True, "message": f"The engine did not hold {ended.name}."})
            ended = replace(ended, ok=reply.ok)
        except EngineError as error:
            reply, is_gone = refusal_reply(503, f"{call}: {error}."), isinstance(error, EngineGoneError)
        finally:
            self.dispatch(ended, durable=False)
        if is_gone:
            await self.observe()  # the coordinator asks next whether the engine is lost
        if call in (ControlCall.LOAD_ADAPTER, ControlCall.UNLOAD_ADAPTER):
            await self.gate.settle()  # callers rely on the gate's list of adapters once the call is answered
        seconds = time.monotonic() - self.running_since
        failure = "" if reply.ok else f": {reply.body[:300].decode(errors='replace')}"
        log.info("%s: %s after %.0f ms%s", call, reply.status, seconds * 1000, failure)
        self.on_call_ended(call, reply, seconds)
        return reply

    def _refusal(self, call: str, body: dict[str, Any], attempt: str = "") -> Refusal | None:
        activation = self.state.record.activation
        if self.giving_up_since is not None:
            message = f"{call}: the agent is giving up an update (/agent/fence) and takes no call until that has ended."
            return Refusal(RefusalCode.CONFLICT, message)
        if attempt != self.attempt:
            return Refusal(RefusalCode.CONFLICT, f"{call}: the agent is loading a staged version and takes no call until that has ended.")
        if attempt and (activation is None or activation.attempt != attempt):
            return Refusal(RefusalCode.CONFLICT, f"{call}: the load of the staged version was given up.")
        return guards.refusal(self.state, call, body, is_activation=bool(attempt))

    async def _release_refusal(self) -> Refusal | None:
        """Return why the engine must not release memory now; None if it may. SGLang ends if a request runs during a release."""
        call, interruption = ControlCall.RELEASE_MEMORY, self.state.record.interruption
        # In the other pause modes SGLang releases memory while requests wait.
        if not interruption.is_pause or interruption.mode == PauseMode.IN_PLACE.sglang:
            try:
                running = await self.engine.count_requests()
                if running and await self.engine.wait_for_check():
                    running = await self.engine.count_requests()
            except EngineError as error:
                return Refusal(RefusalCode.UNAVAILABLE, f"{call}: cannot tell whether the engine is idle: {error}.")
            if running:
                advice = "releasing memory under them ends the engine's process. Pause first."
                return Refusal(RefusalCode.CONFLICT, f"{call}: {running} requests run or wait; {advice}")
        if self.engine.info.get("enable_memory_saver") is False:
            missing = "the engine was started without --enable-memory-saver (engine.memorySaver), so nothing would be released."
            return Refusal(RefusalCode.CONFLICT, f"{call}: {missing}")
        return None

    async def _pause_for_release(self) -> None:
        """Close the gate, and pause the engine unless a call has paused it. No request runs until all memory is restored."""
        await self.gate.close()
        if self.state.record.interruption.mode is None:
            reply = await self.engine.call(ControlCall.PAUSE, {"mode": PauseMode.ABORT.sglang})
            if not reply.ok:
                raise EngineError("it could not be paused before its memory was released")
