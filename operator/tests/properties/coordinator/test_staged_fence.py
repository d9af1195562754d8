"""The fence with transport Staged, in any order of events: an open gate always holds a permitted version, as its trainer sent it.

After the record of an activation every live engine ends at that version, without another push.
"""

from __future__ import annotations

from itertools import pairwise

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from sglang_rollout.api.intent import WantedEngine
from sglang_rollout.coordinator.update import events as ev
from sglang_rollout.coordinator.update import requests as rq
from sglang_rollout.coordinator.update.phases import Phase
from sglang_rollout.coordinator.update.store import STORE
from sglang_rollout.coordinator.update.versions import order_key
from sglang_rollout.wire.ports import AGENT_CHECKPOINT, AGENT_STAGE, STORE_COMMIT, STORE_FETCH, STORE_PREFLIGHT
from sglang_rollout.wire.states import EngineState, FleetState
from tests.properties.support.search_depth import examples
from tests.properties.support.simulated_agent import NAMES
from tests.properties.support.staged_world import TENSORS, StagedWorld, shard_of

ENGINES = ("e0", "e1", "e2", "e3")
CALLERS = ("ml/Job/a", "ml/Job/b")
callers = st.sampled_from(CALLERS)
labels = st.sampled_from([None, "1", "5", "x"])
peers = st.frozensets(st.sampled_from((*ENGINES, STORE)), max_size=2)
rarely = st.one_of(st.just(frozenset[str]()), peers)


