"""What the coordinator knows of its fleet. Facts only; operations change them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from sglang_rollout.coordinator.update.engine import Engine
from sglang_rollout.coordinator.update.phases import Phase, PhaseClock
from sglang_rollout.coordinator.update.progress import By, Group, Hold, Update
from sglang_rollout.coordinator.update.ranks import RankTable, rank_table
from sglang_rollout.coordinator.update.tensors import Brought, packed
from sglang_rollout.coordinator.update.versions import history, newest, next_version
from sglang_rollout.wire.agent import SyncRequest
from sglang_rollout.wire.intent import Adapter
from sglang_rollout.wire.policy import WeightsPolicy
from sglang_rollout.wire.record import LastUpdate, Noted, OnDisk, Record, UpdateOutcome
from sglang_rollout.wire.states import LENT, FleetMode, FleetState, held_sentence
from sglang_rollout.wire.weights import Version

ROOM = 100_000
"""Characters of engines' reasons in the record, which has to fit into a ConfigMap (1 MiB): 200 for each of 500 engines."""


@dataclass
class Fleet:
    """Everything the state machine knows."""

    name: str
    term: int
    policy: WeightsPolicy = field(default_factory=WeightsPolicy)
    generation: int = 0
    epoch: int = 0
    formed: bool = False
    """The fleet was complete once, or has taken weights: from then on it goes on with the engines that are there."""
    base: int | None = None
    """It is complete with so many engines; None: with all that are wanted."""
    committed: Version | None = None
    """None while a restarted coordinator has not yet proved what is committed."""
    history: list[Version] = field(default_factory=list)
    """Versions that may be served, oldest first; the committed one is the last."""
    id: str = ""
    """Tells this fleet's versions from those of another that had the same name."""
    life: str = ""
    """Of this coordinator."""
    disk: OnDisk | None = None
    """Where the committed version was loaded from, if it was."""
    checksums: dict[int, tuple[str, ...]] = field(default_factory=dict)
    """Of the committed version, by the number of an engine's ranks; as far as they are known."""
    next_run: int = 0
    """The run that the next update opens, if somebody asked for a new one."""
    burned: Version | None = None
    """Highest version that some engine acknowledged and that was not committed."""
    engines: dict[str, Engine] = field(default_factory=dict)
    groups: dict[str, Group] = field(default_factory=dict)
    opening: str | None = None
    """Store (HOST:PORT) of the group that engines are joining now."""
    hold: Hold | None = None
    wish: FleetState = FleetState.ACTIVE
    """What the spec asks for."""
    drain: float = 300.0
    """Seconds that requests have to end before engines fall asleep."""
    adapters: dict[str, Adapter] | None = None
    """Adapters of the spec by name. None: it says nothing about any."""
    called: dict[str, Adapter] = field(default_factory=dict)
    """Adapters that trainers have loaded, by name."""
    kept: FleetState = FleetState.ACTIVE
    """What of it is in effect. No trainer's call and no lease ends it."""
    mode: FleetMode | None = None
    """Whose GPUs it uses; None: its own."""
    lent: tuple[str, ...] = ("kv_cache", "weights")
    """Memory that a trainer has who shares its GPUs with the fleet. Before its first call, what verl's own sleep releases: asleep until
    woken."""
    lent_apart: dict[str, tuple[str, ...]] = field(default_factory=dict)
    """The same of engines at whose own URL it has said something else since."""
    noted: dict[str, Noted] = field(default_factory=dict)
    """What each engine holds of a fleet that keeps its weights."""
    update: Update | None = None
    sources: frozenset[str] = frozenset()
    """Groups that brought the last committed tensors: the stages of one trainer, if there are several."""
    brought: Brought = field(default_factory=Brought)
    """The tensors that make the committed version, over what ``model.path`` holds."""
    tried: frozenset[str] = frozenset()
    """Tensors that engines may hold from updates that failed."""
    tried_before: frozenset[bytes] = frozenset()
    """The same of updates that a coordinator before this one led, as marks of their names."""
    commits: int = 0
    """Updates that this coordinator has committed."""
    label: str | None = None
    """Label that the trainer gave before its first tensors."""
    clock: PhaseClock = field(default_factory=PhaseClock)
    last_update: LastUpdate | None = None
    ended: Counter[UpdateOutcome] = field(default_factory=Counter)
    """Weight updates that ended while this coordinator led, by outcome. A last update that was read from the record is not among them."""
    now: float = 0.0
    """Time of the newest event."""
    wall_offset: float = 0.0
    """What to add to ``now`` to get seconds since 1970: only ever shown."""
    rested: float = 0.0
    """When the last operation that changed the fleet ended: answers from before tell of the time before."""

    @property
    def phase(self) -> Phase:
        """Where the weight update stands."""
        return self.clock.phase

    @property
    def held(self) -> str:
        """What keeps all engines from generating until somebody lets them, as a sentence; empty if nothing does."""
        asleep = self.mode is not None and all(self.lent_of(name) for name in self.engines)
        return held_sentence(self.kept) or (LENT if asleep else "")

    @property
    def keeps_weights(self) -> bool:
        """Whether it serves what it was started with, and nobody sends it weights."""
        return self.mode is FleetMode.COLOCATED

    def lent_of(self, name: str) -> tuple[str, ...]:
        """Memory of this engine that the trainer has."""
        return self.lent_apart.get(name, self.lent) if self.mode is not None else ()

    @property
    def table(self) -> RankTable:
        """Ranks of a group opened now."""
        return rank_table((name, engine.tensor_size) for name, engine in self.members().items())

    def members(self) -> dict[str, Engine]:
        """Engines that take part in a group opened now, in rank order."""
        return {name: engine for name, engine in self.engines.items() if engine.member}

    def up(self) -> list[str]:
        """Engines that can be called now."""
        return [name for name, engine in self.engines.items() if engine.up and not engine.catching]

    def boot(self, name: str) -> str | None:
        """The life of an engine that was last seen; None when it is gone or down."""
        engine = self.engines.get(name)
        return engine.boot if engine is not None else None

    def changed(self, boots: Mapping[str, str]) -> list[str]:
        """Of the engines that ran in these lives, those that do not any more."""
        return [name for name, boot in boots.items() if self.boot(name) != boot]

    def is_live(self, group: Group) -> bool:
        """Whether every member that joined is still the same process. A joiner outside does not make a group stale."""
        return not self.changed(group.boots)

    def target(self) -> Version:
        """The version that the open update becomes if it commits."""
        label = self.update.label if self.update is not None else None
        committed = self.committed
        if committed is None:
            raise RuntimeError("no update can be open before the committed version is proved")
        return next_version(committed, label or self.label, self.burned, self.next_run)

    def require_update(self) -> Update:
        """Return the open update. Raises RuntimeError if none is open: a bug."""
        if self.update is None:
            raise RuntimeError("no update is open")
        return self.update

    def commit(self, version: Version) -> None:
        """From now on this is the version."""
        before = self.history or ([self.committed] if self.committed is not None else [])
        if version != self.committed:
            self.checksums, self.disk = {}, None
        self.history = history(before, version, self.policy.max_staleness)
        self.committed = version

    def end_update(self, last: LastUpdate) -> None:
        """Note how an update ended. Call this once per update; later figures of the same update are assigned to ``last_update``."""
        self.last_update = last
        self.ended[last.outcome] += 1

    def tolerated(self) -> list[Version]:
        """Older versions that may be served."""
        keep = self.policy.max_staleness
        return self.history[:-1][-keep:] if keep else []

    def burn(self, versions: Iterable[Version | None]) -> None:
        """Never use these versions for other weights."""
        self.burned = newest(self.burned, *versions)

    def advice(self) -> dict[str, Any]:
        """What a refusal tells: with what a trainer would be right."""
        table = self.table
        return {
            "epoch": self.epoch,
            "world_size": table.world_size,
            "rank_offset": 1,
            "members": [
                {"name": name, "tensor_size": size, "rank_offset": table.offsets()[name]}
                for name, size in zip(table.names, table.sizes, strict=True)
            ],
        }

    def enter(self, phase: Phase) -> None:
        """Advance to a phase; raises IllegalTransitionError if it cannot follow the current one."""
        self.clock.enter(phase, self.now)

    def phases_ms(self) -> dict[str, int]:
        """Milliseconds spent in each phase since the fleet was last idle, and their sum."""
        return self.clock.milliseconds(self.now)

    def finished(self) -> str:
        """Wall-clock time of the newest event, RFC 3339 in UTC."""
        moment = datetime.fromtimestamp(self.now + self.wall_offset, UTC)
        return moment.isoformat(timespec="milliseconds").replace("+00:00", "Z")

    def sync_request(self, name: str | None = None) -> SyncRequest:
        """What every agent is told again and again. One that was never heard (``name``) is asked first: what it was told before
        may prove a newer version, and it forgets that with the first word of another one."""
        engine = self.engines.get(name) if name is not None else None
        proved = self.committed is not None and (engine is None or engine.status is not None)
        return SyncRequest(
            committed=self.committed if proved else None,
            tolerated=self.tolerated() if proved else [],
            lease=self.policy.trainer_lease.ttl,
            silent=self.policy.deadlines.silent,
            hold=self.kept if proved else None,
            drain=self.drain,
            at=self.now,
            life=self.life,
        )

    def _may_hold(self) -> frozenset[str]:
        """The tensors that some engine may hold otherwise than they were committed."""
        wrote = [engine.wrote for engine in self.engines.values() if engine.wrote]
        return self.tried.union(*wrote) if wrote else self.tried

    def record(self) -> Record | None:
        """What is persisted; None before the rebuild has ended: nothing unproved is ever written."""
        if self.committed is None:
            return None
        places = {name: place for place, name in enumerate(self.engines)}
        return Record(
            term=self.term,
            epoch=self.epoch,
            committed=self.committed,
            intent_generation=self.generation,
            engines=[engine.row(ROOM // max(1, len(self.engines))) for engine in self.engines.values()],
            joined=[group.row(places) for group in self.groups.values()],
            last_update=self.last_update,
            history=self.history,
            burned=self.burned,
            under_way=self.target() if self.update is not None else None,
            next_run=self.next_run,
            fleet_id=self.id,
            world_size=self.table.world_size,
            state=self.kept,
            waits_for_trainer=self.hold is not None and self.hold.by is By.LOSS,
            checksums=self.checksums,
            disk=self.disk,
            tensors=self.brought.row,
            sources=sorted(self.sources),
            tried=packed(self._may_hold(), self.brought.names, self.tried_before),
            lent=list(self.lent) if self.mode is not None else None,
            lent_apart={name: list(tags) for name, tags in self.lent_apart.items() if name in self.engines},
            noted={name: noted for name, noted in self.noted.items() if name in self.engines},
        )
