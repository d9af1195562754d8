"""Carries out the state machine's effects and feeds it events. Decides nothing itself."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import time
import uuid
from collections.abc import Coroutine
from typing import Any

from sglang_rollout.api.intent import Intent
from sglang_rollout.coordinator.agents import Agents
from sglang_rollout.coordinator.leader import DeposedError, Leadership
from sglang_rollout.coordinator.members import Members
from sglang_rollout.coordinator.metrics import Metrics
from sglang_rollout.coordinator.record_store import Keeper, LostError, RecordStore
from sglang_rollout.coordinator.takeover import claim
from sglang_rollout.coordinator.update import Machine
from sglang_rollout.coordinator.update.events import (
    Answered,
    Asked,
    Beat,
    Cut,
    Event,
    Left,
    Reply,
    Save,
    Seen,
    Send,
    Tick,
    Wanted,
    Write,
    Written,
)
from sglang_rollout.coordinator.update.model import Fleet
from sglang_rollout.coordinator.update.phases import Phase
from sglang_rollout.coordinator.update.requests import Answer, Request
from sglang_rollout.wire.record import UpdateOutcome
from sglang_rollout.wire.states import FleetState, held_sentence

log = logging.getLogger(__name__)

SYNC_EVERY = 0.5
SYNC_AT_LEAST = 2.0
"""Also in the middle of an update: a restart of the engine must not wait for the end of its buckets."""
TICK_EVERY = 1.0
READ_AGAIN = 2.0
RELEASE_DEADLINE = 2.0


class Driver:
    """One machine with everything around it that does I/O."""

    def __init__(
        self, *, name: str, members: Members, agents: Agents, store: RecordStore, leadership: Leadership, metrics: Metrics
    ) -> None:
        self._name = name
        self._members = members
        self._agents = agents
        self._store = store
        self._leadership = leadership
        self._metrics = metrics
        self.keeper = Keeper(store)
        self._machine: Machine | None = None
        self._calls = itertools.count(1)
        self._cuts: dict[int, asyncio.Future[str]] = {}
        self._waiting: dict[int, asyncio.Future[Answer]] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._failed: asyncio.Future[None] | None = None
        self._kept = FleetState.ACTIVE
        self._reported = 0
        """Ended updates that the log holds."""
        self._phase: Phase | None = None
        """The phase that the log named last."""
        self._syncing: dict[str, asyncio.Task[None]] = {}
        self._synced: dict[str, float] = {}
        self._claimed = 0
        """The highest term that was claimed because an agent knew the one below."""

    @property
    def machine(self) -> Machine | None:
        """The state machine; None until the record could be read."""
        return self._machine

    @property
    def term(self) -> int:
        """This coordinator's term."""
        return self._machine.fleet.term if self._machine is not None else 0

    async def run(self) -> None:
        """Lead until something ends it. Raises DeposedError, or whatever was a bug: a fresh process proves all again."""
        self._failed = asyncio.get_running_loop().create_future()
        try:
            await self._lead()
        finally:
            await self._resign()

    async def _resign(self) -> None:
        """Write what is left, and only then let another one lead: it must not find that over its own record."""
        try:
            await self.keeper.close()
        except LostError as error:
            log.warning("the last record is not written: %s", error)
        finally:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(RELEASE_DEADLINE):
                    await self._leadership.release()

    async def _lead(self) -> None:
        held = await self._leadership.acquire()
        term, record = await claim(self._store, self._leadership.announce, held)
        log.info("leading, term %d", term)
        if record is not None:
            self.keeper.save(record.model_copy(update={"term": term}))  # again and again, if it could not be written yet
        at = time.monotonic()
        self._machine = Machine(name=self._name, term=term, record=record, at=at, wall_offset=time.time() - at, new_id=uuid.uuid4().hex)
        self._agents.outranked = self._outranked
        self._members.changed = self._changed
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._watch_failure(), name="failure")
                group.create_task(self._leadership.hold(), name="leadership")
                group.create_task(self._members.run(), name="members")
                group.create_task(self._sync_all(), name="sync")
                group.create_task(self._tick(), name="tick")
                group.create_task(self.keeper.run(), name="record")
        finally:
            for task in [*self._tasks, *self._syncing.values()]:
                task.cancel()

    async def ask(self, request: Request) -> Answer:
        """Put a trainer's request to the machine; returns its answer. Cancelled: the trainer has gone."""
        if self._machine is None:
            return Answer(503, "The coordinator has just started and cannot read its record yet. Try again in a moment.")
        call = next(self._calls)
        future: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        self._waiting[call] = future
        try:
            self.feed(Asked(call, request, time.monotonic()))
            return await future
        except asyncio.CancelledError:
            self.feed(Left(call, time.monotonic()))
            raise
        finally:
            self._waiting.pop(call, None)

    def beat(self) -> None:
        """Take the trainer's heartbeat."""
        self.feed(Beat(time.monotonic()))

    def feed(self, event: Event) -> None:
        """Give the machine an event and start what it wants done."""
        if self._machine is None:
            return
        try:
            effects = self._machine.handle(event)
        except Exception as error:  # a bug: the state cannot be trusted any more, a fresh process proves it again
            self._fail(error)
            raise
        for effect in effects:
            match effect:
                case Send():
                    # Not in its task, which begins later: a Cut of it may be the next effect.
                    cut = self._cuts[effect.id] = asyncio.get_running_loop().create_future()
                    self._spawn(self._send(effect, cut))
                case Write():
                    self._spawn(self._write(effect))
                case Save(record):
                    self.keeper.save(record)
                case Cut():
                    self._cut(effect)
                case Reply(call, answer):
                    future = self._waiting.get(call)
                    if future is not None and not future.done():
                        future.set_result(answer)
        self._log_phase(self._machine.phase)
        self._report(self._machine.fleet)
        if self._machine.fleet.applied_state is not self._kept:
            self._kept = self._machine.fleet.applied_state
            log.info("%s", held_sentence(self._kept) or "The fleet is active, as its spec says.")

    def _cut(self, effect: Cut) -> None:
        log.warning("%s", effect.reason)
        future = self._cuts.get(effect.effect)
        if future is not None and not future.done():
            future.set_result(effect.reason)

    def _log_phase(self, phase: Phase) -> None:
        """Log each phase when it begins: the log of a coordinator that was killed names the phase it was killed in."""
        if phase is not self._phase:
            self._phase = phase
            log.info("update phase: %s", phase)

    def _report(self, fleet: Fleet) -> None:
        """Count an update that has just ended, and log one line about it."""
        self._metrics.count(fleet.transaction.outcomes)
        last, ended = fleet.last_update, fleet.transaction.outcomes.total()
        if last is None or ended == self._reported:
            return
        self._reported = ended
        what = f"{last.outcome}: version {last.version} (label {last.version.label}) {last.phases_ms}"
        if last.outcome is UpdateOutcome.COMMITTED:
            log.info("%s", what)
        else:
            log.warning("%s: %s", what, last.reason)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._done)

    def _done(self, task: asyncio.Task[None]) -> None:
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
            results = await self._agents.fan_out(effect, cut)
        finally:
            self._cuts.pop(effect.id, None)
        ended = time.monotonic()
        for name, result in results.items():
            if not result.ok:
                log.warning("%s on %s: %s %s", effect.path, name, result.status or "no answer:", result.message)
        self._metrics.fan_out(effect.path, ended - began, results)
        log.debug("%s on %d engines: %.0f ms", effect.path, len(results), (ended - began) * 1000)
        self.feed(Answered(effect.id, results, ended))

    async def _write(self, effect: Write) -> None:
        try:
            ok = await self.keeper.write(effect.record)
        except LostError as error:
            raise DeposedError(str(error)) from error
        self.feed(Written(effect.id, ok, time.monotonic()))

    def _changed(self, intent: Intent, addressed: frozenset[str]) -> None:
        self.feed(Wanted(intent, addressed, time.monotonic()))

    def _outranked(self, term: int) -> None:
        machine = self._machine
        if machine is None or term < machine.fleet.term:
            return
        if machine.outranked(term):
            self._fail(DeposedError(f"an agent follows a coordinator of term {term}; this one is of term {machine.fleet.term}"))
        elif machine.fleet.committed is None and term >= self._claimed:
            self._claimed = term + 1
            self._spawn(self._rise(machine, term + 1))

    async def _rise(self, machine: Machine, term: int) -> None:
        """Only who may still lead goes above a term that an agent knows: else two coordinators would have one term."""
        await self._leadership.announce(term)
        machine.rise(term)

    async def _sync_all(self) -> None:
        """Each agent on its own: one that does not answer delays no other."""
        while True:
            machine = self._machine
            names = list(machine.fleet.engines) if machine is not None else []
            for name in names:
                running = self._syncing.get(name)
                if (running is None or running.done()) and not self._busy(name):
                    self._syncing[name] = asyncio.create_task(self._sync(name), name=f"sync {name}")
            for name in [name for name in self._syncing if name not in names]:
                self._syncing.pop(name).cancel()
            await asyncio.sleep(SYNC_EVERY)

    def _busy(self, name: str) -> bool:
        """Whether the update under way has just heard from the agent. In a large fleet the calls of an update and as many syncs
        would take turns on the coordinator's one core."""
        machine = self._machine
        updating = machine is not None and machine.fleet.update is not None
        return updating and self._agents.silence(name) < SYNC_EVERY and time.monotonic() - self._synced.get(name, 0.0) < SYNC_AT_LEAST

    async def _sync(self, name: str) -> None:
        machine = self._machine
        if machine is None:
            return
        asked = self._synced[name] = time.monotonic()
        try:
            status = await self._agents.sync(name, machine.fleet.sync_request(name))
            self.feed(Seen(name, status, asked, time.monotonic()))
        except Exception as error:  # noqa: BLE001 - reported through _fail, which ends the process
            self._fail(error)

    async def _tick(self) -> None:
        while True:
            self.feed(Tick(time.monotonic()))
            await asyncio.sleep(TICK_EVERY)
