"""The tables of phases and of control calls are complete, and an illegal transition raises."""

from __future__ import annotations

from typing import get_args

import pytest

from sglang_rollout.coordinator.update.control_calls import ANY, STANDALONE, TABLES, Handler
from sglang_rollout.coordinator.update.phases import TRANSITIONS, IllegalTransitionError, Phase, PhaseClock
from sglang_rollout.coordinator.update.requests import Call, Tensors


def test_every_phase_is_reached_from_idle_and_leads_back() -> None:
    def reachable(start: Phase) -> set[Phase]:
        found, ahead = {start}, [start]
        while ahead:
            new = TRANSITIONS[ahead.pop()] - found
            found |= new
            ahead += new
        return found

    entered = set(Phase) - {Phase.PREPARE}
    assert reachable(Phase.IDLE) == entered
    assert all(Phase.IDLE in reachable(phase) for phase in entered)


def test_a_phase_that_cannot_follow_is_refused() -> None:
    clock = PhaseClock()
    with pytest.raises(IllegalTransitionError, match="phase commit cannot follow phase idle"):
        clock.enter(Phase.COMMIT, 1.0)
    assert clock.phase is Phase.IDLE


def test_the_time_of_a_phase_adds_up_until_the_fleet_is_idle() -> None:
    clock = PhaseClock()
    clock.enter(Phase.PAUSE, 1.0)
    clock.enter(Phase.OPEN, 2.0)
    clock.enter(Phase.PAUSE, 4.0)
    assert clock.milliseconds(5.0) == {"pause": 2000, "open": 2000, "total": 4000}
    clock.enter(Phase.IDLE, 6.0)
    assert clock.milliseconds(9.0) == {"total": 0}


def test_every_call_has_a_handler_that_says_what_happens_where_the_call_is_not_legal() -> None:
    assert set(STANDALONE) == set(get_args(Call)) - {Tensors}, "without a shared GPU there are no handles"
    for at_fleet, at_engine in TABLES.values():
        assert set(at_fleet) >= set(STANDALONE)
        assert set(at_engine) <= set(get_args(Call))
        for handler in [*at_fleet.values(), *at_engine.values()]:
            if isinstance(handler, Handler):
                assert handler.legal <= ANY
                assert handler.legal == ANY or handler.otherwise is not None
