"""A fleet with transport Staged: a simulated weight store beside the simulated agents. No I/O, no clock."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from sglang_rollout.api.intent import WantedStore
from sglang_rollout.api.weights_spec import (
    Activation,
    ActivationStrategy,
    Backend,
    Staging,
    TrainerPause,
    Transport,
    VersionPolicy,
    Weights,
)
from sglang_rollout.coordinator.update import requests as rq
from sglang_rollout.coordinator.update.events import Result, Send, StoreSeen
from sglang_rollout.coordinator.update.requests import Answer
from sglang_rollout.coordinator.update.store import STORE
from sglang_rollout.coordinator.update.versions import order_key
from sglang_rollout.wire.ports import (
    AGENT_ACTIVATE,
    STORE_COMMIT,
    STORE_DROP,
    STORE_FETCH,
    STORE_JOIN,
    STORE_LEAVE,
    STORE_OPEN,
    STORE_PREFLIGHT,
    STORE_RECEIVE,
    STORE_SEAL,
)
from sglang_rollout.wire.reasons import RefusalCode
from sglang_rollout.wire.record import EndedUpdate
from sglang_rollout.wire.staged import Shard, StagedTensor, StoreStatus
from sglang_rollout.wire.states import FleetState, Snapshot, SnapshotsState, StagedCopy, Version
from tests.properties.support.coordinator_world import World
from tests.properties.support.simulated_agent import NAMES, Copy, Holder, SimulatedAgent, fetch

TENSORS = {"names": list(NAMES), "dtypes": ["bfloat16"] * len(NAMES), "shapes": [[2]] * len(NAMES)}


@dataclass
class SimulatedStore:
    """The weight store, as the coordinator, the agents and an uploader reach it."""

    peers: Mapping[str, Holder] = field(default_factory=dict)
    starts: int = 1
    answers: bool = True
    copies: dict[str, Copy] = field(default_factory=dict)
    """Complete versions by update."""
    arriving: dict[str, dict[str, object]] = field(default_factory=dict)
    """Tensors of versions that are not complete, by update."""
    wanted: dict[str, set[str]] = field(default_factory=dict)
    """Tensors of each upload that have not arrived."""
    groups: list[str] = field(default_factory=list)
    committed: str = ""
    """Update of the version that the coordinator has named as committed."""
    snapshots: dict[str, Copy] | None = None
    """Versions on the volume by update; None: there is no volume."""
    damaged: set[str] = field(default_factory=set)
    """Updates whose snapshots cannot be read."""
    message: str = ""
    """Why the newest snapshot could not be written."""

    @property
    def serves_copies(self) -> bool:
        return self.answers

    def restart(self) -> None:
        """End the process. Nothing that it held remains."""
        self.starts += 1
        self.copies, self.arriving, self.wanted, self.groups, self.answers = {}, {}, {}, [], True
        self.committed = ""

    def upload(self, update: str, tensors: Mapping[str, object]) -> None:
        """Let pieces of an upload arrive."""
        self.arriving[update].update(tensors)
        self.wanted[update] -= tensors.keys()

    def digest_of(self, update: str) -> str:
        """Return the digest of a version whose tensors have all arrived."""
        return hashlib.sha256(repr(sorted(self.arriving[update].items())).encode()).hexdigest()

    def status(self) -> StoreStatus:
        partial = [StagedCopy(update=update, bytes=len(tensors)) for update, tensors in self.arriving.items()]
        whole = [StagedCopy(update=update, version=copy.version, bytes=8, digest=copy.digest) for update, copy in self.copies.items()]
        return StoreStatus(
            instance=f"store#{self.starts}",
            copies=[*whole, *partial],
            groups=self.groups,
            committed=self.committed,
            snapshots=self._snapshots_state(),
        )

    def _snapshots_state(self) -> SnapshotsState | None:
        if self.snapshots is None:
            return None
        found = [
            Snapshot(update=update, version=copy.version, digest=copy.digest, bytes=8, problem="damaged" if update in self.damaged else "")
            for update, copy in self.snapshots.items()
            if copy.version is not None
        ]
        return SnapshotsState(snapshots=found, message=self.message)

    def call(self, path: str, body: dict[str, Any], token: object, *, works: bool) -> Result:
        if not self.answers:
            return Result(ok=False, message="no answer within 60 s.")
        if not works:
            return Result(ok=False, status=500, message="the store failed.")
        refused = self._apply(path, body, token)
        return refused or Result(ok=True, status=200, store=self.status() if path != STORE_PREFLIGHT else None)

    def _apply(self, path: str, body: dict[str, Any], token: object) -> Result | None:
        match path:
            case _ if path == STORE_JOIN:
                self.groups = [*self.groups, body["group_name"]]
            case _ if path == STORE_LEAVE:
                if body["group_name"] not in self.groups:
                    return Result(ok=False, status=404, message="There is no such process group.", code=RefusalCode.NOT_FOUND)
                self.groups = [name for name in self.groups if name != body["group_name"]]
            case _ if path in (STORE_OPEN, STORE_DROP):
                self._keep(body["keep"])
                if path == STORE_OPEN:
                    self.arriving[body["update"]] = {}
                    self.wanted[body["update"]] = {tensor["name"] for shard in body["shards"] for tensor in shard["tensors"]}
            case _ if path == STORE_RECEIVE:
                if body["group_name"] not in self.groups or body["update"] not in self.arriving:
                    return Result(ok=False, status=404, message="There is no such process group or update.", code=RefusalCode.NOT_FOUND)
                self.arriving[body["update"]].update({tensor["name"]: token for tensor in body["shard"]["tensors"]})
            case _ if path == STORE_SEAL:
                return self._seal(body)
            case _ if path == STORE_COMMIT:
                self.committed = body["update"]
                if self.snapshots is not None:
                    self.snapshots[body["update"]] = self.copies[body["update"]]
            case _ if path == STORE_FETCH:
                found = fetch(self.peers, body) if body["parents"] else (self.snapshots or {}).get(body["update"])
                if found is None or (not body["parents"] and body["update"] in self.damaged):
                    return Result(ok=False, status=502, message="no agent and no snapshot has the version.")
                self._keep(body["keep"])
                self.copies[body["update"]] = found
        return None

    def _keep(self, updates: Collection[str]) -> None:
        self.copies = {update: copy for update, copy in self.copies.items() if update in updates}
        self.arriving = {update: tensors for update, tensors in self.arriving.items() if update in updates}

    def _seal(self, body: dict[str, Any]) -> Result | None:
        update = body["update"]
        if update in self.copies:
            return None
        if update not in self.arriving:
            return Result(ok=False, status=404, message="There is no such update.", code=RefusalCode.NOT_FOUND)
        if self.wanted[update]:
            return Result(ok=False, status=409, message=f"{len(self.wanted[update])} pieces are missing.", code=RefusalCode.CONFLICT)
        digest, tensors = self.digest_of(update), self.arriving.pop(update)
        self.copies[update] = Copy(tensors, digest, Version.model_validate(body["version"]))
        return None


class StagedWorld(World):
    """A state machine, its agents, its weight store, and the store of its record."""

    def __init__(
        self,
        engines: int = 2,
        min_committed: int | str | None = None,
        *,
        copies: int = 2,
        in_turn: int | str | None = None,
        trainer_pause: TrainerPause = TrainerPause.HONOUR,
        **policy: Any,
    ) -> None:
        """Start a fleet. ``in_turn``: engines that load at a time; None: all at once."""
        if in_turn is not None:
            activation = Activation(strategy=ActivationStrategy.ROLLING, max_unavailable=in_turn)
            policy = {"version_policy": VersionPolicy.MAX_STALENESS, "max_staleness": 1, "activation": activation, **policy}
        self.store = SimulatedStore()
        self.uploads = itertools.count(1)
        super().__init__([1] * engines, min_committed)
        staging = Staging(size_limit="1Gi", copies=copies, fanout=2, trainer_pause=trainer_pause)
        policy = {"backend": Backend.GLOO, **policy}
        self.policy = Weights(min_committed=min_committed, transport=Transport.STAGED, staging=staging, **policy)
        self.wanted_store = WantedStore(name="demo-store", url="http://store", data_url="http://store-data")
        self.connect()
        self.start()
        self.settle()

    def connect(self) -> None:
        """Let all pods reach each other, also those that came since."""
        self.store.peers = self.agents
        for agent in self.agents.values():
            agent.peers = {**self.agents, STORE: self.store}

    def add_agent(self, name: str) -> SimulatedAgent:
        """Start a pod of an engine."""
        self.agents[name] = SimulatedAgent(name, starts=1000 * self.generation)
        self.connect()
        return self.agents[name]

    def call_store(self, path: str, body: dict[str, Any], token: object, *, works: bool) -> Result:
        return self.store.call(path, body, token, works=works)

    def check_pause(self, effect: Send) -> None:
        super().check_pause(effect)
        if effect.path == AGENT_ACTIVATE:
            self._check_turns(effect)

    def _check_turns(self, effect: Send) -> None:
        """Check that a load closes no more gates at a time than the policy allows, if engines load in turn."""
        fleet, activation = self.machine.fleet, self.policy.activation
        generates = fleet.pause is None and fleet.applied_state is FleetState.ACTIVE and not fleet.is_pause_waiting
        if activation.strategy is not ActivationStrategy.ROLLING or not generates:
            return
        permitted = {order_key(version) for version in [*fleet.tolerated(), *filter(None, [fleet.committed])]}
        called = [self.agents[name] for name in effect.bodies if name in self.agents and not fleet.engines[name].is_catching_up]
        closing = [agent.name for agent in called if agent.gate_open and agent.version and order_key(agent.version) in permitted]
        wanted = activation.max_unavailable
        most = wanted if isinstance(wanted, int) else max(1, int(wanted.rstrip("%")) * len(fleet.engines) // 100)
        assert len(closing) <= most, f"the gates of {closing} close at the same time"

    def poll_store(self) -> None:
        status = self.store.status() if self.store.answers else None
        self.feed(StoreSeen(status, self.machine.fleet.next_seq(), self.now))

    def sync_all(self) -> None:
        self.poll_store()
        super().sync_all()

    def open_group(self, name: str = "g", caller: str = "") -> Answer:
        body = {"master_address": "10.0.0.9", "master_port": 7, "rank_offset": 1, "group_name": name, "world_size": 2}
        return self.do(rq.OpenGroup(body), caller)

    def send_tensors(self, label: str | None = None, caller: str = "") -> Answer:
        return self.do(rq.Update("g", label, TENSORS), caller)

    def push(self, label: str | None = None, caller: str = "") -> Answer:
        """Make a push through a process group, with a session. Every call succeeds until the commit."""
        if "g" not in self.machine.fleet.groups:
            assert self.open_group("g", caller).success
        for request in (rq.Begin(), rq.Update("g", label, TENSORS)):
            answer = self.do(request, caller)
            assert answer.success, answer.message
        return self.do(rq.End(), caller)

    def open_upload(self, label: str | None = None, names: Collection[str] = NAMES, caller: str = "") -> Answer:
        return self.do(rq.Upload((shard_of(names),), label), caller)

    def fill_upload(self, update: str, names: Collection[str] = NAMES) -> None:
        """Let all pieces of an upload arrive."""
        token = ("upload", next(self.uploads))
        self.store.upload(update, dict.fromkeys(names, token))
        if self.opened[0] is not self.machine.fleet.update:
            self.opened = (self.machine.fleet.update, {})
        self.opened[1].update(dict.fromkeys(names, token))

    @property
    def serving(self) -> list[str]:
        return [name for name, agent in self.agents.items() if agent.gate_open]

    def versions(self) -> dict[str, str]:
        """Return the version that each engine holds."""
        return {name: str(agent.version) for name, agent in self.agents.items()}


def shard_of(names: Collection[str], shape: tuple[int, ...] = (2,)) -> Shard:
    return Shard(tensors=[StagedTensor(name=name, dtype="BF16", shape=list(shape)) for name in names])


def last(world: StagedWorld) -> EndedUpdate:
    """Return the update that ended last."""
    found = world.machine.fleet.last_update
    assert found is not None
    return found


def serves(world: StagedWorld, version: str) -> bool:
    """Return whether every engine serves this version, and none is paused."""
    world.settle()
    agents = world.agents.values()
    return all(agent.gate_open and not agent.paused and str(agent.version) == version for agent in agents)


def run_to(world: StagedWorld, path: str) -> None:
    """Carry out effects until a call to this path is the next."""
    for _ in range(200):
        if world.pending and isinstance(world.pending[0], Send) and world.pending[0].path == path:
            return
        world.complete()
    raise AssertionError(f"{path} was not called")
