"""Coordinators of different terms that call the same agents and do not know of each other. No I/O, no clock."""

from __future__ import annotations

from dataclasses import dataclass, field

from sglang_rollout.api.intent import Intent, WantedEngine
from sglang_rollout.api.weights_spec import Weights
from sglang_rollout.coordinator.update import Machine
from sglang_rollout.coordinator.update.events import (
    Answered,
    Asked,
    Cut,
    Effect,
    Event,
    Reply,
    Result,
    Save,
    Seen,
    Send,
    Tick,
    Wanted,
    Write,
    Written,
)
from sglang_rollout.coordinator.update.requests import Answer, Request
from sglang_rollout.coordinator.update.versions import order_key
from sglang_rollout.wire.ports import AGENT_ACK, AGENT_RUN, AGENT_SYNC
from sglang_rollout.wire.record import Record
from sglang_rollout.wire.states import Version
from tests.properties.support.simulated_agent import SimulatedAgent

SILENCE = "no answer within 60 s."
Contents = frozenset[tuple[str, object]]


@dataclass
class Received:
    """What one agent has received from the coordinator of the highest term."""

    term: int = 0
    served: frozenset[tuple[int, int]] = frozenset()


@dataclass(eq=False)
class Coordinator:
    """One coordinator process: its state machine, its pending calls, and the failures of its network."""

    machine: Machine
    record: Record | None
    """The newest record to write."""
    alive: bool = True
    refused: bool = False
    """True if an agent has refused the term after this coordinator had proved the committed version."""
    pending: list[Send | Write] = field(default_factory=list)
    results: dict[int, dict[str, Result]] = field(default_factory=dict)
    """Answers to each pending Send, by the ID of the Send and by engine."""
    cut_off: set[str] = field(default_factory=set)
    """Engines that the coordinator cannot reach."""
    store_fails: bool = False
    """True while the coordinator cannot reach the store."""
    answers: dict[int, Answer] = field(default_factory=dict)
    calls: int = 0

    @property
    def term(self) -> int:
        return self.machine.fleet.term


