"""Pauses and released memory of an engine: each ends by the side that began it."""

from __future__ import annotations

import pytest

from sglang_rollout.agent.interruption import Cause, Interruption, next_call, should_resume
from sglang_rollout.sglang.api import MEMORY_TAGS, ControlCall
from sglang_rollout.wire.states import FleetState

NONE = Interruption()
PAUSED = NONE.begin_pause("retract")
RELEASED = NONE.release(["kv_cache"], by_spec=False)
ASLEEP = NONE.release(MEMORY_TAGS, by_spec=True)


def test_a_restore_resumes_an_engine_that_was_paused_for_the_release() -> None:
    assert (RELEASED.cause, RELEASED.mode, RELEASED.released) == (Cause.RELEASE, None, ["kv_cache"])
    assert not should_resume(FleetState.ACTIVE, RELEASED)
    restored = RELEASED.restore(["kv_cache"])
    assert should_resume(FleetState.ACTIVE, restored)
    assert not should_resume(FleetState.PAUSED, restored), "the spec pauses it"
    assert restored.end_pause() == NONE


def test_a_restore_leaves_a_pause_call_in_effect() -> None:
    released = PAUSED.release(["kv_cache"], by_spec=False)
    assert (released.cause, released.mode) == (Cause.CALL, "retract")
    assert released.restore(["kv_cache"]) == PAUSED


def test_a_pause_call_leaves_the_agents_own_pause_in_effect() -> None:
    assert RELEASED.begin_pause("in_place") == RELEASED
    assert ASLEEP.begin_pause("in_place") == ASLEEP


@pytest.mark.parametrize("before", [NONE, PAUSED, RELEASED])
def test_the_spec_takes_over_every_interruption_and_ends_it(before: Interruption) -> None:
    assert next_call(FleetState.ASLEEP, before) is ControlCall.RELEASE_MEMORY
    asleep = before.release(MEMORY_TAGS, by_spec=True)
    assert next_call(FleetState.ASLEEP, asleep) is None
    for state in (FleetState.ACTIVE, FleetState.PAUSED):
        assert next_call(state, asleep) is ControlCall.RESUME_MEMORY
        assert next_call(state, asleep.restore(["weights"])) is ControlCall.RESUME_MEMORY, "until all memory is back"
        assert next_call(state, asleep.restore(MEMORY_TAGS)) is None
    assert should_resume(FleetState.ACTIVE, asleep.restore(MEMORY_TAGS))


@pytest.mark.parametrize("interruption", [NONE, PAUSED, RELEASED])
def test_the_spec_ends_no_interruption_of_a_trainer(interruption: Interruption) -> None:
    assert next_call(FleetState.ACTIVE, interruption) is None
    assert next_call(FleetState.PAUSED, interruption) is None


def test_a_release_of_further_tags_keeps_their_order() -> None:
    assert RELEASED.release(["weights", "kv_cache"], by_spec=False).released == ["kv_cache", "weights"]
    assert RELEASED.release(["weights"], by_spec=False).restore(["kv_cache"]).released == ["weights"]