class StagedFence(RuleBasedStateMachine):
    """A fleet with transport Staged under calls, failures, restarts and time in any order."""

    @initialize(
        engines=st.integers(1, 4),
        least=st.sampled_from([None, 1, 2, "50%"]),
        copies=st.integers(1, 2),
        verify=st.sampled_from(["Always", "Off"]),
        in_turn=st.sampled_from([None, 1, 2, "50%"]),
    )
    def begin(self, engines: int, least: int | str | None, copies: int, verify: str, in_turn: int | str | None) -> None:
        self.world = StagedWorld(engines, least, copies=copies, verify=verify, in_turn=in_turn)

    # Calls of trainers

    @rule(caller=callers, name=st.sampled_from(["g", "h"]))
    def open_group(self, caller: str, name: str) -> None:
        body = {"master_address": "10.0.0.9", "master_port": 7, "rank_offset": 1, "group_name": name, "world_size": 2}
        self.world.ask(rq.OpenGroup(body), caller)

    @rule(caller=callers)
    def close_group(self, caller: str) -> None:
        self.world.ask(rq.CloseGroup("g"), caller)

    @rule(caller=callers, label=labels)
    def send_tensors(self, caller: str, label: str | None) -> None:
        self.world.ask(rq.Update("g", label, TENSORS), caller)

    @rule(caller=callers, request=st.sampled_from([rq.Begin(), rq.End(), rq.Flush(), rq.Continue(), rq.Pause("retract"), rq.NewRun()]))
    def call(self, caller: str, request: rq.Call) -> None:
        self.world.ask(request, caller)

    @rule(caller=callers, label=labels)
    def open_upload(self, caller: str, label: str | None) -> None:
        self.world.ask(rq.Upload((shard_of(NAMES),), label), caller)
        self.world.drain()

    @rule(caller=callers, whole=st.booleans(), commits=st.booleans())
    def end_upload(self, caller: str, whole: bool, commits: bool) -> None:
        update = self.world.machine.fleet.update
        if update is None or update.staged is None or not update.staged.is_upload or update.staged.is_complete:
            return
        identity = update.staged.id
        if identity in self.world.store.arriving and whole:
            self.world.fill_upload(identity)
        self.world.ask(rq.CommitUpload(identity, wait=commits) if commits or whole else rq.WithdrawUpload(identity), caller)

    @rule(caller=callers, label=labels)
    def push(self, caller: str, label: str | None) -> None:
        """A whole push that nothing disturbs: so that deep states are reached."""
        self.world.drain()
        self.world.sync_all()
        self.world.drain()
        self.open_group(caller, "g")
        self.world.drain()
        for request in (rq.Begin(), rq.Update("g", label, TENSORS), rq.End()):
            self.world.ask(request, caller)
            self.world.drain()

    @rule(caller=callers, step=st.integers(0, 8), broken=peers, lost=rarely, kills=st.booleans())
    def push_with_a_fault(self, caller: str, step: int, broken: frozenset[str], lost: frozenset[str], kills: bool) -> None:
        """A push one step of whose end fails: seal, copy, canary, record, activation, resume."""
        self.world.drain()
        self.world.sync_all()
        self.world.drain()
        self.open_group(caller, "g")
        self.world.drain()
        for request in (rq.Begin(), rq.Update("g", None, TENSORS)):
            self.world.ask(request, caller)
            self.world.drain()
        self.world.ask(rq.End(), caller)
        for number in range(step + 1):
            if self.world.pending and number == step and kills:
                for name in broken & self.world.agents.keys():
                    self.world.agents[name].restart()
            if self.world.pending:
                self.world.complete(0, broken if number == step else frozenset(), lost if number == step else frozenset())

    # The world

    @precondition(lambda self: self.world.pending)
    @rule(index=st.integers(0, 9), broken=rarely, lost=rarely)
    def complete(self, index: int, broken: frozenset[str], lost: frozenset[str]) -> None:
        self.world.complete(index, broken, lost)

    @precondition(lambda self: self.world.pending)
    @rule()
    def drain(self) -> None:
        self.world.drain()

    @rule(name=st.sampled_from(ENGINES), late=st.booleans())
    def sync(self, name: str, late: bool) -> None:
        if name in self.world.agents:
            self.world.answer_sync(name)
            if not late:
                self.world.deliver_sync(name)

    @precondition(lambda self: self.world.sync_answers)
    @rule()
    def arrive(self) -> None:
        for name in ENGINES:
            self.world.deliver_sync(name)

    @rule()
    def poll(self) -> None:
        self.world.poll_store()

    @rule(name=st.sampled_from(ENGINES), works=st.booleans())
    def load_own_copy(self, name: str, works: bool) -> None:
        """Its agent loads the committed version by itself."""
        if name in self.world.agents and self.world.agents[name].answers:
            self.world.agents[name].load_own_copy(works)

    @rule(name=st.sampled_from(ENGINES), pod=st.booleans(), loads=st.booleans(), works=st.booleans())
    def restart_engine(self, name: str, pod: bool, loads: bool, works: bool) -> None:
        """``pod``: its pod is recreated, so its copies are gone. ``loads``: its agent is faster than the coordinator."""
        if name in self.world.agents:
            self.world.agents[name].restart()
            self.world.agents[name].copies = {} if pod else self.world.agents[name].copies
            if loads:
                self.load_own_copy(name, works)

    @rule(name=st.sampled_from(ENGINES))
    def boot_new_pod(self, name: str) -> None:
        """Its agent answers, and its engine boots until it is restarted."""
        if name in self.world.agents:
            self.world.agents[name].up, self.world.agents[name].copies = False, {}

    @rule()
    def stop_all_engines(self) -> None:
        for agent in self.world.agents.values():
            agent.up = False
        self.world.sync_all()

    @rule(name=st.sampled_from(ENGINES), answers=st.booleans(), breaks=st.booleans())
    def agent_answers(self, name: str, answers: bool, breaks: bool) -> None:
        if name in self.world.agents:
            self.world.agents[name].answers, self.world.agents[name].breaks = answers, breaks

    @rule(name=st.sampled_from(ENGINES), draining=st.booleans())
    def drain_engine(self, name: str, draining: bool) -> None:
        if name in self.world.agents:
            if draining:
                self.world.agents[name].draining = True
            else:
                self.world.agents[name].restart()

    @rule()
    def restart_store(self) -> None:
        self.world.store.restart()

    @rule(answers=st.booleans())
    def store_answers(self, answers: bool) -> None:
        self.world.store.answers = answers

    @rule(fails=st.booleans())
    def record_fails(self, fails: bool) -> None:
        self.world.store_fails = fails

    @rule()
    def restart_coordinator(self) -> None:
        self.world.start()

    @rule(seconds=st.sampled_from([0.5, 4.0, 30.0, 200.0]))
    def wait(self, seconds: float) -> None:
        self.world.tick(seconds)

    @precondition(lambda self: self.world.calls)
    @rule(back=st.integers(0, 5))
    def leave(self, back: int) -> None:
        self.world.disconnect(max(1, self.world.calls - back))

    @rule(state=st.sampled_from(FleetState))
    def set_state(self, state: FleetState) -> None:
        self.world.set_state(state)

    @rule(count=st.integers(1, 4))
    def scale(self, count: int) -> None:
        for name in ENGINES[:count]:
            if name not in self.world.agents:
                self.world.add_agent(name)
        for name in ENGINES[count:]:
            self.world.agents.pop(name, None)
        self.world.connect()
        self.world.engines = [WantedEngine(name=name) for name in ENGINES[:count]]
        self.world.generation += 1
        self.world.send_intent()

    # What always holds

    @invariant()
    def an_open_gate_holds_a_permitted_version_as_it_was_sent(self) -> None:
        committed = {order_key(version) for version in self.world.history} | self.world.unproved
        for agent in self.world.agents.values():
            if agent.gate_open:
                assert agent.state is EngineState.CLEAN
                assert agent.version is not None
                assert agent.content != "mixture"
                assert order_key(agent.version) in committed, "no coordinator committed this"
                if order_key(agent.version) in self.world.pushed:
                    assert agent.tensors == self.world.pushed[order_key(agent.version)], "it is not what was sent"

    @invariant()
    def no_engine_serves_two_versions_behind(self) -> None:
        newest = [order_key(version) for version in self.world.history[-2:]]
        for agent in self.world.agents.values():
            if agent.gate_open and agent.version is not None and newest and agent.committed == self.world.history[-1]:
                permitted = newest if self.world.policy.max_staleness else newest[-1:]
                assert order_key(agent.version) in permitted

    @invariant()
    def committed_versions_only_grow(self) -> None:
        assert all(order_key(before) < order_key(after) for before, after in pairwise(self.world.history))

    @invariant()
    def no_engine_takes_part_before_the_canary(self) -> None:
        fleet = self.world.machine.fleet
        if fleet.phase is Phase.STAGE and fleet.update is not None and fleet.update.staged is not None:
            assert not fleet.update.staged.called

    @invariant()
    def nothing_runs_without_a_bound(self) -> None:
        machine = self.world.machine
        assert not machine.changing or self.world.pending
        assert all(effect.deadline > 0 for effect in self.world.pending if isinstance(effect, ev.Send))

    @invariant()
    def one_transaction_at_a_time(self) -> None:
        catching = {name for name, engine in self.world.machine.fleet.engines.items() if engine.is_catching_up}
        harmless = {AGENT_CHECKPOINT, AGENT_STAGE, STORE_COMMIT, STORE_FETCH, STORE_PREFLIGHT}
        sends = [effect for effect in self.world.pending if isinstance(effect, ev.Send) and not set(effect.bodies) <= catching]
        assert sum(effect.path not in harmless for effect in sends) <= 1

    # How it ends

    def settle(self) -> None:
        for _ in range(10):
            self.world.drain()
            self.world.tick(150.0)
            self.world.drain()
            self.world.sync_all()
            self.world.drain()

    def every_pod_has_a_copy(self) -> None:
        """Pods whose engines boot have copied the committed version, if a pod or the weight store has it."""
        version, agents = self.world.machine.fleet.weights.staged, [self.world.agents[engine.name] for engine in self.world.engines]
        held = [self.world.store.copies, *(agent.copies for agent in agents)]
        if version is not None and any(version.update in copies for copies in held):
            assert all(version.update in agent.copies for agent in agents if not agent.draining)

    def teardown(self) -> None:
        """When everything answers again, every engine serves the committed version without a push, and a push reaches all engines."""
        if not hasattr(self, "world"):
            return
        world = self.world
        world.store.answers, world.store_fails = True, False
        for agent in world.agents.values():
            agent.answers = True
        world.set_state(FleetState.ACTIVE)
        self.settle()
        self.every_pod_has_a_copy()
        for agent in world.agents.values():
            if not agent.up or agent.draining:
                agent.restart()
        self.settle()
        fleet = world.machine.fleet
        assert fleet.pause is None
        assert fleet.update is None
        members = [world.agents[engine.name] for engine in world.engines]
        if fleet.weights.staged is not None and any(fleet.weights.staged.update in agent.copies for agent in members):
            assert all(agent.gate_open and agent.version == fleet.committed for agent in members), "an engine did not move forward"
            assert world.store.copies.keys() >= {fleet.weights.staged.update}, "the weight store did not get the version back"
        answer = world.push(None)
        assert answer.success, answer.message
        assert all(agent.gate_open and agent.version == fleet.committed for agent in members)
        assert all(agent.tensors == dict.fromkeys(NAMES, agent.tensors[NAMES[0]]) for agent in members)
        self.an_open_gate_holds_a_permitted_version_as_it_was_sent()


StagedFence.TestCase.settings = settings(max_examples=examples(60), stateful_step_count=40, deadline=None)
TestStagedFence = StagedFence.TestCase
