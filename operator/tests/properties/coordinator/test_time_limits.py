"""From any state a fleet comes to rest within the limits of its policy when its trainer is silent."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import rule

from sglang_rollout.coordinator.update import events as ev
from sglang_rollout.coordinator.update import requests as rq
from sglang_rollout.coordinator.update.interruption import Cause
from sglang_rollout.coordinator.update.requests import AtEngine
from sglang_rollout.sglang.api import ControlCall
from sglang_rollout.wire.states import EngineState, FleetState
from tests.properties.coordinator.test_fence import Fence
from tests.properties.coordinator.test_hybrid import at, gates, make, tensors
from tests.properties.support.search_depth import examples
from tests.properties.support.simulated_agent import NAMES

UPKEEP = 30.0
"""Ending a pause takes some calls after the limit, and stray engines are fenced a moment later."""


class Silence(Fence):
    """The same fleet; in the end its trainer is silent, engines that are gone stay gone, and only time passes."""

    jump = 5.0
    last: rq.Request | None = rq.Pause("retract", {"mode": "retract"})

    @rule(seconds=st.sampled_from([1.0, 7.0, 61.0]))
    def choose_jump(self, seconds: float) -> None:
        """How far apart the coordinator looks at the clock."""
        self.jump = seconds

    @rule(last=st.sampled_from([None, rq.Begin(), rq.Update(None, None, {"names": list(NAMES)})]))
    def choose_last(self, last: rq.Request | None) -> None:
        """What the trainer asks for before it falls silent."""
        self.last = last

    def teardown(self) -> None:
        if not hasattr(self, "world"):
            return
        world = self.world
        # Calls under way end within their deadlines: those of engines that are not there fail.
        within = sum(effect.deadline for effect in world.pending if isinstance(effect, ev.Send))
        world.drain()
        if self.last is not None:
            world.do(self.last)
        until = world.now + world.policy.deadlines.idle_seconds + UPKEEP + 3 * self.jump + within
        while world.now < until:
            world.tick(self.jump)
            world.sync_all()
            world.drain()
        fleet = world.machine.fleet
        assert fleet.update is None, "an update is open forever"
        assert fleet.pause is None or fleet.pause.cause is Cause.TRAINER_LOST, "a pause lasts forever"
        assert not world.machine.changing
        if fleet.committed is not None and fleet.applied_state is FleetState.ACTIVE:
            waiting = [agent for agent in world.agents.values() if agent.up and agent.answers and not agent.released]
            assert not any(agent.paused or agent.session for agent in waiting if agent.state is EngineState.CLEAN), (
                "an engine is left paused"
            )


Silence.TestCase.settings = settings(max_examples=examples(60), stateful_step_count=30, deadline=None)
TestSilence = Silence.TestCase


def test_the_last_engine_to_end_its_session_is_waited_for_by_what_the_others_took() -> None:
    world = make(4)
    for name in world.agents:
        for call in (rq.ResumeMemory(), rq.Begin(), tensors("a")):
            assert at(world, name, call).success
    assert world.policy.deadlines.update_seconds == 300
    for name, limit in {"e0": 300.0, "e1": 300.0, "e2": 20.0, "e3": 50.0}.items():
        world.ask(AtEngine(name, rq.End()))
        ending = world.pending[0]
        assert isinstance(ending, ev.Send)
        assert ending.path == ControlCall.END_UPDATE.path
        assert ending.deadline == pytest.approx(limit, abs=1)
        world.now += {"e0": 2.0, "e1": 1.0, "e2": 5.0}.get(name, 0.0)
        world.drain()
    assert gates(world) == [True] * 4
