"""Arbitrary interleavings of trainers, failures, restarts and time: the fence holds in all of them."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

from fleet_world import LIBRARY, FakeAgent, World
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from sglang_rollout.fleet.update import events as ev
from sglang_rollout.fleet.update.calls import END, INIT, UPDATE
from sglang_rollout.fleet.update.versions import key
from sglang_rollout.wire.models import CatchUp, EngineState, UpdateOutcome, Version, WantedEngine, WeightsPolicy
from sglang_rollout.wire.ports import AGENT_ACK, AGENT_CHECKPOINT, AGENT_PREFLIGHT

ENGINES = ["e0", "e1", "e2"]
names = st.frozensets(st.sampled_from(ENGINES))
rarely = st.one_of(st.just(frozenset()), st.just(frozenset()), names)
groups = st.sampled_from(["g", "h"])
labels = st.sampled_from([None, "1", "2", "7", "step-a"])


class Fence(RuleBasedStateMachine):
    """One fleet under everything at once."""

    @initialize(
        sizes=st.lists(st.integers(1, 3), min_size=1, max_size=3),
        least=st.sampled_from([None, 1, 2, "50%"]),
        library=st.booleans(),
    )
    def begin(self, sizes: list[int], least: int | str | None, library: bool) -> None:
        self.world = World(sizes, least)
        if library:
            self.world.policy = self.world.policy.model_copy(update={"catch_up": CatchUp(disk=LIBRARY)})
            self.world.want()
            for agent in self.world.agents.values():
                agent.library = True
        self.world.sync_all()
        self.contents = self.world.contents

    def ask(self, request: ev.Request) -> None:
        self.world.ask(request)

    @rule(name=groups, port=st.integers(1000, 2000))
    def open_group(self, name: str, port: int) -> None:
        world_size = self.world.machine.fleet.table.world_size
        body = {
            "master_address": "10.0.0.9", "master_port": port, "rank_offset": 1, "world_size": world_size, "group_name": name,
        }  # fmt: skip
        self.ask(ev.OpenGroup(body))

    @rule(name=st.one_of(st.none(), groups))
    def close_group(self, name: str | None) -> None:
        self.ask(ev.CloseGroup(name))

    @rule(mode=st.sampled_from(["abort", "retract", "in_place"]))
    def pause(self, mode: str) -> None:
        self.ask(ev.Pause(mode, {"mode": mode}))

    @rule()
    def beat(self) -> None:
        self.world.feed(ev.Beat(self.world.now))

    @rule()
    def resume(self) -> None:
        self.ask(ev.Continue())

    @rule()
    def begin_update(self) -> None:
        self.ask(ev.Begin())

    @rule(name=st.one_of(st.none(), groups), label=labels)
    def update(self, name: str | None, label: str | None) -> None:
        self.ask(ev.Update(name, label, {"names": ["w"]}))

    @rule(label=labels)
    def from_disk(self, label: str | None) -> None:
        self.ask(ev.FromDisk("/snapshots/1", label, {}))

    @rule()
    def new_run(self) -> None:
        self.ask(ev.NewRun())

    @rule()
    def end(self) -> None:
        self.ask(ev.End())

    @rule()
    def flush(self) -> None:
        self.ask(ev.Flush())

    @rule(label=st.sampled_from(["3", "x"]))
    def set_label(self, label: str) -> None:
        self.ask(ev.SetLabel(label))

    @precondition(lambda self: self.world.pending)
    @rule(index=st.integers(0, 9), broken=rarely, lost=rarely)
    def complete(self, index: int, broken: frozenset[str], lost: frozenset[str]) -> None:
        self.world.complete(index, broken, lost)

    @precondition(lambda self: self.world.pending)
    @rule()
    def drain(self) -> None:
        self.world.drain()

    @rule()
    def push(self) -> None:
        """A whole push that nothing disturbs: so that deep states are reached."""
        self.world.drain()
        self.world.sync_all()
        self.world.drain()
        self.open_group("g", 1500)
        self.world.drain()
        for request in (ev.Begin(), ev.Update("g", None, {"names": ["w"]}), ev.End()):
            self.ask(request)
            self.world.drain()

    @rule(name=st.sampled_from(ENGINES), on=st.booleans())
    def drain_engine(self, name: str, on: bool) -> None:
        """Its pod is about to end; or the engine has been replaced."""
        if name in self.world.agents:
            if on:
                self.world.agents[name].draining = True
            else:
                self.world.agents[name].restart()

    @rule(name=st.sampled_from(ENGINES))
    def sync(self, name: str) -> None:
        if name in self.world.agents:
            self.world.sync(name)

    @rule(name=st.sampled_from(ENGINES))
    def restart_engine(self, name: str) -> None:
        if name in self.world.agents:
            self.world.agents[name].restart()

    @rule(name=st.sampled_from(ENGINES), up=st.booleans())
    def engine_up(self, name: str, up: bool) -> None:
        agent = self.world.agents.get(name)
        if agent is not None and agent.up != up:
            agent.restart()
            agent.up = up

    @rule(name=st.sampled_from(ENGINES), answers=st.booleans())
    def agent_answers(self, name: str, answers: bool) -> None:
        if name in self.world.agents:
            self.world.agents[name].answers = answers

    @rule(seconds=st.sampled_from([0.5, 4.0, 200.0]))
    def wait(self, seconds: float) -> None:
        self.world.tick(seconds)

    @precondition(lambda self: self.world.calls)
    @rule(back=st.integers(0, 5))
    def leave(self, back: int) -> None:
        self.world.leave(max(1, self.world.calls - back))

    @rule(keep_record=st.booleans())
    def restart_coordinator(self, keep_record: bool) -> None:
        if not keep_record:
            self.world.record = None
        self.world.start()

    @rule(count=st.integers(1, 3))
    def scale(self, count: int) -> None:
        for name in ENGINES[:count]:
            if name not in self.world.agents:
                self.world.agents[name] = FakeAgent(name)
        for name in ENGINES[count:]:
            self.world.agents.pop(name, None)  # its pod is deleted with it
        self.world.engines = [WantedEngine(name=name) for name in ENGINES[:count]]
        self.world.generation += 1
        self.world.want()

    @invariant()
    def only_committed_weights_are_served(self) -> None:
        """Every open gate shows the very bytes that were committed under that version."""
        for agent in self.world.agents.values():
            if agent.gate_open:
                assert agent.state is EngineState.CLEAN
                assert agent.version is not None
                assert agent.content != "mixture"
                known = self.contents.setdefault(key(agent.version), agent.content)
                assert known == agent.content, "two contents under one version"

    @invariant()
    def versions_never_go_back(self) -> None:
        history = self.world.history
        assert all(key(before) < key(after) for before, after in pairwise(history))

    @invariant()
    def every_commit_was_acknowledged_by_as_many_as_the_policy_wants(self) -> None:
        least = self.world.policy.min_committed
        complete = {
            version
            for (version, cohort), acked in self.world.acked.items()
            if len(acked & set(cohort)) >= (len(cohort) if least is None else 1)
        }
        assert all(version.is_base or key(version) in complete for version in self.world.history)

    @invariant()
    def nothing_runs_without_a_bound(self) -> None:
        """Whoever holds the turn waits for an effect, and every effect has a deadline."""
        machine = self.world.machine
        assert not machine.changing or self.world.pending
        assert all(effect.deadline > 0 for effect in self.world.pending if isinstance(effect, ev.Send))

    @invariant()
    def one_transaction_at_a_time(self) -> None:
        """Of all calls under way at most one set changes engines; preflights tell engines nothing, and who catches up is
        in no transaction."""
        catching = {name for name, engine in self.world.machine.fleet.engines.items() if engine.catching}
        sends = [effect for effect in self.world.pending if isinstance(effect, ev.Send) and not set(effect.bodies) <= catching]
        assert sum(effect.path not in {AGENT_PREFLIGHT, AGENT_CHECKPOINT} for effect in sends) <= 1

    def teardown(self) -> None:
        """However it went: when everything answers again, every pause ends and a complete push is served by all."""
        if not hasattr(self, "world"):
            return
        world = self.world
        for agent in world.agents.values():
            agent.answers = True
            if not agent.up or agent.draining:
                agent.restart()
        for _ in range(8):
            world.drain()
            world.tick(150.0)
            world.drain()
            world.sync_all()
        assert world.machine.fleet.hold is None
        assert world.machine.fleet.update is None
        members = [world.agents[engine.name] for engine in world.engines]
        assert not any(agent.paused or agent.session for agent in members)
        body = {
            "master_address": "10.0.0.9", "master_port": 1, "rank_offset": 1, "group_name": "last",
            "world_size": world.machine.fleet.table.world_size,
        }  # fmt: skip
        assert world.do(ev.OpenGroup(body)).success
        assert world.do(ev.Update("last", None, {"names": ["w"]})).success
        assert world.do(ev.Continue()).success
        assert all(agent.gate_open for agent in members)
        assert len({agent.content for agent in members}) == 1
        self.only_committed_weights_are_served()


Fence.TestCase.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)
TestFence = Fence.TestCase


def group_body(world: World, name: str) -> dict[str, Any]:
    world_size = world.machine.fleet.table.world_size
    return {"master_address": "10.0.0.9", "master_port": 1, "rank_offset": 1, "group_name": name, "world_size": world_size}


def push(world: World, label: str | None) -> Version | None:
    assert world.do(ev.OpenGroup(group_body(world, "g"))).success
    assert world.do(ev.Begin()).success
    assert world.do(ev.Update("g", label, {"names": ["w"]})).success
    assert world.do(ev.End()).success
    return world.machine.fleet.committed


def test_a_push_reaches_every_engine_and_is_served() -> None:
    world = World([1, 2])
    world.sync_all()
    assert push(world, "5") == Version(run=1, n=5, label="5")
    assert [agent.gate_open for agent in world.agents.values()] == [True, True]
    assert not any(agent.paused for agent in world.agents.values())
    assert [send.path for send in world.sent if send.path == UPDATE] == [UPDATE]


def test_one_missing_acknowledgement_means_no_commit() -> None:
    world = World([1, 1])
    world.sync_all()
    push(world, "1")
    assert world.do(ev.Begin()).success
    assert world.do(ev.Update("g", "2", {"names": ["w"]})).success
    call = world.ask(ev.End())
    while world.pending:
        path = getattr(world.pending[0], "path", "")
        world.complete(broken=frozenset({"e1"} if path == AGENT_ACK else ()))
    answer = world.answers[call]
    assert answer.status == 400
    assert "engine e1 did not acknowledge version 1/2" in answer.message
    assert world.machine.fleet.committed == Version(run=1, n=1, label="1")
    assert not any(agent.gate_open for agent in world.agents.values()), "one holds 1/2, one holds a mixture: nobody serves"
    again = push(world, "2")
    assert again == Version(run=2, n=2, label="2"), "1/2 is what e0 held: the name is not used for other weights"
    assert all(agent.gate_open for agent in world.agents.values())


def test_a_second_coordinator_proves_a_commit_that_the_first_could_not_write() -> None:
    world = World([1, 1])
    world.sync_all()
    push(world, "1")
    kept = world.record
    push(world, "2")
    world.record = kept
    world.start()
    world.sync_all()
    assert world.machine.fleet.committed == Version(run=1, n=2, label="2")


def test_a_client_that_leaves_before_its_turn_changes_nothing() -> None:
    world = World([1])
    world.sync_all()
    first = world.ask(ev.Pause("abort", {"mode": "abort"}))
    second = world.ask(ev.Continue())
    world.leave(second)
    world.drain()
    assert world.answers[first].success
    assert second not in world.answers
    assert world.agents["e0"].paused


def test_with_min_committed_a_failing_engine_is_fenced_alone() -> None:
    world = World([1, 1, 1], min_committed="60%")
    world.sync_all()
    push(world, "1")
    assert world.do(ev.Begin()).success
    assert world.do(ev.Update("g", "2", {"names": ["w"]})).success
    call = world.ask(ev.End())
    while world.pending:
        path = getattr(world.pending[0], "path", "")
        world.complete(broken=frozenset({"e1"} if path == END else ()))
    answer = world.answers[call]
    assert answer.status == 200
    assert "2 of 3 engines hold version 1/2" in answer.message
    assert answer.fleet["outcome"] == "Partial"
    assert list(answer.fleet["fenced"]) == ["e1"]
    assert [agent.gate_open for agent in world.agents.values()] == [True, False, True]
    last = world.machine.fleet.last_update
    assert last is not None
    assert (last.outcome, last.engines) == (UpdateOutcome.PARTIAL, ["e0", "e2"])
    assert push(world, "3") == Version(run=1, n=3, label="3")
    assert all(agent.gate_open for agent in world.agents.values()), "the next complete update takes it back"


def test_fewer_than_min_committed_is_no_commit() -> None:
    world = World([1, 1, 1], min_committed=2)
    world.sync_all()
    push(world, "1")
    assert world.do(ev.Begin()).success
    assert world.do(ev.Update("g", "2", {"names": ["w"]})).success
    call = world.ask(ev.End())
    while world.pending:
        path = getattr(world.pending[0], "path", "")
        world.complete(broken=frozenset({"e1", "e2"} if path == END else ()))
    assert world.answers[call].status == 400
    assert world.answers[call].fleet["engine"] == "e1"
    assert world.machine.fleet.committed == Version(run=1, n=1, label="1")
    assert not any(agent.gate_open for agent in world.agents.values())


def test_a_fleet_that_never_took_weights_waits_until_it_is_complete() -> None:
    world = World([1, 1])
    world.agents["e1"].up = False
    world.sync_all()
    refused = world.do(ev.OpenGroup(group_body(world, "g")))
    assert refused.status == 503
    assert "1 of 2 engines are up" in refused.message
    assert "e1" in refused.message
    assert not any(send.path == INIT for send in world.sent)
    world.agents["e1"].restart()
    world.sync_all()
    assert world.do(ev.OpenGroup(group_body(world, "g"))).success


def test_min_committed_lets_a_fleet_begin_with_fewer() -> None:
    world = World([1, 1], min_committed=1)
    world.agents["e1"].up = False
    world.sync_all()
    assert push(world, "1") == Version(run=1, n=1, label="1")
    assert [agent.gate_open for agent in world.agents.values()] == [True, False]


def test_an_engine_that_is_away_does_not_hold_up_a_fleet_that_has_weights() -> None:
    world = World([1, 2])
    world.sync_all()
    push(world, "1")
    epoch = world.machine.fleet.epoch
    world.agents["e1"].up = False
    world.sync_all()
    assert world.machine.fleet.epoch > epoch
    assert world.machine.fleet.table.world_size == 2
    assert push(world, "2") == Version(run=1, n=2, label="2")
    world.agents["e1"].restart()
    world.sync_all()
    assert not world.agents["e1"].gate_open, "it holds base"
    assert world.machine.fleet.table.world_size == 4
    push(world, "3")
    assert all(agent.gate_open for agent in world.agents.values())


def test_an_engine_that_is_silent_for_a_moment_is_not_counted_out() -> None:
    world = World([1, 1])
    world.sync_all()
    push(world, "1")
    world.agents["e1"].answers = False
    for _ in range(4):
        world.sync_all()
    refused = world.do(ev.OpenGroup(group_body(world, "h")))
    assert refused.status == 503
    assert "engine e1 has not answered" in refused.message
    world.tick(11)
    assert world.do(ev.OpenGroup(group_body(world, "h"))).success


def test_an_engine_that_drains_takes_no_new_update() -> None:
    world = World([1, 1])
    world.sync_all()
    push(world, "1")
    world.agents["e1"].draining = True
    world.sync_all()
    refused = world.do(ev.Begin())
    assert refused.status == 503
    assert "engine e1 cannot take an update now: it is being drained" in refused.message
    assert world.agents["e0"].gate_open, "nothing was begun"
    assert push(world, "2") == Version(run=1, n=2, label="2")
    assert [agent.gate_open for agent in world.agents.values()] == [True, False]


def away_for_one_update(world: World) -> None:
    """Version 1 reaches both engines, version 2 only e0; then e1 is back, in the same life."""
    world.sync_all()
    push(world, "1")
    world.agents["e1"].answers = False
    for _ in range(4):
        world.sync_all()
    world.tick(11)
    push(world, "2")
    world.agents["e1"].answers = True
    world.sync_all()


def test_the_latest_only_is_served_by_default() -> None:
    world = World([1, 1])
    away_for_one_update(world)
    assert [agent.gate_open for agent in world.agents.values()] == [True, False]


def test_max_staleness_lets_an_engine_serve_that_is_not_further_behind() -> None:
    world = World([1, 1])
    world.policy = WeightsPolicy(max_staleness=1)
    world.want()
    away_for_one_update(world)
    assert [agent.gate_open for agent in world.agents.values()] == [True, True]
    world.start()
    world.sync_all()
    assert world.agents["e1"].gate_open, "the record remembers what is tolerated"
    world.agents["e1"].answers = False
    for _ in range(4):
        world.sync_all()
    world.tick(11)
    push(world, "3")
    world.agents["e1"].answers = True
    world.sync_all()
    assert not world.agents["e1"].gate_open, "it is two behind now"


def test_a_new_run_on_demand() -> None:
    world = World([1])
    world.sync_all()
    push(world, "7")
    assert world.do(ev.NewRun()).fleet["next_run"] == 2
    world.start()
    world.sync_all()
    assert push(world, "8") == Version(run=2, n=8, label="8"), "8 follows 7, and yet it is another run"
    assert push(world, "9") == Version(run=2, n=9, label="9")
