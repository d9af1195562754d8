"""Whatever names a trainer pushes: behind an open gate the engine's memory is exactly what its version says.

Engines write a part of a call and then refuse it, ignore names that their model does not have, and may have a model that no agent can list.
"""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from sglang_rollout.coordinator.update import requests as rq
from sglang_rollout.coordinator.update.versions import order_key
from tests.properties.coordinator.test_wrong_names import Push
from tests.properties.support.coordinator_world import World, group_body
from tests.properties.support.search_depth import examples
from tests.properties.support.simulated_agent import NAMES
from tests.properties.support.staged_world import StagedWorld

NAMES_OF_PUSHES = st.sets(st.sampled_from([*NAMES, "policy.u", "x"]), min_size=1).map(lambda names: tuple(sorted(names)))
ENGINES = st.sampled_from(["e0", "e1"])
MAX_PUSHES = 3
"""Pushes after which every fleet is repaired. A fleet whose agents list the tensors of the model needs one."""


class OpenGates(RuleBasedStateMachine):
    """Pushes of right and wrong names, engines that refuse them, and restarts."""

    world: World
    readable: bool

    @initialize(staged=st.booleans(), readable=st.booleans())
    def begin(self, staged: bool, readable: bool) -> None:
        self.world = StagedWorld(2) if staged else World([1, 1])
        self.readable = readable
        for agent in self.world.agents.values():
            agent.readable = readable
        self.world.settle()
        self.send = Push(self.world)

    @property
    def is_distributed(self) -> bool:
        return not isinstance(self.world, StagedWorld)

    @rule(names=NAMES_OF_PUSHES, check=st.booleans())
    def push(self, names: tuple[str, ...], check: bool) -> None:
        if self.can_push():
            self.send(*names, check_model=check)

    @precondition(lambda self: self.is_distributed)
    @rule(names=NAMES_OF_PUSHES, refused=st.sampled_from([*NAMES, "x"]), by=st.sets(ENGINES, min_size=1), check=st.booleans())
    def push_what_engines_refuse(self, names: tuple[str, ...], refused: str, by: set[str], check: bool) -> None:
        if not self.can_push():
            return
        for name in by:
            self.world.agents[name].refuses = frozenset({refused})
        self.send(*names, check_model=check)
        for agent in self.world.agents.values():
            agent.refuses = frozenset()

    @precondition(lambda self: self.is_distributed)
    @rule(names=NAMES_OF_PUSHES)
    def push_half(self, names: tuple[str, ...]) -> None:
        """The trainer begins again after its first tensors."""
        if self.can_push():
            self.world.do(rq.OpenGroup(group_body(self.world, f"half-{self.world.calls}")))
            self.world.do(rq.Begin())
            self.world.do(rq.Update(list(self.world.machine.fleet.groups)[-1], None, {"names": list(names)}, check_model=False))

    def can_push(self) -> bool:
        self.world.settle()
        return len(self.world.machine.fleet.members()) == 2

    @rule(name=ENGINES)
    def restart_engine(self, name: str) -> None:
        self.world.agents[name].restart()
        self.world.settle()

    @rule()
    def restart_coordinator(self) -> None:
        self.world.start()
        self.world.settle()

    @rule()
    def new_run(self) -> None:
        self.world.do(rq.NewRun())

    @invariant()
    def an_open_gate_means_what_the_version_says(self) -> None:
        if not hasattr(self, "world"):
            return
        for agent in self.world.agents.values():
            if agent.gate_open and agent.version is not None:
                says = self.world.pushed[order_key(agent.version)]
                assert agent.tensors == {name: says[name] for name in NAMES}, f"{agent.name} serves {agent.version}"

    def teardown(self) -> None:
        """Correct pushes repair the fleet, whatever happened."""
        if not hasattr(self, "world") or (not self.is_distributed and not self.readable):
            return
        answers = []
        for _ in range(1 if self.readable else MAX_PUSHES):
            assert self.can_push()
            self.world.do(rq.NewRun())
            answers.append(self.send(*NAMES))
            if answers[-1].success:
                break
        assert answers[-1].success, answers[-1].message
        self.world.settle()
        assert all(agent.gate_open for agent in self.world.agents.values())
        self.an_open_gate_means_what_the_version_says()


OpenGates.TestCase.settings = settings(max_examples=examples(60), stateful_step_count=12, deadline=None)
TestOpenGates = OpenGates.TestCase
