"""Coordinators of different terms over the same agents, which do not know of each other. No I/O, no clock."""

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
    """One coordinator process: its machine, its calls under way, and what it can reach."""

    machine: Machine
    record: Record | None
    """The newest record to write."""
    alive: bool = True
    refused: bool = False
    """True if an agent has refused the term after this coordinator had proved the committed version."""
    pending: list[Send | Write] = field(default_factory=list)
    results: dict[int, dict[str, Result]] = field(default_factory=dict)
    """Answers of a Send under way, by its id."""
    cut_off: set[str] = field(default_factory=set)
    """Engines that it cannot reach."""
    storeless: bool = False
    """It cannot reach the store."""
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
        """Number of coordinators that have led, also where the record is lost."""
        self.received = {name: Received() for name in self.agents}
        self.acked: dict[tuple[int, tuple[int, int]], set[str]] = {}
        """Engines that have acknowledged a version to the coordinator of a term."""
        self.commits: dict[tuple[int, int], set[int]] = {}
        """Terms that have committed a version and were not stopped by the store: their trainers got the answer."""
        self.refusals = 0
        self.leading: list[Coordinator] = []
        self.start()

    def start(self, *, keep_record: bool = True) -> Coordinator:
        """Start another coordinator, which reads the record and writes its term into it. Earlier coordinators continue."""
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

    def feed(self, who: Coordinator, event: Event) -> None:
        if who.alive:
            self.carry_out(who, who.machine.handle(event))

    def carry_out(self, who: Coordinator, effects: list[Effect]) -> None:
        for effect in effects:
            match effect:
                case Send():
                    who.pending.append(effect)
                    who.results[effect.id] = {}
                case Write():
                    who.pending.append(effect)
                case Save(record):
                    who.record = record
                    self.write(who)
                case Cut():
                    send = next(sent for sent in who.pending if sent.id == effect.effect)
                    assert isinstance(send, Send)
                    missing = {name: Result(ok=False, message=effect.reason) for name in send.bodies}
                    self.conclude(who, send, {**missing, **who.results[send.id]})
                case Reply(call, answer):
                    who.answers[call] = answer

    def write(self, who: Coordinator) -> bool:
        """Write the record as the store does: a coordinator that would overwrite a higher term stops instead."""
        if who.record is None or who.storeless or not who.alive:
            return False
        if self.store is not None and self.store.term > who.record.term:
            who.alive = False
            return False
        self.store = who.record
        return True

    def ask(self, who: Coordinator, request: Request) -> int:
        who.calls += 1
        self.feed(who, Asked(who.calls, request, self.now))
        return who.calls

    def tick(self, seconds: float) -> None:
        self.now += seconds
        for who in self.leading:
            self.feed(who, Tick(self.now))

    def reach(self, who: Coordinator, name: str, path: str, body: dict[str, object], token: object, *, works: bool = True) -> Result:
        """Make one call of one coordinator to one agent, which checks the term first."""
        agent = self.agents[name]
        if name in who.cut_off or not agent.answers:
            return Result(ok=False, message=SILENCE)
        if who.term < agent.term:
            self.refusals += 1
            who.refused = who.refused or who.machine.fleet.committed is not None
            if who.machine.outranked(agent.term):
                who.alive = False
            elif who.machine.fleet.committed is None:
                self.rise(who, agent.term + 1)
            return Result(ok=False, status=409, message=f"term {who.term} is over.")
        agent.term = who.term
        if path in (AGENT_SYNC, AGENT_RUN) and body["committed"] is not None:
            served = [Version.model_validate(version) for version in [body["committed"], *body["tolerated"]]]  # type: ignore[misc]
            self.received[name] = Received(who.term, frozenset(map(order_key, served)))
        result = agent.call(path, dict(body), contents(agent) if path == AGENT_ACK else token, works)
        if path == AGENT_ACK and result.ok:
            self.acked.setdefault((who.term, order_key(Version.model_validate(body["version"]))), set()).add(name)
        return result

    def rise(self, who: Coordinator, term: int) -> None:
        """Raise the term as the Lease does: only the leader gets a higher term, and the next leader one above that."""
        if who is not self.leading[-1]:
            who.alive = False
            return
        self.lease = max(self.lease, term)
        who.machine.rise(term)

    def sync(self, who: Coordinator, name: str) -> None:
        if not who.alive:
            return
        sync = who.machine.fleet.sync_request(name)
        result = self.reach(who, name, AGENT_SYNC, sync.model_dump(mode="json"), None)
        self.feed(who, Seen(name, result.agent, sync.seq, self.now))

    def deliver(self, who: Coordinator, index: int, nth: int, *, works: bool = True, lost: bool = False) -> None:
        """Deliver one call to one engine, or one record to the store. ``lost``: the answer does not come back."""
        self.now += 0.01
        effect = who.pending[index % len(who.pending)]
        if isinstance(effect, Write):
            who.pending.remove(effect)
            who.record = effect.record
            ok = self.write(who)
            if who.alive:
                self.commits.setdefault(order_key(effect.record.committed), set()).add(who.term)
            self.feed(who, Written(effect.id, ok, self.now))
            return
        waiting = [name for name in effect.bodies if name not in who.results[effect.id]]
        name = waiting[nth % len(waiting)]
        result = self.reach(who, name, effect.path, dict(effect.bodies[name]), (who.term, effect.id), works=works)
        if effect not in who.pending:
            return  # it has stopped
        who.results[effect.id][name] = Result(ok=False, message=SILENCE) if lost else result
        if len(waiting) == 1:
            self.conclude(who, effect, who.results[effect.id])

    def conclude(self, who: Coordinator, effect: Send, results: dict[str, Result]) -> None:
        who.pending.remove(effect)
        self.feed(who, Answered(effect.id, results, self.now))

    def drain(self, who: Coordinator) -> None:
        """Deliver everything under way, also of a coordinator that has stopped."""
        while who.pending:
            self.deliver(who, 0, 0)

    def do(self, who: Coordinator, request: Request) -> Answer | None:
        """Make a request and let every call succeed. Returns the answer; None: the coordinator has stopped meanwhile."""
        call = self.ask(who, request)
        self.drain(who)
        return who.answers.get(call)


def contents(agent: SimulatedAgent) -> Contents:
    """Return the contents of the engine's tensors."""
    return frozenset(agent.tensors.items())
