"""Carry out the effects of the state machine and feed it events: the coordinator's I/O around one fleet. No decisions."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import time
import uuid
from collections.abc import Callable, Coroutine
from typing import Any

from sglang_rollout.api.intent import Intent
from sglang_rollout.coordinator.aborts import Aborts
from sglang_rollout.coordinator.agents import Agents
from sglang_rollout.coordinator.leadership import DeposedError, Leadership, take_over
from sglang_rollout.coordinator.metrics import Metrics
from sglang_rollout.coordinator.record import HigherTermError, RecordStore, RecordWriter
from sglang_rollout.coordinator.update import Machine
from sglang_rollout.coordinator.update.events import (
    Answered,
    Asked,
    Beat,
    CallersForbidden,
    Cut,
    Event,
    Left,
    NetworkChecked,
    Reply,
    Save,
    Seen,
    Send,
    StoreSeen,
    Tick,
    Wanted,
    Write,
    Written,
)
from sglang_rollout.coordinator.update.model import Fleet
from sglang_rollout.coordinator.update.phases import Phase
from sglang_rollout.coordinator.update.requests import Answer, Request
from sglang_rollout.coordinator.update.store import STORE
from sglang_rollout.coordinator.wanted_engines import WantedEngines
from sglang_rollout.wire.reasons import RefusalCode
from sglang_rollout.wire.record import GroupFailure, Isolation, UpdateOutcome
from sglang_rollout.wire.states import FleetState, describe_state

log = logging.getLogger(__name__)

SYNC_SECONDS = 0.5
"""Interval of syncs with each agent."""
SYNC_SECONDS_IN_UPDATE = 2.0
"""Longest interval of syncs with an agent that takes part in an update. A restarted engine is noticed before the last bucket."""
TICK_SECONDS = 1.0
RELEASE_DEADLINE_SECONDS = 2.0
DEPOSED = "This coordinator does not lead the fleet any more. Try again: another coordinator answers in a moment."


class Driver:
    """Runs one state machine: sends its calls, writes its record, answers its callers."""

    def __init__(
        self,
        *,
        name: str,
        wanted_engines: WantedEngines,
        agents: Agents,
        store: RecordStore,
        leadership: Leadership,
        metrics: Metrics,
        is_gone: Callable[[str], bool] = lambda caller: False,
        aborts: Aborts | None = None,
    ) -> None:
        """Create the driver of one fleet; :meth:`run` starts it.

        Args:
            name: Name of the rollout.
            wanted_engines: Engines of the intent.
            agents: Client of the agents.
            store: Where the record is written.
            leadership: Decides which coordinator leads.
            metrics: Counters to update.
            is_gone: Returns True if a caller was pods and none of them lives.
            aborts: Ends requests that no engine has; None: nothing holds such requests.
        """
        self._name = name
        self._wanted_engines = wanted_engines
        self._agents = agents
        self._store = store
        self._leadership = leadership
        self._metrics = metrics
        self._is_gone = is_gone
        self._aborts = aborts
        self.record_writer = RecordWriter(store)
        self._machine: Machine | None = None
        self._calls = itertools.count(1)
        self._cuts: dict[int, asyncio.Future[str]] = {}
        self._waiting: dict[int, asyncio.Future[Answer]] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._failed: asyncio.Future[None] | None = None
        self._ended = False
        """True after this coordinator has stopped leading. Events are ignored from then on."""
        self._logged_state = FleetState.ACTIVE
        self._logged_group_failure: GroupFailure | None = None
        self._logged_updates = 0
        """Number of ended updates in the log."""
        self._logged_phase: Phase | None = None
        self._syncing: dict[str, asyncio.Task[None]] = {}
        self._synced: dict[str, float] = {}
        """Time of the last sync by engine."""
        self._announced = 0
        """Highest term that was announced because an agent knew the term below."""

    @property
    def machine(self) -> Machine | None:
        """The state machine; None until the record has been read."""
        return self._machine

    @property
    def term(self) -> int:
        """Term of this coordinator; 0 until the record has been read."""
        return self._machine.fleet.term if self._machine is not None else 0

    @property
    def label(self) -> str:
        """Label of the committed version; empty while none is known."""
        committed = self._machine.fleet.committed if self._machine is not None else None
        return committed.label if committed is not None else ""

    async def run(self) -> None:
        """Lead until the task is cancelled or fails.

        Raises:
            DeposedError: Another coordinator leads.
            Exception: A bug. The caller ends the process, and a new process starts from the record and the agents.
        """
        self._failed = asyncio.get_running_loop().create_future()
        try:
            await self._lead()
        finally:
            await self._stop()

    async def _stop(self) -> None:
        """Cancel all work, write the newest record, and release the leadership only then: the next leader reads that record."""
        self._ended = True
        tasks = [*self._tasks, *self._syncing.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if self._failed is not None:
            self._failed.cancel()
            if not self._failed.cancelled():
                self._failed.exception()  # asyncio warns about exceptions that are not retrieved
        try:
            await self.record_writer.close()
        except HigherTermError as error:
            log.warning("the last record is not written: %s", error)
        finally:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(RELEASE_DEADLINE_SECONDS):
                    await self._leadership.release()

    async def _lead(self) -> None:
        acquired = await self._leadership.acquire()
        term, record = await take_over(self._store, self._leadership.announce, acquired)
        log.info("leading, term %d", term)
        if record is not None:
            self.record_writer.save(record.model_copy(update={"term": term}))  # retries if the takeover could not write it
        at = time.monotonic()
        self._machine = Machine(name=self._name, term=term, record=record, at=at, wall_offset=time.time() - at, new_id=uuid.uuid4().hex)
        self._agents.on_outranked = self._handle_outranked
        self._wanted_engines.on_change = self._handle_intent
        async with asyncio.TaskGroup() as group:
            group.create_task(self._watch_failure(), name="failure")
            group.create_task(self._leadership.hold(), name="leadership")
            group.create_task(self._wanted_engines.run(), name="wanted engines")
            group.create_task(self._sync_all(), name="sync")
            group.create_task(self._tick(), name="tick")
            group.create_task(self.record_writer.run(), name="record")

    async def ask(self, request: Request, caller: str = "") -> Answer:
        """Send a request of a caller to the state machine and return its answer. A cancellation means that the client has disconnected."""
        if self._ended:
            return Answer(503, DEPOSED, code=RefusalCode.UNAVAILABLE)
        if self._machine is None:
            message = "The coordinator has just started and cannot read its record yet. Try again in a moment."
            return Answer(503, message, code=RefusalCode.UNAVAILABLE)
        call = next(self._calls)
        future: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        self._waiting[call] = future
        try:
            self.feed(Asked(call, request, time.monotonic(), caller, self._find_gone(self._machine)))
            return await future
        except asyncio.CancelledError:
            self.feed(Left(call, time.monotonic()))
            raise
        finally:
            self._waiting.pop(call, None)

    def refuse_other_trainer(self, caller: str) -> None:
        """Raise RefusedError for a call beside the queue of operations, while another trainer than the caller holds the fleet."""
        if self._machine is not None:
            self._machine.refuse_other_trainer(caller, self._find_gone(self._machine), time.monotonic())

    def _find_gone(self, machine: Machine) -> str:
        """Return the holder of the fleet, if it has no pods any more; otherwise an empty text."""
        holder = machine.fleet.holder
        return holder if self._is_gone(holder) else ""

    def note_heartbeat(self) -> None:
        """Record a heartbeat of the trainer."""
        self.feed(Beat(time.monotonic()))

    def note_isolation(self, result: Isolation | None) -> None:
        """Record the result of a check of the NetworkPolicies."""
        self.feed(NetworkChecked(result, time.monotonic()))

    def note_caller_rights(self, forbidden: bool) -> None:
        """Record whether the coordinator lacks the right to watch callers of other namespaces."""
        if self._machine is not None and self._machine.fleet.callers_forbidden != forbidden:
            self.feed(CallersForbidden(forbidden, time.monotonic()))

    def feed(self, event: Event) -> None:
        """Give the state machine an event and start its effects. Ignore the event before the record is read and after the end."""
        if self._machine is None or self._ended:
            return
        try:
            effects = self._machine.handle(event)
        except Exception as error:  # a bug: this state cannot be trusted, and a new process rebuilds the state
            self._fail(error)
            raise
        for effect in effects:
            match effect:
                case Send():
                    # Created here and not in the task, which starts later, because the next effect may cut this call.
                    cut = self._cuts[effect.id] = asyncio.get_running_loop().create_future()
                    self._spawn(self._send(effect, cut))
                case Write():
                    self._spawn(self._write(effect))
                case Save(record):
                    self.record_writer.save(record)
                case Cut():
                    self._cut(effect)
                case Reply(call, answer):
                    future = self._waiting.get(call)
                    if future is not None and not future.done():
                        future.set_result(answer)
        self._log_changes(self._machine)

    def _log_changes(self, machine: Machine) -> None:
        """Log each phase when it begins, so that the log of a killed coordinator names the phase. Log ended updates and the state."""
        if machine.phase is not self._logged_phase:
            self._logged_phase = machine.phase
            log.info("update phase: %s", machine.phase)
        failure = machine.fleet.membership.group_failure
        if failure is not None and failure != self._logged_group_failure:
            log.warning("no process group was opened (%s): %s", failure.code, failure.message)
        self._logged_group_failure = failure
        self._count_update(machine.fleet)
        if machine.fleet.applied_state is not self._logged_state:
            self._logged_state = machine.fleet.applied_state
            log.info("%s", describe_state(self._logged_state) or "The fleet is active, as its spec says.")

    def _cut(self, effect: Cut) -> None:
        log.warning("%s", effect.reason)
        future = self._cuts.get(effect.effect)
        if future is not None and not future.done():
            future.set_result(effect.reason)

    def _count_update(self, fleet: Fleet) -> None:
        """Count an update that has just ended, and log one line about it."""
        outcomes = fleet.transaction.outcomes
        self._metrics.count_updates(outcomes)
        last = fleet.last_update
        if last is None or outcomes.total() == self._logged_updates:
            return
        self._logged_updates = outcomes.total()
        author = f" by {last.author}" if last.author else ""
        summary = f"{last.outcome}: version {last.version} (label {last.version.label}){author} {last.phases_ms}"
        if last.outcome is UpdateOutcome.COMMITTED:
            log.info("%s", summary)
        else:
            log.warning("%s: %s", summary, last.message)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._forget_task)

    def _forget_task(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            self._fail(task.exception())

    def _fail(self, error: BaseException | None) -> None:
        if self._failed is not None and not self._failed.done() and error is not None:
            self._failed.set_exception(error)

    async def _watch_failure(self) -> None:
        if self._failed is not None:
            await self._failed

    async def _send(self, effect: Send, cut: asyncio.Future[str]) -> None:
        began = time.monotonic()
        try:
            if effect.ends_held and self._aborts is not None:
                await self._aborts.end_waiting()
            results = await self._agents.fan_out(effect, cut)
        finally:
            self._cuts.pop(effect.id, None)
        ended = time.monotonic()
        for name, result in results.items():
            if not result.ok:
                log.warning("%s on %s: %s %s", effect.path, name, result.status or "no answer:", result.message)
        self._metrics.count_fan_out(effect.path, ended - began, results)
        log.debug("%s on %d engines: %.0f ms", effect.path, len(results), (ended - began) * 1000)
        self.feed(Answered(effect.id, results, ended))

    async def _write(self, effect: Write) -> None:
        try:
            ok = await self.record_writer.write(effect.record)
        except HigherTermError as error:
            raise DeposedError(str(error)) from error
        self.feed(Written(effect.id, ok, time.monotonic()))

    def _handle_intent(self, intent: Intent, addressed: frozenset[str]) -> None:
        self.feed(Wanted(intent, addressed, time.monotonic()))

    def _handle_outranked(self, term: int) -> None:
        """End if a coordinator of a higher term leads. If this coordinator lost its record instead, announce a higher term."""
        machine = self._machine
        if machine is None or term < machine.fleet.term:
            return
        if machine.is_outranked(term):
            self._fail(DeposedError(f"an agent follows a coordinator of term {term}; this one is of term {machine.fleet.term}"))
        elif machine.fleet.committed is None and term >= self._announced:
            self._announced = term + 1
            self._spawn(self._raise_term(machine, term + 1))

    async def _raise_term(self, machine: Machine, term: int) -> None:
        """Announce a higher term before this coordinator uses it. Otherwise two coordinators could have the same term."""
        await self._leadership.announce(term)
        machine.raise_term(term)

    async def _sync_all(self) -> None:
        """Sync each agent in its own task, so that a silent agent does not delay the other agents."""
        while True:
            machine = self._machine
            names = list(machine.fleet.engines) if machine is not None else []
            for name in names:
                running = self._syncing.get(name)
                if (running is None or running.done()) and not self._can_skip_sync(name):
                    self._syncing[name] = asyncio.create_task(self._sync(name), name=f"sync {name}")
            polls_store = machine is not None and machine.fleet.store is not None
            for name in [name for name in self._syncing if name not in names and not (name == STORE and polls_store)]:
                self._syncing.pop(name).cancel()
            polling = self._syncing.get(STORE)
            if polls_store and (polling is None or polling.done()):
                self._syncing[STORE] = asyncio.create_task(self._poll_store(), name=f"poll {STORE}")
            await asyncio.sleep(SYNC_SECONDS)

    def _can_skip_sync(self, name: str) -> bool:
        """Return True if the agent has just answered a call of the running update.

        In a large fleet, a sync for every call of the update would overload the coordinator's one core.
        """
        machine = self._machine
        if machine is None or machine.fleet.update is None:
            return False
        since_sync = time.monotonic() - self._synced.get(name, 0.0)
        return self._agents.silence(name) < SYNC_SECONDS and since_sync < SYNC_SECONDS_IN_UPDATE

    async def _sync(self, name: str) -> None:
        machine = self._machine
        if machine is None:
            return
        self._synced[name] = time.monotonic()
        try:
            sync = machine.fleet.sync_request(name)
            status = await self._agents.sync(name, sync)
            self.feed(Seen(name, status, sync.seq, time.monotonic()))
        except Exception as error:  # noqa: BLE001 - _fail reports it and ends the process
            self._fail(error)

    async def _poll_store(self) -> None:
        """Ask the weight store for its status."""
        machine = self._machine
        if machine is None:
            return
        seq = machine.fleet.next_seq()
        try:
            self.feed(StoreSeen(await self._agents.poll_store(), seq, time.monotonic()))
        except Exception as error:  # noqa: BLE001 - _fail reports it and ends the process
            self._fail(error)

    async def _tick(self) -> None:
        while True:
            self.feed(Tick(time.monotonic()))
            await asyncio.sleep(TICK_SECONDS)
