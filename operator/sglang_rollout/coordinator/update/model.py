"""What the coordinator knows about its fleet. Data only: operations and :mod:`.knowledge` change it.

:class:`Fleet` is composed of five parts with few mutators each. Everything else reads them; the record persists them.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from sglang_rollout.api.weights_spec import Transport, Weights
from sglang_rollout.coordinator.update.completeness import Model
from sglang_rollout.coordinator.update.engine import Engine
from sglang_rollout.coordinator.update.failed_commit import make_row
from sglang_rollout.coordinator.update.interruption import Cause, Interruption, Interruptions, in_order
from sglang_rollout.coordinator.update.membership import describe_refused_updates
from sglang_rollout.coordinator.update.phases import Phase, Transaction, Update
from sglang_rollout.coordinator.update.ranks import Group, RankTable, rank_table
from sglang_rollout.coordinator.update.store import STORE, Store
from sglang_rollout.coordinator.update.tensor_names import MAX_STORED_HASHES
from sglang_rollout.coordinator.update.versions import Committed
from sglang_rollout.wire.agent import SyncRequest
from sglang_rollout.wire.record import Adapter, EndedUpdate, GroupFailure, Isolation, Record
from sglang_rollout.wire.states import FleetMode, FleetState, Version

MAX_REASONS_CHARACTERS = 100_000
"""Room for the reasons of all engines in the record, which must fit into a ConfigMap (1 MiB): 200 characters each for 500 engines."""


@dataclass(frozen=True)
class KnownModel:
    """What one engine has reported about the tensors of its model."""

    engine: str
    boot: str
    """Boot ID of the engine."""
    until: float
    """When the engine is asked again."""
    model: Model


@dataclass
class Membership:
    """The wanted engines, those of them that take part in updates, and the process groups that they have joined."""

    engines: dict[str, Engine] = field(default_factory=dict)
    groups: dict[str, Group] = field(default_factory=dict)
    """Open process groups by name."""
    epoch: int = 0
    """Grows when the set of members or the boot ID of any member changes."""
    formed: bool = False
    """True once the fleet was complete or has taken weights. From then on it continues with the engines that are there."""
    model: KnownModel | None = None
    """The tensors of the model that the engines run; None: no engine was asked."""
    base: int | None = None
    """Engines that make the fleet complete; None: all that are wanted."""
    group_failure: GroupFailure | None = None
    """Why the last call to open a process group was refused or failed."""


@dataclass
class Adapters:
    """LoRA adapters that every engine should hold, by name."""

    of_spec: dict[str, Adapter] | None = None
    """None: the spec does not list adapters."""
    of_trainers: dict[str, Adapter] = field(default_factory=dict)
    """Adapters that trainers have loaded."""


@dataclass
class Fleet:
    """Everything the state machine knows."""

    name: str
    term: int
    coordinator_id: str = ""
    """Identifies this coordinator process."""
    seq: Iterator[int] = field(default_factory=lambda: itertools.count(1))
    """Source of sequence numbers. They order the syncs that are sent and the events between them."""
    policy: Weights = field(default_factory=Weights)
    paths: tuple[str, ...] = ()
    """Folders below which trainers may name checkpoints and adapters; empty: all."""
    generation: int = 0
    """Generation of the intent that was acted on."""
    store: Store | None = None
    """The weight store; None: the transport is not Staged."""
    weights: Committed = field(default_factory=Committed)
    membership: Membership = field(default_factory=Membership)
    interruptions: Interruptions = field(default_factory=Interruptions)
    adapters: Adapters = field(default_factory=Adapters)
    transaction: Transaction = field(default_factory=Transaction)
    is_isolated: bool = False
    """True if NetworkPolicies select the engine pods."""
    isolation: Isolation | None = None
    """Result of the last check of the NetworkPolicies; None: no engine could be checked."""
    callers_forbidden: bool = False
    """True if the coordinator may not watch callers of other namespaces, which ``spec.security`` selects."""
    holder: str = ""
    """Caller of the trainer that holds the fleet, or held it last; empty: not known."""
    held_since: float = float("-inf")
    """When the holder last opened something."""
    is_pause_waiting: bool = False
    """True while a call, or a change of ``spec.state``, that ends generation waits for its turn."""
    gone: str = ""
    """The holder of the fleet, if it had no pods when the last call arrived."""
    caller: str = ""
    """Caller of the operation that holds the turn; empty for operations of the coordinator's own."""
    now: float = 0.0
    """Time of the newest event."""
    wall_offset: float = 0.0
    """Added to ``now`` this gives seconds since 1970. For display only."""
    rested_seq: int = 0
    """Sequence number drawn when the last operation that changed the fleet ended. The answer to an earlier sync may describe the state
    before that."""

    @property
    def committed(self) -> Version | None:
        """The committed version; None until it is proved."""
        return self.weights.version

    @property
    def engines(self) -> dict[str, Engine]:
        """The wanted engines by name."""
        return self.membership.engines

    @property
    def groups(self) -> dict[str, Group]:
        """Open process groups by name."""
        return self.membership.groups

    @property
    def epoch(self) -> int:
        """Grows when the set of members or the boot ID of any member changes."""
        return self.membership.epoch

    @property
    def table(self) -> RankTable:
        """Ranks of a process group opened now. With transport Staged only the weight store joins it."""
        if self.is_staged:
            return RankTable((STORE,), (1,))
        return rank_table((name, engine.tensor_size) for name, engine in self.members().items())

    @property
    def is_staged(self) -> bool:
        """True if tensors go to the weight store first (``weights.transport: Staged``)."""
        return self.policy.transport is Transport.STAGED and self.mode is None

    @property
    def is_at_rest(self) -> bool:
        """True if no engine takes part in an open update.

        Valid between two operations: an update with transport Staged is open for engines only while an operation activates it.
        """
        return self.update is None or self.update.staged is not None

    @property
    def update(self) -> Update | None:
        """The open update."""
        return self.transaction.update

    @property
    def phase(self) -> Phase:
        """Where the weight update stands."""
        return self.transaction.clock.phase

    @property
    def last_update(self) -> EndedUpdate | None:
        """How the last update ended."""
        return self.transaction.last

    @property
    def pause(self) -> Interruption | None:
        """The pause by a trainer, for an update or for a lost trainer."""
        return self.interruptions.pause

    @property
    def requested_pause(self) -> Interruption | None:
        """The same, or a trainer's pause that is deferred."""
        return self.interruptions.requested_pause

    @property
    def defers_pause(self) -> bool:
        """True while a trainer's pause is deferred: engines generate."""
        return self.requested_pause is not None and self.pause is None

    @property
    def applied_state(self) -> FleetState:
        """The ``spec.state`` that is in effect."""
        return self.interruptions.applied_state

    @property
    def mode(self) -> FleetMode | None:
        """Whose GPUs the fleet uses; None: its own."""
        return self.interruptions.mode

    @property
    def keeps_weights(self) -> bool:
        """True if the fleet never receives weights."""
        return self.mode is FleetMode.COLOCATED

    @property
    def why_not_generating(self) -> str:
        """Why no engine generates until the spec or a co-located trainer changes that; empty if nothing does."""
        return self.interruptions.why_not_generating(self.engines)

    @property
    def has_trainer_memory(self) -> bool:
        """True while engines have released memory for a trainer, and not only for ``spec.state``."""
        if self.mode is not None:
            return any(self.interruptions.trainer_memory(name) for name in self.engines)
        return self.applied_state is not FleetState.ASLEEP and any(engine.released for engine in self.engines.values())

    def hold(self) -> None:
        """Make the caller of the current operation the holder: it has opened something, or claimed the fleet."""
        self.holder, self.held_since = self.caller or self.holder, self.now

    def new_update_id(self) -> str:
        """Return the ID of a new update: 32 hexadecimal digits that no other coordinator process chooses."""
        text = f"{self.name}/{self.term}/{self.coordinator_id}/{next(self.seq)}"
        return hashlib.sha256(text.encode()).hexdigest()[:32]

    def next_seq(self) -> int:
        """Return a sequence number that is higher than all before."""
        return next(self.seq)

    def has_news(self, name: str) -> bool:
        """Return True if the engine's status answers a sync that was sent after the last operation ended."""
        return self.engines[name].status_seq > self.rested_seq

    def members(self) -> dict[str, Engine]:
        """Return the engines that take part in an update that begins now, in rank order."""
        return {name: engine for name, engine in self.engines.items() if engine.member and self.can_take_updates(engine)}

    def can_take_updates(self, engine: Engine) -> bool:
        """Return False for an engine whose pod was made before the transport became Staged."""
        return engine.takes_copies or not self.is_staged

    def up(self) -> list[str]:
        """Return the engines that can be called now."""
        return [name for name, engine in self.engines.items() if engine.up and not engine.is_catching_up]

    def boot(self, name: str) -> str | None:
        """Return the boot ID of an engine that was last seen; None if the engine is gone or down. For the weight store: its instance."""
        if name == STORE:
            return self.store.instance if self.store is not None else None
        engine = self.engines.get(name)
        return engine.boot if engine is not None else None

    def is_up(self, name: str) -> bool:
        """Return True if an engine, or the weight store, can be called now."""
        if name == STORE:
            return self.store is not None and self.store.is_up
        return name in self.engines and self.engines[name].up

    def lost_engines(self, boots: Mapping[str, str]) -> list[str]:
        """Return those engines that are gone, or that have another boot ID than the given one."""
        return [name for name, boot in boots.items() if self.boot(name) != boot]

    def is_live(self, group: Group) -> bool:
        """Return True if every member of the process group still runs in the boot that joined."""
        return not self.lost_engines(group.boots)

    def target(self) -> Version:
        """Return the version that the open update becomes if it commits."""
        if self.update is not None and self.update.staged is not None and self.update.staged.version is not None:
            return self.update.staged.version
        label = self.update.label if self.update is not None else None
        return self.weights.next_version(label or self.transaction.label)

    def require_update(self) -> Update:
        """Return the open update. Raises RuntimeError if none is open: a bug."""
        if self.update is None:
            raise RuntimeError("no update is open")
        return self.update

    def commit(self, version: Version, author: str) -> None:
        """Make this the committed version.

        Args:
            version: The version.
            author: The caller that pushed it; empty: not known, or no caller did.
        """
        self.weights.commit(version, author, self.policy.max_staleness or 0)

    def tolerated(self) -> list[Version]:
        """Return the older versions that may be served."""
        keep = self.policy.max_staleness
        return self.weights.history[:-1][-keep:] if keep else []

    def advice(self) -> dict[str, Any]:
        """Return the numbers that a refused trainer needs: epoch, world size, ranks."""
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
        self.transaction.clock.enter(phase, self.now)

    def phases_ms(self) -> dict[str, int]:
        """Return the milliseconds spent in each phase since the fleet was last idle, and their sum."""
        return self.transaction.clock.milliseconds(self.now)

    def finished(self) -> str:
        """Return the wall-clock time of the newest event, RFC 3339 in UTC."""
        return self._wall_time(self.now)

    def _wall_time(self, moment: float) -> str:
        wall = datetime.fromtimestamp(moment + self.wall_offset, UTC)
        return wall.isoformat(timespec="milliseconds").replace("+00:00", "Z")

    @property
    def pause_mode(self) -> str:
        """SGLang's mode in which a load pauses engines: that of the trainer's pause, else the policy's."""
        return (self.pause.mode if self.pause is not None else None) or self.policy.pause_mode.sglang

    def sync_request(self, name: str | None = None) -> SyncRequest:
        """Return the message that agents receive about twice a second.

        Args:
            name: The engine that receives it. An agent that was never heard is asked first: what it received from an earlier coordinator
                may prove a newer version, and the agent forgets that with the first committed version it receives.
        """
        engine = self.engines.get(name) if name is not None else None
        proved = self.committed is not None and (engine is None or engine.status is not None)
        return SyncRequest(
            committed=self.committed if proved else None,
            tolerated=self.tolerated() if proved else [],
            staged=self.weights.staged if proved else None,
            lease=self.policy.trainer_lease.ttl_seconds,
            silent=self.policy.deadlines.silent_seconds,
            spec_state=self.applied_state if proved else None,
            drain=self.interruptions.drain_seconds,
            load=self.policy.deadlines.activate_seconds,
            pause_mode=self.pause_mode,
            sender=self.coordinator_id,
            seq=self.next_seq(),
        )

    def record(self) -> Record | None:
        """Return the record to persist; None before the committed version is proved."""
        weights, interruptions = self.weights, self.interruptions
        if weights.version is None:
            return None
        places = {name: place for place, name in enumerate(self.engines)}
        room = MAX_REASONS_CHARACTERS // max(1, len(self.engines))
        doubtful = weights.doubt.names - weights.names
        doubtful_room = min(len(doubtful), MAX_STORED_HASHES - min(len(weights.names), MAX_STORED_HASHES // 2))
        return Record(
            term=self.term,
            epoch=self.epoch,
            committed=weights.version,
            author=weights.author,
            intent_generation=self.generation,
            engines=[engine.row(room) for engine in self.engines.values()],
            joined=[group.row(places) for group in self.groups.values()],
            group_failure=self.membership.group_failure,
            last_update=self.last_update,
            earlier_updates=self.transaction.earlier,
            history=weights.history,
            reserved=weights.reserved,
            under_way=self.target() if self.update is not None else None,
            under_way_since=self._wall_time(self.update.started) if self.update is not None else "",
            under_way_update=self.update.staged.id if self.update is not None and self.update.staged is not None else "",
            failed_commit=make_row(self.transaction.failed, self.update, self.requested_pause),
            next_run=weights.next_run,
            fleet_id=weights.fleet_id,
            world_size=self.table.world_size,
            state=self.applied_state,
            waits_for_trainer=self.pause is not None and self.pause.cause is Cause.TRAINER_LOST,
            checksums=weights.checksums,
            disk=weights.disk,
            staged=weights.staged,
            names=weights.names.pack(MAX_STORED_HASHES - doubtful_room),
            doubtful_names=doubtful.pack(doubtful_room),
            doubtful_engines={places[name]: boot for name, boot in weights.doubt.engines.items() if name in places},
            restarts=sorted(places[name] for name in weights.doubt.restarts if name in places),
            sources=sorted(weights.groups),
            released_to_trainer=list(interruptions.released_to_trainer) if self.mode is not None else None,
            released_at_engines={name: list(in_order(tags)) for name, tags in interruptions.at_engines.items() if name in self.engines},
            engine_checksums={name: noted for name, noted in weights.engine_checksums.items() if name in self.engines},
            isolation=self.isolation if self.is_isolated else None,
            callers_forbidden=self.callers_forbidden,
            snapshot_problem=self.store.snapshot_problem if self.store is not None else "",
            updates_refused=describe_refused_updates(self),
            holder=self.holder,
        )
