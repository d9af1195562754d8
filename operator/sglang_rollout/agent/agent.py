"""The agent's executor: keeps state, record, gate and engine in step.

It carries out what the pure modules :mod:`.state`, :mod:`.events` and :mod:`.guards` decide."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

from sglang_rollout.agent import events as ev
from sglang_rollout.agent import guards
from sglang_rollout.agent import state as s
from sglang_rollout.agent.engine import Engine, EngineError, EngineGoneError, Reply, complaint
from sglang_rollout.agent.gate import Gate, GateAbsentError, GateError, GateLacksError, GateView
from sglang_rollout.agent.interruption import should_resume
from sglang_rollout.agent.record import RecordError, RecordFile
from sglang_rollout.sglang.api import ControlCall, PauseMode
from sglang_rollout.wire.agent import AgentStatus, SyncRequest
from sglang_rollout.wire.reasons import GateReason, Refusal, RefusalCode
from sglang_rollout.wire.states import EngineState

log = logging.getLogger(__name__)

_SILENCES = 3
"""Unanswered polls in a row after which the engine counts as down; a refused connection counts at once."""
_NO_ADAPTER = b"does not exist"
"""Text of SGLang's answer, which has no code, to a request to unload an unknown adapter."""
_CHECK_CLOSES = 2.0
"""Seconds after which the gate has closed because of its check of the agent, if the agent's command was lost."""


class _GateEntries(NamedTuple):
    """Entries that the agent has written into its gate."""

    pid: int
    """Process ID of the haproxy that holds the entries."""
    label: str
    """Version label in the header of every answer."""
    vocabulary: int | None
    """Number of the model's tokens; requests with others are refused."""
    tokenizer: bool
    """False: requests that need a tokenizer are refused."""
    adapters: frozenset[str] | None
    """Adapters that requests may name; None: SGLang decides."""
    generates: bool
    """False: requests for tokens are refused."""


