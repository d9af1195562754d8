"""The tables of phases and rules are complete, and an illegal transition raises."""

from __future__ import annotations

from typing import get_args

import pytest

from sglang_rollout.coordinator.update.phases import TRANSITIONS, IllegalTransitionError, Phase, PhaseClock
from sglang_rollout.coordinator.update.requests import Call, Tensors
from sglang_rollout.coordinator.update.rules import ANY, HYBRID_RULES, RULES


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


def test_every_call_has_a_rule_that_says_what_happens_where_the_call_is_not_legal() -> None:
    assert set(RULES) == set(get_args(Call)) - {Tensors}, "without a shared GPU there are no handles"
    assert set(HYBRID_RULES) <= set(get_args(Call))
    for rule in [*RULES.values(), *HYBRID_RULES.values()]:
        assert rule.legal <= ANY
        assert rule.legal == ANY or rule.otherwise is not None
