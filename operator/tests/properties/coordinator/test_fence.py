"""Arbitrary interleavings of trainers, failures, restarts and time: the fence holds in all of them."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from sglang_rollout.api.intent import WantedEngine
from sglang_rollout.api.weights_spec import CatchUp
from sglang_rollout.coordinator.update import events as ev
from sglang_rollout.coordinator.update import requests as rq
from sglang_rollout.coordinator.update.tensor_names import TensorNames
from sglang_rollout.coordinator.update.versions import order_key
from sglang_rollout.wire.ports import AGENT_CHECKPOINT, AGENT_PREFLIGHT
from sglang_rollout.wire.states import EngineState, FleetState
from tests.properties.support.coordinator_world import SNAPSHOTS, World, group_body
from tests.properties.support.search_depth import examples
from tests.properties.support.simulated_agent import MEMORY, NAMES, SimulatedAgent

ENGINES = ["e0", "e1", "e2"]
names = st.frozensets(st.sampled_from(ENGINES))
rarely: st.SearchStrategy[frozenset[str]] = st.one_of(st.just(frozenset()), st.just(frozenset()), names)
groups = st.sampled_from(["g", "h"])
labels = st.sampled_from([None, "1", "2", "7", "step-a"])
parts = st.sampled_from([("w",), ("v",), ("u", "v"), NAMES])


class Fence(RuleBasedStateMachine):
    """One fleet under calls, failures, restarts and time in any order."""

    @initialize(
        sizes=st.lists(st.integers(1, 3), min_size=1, max_size=3),
        least=st.sampled_from([None, 1, 2, "50%"]),
        stocked=st.booleans(),
        backup=st.booleans(),
    )
    def begin(self, sizes: list[int], least: int | str | None, stocked: bool, backup: bool) -> None:
        self.world = World(sizes, least)
        for agent in self.world.agents.values():
            agent.backup = backup
        if stocked:
            self.world.policy = self.world.policy.model_copy(update={"catch_up": CatchUp(disk=SNAPSHOTS)})
            self.world.send_intent()
            for agent in self.world.agents.values():
                agent.stocked = True
        self.world.sync_all()
        self.contents = self.world.contents
        self.forgot = False
        self.backup = backup

    def ask(self, request: rq.Request) -> None:
        self.world.ask(request)

    @rule(name=groups, port=st.integers(1000, 2000))
    def open_group(self, name: str, port: int) -> None:
        world_size = self.world.machine.fleet.table.world_size
        body = {
            "master_address": "10.0.0.9", "master_port": port, "rank_offset": 1, "world_size": world_size, "group_name": name,
        }  # fmt: skip
        self.ask(rq.OpenGroup(body))

    @rule(name=st.one_of(st.none(), groups))
    def close_group(self, name: str | None) -> None:
        self.ask(rq.CloseGroup(name))

    @rule(mode=st.sampled_from(["abort", "retract", "in_place"]))
    def pause(self, mode: str) -> None:
        self.ask(rq.Pause(mode, {"mode": mode}))

    @rule()
    def beat(self) -> None:
        self.world.feed(ev.Beat(self.world.now))

    @rule()
    def resume(self) -> None:
        self.ask(rq.Continue())

    @rule()
    def begin_update(self) -> None:
        self.ask(rq.Begin())

    @rule(name=st.one_of(st.none(), groups), label=labels, part=parts)
    def update(self, name: str | None, label: str | None, part: tuple[str, ...]) -> None:
        self.ask(rq.Update(name, label, {"names": list(part if self.remembers() else NAMES)}))

    def remembers(self) -> bool:
        """Return True unless the record was lost and not all tensors have been announced since.

        The coordinator then takes the next update for complete, so it must be.
        """
        return not self.forgot or self.world.machine.fleet.weights.names.pack() == TensorNames(NAMES).pack()

    @rule(label=labels)
    def from_disk(self, label: str | None) -> None:
        self.ask(rq.FromDisk("/snapshots/1", label, {}))

    @rule()
    def new_run(self) -> None:
        self.ask(rq.NewRun())

    @rule()
    def end(self) -> None:
        self.ask(rq.End())

    @rule()
    def flush(self) -> None:
        self.ask(rq.Flush())

    @rule(label=st.sampled_from(["3", "x"]))
    def set_label(self, label: str) -> None:
        self.ask(rq.SetLabel(label))

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
        for request in (rq.Begin(), rq.Update("g", None, {"names": list(NAMES)}), rq.End()):
            self.ask(request)
            self.world.drain()

    @rule(part=parts, step=st.integers(0, 3), broken=names)
    def push_with_a_fault(self, part: tuple[str, ...], step: int, broken: frozenset[str]) -> None:
        """A push of some tensors; of the steps of its end (session, checksum, flush, acknowledgement) one fails on some engines."""
        self.world.drain()
        self.world.sync_all()
        self.world.drain()
        self.open_group("g", 1500)
        self.world.drain()
        for request in (rq.Begin(), rq.Update("g", None, {"names": list(part if self.remembers() else NAMES)})):
            self.ask(request)
            self.world.drain()
        self.ask(rq.End())
        for turn in range(step + 1):
            if self.world.pending:
                self.world.complete(0, broken if turn == step else frozenset())

    @rule(name=st.sampled_from(ENGINES), on=st.booleans())
    def drain_engine(self, name: str, on: bool) -> None:
        """Its pod is about to end; or the engine has been replaced."""
        if name in self.world.agents:
            if on:
                self.world.agents[name].draining = True
            else:
                self.world.agents[name].restart()

    @rule(name=st.sampled_from(ENGINES), late=st.booleans())
    def sync(self, name: str, late: bool) -> None:
        """``late``: the answer comes back after whatever comes next."""
        if name in self.world.agents:
            self.world.answer_sync(name)
            if not late:
                self.world.deliver_sync(name)

    @precondition(lambda self: self.world.sync_answers)
    @rule()
    def arrive(self) -> None:
        for name in ENGINES:
            self.world.deliver_sync(name)

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
        self.world.disconnect(max(1, self.world.calls - back))

    @rule(keep_record=st.booleans())
    def restart_coordinator(self, keep_record: bool) -> None:
        if not keep_record:
            self.forgot = True
            self.world.record = None
            # No record has the numbers of updates that were given up; none of them was ever served.
            committed = {order_key(version) for version in self.world.history} | self.world.unproved
            for number in set(self.world.tensors) - committed:
                del self.world.tensors[number]
        self.world.start()

    @rule(state=st.sampled_from(FleetState))
    def set_state(self, state: FleetState) -> None:
        self.world.set_state(state)

    @rule(tags=st.sampled_from([(), ("kv_cache",), ("weights",)]))
    def release(self, tags: tuple[str, ...]) -> None:
        self.ask(rq.ReleaseMemory(tags))

    @rule(tags=st.sampled_from([(), ("kv_cache",), ("weights",)]))
    def take_back(self, tags: tuple[str, ...]) -> None:
        self.ask(rq.ResumeMemory(tags))

    @rule(count=st.integers(1, 3))
    def scale(self, count: int) -> None:
        for name in ENGINES[:count]:
            if name not in self.world.agents:
                # Another pod of that name: no process ever has the boot id of another.
                self.world.agents[name] = SimulatedAgent(name, starts=1000 * self.world.generation, backup=self.backup)
        for name in ENGINES[count:]:
            self.world.agents.pop(name, None)  # its pod is deleted with it
        self.world.engines = [WantedEngine(name=name) for name in ENGINES[:count]]
        self.world.generation += 1
        self.world.send_intent()

    @invariant()
    def only_committed_weights_are_served(self) -> None:
        """Every open gate shows the very bytes that were committed under that version."""
        for agent in self.world.agents.values():
            if agent.gate_open:
                assert agent.state is EngineState.CLEAN
                assert agent.version is not None
                assert agent.content != "mixture"
                known = self.contents.setdefault(order_key(agent.version), agent.content)
                assert known == agent.content, "two contents under one version"
                if not agent.version.is_base:
                    assert agent.tensors == self.world.tensors.setdefault(order_key(agent.version), dict(agent.tensors)), (
                        "a mixture is served"
                    )

    @invariant()
    def what_is_served_is_what_trainers_sent(self) -> None:
        """Every open gate shows a version that some coordinator committed, with each tensor as a trainer sent it last."""
        committed = {order_key(version) for version in self.world.history} | self.world.unproved
        for agent in self.world.agents.values():
            if agent.gate_open:
                assert agent.version is not None
                assert order_key(agent.version) in committed, "no coordinator committed this"
                if order_key(agent.version) in self.world.pushed:
                    assert agent.tensors == self.world.pushed[order_key(agent.version)], "it is not what was sent"

    @invariant()
    def committed_versions_only_grow(self) -> None:
        history = self.world.history
        assert all(order_key(before) < order_key(after) for before, after in pairwise(history))

    @invariant()
    def every_commit_was_acknowledged_by_as_many_as_the_policy_asks_for(self) -> None:
        complete = {
            version
            for (version, cohort), acked in self.world.acked.items()
            if len(acked & set(cohort)) >= self.world.required_acks[version, cohort]
        }
        assert all(version.is_base or order_key(version) in complete for version in self.world.history)

    @invariant()
    def nothing_runs_without_a_bound(self) -> None:
        """The operation that holds the turn waits for an effect, and every effect has a deadline."""
        machine = self.world.machine
        assert not machine.changing or self.world.pending
        assert all(effect.deadline > 0 for effect in self.world.pending if isinstance(effect, ev.Send))

    @invariant()
    def no_gate_is_open_while_the_spec_pauses_the_fleet(self) -> None:
        """As soon as an agent has heard of it; one that came up since has its hold from the first sync on."""
        for agent in self.world.agents.values():
            assert not (agent.gate_open and agent.applied_state is not FleetState.ACTIVE)

    @invariant()
    def no_engine_of_an_open_update_counts_as_serving(self) -> None:
        fleet = self.world.machine.fleet
        boots = fleet.update.boots if fleet.update is not None else {}
        assert not any(fleet.engines[name].serving for name, boot in boots.items() if fleet.boot(name) == boot)

    @invariant()
    def one_transaction_at_a_time(self) -> None:
        """Of all calls under way at most one set changes engines; preflights tell engines nothing, and who catches up is
        in no transaction."""
        catching = {name for name, engine in self.world.machine.fleet.engines.items() if engine.is_catching_up}
        sends = [effect for effect in self.world.pending if isinstance(effect, ev.Send) and not set(effect.bodies) <= catching]
        assert sum(effect.path not in {AGENT_PREFLIGHT, AGENT_CHECKPOINT} for effect in sends) <= 1

    def settle(self) -> None:
        """Everything answers, and enough time passes for every lease."""
        for _ in range(8):
            self.world.drain()
            self.world.tick(150.0)
            self.world.drain()
            self.world.sync_all()
            self.world.drain()
        assert self.world.machine.fleet.pause is None
        assert self.world.machine.fleet.update is None

    def stays_as_the_spec_says(self, members: list[SimulatedAgent]) -> None:
        """No lease has ended the hold, all are paused, and a whole push commits and opens nothing."""
        world = self.world
        assert all(agent.paused and not agent.session and not agent.gate_open for agent in members)
        assert world.do(rq.OpenGroup(group_body(world, "held"))).success
        for request in (rq.Begin(), rq.Update("held", None, {"names": list(NAMES)}), rq.End()):
            assert world.do(request).success
        answer = world.do(rq.Continue())
        assert (answer.success, "spec.state: Paused" in answer.message) == (True, True)
        world.sync_all()
        world.drain()
        assert all(agent.paused and not agent.gate_open for agent in members)
        assert {agent.version for agent in members} == {world.machine.fleet.committed}

    def teardown(self) -> None:
        """However it went: when everything answers again, every pause ends and a complete push is served by all."""
        if not hasattr(self, "world"):
            return
        world = self.world
        for agent in world.agents.values():
            agent.answers = True
            if not agent.up or agent.draining:
                agent.restart()
        self.settle()
        members = [world.agents[engine.name] for engine in world.engines]
        if world.state is FleetState.ASLEEP:
            assert all(set(agent.released) == set(MEMORY) and not agent.gate_open for agent in members)
            world.set_state(FleetState.PAUSED)
            self.settle()
        world.do(rq.ResumeMemory())
        self.settle()
        assert not any(agent.released for agent in members)
        if world.state is not FleetState.ACTIVE:
            self.stays_as_the_spec_says(members)
            world.set_state(FleetState.ACTIVE)
            world.drain()
            world.sync_all()
            serving = [agent for agent in members if agent.gate_open]
            assert serving or not any(agent.version == world.machine.fleet.committed for agent in members)
            self.settle()
        # What the engine itself has: after a refused begin the agent cannot know, and counts it as open until the next begin.
        assert not any(agent.paused or agent.engine.session for agent in members)
        body = {
            "master_address": "10.0.0.9", "master_port": 1, "rank_offset": 1, "group_name": "last",
            "world_size": world.machine.fleet.table.world_size,
        }  # fmt: skip
        assert world.do(rq.OpenGroup(body)).success
        assert world.do(rq.Update("last", None, {"names": list(NAMES)})).success
        assert world.do(rq.Continue()).success
        assert all(agent.gate_open for agent in members)
        assert len({agent.content for agent in members}) == 1
        self.only_committed_weights_are_served()


Fence.TestCase.settings = settings(max_examples=examples(100), stateful_step_count=40, deadline=None)
TestFence = Fence.TestCase
