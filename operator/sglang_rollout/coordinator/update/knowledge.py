"""How facts come in: the wanted engines, the statuses of agents, and what these prove after a restart. Pure.

Three things prove a commit to a restarted coordinator:

* the record, because it is written after the last acknowledgement and before any gate opens,
* a complete cohort: every engine of the update says that it holds this version, of this cohort, completely (the API server was away, or
  the coordinator died between the last acknowledgement and the record),
* an agent that received it: a coordinator sends only what has been committed.

Anything else, above all an open update, is not proved and is given up. *base* needs no proof if nothing higher has one, but it may be
concluded only after every agent that could know better has answered (:func:`is_everyone_heard`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from sglang_rollout.coordinator.update.adapters import adapter_of
from sglang_rollout.coordinator.update.completeness import Doubt
from sglang_rollout.coordinator.update.engine import Engine
from sglang_rollout.coordinator.update.events import Seen, StoreSeen, Wanted
from sglang_rollout.coordinator.update.failed_commit import RESTARTED, read_row
from sglang_rollout.coordinator.update.interruption import Cause, Interruption
from sglang_rollout.coordinator.update.membership import initial_size, is_enough
from sglang_rollout.coordinator.update.model import Fleet
from sglang_rollout.coordinator.update.phases import Phase
from sglang_rollout.coordinator.update.ranks import Group
from sglang_rollout.coordinator.update.steps import Results
from sglang_rollout.coordinator.update.store import STORE, Store
from sglang_rollout.coordinator.update.tensor_names import TensorNames
from sglang_rollout.coordinator.update.versions import newest, order_key
from sglang_rollout.wire.agent import AgentStatus
from sglang_rollout.wire.record import EndedUpdate, Record, UpdateOutcome, UpdateReason
from sglang_rollout.wire.staged import StoreStatus
from sglang_rollout.wire.states import BASE, EngineState, StagedVersion, Version

REBUILD_SECONDS = 5.0
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
        """True if anything was learned since the last conclusion."""
        self.give_up: list[str] = []
        """Engines that the rebuild found in an update that no coordinator leads any more."""
        self._given_up: Version | None = None
        """Version of the update that the earlier coordinator had open, if it was reported as failed. Engines may complete it later."""
        self.outdated: list[str] = []
        """Engines that served a version that is not permitted any more, when a commit of an earlier coordinator was proved."""

    def take_results(self, results: Results) -> None:
        """Take in the statuses that calls returned. Ignore the status of another engine: addresses move between pods."""
        seq = self._fleet.next_seq()
        for name, result in results.items():
            if result.store is not None and self._fleet.store is not None:
                self._fleet.store.take(result.store, seq)
                self._fresh = True
            if result.agent is not None and result.agent.name == name:
                self._take(result.agent, seq)
                self._fresh = True

    def take_answer(self, event: Seen) -> bool:
        """Take in the answer to a sync, or its absence. Returns True if it is news."""
        engine = self._fleet.engines.get(event.name)
        if engine is None:
            return False
        before = (engine.status, engine.misses)
        if event.status is None:
            engine.misses += 1
        elif event.status.name == event.name:
            self._take(event.status, event.seq)
        self._fresh = self._fresh or before != (engine.status, engine.misses)
        return self._fresh

    def take_store(self, event: StoreSeen) -> bool:
        """Take in the answer to a poll of the weight store, or its absence. Returns True if tensors of the open upload have arrived."""
        store, update = self._fleet.store, self._fleet.update
        if store is None:
            return False
        before = (store.is_up, store.instance)
        if event.status is None:
            store.misses += 1
        else:
            store.take(event.status, event.seq)
        self._fresh = self._fresh or before != (store.is_up, store.instance)
        staged = update.staged if update is not None else None
        copy = store.find_copy(staged.id) if staged is not None else None
        if staged is None or copy is None or (arrived := copy.bytes + copy.received) <= staged.arrived:
            return False
        staged.arrived = arrived
        return True

    def recompute(self) -> None:
        """Force a recomputation after a state change that produced no event."""
        self._fresh = True

    def _take(self, status: AgentStatus, seq: int) -> None:
        engine = self._fleet.engines.get(status.name)
        if engine is None:
            return
        engine.misses, engine.heard = 0, self._fleet.now
        engine.take(status, seq)
        self._reserve(status)

    def _reserve(self, status: AgentStatus) -> None:
        """Reserve versions that another coordinator has committed or loaded into an engine, unknown to this one.

        In the middle of an update such a version cannot be adopted any more, and its number must not name other weights.
        """
        fleet = self._fleet
        outside = fleet.update is None or status.name not in fleet.update.boots
        claims = [status.committed, status.version if outside and status.state is EngineState.CLEAN else None]
        if fleet.committed is not None:
            fleet.weights.reserve(version for version in claims if version is not None and order_key(version) > order_key(fleet.committed))

    def take_intent(self, event: Wanted) -> None:
        """Take in the wanted engines and the policy."""
        fleet, known = self._fleet, self._fleet.engines
        fleet.policy = event.intent.weights
        fleet.paths = tuple(event.intent.security.paths)
        fleet.generation, fleet.membership.base = event.intent.generation, event.intent.base
        adapters = event.intent.adapters
        fleet.adapters.of_spec = None if adapters is None else {adapter.name: adapter for adapter in adapters}
        fleet.interruptions.desired_state, fleet.interruptions.drain_seconds = event.intent.state, event.intent.drain
        fleet.interruptions.mode = event.intent.mode
        fleet.is_isolated = bool(event.intent.isolated)
        if event.intent.store is None:
            fleet.store = None
        elif fleet.store is None or fleet.store.wanted != event.intent.store:
            fleet.store = Store(event.intent.store)
        fleet.membership.engines = {}
        for wanted in event.intent.engines:
            engine = known.get(wanted.name) or Engine(wanted)
            engine.wanted = wanted
            fleet.engines[wanted.name] = engine
        # A process group stays valid when an engine joins. An engine that left takes its process groups with it.
        peers = {STORE} if fleet.is_staged else set(fleet.engines)
        fleet.membership.groups = {name: group for name, group in fleet.groups.items() if set(group.boots) <= peers}
        self._addressed = event.addressed & set(fleet.engines)
        self._fresh = True

    def update(self) -> None:
        """Update what follows from the facts: committed version, epoch, process groups. Called whenever no operation holds the turn."""
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
            self._settle_doubt()

    def describe_awaited(self) -> str:
        """Return which engines a rebuild waits for, as a phrase."""
        if self._addressed is None:
            return "the list of engines is not known yet"
        missing = sorted(self._addressed - set(self._heard()))
        return f"waiting for {', '.join(missing[:4])}{', …' if len(missing) > 4 else ''}" if missing else "almost done"

    def interrupted_engines(self) -> list[str]:
        """Return the engines that are paused or in a session since the last operation ended."""
        engines = self._fleet.engines.items()
        found = [name for name, engine in engines if engine.up and engine.status and is_interrupted(engine.status)]
        return [name for name in found if self._fleet.has_news(name) and not self._fleet.engines[name].is_catching_up]

    def _statuses(self) -> list[AgentStatus]:
        return [engine.status for engine in self._fleet.engines.values() if engine.status is not None]

    def _heard(self) -> list[str]:
        return [status.name for status in self._statuses()]

    def _rebuild(self) -> None:
        """Decide which version is committed, once every agent that may know it was heard. With a record, wait at most REBUILD_SECONDS."""
        if self._addressed is None:
            return
        waited = self._fleet.now - self._started >= REBUILD_SECONDS
        if self._fleet.store is not None and self._fleet.store.status is None and not waited:
            return  # it tells which process groups survive
        everyone = is_everyone_heard(self._addressed, self._heard())
        if not everyone and not (self._record is not None and waited):
            return
        fleet = self._fleet
        proved = rebuild(self._record, self._statuses(), fleet.store.status if fleet.store is not None and fleet.is_staged else None)
        self.give_up = list(proved.give_up)
        fleet.weights.reserved, fleet.membership.groups = proved.reserved, dict(proved.groups)
        # Without a record the desired state counts as applied, so that no gate opens for a moment.
        fleet.interruptions.apply_state(self._record.state if self._record is not None else fleet.interruptions.desired_state)
        if self._record is not None:
            fleet.transaction.last, fleet.transaction.earlier = self._record.last_update, self._record.earlier_updates
            fleet.membership.epoch = self._record.epoch
            fleet.weights.next_run = self._record.next_run
            # An engine that is not heard, or was recreated, may have committed the open update while the store was away.
            knows = everyone and not self._has_recreated_engine(self._record)
            fleet.weights.reserve([self._record.reserved, None if knows else self._record.under_way])
            self._note_end(self._record, proved.committed)
            fleet.adapters.of_trainers = {row.name: adapter_of(row) for row in self._record.adapters if not row.by_spec}
            fleet.weights.fleet_id = self._record.fleet_id or fleet.weights.fleet_id
            fleet.weights.engine_checksums = dict(self._record.engine_checksums)
            fleet.weights.names = TensorNames.unpack(self._record.names)
            doubtful = TensorNames.unpack(self._record.doubtful_names) | fleet.weights.names
            listed = [row.name for row in self._record.engines]
            boots = {listed[place]: boot for place, boot in self._record.doubtful_engines.items()}
            fleet.weights.doubt = Doubt(doubtful, boots, {listed[place] for place in self._record.restarts})
            fleet.weights.groups = frozenset(self._record.sources)
            if self._record.released_to_trainer is not None:
                fleet.interruptions.release_to_trainer(self._record.released_to_trainer)
            fleet.interruptions.at_engines = {name: frozenset(tags) for name, tags in self._record.released_at_engines.items()}
            fleet.weights.history = [version for version in self._record.history if order_key(version) < order_key(proved.committed)]
            before = {(row.name, row.boot_id) for row in self._record.engines if row.boot_id is not None}
            same = {row.store for row in self._record.joined} == {fleet.boot(STORE)}
            if same if fleet.is_staged else before == {(name, engine.boot) for name, engine in fleet.members().items()}:
                self._signature = self._members()
            self._wait_for_trainer(self._record)
        if self._record is not None and order_key(proved.committed) > order_key(self._record.committed):
            self._note_proved_names()
        fleet.commit(proved.committed, self._find_author(proved.committed))
        fleet.weights.staged = self._find_staged(proved.committed)
        if self._record is not None and self._record.committed == proved.committed:
            fleet.weights.checksums, fleet.weights.disk = dict(self._record.checksums), self._record.disk
        self.outdated = self._find_outdated()

    def _find_outdated(self) -> list[str]:
        """Return the engines that serve a version that is not permitted: the earlier coordinator ended before it closed their gates."""
        fleet = self._fleet
        permitted = {order_key(version) for version in (fleet.committed, *fleet.tolerated()) if version is not None}
        serving = [(name, engine.status) for name, engine in fleet.engines.items() if engine.serving and engine.status is not None]
        return [name for name, status in serving if status.version is not None and order_key(status.version) not in permitted]

    def _note_end(self, record: Record, committed: Version) -> None:
        """Note how the update ended that was open when the earlier coordinator ended: it has failed, unless a commit is proved."""
        version = record.under_way
        if order_key(committed) > order_key(record.committed):
            self._note_proved(committed)
        elif version is not None and order_key(version) == order_key(record.committed):
            self._note_activating(version)
        if version is not None and order_key(version) > order_key(committed):
            self._given_up = version
            # An agent that loads a copy ends the load without a coordinator, and its engine may hold this number then.
            self._fleet.weights.reserve([version] if record.under_way_update else [])
            self._fleet.transaction.end(EndedUpdate(
                version=version, outcome=UpdateOutcome.FAILED, finished=self._fleet.finished(), author=record.holder,
                reason=UpdateReason.COORDINATOR_RESTARTED, message=RESTARTED,
                update=record.under_way_update,
            ))  # fmt: skip
        if record.failed_commit is not None and (version is None or self._given_up == version):
            self._fleet.transaction.failed = read_row(record.failed_commit)

    def _note_proved(self, version: Version) -> None:
        """Note a commit that an earlier coordinator did not record."""
        fleet = self._fleet
        fleet.transaction.end(EndedUpdate(
            version=version, outcome=UpdateOutcome.COMMITTED, finished=fleet.finished(), author=self._find_author(version),
            reason=UpdateReason.COORDINATOR_RESTARTED,
            message="proved afterwards: every engine of the update says that it holds this version",
            engines=[name for name, engine in fleet.engines.items() if engine.holds(version)],
            update=staged.update if (staged := self._find_staged(version)) is not None else "",
        ))  # fmt: skip

    def _note_activating(self, version: Version) -> None:
        """Note a commit whose version engines loaded when the earlier coordinator ended (transport Staged)."""
        fleet = self._fleet
        holding = [name for name, engine in fleet.engines.items() if engine.holds(version)]
        fleet.transaction.end(EndedUpdate(
            version=version, outcome=UpdateOutcome.COMMITTED if len(holding) == len(fleet.engines) else UpdateOutcome.PARTIAL,
            finished=fleet.finished(), author=self._find_author(version), reason=UpdateReason.COORDINATOR_RESTARTED, engines=holding,
            message="the coordinator was restarted while engines loaded this version; the other engines load it from their copies",
            update=staged.update if (staged := self._find_staged(version)) is not None else "",
        ))  # fmt: skip

    def _find_staged(self, version: Version) -> StagedVersion | None:
        """Return what identifies the contents of a committed version: from the record, or from agents that loaded it; None if unknown."""
        record = self._record
        if record is not None and record.staged is not None and order_key(record.committed) == order_key(version):
            return record.staged
        copies = [copy for status in self._statuses() for copy in status.staged if copy.digest and copy.version is not None]
        found = next((copy for copy in copies if copy.version is not None and order_key(copy.version) == order_key(version)), None)
        return StagedVersion(update=found.update, digest=found.digest, bytes=found.bytes) if found is not None else None

    def _find_author(self, version: Version) -> str:
        """Return the caller that pushed a version, as the record of the earlier coordinator says; empty if it says nothing."""
        record = self._record
        if record is None:
            return ""
        if order_key(record.committed) == order_key(version):
            return record.author
        is_under_way = record.under_way is not None and order_key(record.under_way) == order_key(version)
        return record.holder if is_under_way else ""

    def _has_recreated_engine(self, record: Record) -> bool:
        """Return True if an engine of the record has another boot ID and its agent knows of no commit. What the engine held is lost."""
        before = {row.name: row.boot_id for row in record.engines if row.boot_id is not None}
        return any(status.committed is None and status.boot_id != before.get(status.name, status.boot_id) for status in self._statuses())

    def _wait_for_trainer(self, record: Record) -> None:
        """Continue the pause that the earlier coordinator began when its trainer was lost."""
        statuses = self._statuses() if record.waits_for_trainer else []
        paused = tuple(status.name for status in statuses if status.paused and not status.session)
        if paused:
            self._fleet.interruptions.begin(Interruption(Cause.TRAINER_LOST, engines=paused, since=self._fleet.now))
            self._fleet.enter(Phase.PAUSE)
            self.give_up = [name for name in self.give_up if name not in paused]

    def _adopt(self) -> None:
        """Adopt a version that is proved late, by an agent that came back."""
        fleet = self._fleet
        if fleet.committed is None or fleet.update is not None:
            return
        proved = prove_version(None, self._statuses(), self._given_up)
        if order_key(proved) > order_key(fleet.committed):
            self._note_proved_names()
            fleet.commit(proved, self._find_author(proved))
            fleet.weights.staged = self._find_staged(proved)
            self._note_proved(proved)
            self.outdated = self._find_outdated()
        for status in self._statuses():
            self._reserve(status)

    def _members(self) -> tuple[tuple[str, int, str | None], ...]:
        if self._fleet.is_staged:
            return ((STORE, 1, self._fleet.boot(STORE)),)
        engines = self._fleet.members().items()
        return tuple(sorted((name, engine.tensor_size, engine.boot) for name, engine in engines))

    def _note_formed(self) -> None:
        fleet = self._fleet
        if not fleet.membership.formed:
            there = len(fleet.members())
            fleet.membership.formed = (
                fleet.is_staged
                or (fleet.committed is not None and not fleet.committed.is_base)
                or bool(fleet.groups)
                or (there > 0 and is_enough(fleet, there, initial_size(fleet)))
            )

    def _count_epoch(self) -> None:
        members = self._members()
        if members != self._signature:
            self._signature = members
            self._fleet.membership.epoch += 1

    def _note_proved_names(self) -> None:
        """Note the tensors of a commit that an earlier coordinator did not record: those that engines may have received are among them."""
        weights = self._fleet.weights
        weights.names |= weights.doubt.names

    def _settle_doubt(self) -> None:
        """Forget what engines may hold that are clean, that have restarted, or that do not belong to the fleet any more."""
        fleet = self._fleet
        taking_part = fleet.update.boots if fleet.update is not None and fleet.update.staged is None else {}
        settled = []
        for name, boot in fleet.weights.doubt.engines.items():
            engine = fleet.engines.get(name)
            if name in taking_part or (engine is not None and engine.is_catching_up):
                continue  # it may receive tensors, although it is still clean
            is_clean = engine is not None and (engine.holds(BASE) or (fleet.committed is not None and engine.holds(fleet.committed)))
            if engine is None or is_clean or engine.boot not in (None, boot):
                settled.append(name)
        fleet.weights.doubt.end(settled)

    def _drop_lost_groups(self) -> None:
        """Drop process groups without any member left. Their trainer gets the same refusal without them."""
        fleet = self._fleet
        if fleet.store is not None and fleet.store.status is None:
            return  # the store has not been heard yet
        fleet.membership.groups = {
            name: group for name, group in fleet.groups.items() if len(fleet.lost_engines(group.boots)) < len(group.boots)
        }


@dataclass(frozen=True)
class Rebuilt:
    """Facts that the record and the statuses of agents prove."""

    committed: Version
    reserved: Version | None
    """Highest version that an engine holds and that was not committed."""
    groups: Mapping[str, Group]
    give_up: tuple[str, ...]
    """Engines in a pause or session that this coordinator did not begin."""


def rebuild(record: Record | None, statuses: Sequence[AgentStatus], store: StoreStatus | None = None) -> Rebuilt:
    """Return everything that the record and the statuses prove. ``store``: status of the weight store; None: there is none."""
    committed = prove_version(record, statuses)
    held = [status.version for status in statuses if status.version is not None]
    return Rebuilt(
        committed=committed,
        reserved=newest(*(version for version in held if order_key(version) > order_key(committed))),
        groups=_surviving_groups(record, statuses) if store is None else _groups_of_store(record, store),
        give_up=tuple(status.name for status in statuses if is_interrupted(status)),
    )


def prove_version(record: Record | None, statuses: Sequence[AgentStatus], given_up: Version | None = None) -> Version:
    """Return the highest version that is proved to be committed.

    ``given_up``: a version that was reported as failed, so that engines which hold it prove nothing any more.
    """
    proofs = [BASE]
    if record is not None:
        proofs.append(record.committed)
    proofs += [status.committed for status in statuses if status.committed is not None]
    proofs += [version for version in complete_cohorts(statuses) if given_up is None or order_key(version) != order_key(given_up)]
    return max(proofs, key=order_key)


def complete_cohorts(statuses: Iterable[AgentStatus]) -> list[Version]:
    """Return the versions that every engine of their cohort reports, with the same cohort."""
    holders: dict[tuple[int, int, tuple[str, ...]], set[str]] = {}
    versions: dict[tuple[int, int, tuple[str, ...]], Version] = {}
    for status in statuses:
        if status.state is EngineState.CLEAN and status.version is not None and status.cohort:
            token = (*order_key(status.version), tuple(sorted(set(status.cohort))))
            holders.setdefault(token, set()).add(status.name)
            versions[token] = status.version
    return [versions[token] for token, names in holders.items() if names >= set(token[2])]


def is_interrupted(status: AgentStatus) -> bool:
    """Return True if the engine is paused or in a session, which must end."""
    return status.boot_id is not None and (status.session or status.paused)


def is_everyone_heard(addressed: Iterable[str], heard: Iterable[str]) -> bool:
    """Return True if every engine that could hold a proof has been heard. An engine without an address has no running pod."""
    return set(addressed) <= set(heard)


def _groups_of_store(record: Record | None, store: StoreStatus) -> dict[str, Group]:
    """Return the process groups of the record that the weight store is still in."""
    rows = [row for row in (record.joined if record is not None else []) if row.store == store.instance and row.name in store.groups]
    return {row.name: Group(row.name, row.epoch, row.world_size, row.master, row.backend, {STORE: row.store}, row.author) for row in rows}


def _surviving_groups(record: Record | None, statuses: Sequence[AgentStatus]) -> dict[str, Group]:
    """Return the process groups of the record whose members all run in the boot that joined, and whose agents confirm it."""
    if record is None:
        return {}
    seen = {status.name: status for status in statuses}
    found: dict[str, Group] = {}
    for row in record.joined:
        members: dict[str, str] = {}
        for engine in record.members(row):
            boot, status = engine.boot_id, seen.get(engine.name)
            if boot is not None and status is not None and status.boot_id == boot and row.name in status.groups:
                members[engine.name] = boot
        if members and len(members) == len(row.places):
            found[row.name] = Group(row.name, row.epoch, row.world_size, row.master, row.backend, members, row.author)
    return found