class Agent:
    """Controls one engine and its gate; :mod:`.app` offers it over HTTP."""

    def __init__(self, *, name: str, engine: Engine, gate: Gate, record_file: RecordFile, tensor_size: int | None = None) -> None:
        self.name = name
        self.engine = engine
        self.gate = gate
        self._record_file = record_file
        self._tensor_size = tensor_size
        record, complaint = record_file.load()
        if complaint:
            log.warning("%s", complaint)
        self.state = ev.restored(record, usable=not complaint)
        self.view: GateView | None = None
        """Last state reported by the gate; None while the gate does not answer."""
        self.gate_due = asyncio.Event()
        """Set when the gate has to open or close."""
        self.running: asyncio.Task[Reply] | None = None
        """Control call that the engine has not answered yet."""
        self.running_since = 0.0
        self.fencing_since: float | None = None
        """When the agent began to give up an update; None while it does not."""
        self.heard_at = time.monotonic()
        """When the last call of a coordinator arrived."""
        self.lease = SyncRequest(committed=None).lease
        """Seconds without a coordinator's call after which an unfinished update is given up. Each sync sets it."""
        self.silent = SyncRequest(committed=None).silent
        """Seconds without an answer after which an engine that no call keeps busy is restarted. Each sync sets it."""
        self.drain = SyncRequest(committed=None).drain
        """Seconds that requests have to finish before the spec releases the engine's memory. Each sync sets it."""
        self.release_failure: Refusal | None = None
        """Why the engine could not release its memory as the spec asks."""
        self.observer: Callable[[str, Reply, float], None] | None = None
        """Called after each control call with its name, answer and duration in seconds."""
        self.why_down: Callable[[], Refusal | None] = lambda: None
        """Return what else is known about an engine of several pods that is not up."""
        self._silences = 0
        self._named: _GateEntries | None = None
        """Entries that the gate holds; None if some of them may be missing."""
        self._gate_lock = asyncio.Lock()

    # What is known

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
                    self.gate_due.set()
        before, after = s.closed_reason(self.state), s.closed_reason(new)
        self.state = new
        if before != after:
            said = f"The engine holds the committed version {new.record.version}: the gate may open." if after is None else after.message
            log.info("%s", said)

    def may_open(self) -> bool:
        """Return whether the gate may be open; reads the boot file, so that a restarted container is noticed before its engine listens."""
        self._notice_restart()
        return s.gate_may_open(self.state)

    def status(self) -> AgentStatus:
        """Return the status message of this moment."""
        told = s.status(self.state, name=self.name, gate_open=self.view is not None and self.view.up)
        if self.release_failure is not None:
            told = told.model_copy(update={"reason": self.release_failure.code, "message": self.release_failure.message})
        if self.fencing_since is None:
            return told
        return told.model_copy(update={"giving_up": max(time.monotonic() - self.fencing_since, 0.001)})

    @property
    def fencing(self) -> bool:
        """True while the agent gives up an update; until that ends, it refuses calls."""
        return self.fencing_since is not None

    async def observe(self) -> None:
        """Poll the engine once."""
        self._notice_restart()
        calls = self.state.calls
        try:
            label = await self.engine.label()
            self._silences = 0
            self._notice_restart()
            if self.state.up:
                self.dispatch(ev.LabelPolled(label, calls))
            else:
                self.dispatch(ev.EngineIdentified(await self._identify(label)))
        except EngineGoneError as error:
            self._lost(error)
        except EngineError as error:
            self._silences += 1
            if not self.state.up or self._silences >= _SILENCES:
                self._lost(error)
        except RecordError as error:
            self.dispatch(ev.EngineDown(str(error)))

    def _lost(self, error: EngineError) -> None:
        known = self.why_down()
        self.dispatch(ev.EngineDown(str(error)) if known is None else ev.EngineDown(known.message, GateReason(known.code)))

    async def watch_connection(self) -> None:
        """Wait until the engine's process ends, then identify its successor. Polls alone would miss a quick restart."""
        try:
            await self.engine.until_it_ends()
        except EngineGoneError:
            return  # the next poll reports it
        if not self.state.up:
            return
        try:
            facts = await self._identify(await self.engine.label())
            self.dispatch(ev.EngineIdentified(facts))
        except (EngineError, RecordError) as error:
            self.dispatch(ev.EngineDown(str(error)))

    async def _identify(self, label: str) -> s.EngineFacts:
        boot, facts = self.engine.container_boot(), self.state.facts
        if boot is not None and facts is not None and facts.boot_id == boot:
            # The same process was silent for a while. /server_info could take as long as the call that kept it busy.
            return replace(facts, live_label=label)
        facts = await self.engine.identify(label, self.state.record.boot_id)
        self._check_size(facts.tensor_size)
        return facts

    def _check_size(self, size: int | None) -> None:
        """Raise EngineError for an unexpected tensor parallel size, because process groups would be refused or hang."""
        wanted = self._tensor_size
        if wanted is not None and size is not None and size != wanted:
            raise EngineError(
                f"it runs with tensor parallel size {size}, and the fleet expects {wanted}: start the engine with --tp-size {wanted},"
                " or correct the size that the fleet was given"
            )

    def _notice_restart(self) -> None:
        boot = self.engine.container_boot()
        if self.state.up and boot is not None and boot != self.state.record.boot_id:
            self.dispatch(ev.EngineDown("its container has been restarted"))

    # The gate

    async def settle_gate(self) -> None:
        """Read the gate's state and open or close it as required. This reopens the gate of a restarted haproxy."""
        async with self._gate_lock:
            self.gate_due.clear()
            try:
                # Close an open gate without reading its state first, because an update waits for it.
                shut = self.view is not None and self.view.ready and not s.gate_may_open(self.state)
                before = self.view if shut and self.view is not None else await self.gate.view()
                view, wanted = before, s.gate_may_open(self.state)
                if wanted:
                    await self._name_version(view.pid)
                if before.ready != wanted:
                    view = await self.gate.set(is_open=wanted)
                    log.info("The gate (haproxy, pid %d) is %s.", view.pid, "open" if wanted else "closed for new requests")
            except GateError as error:
                if self.view is not None:
                    log.warning("%s.", error)
                self.view = None
                return
            self.view = view

    async def settle_gate_if_due(self) -> None:
        """Call :meth:`settle_gate` unless the last known state of the gate is the required one.

        For answers that an update waits for. The next settling, within half a second, notices a restarted haproxy.
        """
        async with self._gate_lock:  # a concurrent settling may suffice
            if self._gate_is_settled():
                return
        await self.settle_gate()

    def _gate_is_settled(self) -> bool:
        view, wanted, version = self.view, s.gate_may_open(self.state), self.state.record.version
        if view is None or self.gate_due.is_set() or (view.ready, view.up) != (wanted, wanted):
            return False
        return not wanted or (self._named is not None and version is not None and self._named.label == version.label)

    async def _name_version(self, pid: int) -> None:
        """Write the engine's version, vocabulary, tokenizer and adapters into the gate before the gate opens; only changed entries.

        Entries unknown to an older gate are left out. After any other error the gate stays closed, and all entries are written again.
        """
        version, vocabulary, info = self.state.record.version, self.engine.vocabulary, self.engine.info
        # Only SGLang knows adapters of the command line.
        ours = info.get("enable_lora") and not info.get("lora_paths")
        adapters = frozenset(name for name, path in self.state.record.adapters.items() if path != s.UNSURE) if ours else None
        label, tokenizer = version.label if version is not None else "", not info.get("skip_tokenizer_init")
        generates = self.engine.generates
        named, before = _GateEntries(pid, label, vocabulary, tokenizer, adapters, generates), self._named
        if named == before:
            return
        if before is not None and before.pid != pid:
            before = None
        self._named = None
        try:
            if before is None or before.label != label:
                await self.gate.name_version(label)
            if vocabulary is not None and (before is None or before.vocabulary != vocabulary):
                await self.gate.name_vocabulary(vocabulary)
            if before is None or before.tokenizer != tokenizer:
                await self.gate.name_tokenizer(present=tokenizer)
            if before is None or before.adapters != adapters:
                await self.gate.name_adapters(adapters)
            if before is None or before.generates != generates:
                await self.gate.name_generation(generates=generates)
        except GateLacksError as error:
            log.warning("Answers will not name their version, or tokens and adapters are not checked: %s.", error)
        self._named = named

    async def shut_gate(self) -> None:
        """Return when no new request can reach the engine. The state must already require a closed gate."""
        async with self._gate_lock:  # sees the result of a concurrent settling
            if self.view is not None and not self.view.ready:
                return
            try:
                self.view = await self.gate.set(is_open=False)
            except GateAbsentError:
                return  # nothing passes without haproxy, which starts closed
            except GateError as error:
                log.warning("%s; waiting until the gate closes because of its check.", error)
                await asyncio.sleep(_CHECK_CLOSES)

    async def cut(self) -> None:
        """Close the gate's connections to the engine."""
        try:
            await self.gate.cut()
        except GateError as error:
            log.warning("Connections to the engine could not be cut: %s.", error)

    # Control calls

    async def control(self, call: str, body: dict[str, Any], deadline: float, *, by_spec: bool = False) -> Reply:
        """Send a control call to the engine unless a guard refuses it.

        Args:
            call: Name of the call.
            body: JSON body.
            deadline: Seconds to wait for the answer. The engine completes the call also after that.
            by_spec: True for a release of memory that ``spec.state`` asks for.
        """
        refused = self._refusal(call, body)
        if refused is None and call == ControlCall.RELEASE_MEMORY:
            refused = await self._release_refusal() or self._refusal(call, body)
        if refused is not None:
            return complaint(refused.status, refused.message)
        if call == ControlCall.RELEASE_MEMORY and not guards.tags_of(call, body, self.state.record.interruption.released):
            return Reply.json(200, None)  # all of it is already released
        task = self.start(call, body, by_spec=by_spec)
        await asyncio.wait({task}, timeout=deadline)
        if not task.done():
            return complaint(504, f"{call}: the engine has not answered within {deadline:g} s; the call continues.")
        reply = task.result()
        record = self.state.record
        if call == ControlCall.RESUME_MEMORY and reply.ok and should_resume(record.applied_state, record.interruption):
            await self.control(ControlCall.CONTINUE, {}, deadline)
        return reply

    def start(self, call: str, body: dict[str, Any], *, by_spec: bool = False) -> asyncio.Task[Reply]:
        """Record that a call begins and send it to the engine. The call continues if the caller disconnects."""
        record = self.state.record
        name, details = guards.name_of(call, body), guards.details_of(call, body, record.interruption.released)
        self.dispatch(ev.CallBegan(call, name, details, by_spec))
        self.running_since = time.monotonic()
        ended = ev.CallEnded(call, ok=False, boot_id=record.boot_id, name=name, details=details)
        self.running = asyncio.create_task(self._perform(ended, guards.prepared(call, body, record)), name=call)
        return self.running

    async def _perform(self, ended: ev.CallEnded, body: dict[str, Any]) -> Reply:
        try:
            if ended.call == ControlCall.RELEASE_MEMORY:
                await self._pause_for_release()
            elif self.state.record.state is EngineState.DIRTY:
                await self.shut_gate()
            reply = await self.engine.call(ended.call, body)
            if (
                ended.call == ControlCall.UNLOAD_ADAPTER
                and self.state.record.adapters.get(ended.name) == s.UNSURE
                and _NO_ADAPTER in reply.body
            ):
                reply = Reply.json(200, {"success": True, "message": f"The engine did not hold {ended.name}."})
            ended = replace(ended, ok=reply.ok)
        except EngineError as error:
            reply = complaint(503, f"{ended.call}: {error}.")
        finally:
            self.dispatch(ended, durable=False)
        if ended.call in (ControlCall.LOAD_ADAPTER, ControlCall.UNLOAD_ADAPTER):
            await self.settle_gate()  # callers rely on the entry once the call is answered
        seconds = time.monotonic() - self.running_since
        log.info(
            "%s: %s after %.0f ms%s",
            ended.call,
            reply.status,
            seconds * 1000,
            "" if reply.ok else f": {reply.body[:300].decode(errors='replace')}",
        )
        if self.observer is not None:
            self.observer(ended.call, reply, seconds)
        return reply

    def _refusal(self, call: str, body: dict[str, Any]) -> Refusal | None:
        if self.fencing:
            message = f"{call}: the agent is giving up an update (/agent/fence) and takes no call until that has ended."
            return Refusal(RefusalCode.CONFLICT, message)
        return guards.refusal(self.state, call, body)

    async def _release_refusal(self) -> Refusal | None:
        """Return why the engine must not release memory now; None if it may. SGLang ends if a request runs during a release."""
        call, interruption = ControlCall.RELEASE_MEMORY, self.state.record.interruption
        if not interruption.is_pause or interruption.mode == PauseMode.IN_PLACE:  # in the other modes SGLang releases while requests wait
            try:
                running = await self.engine.running()
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
        await self.shut_gate()
        if self.state.record.interruption.mode is None:
            reply = await self.engine.call(ControlCall.PAUSE, {"mode": PauseMode.ABORT.value})
            if not reply.ok:
                raise EngineError("it could not be paused before its memory was released")
