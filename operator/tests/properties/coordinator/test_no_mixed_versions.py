"""Trainers that push some tensors, lose a bucket or begin again, on engines that restart: every tensor that is served is of one version."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from sglang_rollout.coordinator.update import requests as rq
from sglang_rollout.coordinator.update.versions import order_key
from tests.properties.support.coordinator_world import World, group_body
from tests.properties.support.search_depth import examples
from tests.properties.support.simulated_agent import NAMES

ENGINES = st.sampled_from(["e0", "e1"])
parts = st.sampled_from([("w",), ("v",), ("u", "v"), NAMES])
labels = st.sampled_from([None, "1"])


class Mixture(RuleBasedStateMachine):
    """Pushes one after another; engines and coordinators restart between them."""

    @initialize(least=st.sampled_from([None, 1]))
    def begin(self, least: int | None) -> None:
        self.world = World([1, 1], least)
        self.world.sync_all()

    @rule(part=parts, label=labels)
    def push(self, part: tuple[str, ...], label: str | None) -> None:
        self.send_tensors(part, label)
        self.world.do(rq.End())

    @rule(part=parts, label=labels)
    def push_half(self, part: tuple[str, ...], label: str | None) -> None:
        """The trainer begins again after some of the tensors."""
        self.send_tensors(part, label)

    @rule(part=parts, late=parts)
    def push_by_two_groups(self, part: tuple[str, ...], late: tuple[str, ...]) -> None:
        """One of them without an engine that came later."""
        agent = self.world.agents["e1"]
        agent.restart()
        agent.up = False
        self.settle()
        self.world.do(rq.OpenGroup(group_body(self.world, f"early-{self.world.calls}")))
        agent.up = True
        self.settle()
        groups = list(self.world.machine.fleet.groups)
        self.send_tensors(late, None)
        rest = [name for name in part if name not in late]
        for name in groups[-1:] if rest else []:
            self.world.do(rq.Update(name, None, {"names": rest}))
        self.world.do(rq.End())

    def send_tensors(self, names: tuple[str, ...], label: str | None) -> None:
        self.settle()
        group = f"g-{self.world.calls}"
        self.world.do(rq.OpenGroup(group_body(self.world, group)))
        self.world.do(rq.Begin())
        self.world.do(rq.Update(group, label, {"names": list(names)}))

    def settle(self) -> None:
        self.world.drain()
        self.world.sync_all()
        self.world.drain()

    @rule()
    def from_disk(self) -> None:
        self.settle()
        self.world.do(rq.FromDisk(f"/snapshots/{self.world.calls}", None, {}))

    @rule(name=ENGINES)
    def restart_engine(self, name: str) -> None:
        self.world.agents[name].restart()

    @rule()
    def restart_all(self) -> None:
        for agent in self.world.agents.values():
            agent.restart()

    @rule()
    def new_run(self) -> None:
        self.world.do(rq.NewRun())

    @rule()
    def restart_coordinator(self) -> None:
        self.world.start()
        self.settle()

    @invariant()
    def no_mixture_is_served(self) -> None:
        for agent in self.world.agents.values():
            if agent.gate_open and agent.version is not None and not agent.version.is_base:
                known = self.world.tensors.setdefault(order_key(agent.version), dict(agent.tensors))
                assert agent.tensors == known, f"a mixture is served as {agent.version}"

    def teardown(self) -> None:
        """A complete push heals whatever happened."""
        if not hasattr(self, "world"):
            return
        self.send_tensors(NAMES, None)
        answer = self.world.do(rq.End())
        assert answer.message == "Success", answer.message
        assert all(agent.gate_open for agent in self.world.agents.values())
        self.no_mixture_is_served()


Mixture.TestCase.settings = settings(max_examples=examples(100), stateful_step_count=15, deadline=None)
TestMixture = Mixture.TestCase