class Pair:
    """The agents, the store, and coordinators that do not know of each other."""

    def __init__(self, engines: int, min_committed: int | None) -> None:
        self.policy = Weights(min_committed=min_committed)
        self.agents = {f"e{index}": SimulatedAgent(f"e{index}") for index in range(engines)}
        self.now = 100.0
        self.store: Record | None = None
        self.lease = 0
        """Transitions of the Lease. The number grows with each leader, also if the record is lost."""
        self.received = {name: Received() for name in self.agents}
        self.acked: dict[tuple[int, tuple[int, int]], set[str]] = {}
        """Engines that have acknowledged a version to the coordinator of a term."""
        self.commits: dict[tuple[int, int], set[int]] = {}
        """Terms that have committed each version. The store stopped none of them, so their trainers got the answer."""
        self.refusals = 0
        self.leading: list[Coordinator] = []
        self.start()

    def start(self, *, keep_record: bool = True) -> Coordinator:
        """Start another coordinator. It reads the record and writes its own term into the record. Earlier coordinators continue."""
        found = self.store if keep_record else None
        self.lease += 1
        term = max(self.lease, (found.term if found else 0) + 1)
        new = Coordinator(
            Machine(name="demo", term=term, record=found, at=self.now), found.model_copy(update={"term": term}) if found else None
        )
        new.machine.fleet.coordinator_id = f"coordinator-{self.lease}"
        if not keep_record:
            self.store = None
        self.write(new)
        self.leading = [*(one for one in self.leading if one.alive), new]
        engines = [WantedEngine(name=name) for name in self.agents]
        intent = Intent(generation=1, name="demo", namespace="default", engines=engines, weights=self.policy)
        self.feed(new, Wanted(intent, frozenset(self.agents), self.now))
        return new

    def feed(self, coordinator: Coordinator, event: Event) -> None:
        if coordinator.alive:
            self.carry_out(coordinator, coordinator.machine.handle(event))

    def carry_out(self, coordinator: Coordinator, effects: list[Effect]) -> None:
        for effect in effects:
            match effect:
                case Send():
                    coordinator.pending.append(effect)
                    coordinator.results[effect.id] = {}
                case Write():
                    coordinator.pending.append(effect)
                case Save(record):
                    coordinator.record = record
                    self.write(coordinator)
                case Cut():
                    send = next(sent for sent in coordinator.pending if sent.id == effect.effect)
                    assert isinstance(send, Send)
                    missing = {name: Result(ok=False, message=effect.reason) for name in send.bodies}
                    self.conclude(coordinator, send, {**missing, **coordinator.results[send.id]})
                case Reply(call, answer):
                    coordinator.answers[call] = answer

    def write(self, coordinator: Coordinator) -> bool:
        """Write the record as the store does: a coordinator that would overwrite a higher term stops instead."""
        if coordinator.record is None or coordinator.store_fails or not coordinator.alive:
            return False
        if self.store is not None and self.store.term > coordinator.record.term:
            coordinator.alive = False
            return False
        self.store = coordinator.record
        return True

    def ask(self, coordinator: Coordinator, request: Request) -> int:
        coordinator.calls += 1
        self.feed(coordinator, Asked(coordinator.calls, request, self.now))
        return coordinator.calls

    def tick(self, seconds: float) -> None:
        self.now += seconds
        for coordinator in self.leading:
            self.feed(coordinator, Tick(self.now))

    def reach(
        self, coordinator: Coordinator, name: str, path: str, body: dict[str, object], token: object, *, works: bool = True
    ) -> Result:
        """Send one call to one agent. The agent checks the term first."""
        agent = self.agents[name]
        if name in coordinator.cut_off or not agent.answers:
            return Result(ok=False, message=SILENCE)
        if coordinator.term < agent.term:
            self.refusals += 1
            coordinator.refused = coordinator.refused or coordinator.machine.fleet.committed is not None
            if coordinator.machine.is_outranked(agent.term):
                coordinator.alive = False
            elif coordinator.machine.fleet.committed is None:
                self.rise(coordinator, agent.term + 1)
            return Result(ok=False, status=409, message=f"term {coordinator.term} is over.")
        agent.term = coordinator.term
        if path in (AGENT_SYNC, AGENT_RUN) and body["committed"] is not None:
            served = [Version.model_validate(version) for version in [body["committed"], *body["tolerated"]]]  # type: ignore[misc]
            self.received[name] = Received(coordinator.term, frozenset(map(order_key, served)))
        result = agent.call(path, dict(body), contents(agent) if path == AGENT_ACK else token, works)
        if path == AGENT_ACK and result.ok:
            self.acked.setdefault((coordinator.term, order_key(Version.model_validate(body["version"]))), set()).add(name)
        return result

    def rise(self, coordinator: Coordinator, term: int) -> None:
        """Raise the term as the Lease does: only the leader gets a higher term, and the next leader one above that."""
        if coordinator is not self.leading[-1]:
            coordinator.alive = False
            return
        self.lease = max(self.lease, term)
        coordinator.machine.raise_term(term)

    def sync(self, coordinator: Coordinator, name: str) -> None:
        if not coordinator.alive:
            return
        sync = coordinator.machine.fleet.sync_request(name)
        result = self.reach(coordinator, name, AGENT_SYNC, sync.model_dump(mode="json"), None)
        self.feed(coordinator, Seen(name, result.agent, sync.seq, self.now))

    def deliver(self, coordinator: Coordinator, index: int, nth: int, *, works: bool = True, lost: bool = False) -> None:
        """Deliver one call to one engine, or one record to the store. ``lost``: the answer does not come back."""
        self.now += 0.01
        effect = coordinator.pending[index % len(coordinator.pending)]
        if isinstance(effect, Write):
            coordinator.pending.remove(effect)
            coordinator.record = effect.record
            ok = self.write(coordinator)
            if coordinator.alive and effect.record.under_way is None:  # otherwise it notes the names of an open update
                self.commits.setdefault(order_key(effect.record.committed), set()).add(coordinator.term)
            self.feed(coordinator, Written(effect.id, ok, self.now))
            return
        waiting = [name for name in effect.bodies if name not in coordinator.results[effect.id]]
        name = waiting[nth % len(waiting)]
        result = self.reach(coordinator, name, effect.path, dict(effect.bodies[name]), (coordinator.term, effect.id), works=works)
        if effect not in coordinator.pending:
            return  # the coordinator has stopped
        coordinator.results[effect.id][name] = Result(ok=False, message=SILENCE) if lost else result
        if len(waiting) == 1:
            self.conclude(coordinator, effect, coordinator.results[effect.id])

    def conclude(self, coordinator: Coordinator, effect: Send, results: dict[str, Result]) -> None:
        coordinator.pending.remove(effect)
        self.feed(coordinator, Answered(effect.id, results, self.now))

    def drain(self, coordinator: Coordinator) -> None:
        """Deliver all pending calls, also those of a coordinator that has stopped."""
        while coordinator.pending:
            self.deliver(coordinator, 0, 0)

    def do(self, coordinator: Coordinator, request: Request) -> Answer | None:
        """Make a request and let every call succeed. Return the answer, or None if the coordinator has stopped."""
        call = self.ask(coordinator, request)
        self.drain(coordinator)
        return coordinator.answers.get(call)


def contents(agent: SimulatedAgent) -> Contents:
    """Return the contents of the engine's tensors."""
    return frozenset(agent.tensors.items())
