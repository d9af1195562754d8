"""One coordinator's state machine between simulated agents, a store and a trainer. No I/O, no clock."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace
from typing import Any

from sglang_rollout.api.intent import Intent, WantedEngine, WantedStore
from sglang_rollout.api.security_spec import Security
from sglang_rollout.api.weights_spec import Weights
from sglang_rollout.coordinator.update import Machine
from sglang_rollout.coordinator.update import requests as rq
from sglang_rollout.coordinator.update.events import (
    Answered,
    Asked,
    Cut,
    Effect,
    Event,
    Left,
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
from sglang_rollout.coordinator.update.store import STORE
from sglang_rollout.coordinator.update.versions import order_key
from sglang_rollout.sglang.api import ControlCall
from sglang_rollout.wire.ports import AGENT_ACK, AGENT_RUN, AGENT_SYNC, STORE_RECEIVE
from sglang_rollout.wire.record import Adapter, Record
from sglang_rollout.wire.states import EngineState, FleetMode, FleetState, Version
from tests.properties.support.simulated_agent import NAMES, SimulatedAgent

_processes = itertools.count()

SNAPSHOTS = "/snapshots"


class World:
    """A state machine, its agents and its store. The test decides when each Send is answered, in any order."""

    def __init__(self, sizes: list[int], min_committed: int | str | None = None) -> None:
        self.policy = Weights(min_committed=min_committed)
        self.agents = {f"e{index}": SimulatedAgent(f"e{index}") for index in range(len(sizes))}
        self.engines = [WantedEngine(name=f"e{index}", tensor_size=size) for index, size in enumerate(sizes)]
        self.now = 100.0
        self.record: Record | None = None
        self.store_fails = False
        self.pending: list[Send | Write] = []
        self.sync_answers: dict[str, Seen] = {}
        """Answers to syncs that the coordinator has not received yet, by agent."""
        self.answers: dict[int, Answer] = {}
        self.calls = 0
        self.gone = ""
        """The holder of the fleet, if it has no pods any more."""
        self.acked: dict[tuple[tuple[int, int], tuple[str, ...]], set[str]] = {}
        """Engines that acknowledged a version, by version and cohort."""
        self.required_acks: dict[tuple[tuple[int, int], tuple[str, ...]], int] = {}
        """Number of acknowledgements that the policy requires, by version and cohort."""
        self.opened: tuple[object, dict[str, object]] = (None, {})
        """The open update, and the last content that its trainer has sent for each tensor."""
        self.pushed: dict[tuple[int, int], dict[str, object]] = {}
        """Contents of the tensors that each committed version must have."""
        self.attempts = 0
        self.committed_contents: dict[tuple[int, int], object] = {}
        self.contents: dict[tuple[int, int], object] = {}
        """Contents that engines have served as each version."""
        self.tensors: dict[tuple[int, int], dict[str, object]] = {}
        """Tensors of the first engine that acknowledged a version."""
        self.sent: list[Send] = []
        self.history: list[Version] = []
        self.unproved: set[tuple[int, int]] = set()
        """Versions that were committed while the store failed, and that no engine could prove later."""
        self.generation = 1
        self.state = FleetState.ACTIVE
        """``spec.state``."""
        self.adapters: list[Adapter] | None = None
        self.paths: list[str] = []
        """``spec.security.paths``."""
        self.base: int | None = None
        self.mode: FleetMode | None = None
        self.wanted_store: WantedStore | None = None
        self.start()

    def start(self) -> None:
        """Start a new coordinator."""
        self.pending, self.sync_answers = [], {}
        self.has_old_record = self.record is None or (bool(self.history) and order_key(self.record.committed) < order_key(self.history[-1]))
        term = (self.record.term if self.record else 0) + 1
        self.machine = Machine(name="demo", term=term, record=self.record, at=self.now)
        # Every coordinator process has its own ID: without a record the term may be the same.
        self.machine.fleet.coordinator_id = f"coordinator-{next(_processes)}"
        self.send_intent()

    def send_intent(self) -> None:
        """Send the coordinator the spec that it must follow."""
        intent = Intent(
            generation=self.generation,
            name="demo",
            namespace="default",
            engines=self.engines,
            base=self.base,
            weights=self.policy,
            state=self.state,
            adapters=self.adapters,
            mode=self.mode,
            security=Security(paths=self.paths),
            store=self.wanted_store,
        )
        self.feed(Wanted(intent, frozenset(engine.name for engine in self.engines), self.now))

    def set_state(self, state: FleetState) -> None:
        """Set ``spec.state``, as a user does."""
        self.state = state
        self.generation += 1
        self.send_intent()

    def feed(self, event: Event) -> None:
        self.carry_out(self.machine.handle(event))

    def carry_out(self, effects: list[Effect]) -> None:
        for effect in effects:
            match effect:
                case Send() | Write():
                    self.pending.append(effect)
                    if isinstance(effect, Send):
                        self.sent.append(effect)
                        self.check_pause(effect)
                        self.note_required_acks(effect)
                    elif is_commit(effect.record) and (before := self.pushed.get(order_key(self.history[-1]))) is not None:
                        self.pushed[order_key(effect.record.committed)] = {**self._under(effect.record.committed, before), **self.opened[1]}
                case Save(record):
                    self.record = self.record if self.store_fails else record
                case Cut():
                    self.cut(effect)
                case Reply(call, answer):
                    assert call not in self.answers, "answered twice"
                    self.answers[call] = answer
                    check_advice(answer)
        committed = self.machine.fleet.committed
        if committed is not None and self.has_old_record:
            self.has_old_record = False
            if self.history and order_key(committed) < order_key(self.history[-1]):
                self._forget(committed)
        if committed is not None and (not self.history or self.history[-1] != committed):
            self.history.append(committed)
            if committed.is_base:
                self.pushed[order_key(committed)] = dict.fromkeys(NAMES, "base")

    def _forget(self, committed: Version) -> None:
        """Forget the commits that nothing can prove: no record has them, and no agent that received them answers."""
        witnesses = self._witnesses(self.history[-1])
        if not witnesses:
            last = order_key(committed)
            self.history = [version for version in self.history if order_key(version) <= last]
            self.contents = {version: found for version, found in self.contents.items() if version <= last}
            self.tensors = {version: found for version, found in self.tensors.items() if version <= last}
            self.pushed = {version: found for version, found in self.pushed.items() if version <= last}
        elif not any(self.machine.fleet.engines[name].status for name in witnesses):
            self.unproved |= {order_key(version) for version in self.history if order_key(version) > order_key(committed)}
            self.history = [version for version in self.history if order_key(version) <= order_key(committed)]

    def check_pause(self, effect: Send) -> None:
        """Check that no call resumes an engine that the spec pauses or that is dirty."""
        if effect.path == AGENT_RUN:
            called = [self.agents[name] for name in effect.bodies if name in self.agents]
            assert not any(agent.state is EngineState.DIRTY for agent in called), "a commit resumed a dirty engine"
        applied = self.machine.fleet.applied_state
        if applied is not FleetState.ACTIVE:
            assert effect.path not in (ControlCall.CONTINUE.path, AGENT_RUN), "an engine of a paused fleet was resumed"
            assert all(body["spec_state"] == applied for body in effect.bodies.values() if effect.path == AGENT_SYNC)

    def note_required_acks(self, effect: Send) -> None:
        """Note how many engines must acknowledge the version.

        ``min_committed`` is at most the number of engines that take part; without it, all of these must acknowledge. Members do not
        change during an update.
        """
        fleet = self.machine.fleet
        least, wanted = self.policy.min_committed, len(fleet.engines)
        for body in effect.bodies.values() if effect.path == AGENT_ACK else ():
            cohort = tuple(body["cohort"])
            share = math.ceil(int(least.rstrip("%")) * wanted / 100) if isinstance(least, str) else min(least or len(cohort), wanted)
            taking_part = len(fleet.update.boots) if fleet.update is not None else len(cohort)
            self.required_acks.setdefault((order_key(Version.model_validate(body["version"])), cohort), max(1, min(share, taking_part)))

    def note_sent(self, path: str, body: Mapping[str, Any], token: object) -> None:
        """Note the last content that the trainer of the open update has sent for each tensor."""
        update = self.machine.fleet.update
        if update is not None and path in (ControlCall.UPDATE_DISTRIBUTED.path, ControlCall.UPDATE_DISK.path, STORE_RECEIVE):
            if self.opened[0] is not update:
                self.opened = (update, {})
            if path == STORE_RECEIVE:
                names: Iterable[str] = [tensor["name"] for tensor in body["shard"]["tensors"]]
            else:
                names = body["names"] if path == ControlCall.UPDATE_DISTRIBUTED.path else NAMES
            self.opened[1].update(dict.fromkeys(names, ("disk", body["model_path"]) if path == ControlCall.UPDATE_DISK.path else token))

    def _under(self, version: Version, before: dict[str, object]) -> dict[str, object]:
        """Return the tensors before a commit: base weights if a run begins that the trainer asked for, or on engines with base weights."""
        present = [self.agents[engine.name] for engine in self.engines if engine.name in self.agents]
        rest = [name for name in NAMES if name not in self.opened[1]]
        latest = self.history[-1].run
        is_wanted = self.machine.fleet.weights.next_run > latest
        has_base = all(agent.tensors[name] == "base" for agent in present for name in rest)
        starts_again = version.run > latest and (is_wanted or has_base)
        return dict.fromkeys(NAMES, "base") if starts_again else before

    def _witnesses(self, version: Version) -> list[str]:
        wanted = {engine.name for engine in self.engines}
        present = [agent for agent in self.agents.values() if agent.name in wanted]
        return [agent.name for agent in present if agent.committed and order_key(agent.committed) >= order_key(version)]

    def ask(self, request: Request, caller: str = "") -> int:
        self.calls += 1
        self.feed(Asked(self.calls, request, self.now, caller, self.gone))
        return self.calls

    def disconnect(self, call: int) -> None:
        self.feed(Left(call, self.now))

    def tick(self, seconds: float) -> None:
        self.now += seconds
        self.feed(Tick(self.now))

    def answer_sync(self, name: str) -> None:
        """Let an agent receive a sync and answer. :meth:`deliver_sync` delivers the answer."""
        agent, sync = self.agents[name], self.machine.fleet.sync_request(name)
        status = agent.call(AGENT_SYNC, sync.model_dump(mode="json"), None, works=True).agent if agent.answers else None
        self.sync_answers[name] = Seen(name, status, sync.seq, self.now)

    def deliver_sync(self, name: str) -> None:
        """Deliver the answer that :meth:`answer_sync` has stored, at the current time."""
        if (seen := self.sync_answers.pop(name, None)) is not None:
            self.feed(replace(seen, at=self.now))

    def sync(self, name: str) -> None:
        self.answer_sync(name)
        self.deliver_sync(name)

    def sync_all(self) -> None:
        for name in list(self.agents):
            self.sync(name)

    def complete(self, index: int = 0, broken: frozenset[str] = frozenset(), lost: frozenset[str] = frozenset()) -> None:
        """End one pending effect. ``broken`` engines fail; the answers of ``lost`` engines do not come back."""
        effect = self.pending.pop(index % len(self.pending))
        self.now += 0.01
        if isinstance(effect, Write):
            ok = not broken and not self.store_fails
            if ok:
                self.record = effect.record
            self.feed(Written(effect.id, ok, self.now))
            return
        self.attempts += 1
        token = ("update", self.attempts)
        self.note_sent(effect.path, next(iter(effect.bodies.values())), token)
        results = {}
        for name, body in effect.bodies.items():
            if name == STORE:
                results[name] = self.call_store(effect.path, dict(body), token, works=name not in broken and name not in lost)
                continue
            agent = self.agents.get(name)
            if agent is None:
                results[name] = Result(ok=False, message="it has no address.")
                continue
            content = self._content(agent.loaded, body["version"], token) if effect.path == AGENT_ACK and agent.loaded else token
            agent.snapshots = self.tensors
            result = agent.call(effect.path, dict(body), content, name not in broken)
            if effect.path == AGENT_ACK and result.ok:
                version = Version.model_validate(body["version"])
                self.acked.setdefault((order_key(version), tuple(body["cohort"])), set()).add(name)
                self.tensors.setdefault(order_key(version), dict(agent.tensors))
                if agent.content == "mixture":  # the engine was fenced, and its checksum proves that it has every tensor
                    assert agent.tensors == self.tensors[order_key(version)]
                    agent.content = self.committed_contents.get(order_key(version), "base")
            if effect.path == AGENT_ACK and result.ok and not agent.loaded:
                self.committed_contents[order_key(Version.model_validate(body["version"]))] = agent.content
            results[name] = result if name not in lost else Result(ok=False, message="no answer within 60 s.")
        self.feed(Answered(effect.id, results, self.now))

    def call_store(self, path: str, body: dict[str, Any], token: object, *, works: bool) -> Result:
        """Let the weight store answer a call. Only a fleet with transport Staged has one."""
        raise AssertionError(f"{path}: this fleet has no weight store")

    def _content(self, folder: str, raw: dict[str, Any], otherwise: object) -> object:
        """Return the contents of a folder. A snapshot has the contents of the engines that committed its version."""
        if folder != SNAPSHOTS:
            return ("disk", folder)
        version = Version.model_validate(raw)
        held = [agent.content for agent in self.agents.values() if agent.version == version]
        return self.contents.get(order_key(version), held[0] if held else self.committed_contents.get(order_key(version), otherwise))

    def cut(self, effect: Cut) -> None:
        """End a Send as the driver does: engines that have not answered count as failed."""
        send = next(pending for pending in self.pending if pending.id == effect.effect)
        assert isinstance(send, Send)
        self.pending.remove(send)
        self.feed(Answered(send.id, {name: Result(ok=False, message=effect.reason) for name in send.bodies}, self.now))

    def drain(self, *, failing: str = "", engines: Collection[str] = ()) -> None:
        """Complete all pending effects. ``engines`` fail their calls to the path ``failing``; all else succeeds."""
        while self.pending:
            effect = self.pending[0]
            fails = isinstance(effect, Send) and effect.path == failing
            self.complete(broken=frozenset(engines) if fails else frozenset())

    def run_round(self) -> None:
        """Sync every agent, and let every call that follows succeed."""
        self.tick(0.5)
        self.sync_all()
        self.drain()

    def settle(self) -> None:
        """Run several rounds, because a status can lead to a call, and its answer to another call."""
        for _ in range(6):
            self.run_round()

    def do(self, request: Request, caller: str = "") -> Answer:
        """Make a request and let every call succeed."""
        call = self.ask(request, caller)
        self.drain()
        return self.answers[call]


def is_commit(record: Record) -> bool:
    """Return whether a record is written for a commit, and not for names that engines may receive."""
    return record.under_way is None or order_key(record.under_way) == order_key(record.committed)


def group_body(world: World, name: str) -> dict[str, Any]:
    world_size = world.machine.fleet.table.world_size
    return {"master_address": "10.0.0.9", "master_port": 1, "rank_offset": 1, "group_name": name, "world_size": world_size}


def push(world: World, label: str | None, names: tuple[str, ...] = ("w",)) -> Version | None:
    assert world.do(rq.OpenGroup(group_body(world, "g"))).success
    assert world.do(rq.Begin()).success
    assert world.do(rq.Update("g", label, {"names": list(names)})).success
    assert world.do(rq.End()).success
    return world.machine.fleet.committed


def check_advice(answer: Answer) -> None:
    """Check that an answer says once to push again, and that its cause, to which clients add an advice of their own, does not."""
    said = len(re.findall(r"push (?:it )?again", answer.message, re.IGNORECASE))
    assert said <= 1, answer.message
    if said:
        assert not re.search(r"push (?:it )?again", answer.fleet["cause"], re.IGNORECASE), answer.fleet["cause"]
