"""The state machine: events in, effects out.

Operations (:mod:`.transaction`, :mod:`.sources`, :mod:`.process_groups`, …) define what happens in which order, and :mod:`.control_calls`
which of them answers a call. This module runs them. One operation at a time holds the *turn* and may change the fleet. The others wait in
the order in which they came. That is also the one global order in which process groups are opened on all engines; without it, several of
them deadlock. An operation that waits for engines gives its turn back, so that the coordinator can bring engines back; requests still wait.

No I/O, no clock: the same events always produce the same effects.
"""

from __future__ import annotations

import itertools
from collections import deque
from dataclasses import dataclass, replace

from sglang_rollout.coordinator.update import adapters as lora
from sglang_rollout.coordinator.update import control_calls
from sglang_rollout.coordinator.update import requests as rq
from sglang_rollout.coordinator.update.activation import staged_answer
from sglang_rollout.coordinator.update.catch_up import (
    catch_up,
    copy_committed,
    fill_store,
    find_for_store,
    find_source,
    find_without_copy,
    next_engine,
)
from sglang_rollout.coordinator.update.events import (
    Answered,
    Asked,
    Beat,
    CallersForbidden,
    Cut,
    Effect,
    Event,
    Left,
    NetworkChecked,
    Reply,
    Result,
    Save,
    Seen,
    StoreSeen,
    Tick,
    Wanted,
    Write,
    Written,
)
from sglang_rollout.coordinator.update.knowledge import Knowledge
from sglang_rollout.coordinator.update.lease import find_refusal, is_holder, is_of_trainer
from sglang_rollout.coordinator.update.loading import load_committed
from sglang_rollout.coordinator.update.model import Fleet
from sglang_rollout.coordinator.update.phases import Phase
from sglang_rollout.coordinator.update.requests import Answer, Request
from sglang_rollout.coordinator.update.rolling import find_next_load
from sglang_rollout.coordinator.update.snapshots import find_unsent_commit, report_store, send_commit
from sglang_rollout.coordinator.update.staged import refuse_further_push
from sglang_rollout.coordinator.update.steps import COLLECTIVE, Operation, Results, Say, Step, Turn, Until, turn
from sglang_rollout.coordinator.update.trainer import Trainer, probe_stores, trainer_stores
from sglang_rollout.coordinator.update.transaction import defers_pauses
from sglang_rollout.coordinator.update.upkeep import Upkeep
from sglang_rollout.coordinator.update.versions import Committed
from sglang_rollout.wire.reasons import RefusalCode, RefusedError
from sglang_rollout.wire.record import Record
from sglang_rollout.wire.states import FleetState

COMMIT_WAIT_SECONDS = 25.0
"""Longest wait of a call that commits a version that is staged already. Unmodified trainers do not wait for the engines: a proxy or the
trainer's own HTTP client would give up."""
_ENDING_GENERATION = (rq.Pause, rq.ReleaseMemory)
_BESIDE_WAIT = (rq.WithdrawUpload, rq.Claim)
"""Calls that do not wait behind a commit that waits for engines: they may end its update."""
_COMMITTING = (rq.End, rq.Continue, rq.Flush, rq.CloseGroup, rq.CommitUpload)


@dataclass(eq=False)
class _Running:
    """One operation that has not ended."""

    operation: Operation[Answer]
    call: int | None = None
    """The request that it answers; None: the machine started it."""
    request: Request | None = None
    caller: str = ""
    """Who sent the request."""
    asked_at: float = 0.0
    """When the request arrived."""
    waiting_for: int | None = None
    wants_turn: bool = False
    """True while it waits for its turn."""
    until: Until | None = None
    """The condition that it waits for without its turn."""
    waits_since: float = 0.0
    """When it began to wait for that condition."""
    answered: bool = False
    left: bool = False
    """True if no client waits for its answer any more."""


