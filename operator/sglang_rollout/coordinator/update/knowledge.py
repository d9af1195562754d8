"""How facts come in: members, agents' statuses, the proof of what is committed, the epoch."""

from __future__ import annotations

import math

from sglang_rollout.coordinator.update.adapters import adapter_of
from sglang_rollout.coordinator.update.engine import Engine
from sglang_rollout.coordinator.update.events import Seen, Wanted
from sglang_rollout.coordinator.update.interruption import Cause, Interruption
from sglang_rollout.coordinator.update.membership import at_first, enough
from sglang_rollout.coordinator.update.model import Fleet
from sglang_rollout.coordinator.update.phases import Phase
from sglang_rollout.coordinator.update.recovery import complete, in_the_middle, prove, rebuild
from sglang_rollout.coordinator.update.steps import Results
from sglang_rollout.coordinator.update.tensors import recalled, unpacked
from sglang_rollout.coordinator.update.versions import key
from sglang_rollout.wire.agent import AgentStatus
from sglang_rollout.wire.record import LastUpdate, Record, UpdateOutcome
from sglang_rollout.wire.weights import EngineState, Version

PATIENCE = 5.0
"""With a record: how long a new coordinator waits for agents that may prove a newer version than the record says."""


class Knowledge:
    """Turns observations into the facts of a :class:`Fleet`."""

    def __init__(self, fleet: Fleet, record: Record | None, at: float) -> None:
        self._fleet = fleet
        self._record = record
        self._started = at
        self._addressed: frozenset[str] | None = None
        self._signature: tuple[tuple[str, int, str | None], ...] | None = None
        self._fresh = True
        """Whether anything was learned since the last conclusion."""
        self.give_up: list[str] = []
        """Engines that the rebuild found in the middle of an update that nobody leads any more."""

    def learn(self, results: Results) -> None:
        """Take in the statuses that calls brought, each of the engine that was called: addresses move from one pod to another."""
        for name, result in results.items():
            if result.agent is not None and result.agent.name == name:
                self._take(result.agent)
                self._fresh = True

    def seen(self, event: Seen) -> bool:
        """Take in the answer to a sync, or that there was none. Returns whether anything is known now that was not before."""
        engine = self._fleet.engines.get(event.name)
        if engine is None:
            return False
        before = (engine.status, engine.misses)
        if event.status is None:
            engine.misses += 1
        elif event.status.name == event.name:
            self._take(event.status, event.asked)
        self._fresh = self._fresh or before != (engine.status, engine.misses)
        return self._fresh

    def doubt(self) -> None:
        """Let the next conclusion be drawn anew, from facts that nobody brought here."""
        self._fresh = True

    def _take(self, status: AgentStatus, asked: float = math.inf) -> None:
        """``asked``: when. A sync's answer may cross a call, and then speaks of what is no longer so."""
        engine = self._fleet.engines.get(status.name)
        if engine is None:
            return
        engine.misses, engine.heard = 0, self._fleet.now
        engine.take(status, asked)
        engine.asked = min(asked, self._fleet.now)
        self._burn(status)

    def _burn(self, status: AgentStatus) -> None:
        """Another coordinator has committed, or has brought to an engine, what this one does not know of: in the middle of an update
        it cannot be taken over any more, and its number must not name other weights."""
        fleet = self._fleet
        outside = fleet.update is None or status.name not in fleet.update.boots
        claims = [status.committed, status.version if outside and status.state is EngineState.CLEAN else None]
        if fleet.committed is not None:
            fleet.weights.reserve(version for version in claims if version is not None and key(version) > key(fleet.committed))

    def wanted(self, event: Wanted) -> None:
        """Take in the members and the policy."""
        fleet, known = self._fleet, self._fleet.engines
        fleet.policy = event.intent.weights
        fleet.generation, fleet.membership.base = event.intent.generation, event.intent.base
        adapters = event.intent.adapters
        fleet.adapters.of_spec = None if adapters is None else {adapter.name: adapter for adapter in adapters}
        fleet.interruptions.desired_state, fleet.interruptions.drain_seconds = event.intent.state, event.intent.drain
        fleet.interruptions.mode = event.intent.mode
        fleet.membership.engines = {}
        for wanted in event.intent.engines:
            engine = known.get(wanted.name) or Engine(wanted)
            engine.wanted = wanted
            fleet.engines[wanted.name] = engine
        # A group loses nothing when an engine joins; one that left takes its groups with it.
        fleet.membership.groups = {name: group for name, group in fleet.groups.items() if set(group.boots) <= set(fleet.engines)}
        self._addressed = event.addressed & set(fleet.engines)
        self._fresh = True

    def conclude(self) -> None:
        """Draw the conclusions that the facts allow: called whenever no operation holds the turn."""
        if not self._fresh and self._fleet.committed is not None:
            return
        self._fresh = False
        if self._fleet.committed is None:
            self._rebuild()
        else:
            self._adopt()
        if self._fleet.committed is not None:
            self._note_formed()
            self._count_epoch()
            self._drop_lost_groups()

    def awaited(self) -> str:
        """Whom a rebuild waits for, in words."""
        if self._addressed is None:
            return "the list of engines is not known yet"
        missing = sorted(self._addressed - set(self._heard()))
        return f"waiting for {', '.join(missing[:4])}{', …' if len(missing) > 4 else ''}" if missing else "almost done"

    def in_the_middle(self, since: float) -> list[str]:
        """Engines that said after ``since`` that they are paused or in a session."""
        engines = self._fleet.engines.items()
        said = [name for name, engine in engines if engine.up and engine.status and in_the_middle(engine.status)]
        return [name for name in said if self._fleet.engines[name].heard > since]

    def _statuses(self) -> list[AgentStatus]:
        return [engine.status for engine in self._fleet.engines.values() if engine.status is not None]

    def _heard(self) -> list[str]:
        return [status.name for status in self._statuses()]

    def _rebuild(self) -> None:
        """Decide what is committed, once everybody who could know was heard; with a record not for ever."""
        if self._addressed is None:
            return
        waited = self._fleet.now - self._started >= PATIENCE
        everybody = complete(self._addressed, self._heard())
        if not everybody and not (self._record is not None and waited):
            return
        fleet = self._fleet
        proved = rebuild(self._record, self._statuses())
        self.give_up = list(proved.give_up)
        fleet.weights.reserved, fleet.membership.groups = proved.burned, dict(proved.groups)
        # Without a record what the spec asks for counts as in effect: no gate opens for a moment in between.
        fleet.interruptions.apply_state(self._record.state if self._record is not None else fleet.interruptions.desired_state)
        if self._record is not None:
            fleet.transaction.last, fleet.membership.epoch = self._record.last_update, self._record.epoch
            fleet.weights.next_run = self._record.next_run
            # Whoever is not heard, or was made anew, may have committed what was under way: the store may have been away by then.
            knows = everybody and not self._made_anew(self._record)
            fleet.weights.reserve([self._record.burned, None if knows else self._record.under_way])
            self._end_interrupted(self._record, proved.committed)
            fleet.adapters.of_trainers = {row.name: adapter_of(row) for row in self._record.adapters if not row.by_spec}
            fleet.weights.fleet_id = self._record.fleet_id or fleet.weights.fleet_id
            fleet.weights.engine_checksums = dict(self._record.noted)
            fleet.weights.tensors, fleet.weights.attempted_before = recalled(self._record.tensors), unpacked(self._record.tried)
            fleet.weights.groups = frozenset(self._record.sources)
            if self._record.lent is not None:
                fleet.interruptions.release_to_trainer(self._record.lent)
            fleet.interruptions.at_engines = {name: frozenset(tags) for name, tags in self._record.lent_apart.items()}
            fleet.weights.history = [version for version in self._record.history if key(version) < key(proved.committed)]
            before = {(row.name, row.boot_id) for row in self._record.engines if row.boot_id is not None}
            if before == {(name, engine.boot) for name, engine in fleet.members().items()}:
                self._signature = self._members()
            self._wait_for_trainer(self._record)
        fleet.commit(proved.committed)
        if self._record is not None and self._record.committed == proved.committed:
            fleet.weights.checksums, fleet.weights.disk = dict(self._record.checksums), self._record.disk

    def _end_interrupted(self, record: Record, committed: Version) -> None:
        """Note that the update which was open when the coordinator before ended has failed, unless it is proved to be committed."""
        version = record.under_way
        if version is None or key(committed) >= key(version):
            return
        reason = "the coordinator was restarted in the middle of the update"
        finished = self._fleet.finished()
        self._fleet.transaction.end(LastUpdate(version=version, outcome=UpdateOutcome.FAILED, reason=reason, finished=finished))

    def _made_anew(self, record: Record) -> bool:
        """Whether an engine that the record knows has another life and an agent that was told nothing: what it held, nobody can say."""
        before = {row.name: row.boot_id for row in record.engines if row.boot_id is not None}
        return any(status.committed is None and status.boot_id != before.get(status.name, status.boot_id) for status in self._statuses())

    def _wait_for_trainer(self, record: Record) -> None:
        """Go on with the pause that the coordinator before began when its trainer was lost."""
        statuses = self._statuses() if record.waits_for_trainer else []
        paused = tuple(status.name for status in statuses if status.paused and not status.session)
        if paused:
            self._fleet.interruptions.begin(Interruption(Cause.TRAINER_LOST, engines=paused, since=self._fleet.now))
            self._fleet.enter(Phase.PAUSE)
            self.give_up = [name for name in self.give_up if name not in paused]

    def _adopt(self) -> None:
        """A version that is proved after all: an agent came back that knows of it."""
        fleet = self._fleet
        if fleet.committed is None or fleet.update is not None:
            return
        proved = prove(None, self._statuses())
        if key(proved) > key(fleet.committed):
            fleet.commit(proved)
            fleet.transaction.end(LastUpdate(
                version=proved, outcome=UpdateOutcome.COMMITTED, finished=fleet.finished(),
                reason="proved afterwards: every engine of the update says that it holds this version",
                engines=[name for name, engine in fleet.engines.items() if engine.holds(proved)],
            ))  # fmt: skip
        for status in self._statuses():
            self._burn(status)

    def _members(self) -> tuple[tuple[str, int, str | None], ...]:
        engines = self._fleet.members().items()
        return tuple(sorted((name, engine.tensor_size, engine.boot) for name, engine in engines))

    def _note_formed(self) -> None:
        fleet = self._fleet
        if not fleet.membership.formed:
            there = len(fleet.members())
            fleet.membership.formed = (
                (fleet.committed is not None and not fleet.committed.is_base)
                or bool(fleet.groups)
                or (there > 0 and enough(fleet, there, at_first(fleet)))
            )

    def _count_epoch(self) -> None:
        members = self._members()
        if members != self._signature:
            self._signature = members
            self._fleet.membership.epoch += 1

    def _drop_lost_groups(self) -> None:
        """A group of which no member is left needs no name: its trainer gets the same refusal without it."""
        fleet = self._fleet
        fleet.membership.groups = {
            name: group for name, group in fleet.groups.items() if len(fleet.changed(group.boots)) < len(group.boots)
        }