class Machine:
    """The coordinator's decisions. Feed it events with :meth:`handle`; ``fleet`` is for reading."""

    def __init__(self, *, name: str, term: int, record: Record | None, at: float, wall_offset: float = 0.0, new_id: str = "") -> None:
        self.fleet = Fleet(name, term, coordinator_id=new_id, weights=Committed(fleet_id=new_id), now=at, wall_offset=wall_offset)
        if record is not None:
            self.fleet.isolation, self.fleet.holder = record.isolation, record.holder
        self._knowledge = Knowledge(self.fleet, record, at)
        self._ids = itertools.count(1)
        self._running: dict[int, _Running] = {}
        """Operations by the effect they wait for."""
        self._queue: deque[_Running] = deque()
        """Operations that wait for their turn."""
        self._turn: _Running | None = None
        self._waiting: _Running | None = None
        """Operation that has given its turn back and waits for a condition. Requests wait for it."""
        self._trainer = Trainer(heard=at, renewed=at)
        self._upkeep = Upkeep(self.fleet, self._knowledge, self._trainer)
        self._saved: Record | None = record
        self._postponed: Wanted | None = None
        self._with_trainer: set[int] = set()
        """Calls under way in which engines wait for the trainer."""
        self._cut: int | None = None
        self._out: list[Effect] = []

    @property
    def phase(self) -> Phase:
        """The phase of the update."""
        preparing = any(running.request is not None and running is not self._turn for running in self._running.values())
        return Phase.PREPARE if self.fleet.phase is Phase.IDLE and preparing else self.fleet.phase

    @property
    def changing(self) -> bool:
        """True while an operation holds the turn."""
        return self._turn is not None

    def refuse_other_trainer(self, caller: str, gone: str, at: float) -> None:
        """Raise RefusedError for a call beside the queue of operations, while another trainer holds the fleet.

        Args:
            caller: Who calls.
            gone: The holder of the fleet, if it has no pods any more.
            at: The time.
        """
        self.fleet.now, self.fleet.gone = max(self.fleet.now, at), gone
        refusal = find_refusal(self.fleet, self._trainer, None, caller)
        if refusal is not None:
            raise refusal

    def handle(self, event: Event) -> list[Effect]:
        """Take one event. Returns the effects to carry out now, in order."""
        self.fleet.now = max(self.fleet.now, event.at)
        match event:
            case Asked():
                self._asked(event)
            case Beat():
                self._note_beat(event.at)
            case Left():
                self._left(event.call)
            case Answered():
                self._knowledge.take_results(event.results)
                self._resume(event.effect, event.results)
            case Written():
                self._resume(event.effect, {"record": Result(ok=event.ok)})
            case Seen():
                if not self._knowledge.take_answer(event):
                    # Of a large fleet hundreds a second: what follows from the time alone follows at the next tick.
                    return []
            case StoreSeen():
                self._take_store(event)
            case Wanted():
                self._postponed = event
            case NetworkChecked() | CallersForbidden():
                self._take_check(event)
            case Tick():
                self._knowledge.recompute()
                self._answer_long_commits()
        self._settle()
        # A status that comes in the middle of an operation is recorded with the operation's next step, or at the next tick.
        if self._turn is None or not isinstance(event, Seen):
            self._save()
        done, self._out = self._out, []
        return done

    def _take_check(self, event: NetworkChecked | CallersForbidden) -> None:
        """Take the result of a check of the cluster."""
        if isinstance(event, NetworkChecked):
            self.fleet.isolation = event.result
        else:
            self.fleet.callers_forbidden = event.forbidden

    def _take_store(self, event: StoreSeen) -> None:
        """Take the answer to a poll of the weight store. If pieces of an upload have arrived, the trainer lives."""
        if self._knowledge.take_store(event):
            self._trainer.heard = event.at
            self._note_beat(event.at)

    def _note_beat(self, at: float) -> None:
        """Note that the trainer lives, although it asks for nothing."""
        self._trainer.beat = self._trainer.renewed = at
        self._trainer.note_alive(at)

    def _asked(self, event: Asked) -> None:
        self.fleet.gone = event.gone
        refusal = find_refusal(self.fleet, self._trainer, event.request, event.caller)
        if refusal is None:
            requests = ((waiting.request, waiting.caller) for waiting in (*self._queue, *self._running.values()))
            refusal = refuse_further_push(self.fleet, event.request, event.caller, requests)
        if refusal is not None:
            self._out.append(Reply(event.call, _refused(refusal)))
            return
        self._note_call(event)
        if self.fleet.committed is None:
            message = (
                "The coordinator has just started and asks the engines what they hold"
                f" ({self._knowledge.describe_awaited()}). Try again in a moment."
            )
            self._out.append(Reply(event.call, Answer(503, message, code=RefusalCode.UNAVAILABLE)))
            return
        self._advance(_Running(control_calls.answer(self.fleet, event.request), event.call, event.request, event.caller, event.at), None)

    def _note_call(self, event: Asked) -> None:
        """Note what a call proves: that the trainer lives, and that the holder does."""
        trainer = self._trainer
        if is_of_trainer(self.fleet, event.request, event.caller):
            trainer.heard = event.at
            trainer.note_alive(event.at)
        if is_holder(self.fleet, event.caller):
            trainer.renewed = event.at

    def _left(self, call: int) -> None:
        """Drop a request that has not begun. One that has begun runs to its end, because engines cannot be called back."""
        for running in [*self._queue, *self._running.values()]:
            if running.call == call and running is not self._turn:
                running.operation.close()
                if running in self._queue:
                    self._queue.remove(running)
                self._running = {effect: other for effect, other in self._running.items() if other is not running}
        for begun in (self._turn, self._waiting):
            if begun is not None and begun.call == call:
                begun.left = self._trainer.left = True

    def _resume(self, effect: int, results: Results) -> None:
        running = self._running.pop(effect, None)
        self._with_trainer.discard(effect)
        if running is not None:
            self._advance(running, results)

    def _advance(self, running: _Running, results: Results | None) -> None:
        """Run an operation until it waits for something or ends."""
        running.waiting_for = None
        self.fleet.is_pause_waiting = self._is_pause_waiting()
        try:
            step = self._take_turn(running) if running.wants_turn else running.operation.send(results)
            while True:
                if isinstance(step, Turn):
                    if not self._may_take_turn(running):
                        running.wants_turn = True
                        self._queue.append(running)
                        return
                    step = self._take_turn(running)
                elif isinstance(step, Until):
                    running.wants_turn, running.until, running.waits_since = True, step, self.fleet.now
                    self._waiting = running
                    self._give_turn_back()
                    return
                elif isinstance(step, Say):
                    self._reply(running, step.answer)
                    step = running.operation.send(None)
                else:
                    effect = next(self._ids)
                    running.waiting_for = effect
                    self._running[effect] = running
                    if isinstance(step, Write):
                        step = replace(step, record=self._complete(step.record))
                        self._saved = step.record
                    elif step.path in COLLECTIVE:
                        self._with_trainer.add(effect)
                    self._out.append(replace(step, id=effect))
                    return
        except StopIteration as ended:
            self._end(running, ended.value)
        except RefusedError as refusal:
            self._end(running, _refused(refusal))

    def _is_pause_waiting(self) -> bool:
        """Return True if a call, or a change of ``spec.state``, that ends generation waits for its turn."""
        state = self._postponed.intent.state if self._postponed is not None else FleetState.ACTIVE
        return state is not FleetState.ACTIVE or any(self._ends_generation(waiting.request) for waiting in self._queue)

    def _ends_generation(self, request: rq.Request | None) -> bool:
        is_deferred = isinstance(request, rq.Pause) and defers_pauses(self.fleet)
        return isinstance(request, _ENDING_GENERATION) and not is_deferred

    def _may_take_turn(self, running: _Running) -> bool:
        """Return True if an operation may begin its turn now.

        Requests wait behind an operation that waits for a condition, except those that may end its update.
        """
        if self._turn is not None:
            return self._turn is running
        return self._waiting is None or running.request is None or isinstance(running.request, _BESIDE_WAIT)

    def _take_turn(self, running: _Running) -> Step:
        """Give an operation its turn. Refuse a call if another trainer has taken the fleet while the call waited."""
        self._turn, running.wants_turn = running, False
        self.fleet.caller = running.caller
        refusal = find_refusal(self.fleet, self._trainer, running.request, running.caller) if running.request is not None else None
        step: Step = running.operation.throw(refusal) if refusal is not None else running.operation.send(None)
        return step

    def _reply(self, running: _Running, answer: Answer) -> None:
        if running.call is not None and not running.answered:
            running.answered = True
            self._out.append(Reply(running.call, answer))

    def _answer_long_commits(self) -> None:
        """Answer calls that have waited long for the commit of a version that is staged. The operations continue."""
        update = self.fleet.update
        if update is None or update.staged is None or not (update.staged.is_complete or update.staged.is_waiting):
            return
        for running in [*filter(None, (self._turn, self._waiting)), *self._queue]:
            if isinstance(running.request, _COMMITTING) and self.fleet.now - running.asked_at >= COMMIT_WAIT_SECONDS:
                self._reply(running, staged_answer(self.fleet))

    def _end(self, running: _Running, answer: Answer) -> None:
        self._reply(running, answer)
        self._knowledge.recompute()
        if running.call is not None and is_holder(self.fleet, running.caller):
            self._trainer.heard = self._trainer.renewed = self.fleet.now
        if self._turn is running:
            self._give_turn_back()

    def _give_turn_back(self) -> None:
        """Let other operations begin. The fleet rests in the phase that follows from what is open."""
        self._turn = None
        self.fleet.rested_seq = self.fleet.next_seq()
        rest = Phase.IDLE if self.fleet.pause is None else Phase.PAUSE
        if self.fleet.update is not None:
            rest = Phase.TRANSFER if self.fleet.update.staged is None else Phase.STAGE
        if rest is not self.fleet.phase:
            self.fleet.enter(rest)

    def _settle(self) -> None:
        """After every event, start what can start: operations of the coordinator's own, the next operation in the queue, catching up."""
        while self._turn is None:
            if self._postponed is not None and self._can_take(self._postponed):
                self._knowledge.take_intent(self._postponed)
                self._postponed = None
            self._knowledge.update()
            self._note_waiting()
            own = self._upkeep.next_operation() if self.fleet.committed is not None else None
            if own is not None:
                running = _Running(_with_turn(own))
            elif (ready := self._find_ready()) is not None:
                running = ready
            elif (queued := next(filter(self._may_take_turn, self._queue), None)) is not None:
                self._queue.remove(queued)
                running = queued
            elif self.fleet.committed is not None and (names := find_next_load(self.fleet)):
                # After the queue: between two groups of engines that load in turn, calls have their turn.
                running = _Running(_with_turn(load_committed(self.fleet, names)))
            else:
                break
            self._advance(running, None)
        self._watch_trainer()
        self._start_joiners()

    def _find_ready(self) -> _Running | None:
        """Return the operation whose wait for a condition has ended; None if none waits, or if it still waits."""
        running = self._waiting
        if running is None or running.until is None:
            return None
        if not running.until.condition() and self.fleet.now - running.waits_since < running.until.seconds:
            return None
        self._waiting = running.until = None
        return running

    def _can_take(self, event: Wanted) -> bool:
        """Return True if the intent may change now.

        The members of an open update never change, and its idle deadline limits the wait. In a staged update no engine takes part yet, so
        only the store and the transport must stay.
        """
        if self.fleet.update is None:
            return True
        stays = event.intent.weights.transport is self.fleet.policy.transport and event.intent.mode is self.fleet.mode
        store = self.fleet.store.wanted if self.fleet.store is not None else None
        return self.fleet.is_at_rest and stays and event.intent.store == store

    def _start_joiners(self) -> None:
        """Start catching up on engines, and on the weight store, that need it, beside other operations."""
        missing = find_for_store(self.fleet) if self._turn is None else None
        if missing is not None and self.fleet.store is not None:
            self.fleet.store.fetching = self.fleet.store.instance
            self._advance(_Running(fill_store(self.fleet, missing)), None)
        unsent = find_unsent_commit(self.fleet) if self._turn is None else None
        if unsent is not None and self.fleet.store is not None:
            self.fleet.store.is_sending_commit = True
            self._advance(_Running(send_commit(self.fleet, unsent)), None)
        while self._turn is None and (name := next_engine(self.fleet)) is not None:
            found = find_source(self.fleet)
            if found is None:
                return
            self.fleet.engines[name].is_catching_up = True
            self._knowledge.recompute()
            self._advance(_Running(catch_up(self.fleet, name, found)), None)
        while self._turn is None and (name := find_without_copy(self.fleet)) is not None:
            self.fleet.engines[name].is_copying = True
            self._advance(_Running(copy_committed(self.fleet, name)), None)

    def _watch_trainer(self) -> None:
        """Probe the store of a silent trainer. If it is gone, end the call that waits for it."""
        trainer = self._trainer
        self._note_waiting()
        if self.fleet.transaction.joining is not None:
            trainer.others = frozenset()  # dead process groups are closed by then, and the new one may have the address of one of them
        if self.fleet.committed is not None and trainer.should_examine_pause(self.fleet):
            trainer.probing, trainer.examined_pause, trainer.others = True, self.fleet.requested_pause, frozenset()
            self._advance(_Running(self._find_other_trainers()), None)
        elif self.fleet.committed is not None and trainer.should_probe(self.fleet):
            trainer.probing = True
            self._advance(_Running(self._probe()), None)
        waiting = self._turn.waiting_for if self._turn is not None else None
        if trainer.gone and waiting is not None and waiting != self._cut and waiting in self._with_trainer:
            self._cut = waiting
            self._out.append(Cut(waiting, f"{trainer.gone}."))

    async def _probe(self) -> Answer:
        """Probe the store of the trainer, beside the operation that holds the turn."""
        trainer, before = self._trainer, self._trainer.proofs
        reasons = await probe_stores(self.fleet, trainer.stores(self.fleet))
        trainer.probing = False
        if not reasons:
            trainer.renewed = self.fleet.now
        if not reasons or trainer.proofs > before:
            trainer.note_alive(self.fleet.now)
        else:
            trainer.gone = list(reasons.values())[-1]
        return Answer(200, trainer.gone)

    async def _find_other_trainers(self) -> Answer:
        """Find the stores of other trainers, beside the operation that holds the turn.

        The trainer has just paused, so stores that are silent now are not its own.
        """
        others = await probe_stores(self.fleet, trainer_stores(self.fleet))
        self._trainer.probing = False
        if not self._trainer.left:  # otherwise it has gone meanwhile, and its store with it
            self._trainer.others = frozenset(others)
        return Answer(200, f"{len(others)} stores belong to another trainer.")

    def _note_waiting(self) -> None:
        """Note whether the client of a call is there and has no answer yet."""
        operations = [*self._running.values(), *self._queue, *([self._waiting] if self._waiting is not None else [])]
        callers = [running.caller for running in operations if running.call is not None and not running.answered and not running.left]
        self._trainer.waiting = bool(callers)
        self._trainer.holder_waits = any(is_holder(self.fleet, caller) for caller in callers)

    def _save(self) -> None:
        record = self.fleet.record()
        if record is None:
            return
        record = self._complete(record)
        if record != self._saved:
            self._saved = record
            self._out.append(Save(record))

    def _complete(self, record: Record) -> Record:
        """Complete a record with adapters and weight store: every record that is persisted names them, also the record of a commit."""
        adapters = lora.rows(self.fleet, lora.MAX_REASONS_CHARACTERS)
        return record.model_copy(update={"adapters": adapters, "store": report_store(self.fleet)})

    def is_outranked(self, term: int) -> bool:
        """Return True if another coordinator leads and this one must end, because an agent has seen this term.

        While nothing is proved yet, a higher term may only mean that the record was lost. Then this coordinator continues above that term
        (:meth:`raise_term`), if no other one leads.
        """
        return self.fleet.committed is not None and term > self.fleet.term

    def raise_term(self, term: int) -> None:
        """Continue with a term that no other coordinator has or gets."""
        self.fleet.term = max(self.fleet.term, term)


def _refused(refusal: RefusedError) -> Answer:
    return Answer(refusal.status, str(refusal), refusal.fleet, refusal.refusal.code)


async def _with_turn(operation: Operation[Answer]) -> Answer:
    await turn()
    return await operation
