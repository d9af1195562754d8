"""Which changes of status are told as Events."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from sglang_rollout.api.conditions import Reason
from sglang_rollout.api.v1alpha1 import SGLangRollout
from sglang_rollout.controller.decide.plan import Failure
from sglang_rollout.controller.decide.status import build_status
from sglang_rollout.controller.decide.transitions import find_events
from sglang_rollout.controller.decide.view import FleetView
from sglang_rollout.controller.render.hashing import revision
from sglang_rollout.wire.reasons import GateReason, Refusal
from sglang_rollout.wire.record import UpdateOutcome
from sglang_rollout.wire.states import FleetState
from sglang_rollout.wire.weights import EngineState, Version
from tests.unit.controller.support.worlds import (
    BASE,
    NOW,
    V1,
    V2,
    cr,
    crashed,
    opening,
    partial,
    pod,
    record,
    row,
    under_way,
    world,
)


def reasons(before: FleetView | None, after: FleetView) -> list[tuple[str, str]]:
    old = None if before is None else build_status(before, NOW)
    return [(event.type, event.reason) for event in find_events(old, build_status(after, NOW))]


def history(*seen: FleetView) -> list[list[str]]:
    """What each step from one world to the next tells, a minute apart, with the status of each written into the next."""
    told, old = [], None
    for minute, one in enumerate(seen):
        new = build_status(replace(one, cr={**one.cr, "status": old}), f"2026-11-21T03:{minute:02}:00Z")
        told.append([event.reason for event in find_events(old, new)])
        old = new
    return told[1:]


HEALTHY = world([pod(0), pod(1)], written=record(row(0), row(1)))


def test_nothing_changed_nothing_told() -> None:
    assert reasons(HEALTHY, HEALTHY) == []


def test_the_first_status_says_where_the_fleet_will_be() -> None:
    assert reasons(None, world([], router=False)) == [("Normal", "Accepted")]


def test_an_engine_comes_up() -> None:
    before = world([pod(0), pod(1, ready=False)], written=record(row(0)))
    assert reasons(before, HEALTHY) == [("Normal", "EngineServing"), ("Normal", "Ready")]


def test_an_engine_is_lost() -> None:
    after = world([pod(0), pod(1, ready=False)], written=record(row(0), row(1)))
    assert reasons(HEALTHY, after) == [("Warning", "EngineLost")]


def test_a_router_that_is_away_is_told_once_and_not_as_engines_that_are_lost() -> None:
    away = world([pod(0), pod(1)], written=record(row(0), row(1)), router=False)
    assert reasons(HEALTHY, away) == [("Warning", "RouterNotReady")]
    assert reasons(away, HEALTHY) == [("Normal", "Ready")]


def test_an_engine_that_is_lost_while_the_router_is_away_is_told() -> None:
    away = world([pod(0), pod(1)], written=record(row(0), row(1)), router=False)
    down = world([pod(0), pod(1, ready=False)], written=record(row(0), row(1)), router=False)
    assert ("Warning", "EngineLost") in reasons(away, down)
    dirty = world([pod(0), pod(1)], written=record(row(0), row(1, gate=False, state=EngineState.DIRTY)))
    assert reasons(away, dirty) == [("Warning", "EngineLost")]
    assert reasons(dirty, away) == [("Normal", "RouterNotReady")], "it was lost before"


def test_an_engine_that_never_served_is_told_when_it_does_after_the_router() -> None:
    away = world([pod(0), pod(1)], router=False)
    assert reasons(away, HEALTHY) == [("Normal", "EngineServing"), ("Normal", "EngineServing"), ("Normal", "Ready")]


def test_an_engine_crashes_and_goes_on_crashing() -> None:
    first = world([pod(0), pod(1, ready=False, status=crashed(message="ValueError: a"))], written=record(row(0)))
    later = world([pod(0), pod(1, ready=False, status=crashed(message="ValueError: a", restarts=9))], written=record(row(0)))
    assert reasons(HEALTHY, first) == [("Warning", "EngineFailed")]
    assert reasons(first, later) == [], "a crash loop is told once"


def test_a_version_is_committed() -> None:
    one = world([pod(0), pod(1)], written=record(row(0, V1), row(1, V1), committed=V1))
    two = world([pod(0), pod(1)], written=record(row(0, V2), row(1, V2), committed=V2))
    assert reasons(HEALTHY, one) == [("Normal", "WeightsCommitted")]
    (told,) = find_events(build_status(one, NOW), build_status(two, NOW))
    assert told.message == "The fleet serves version step-2 (run 1)."
    assert told.key == "WeightsCommitted", "one Event object, however many versions"


def test_an_update_loses_no_engine() -> None:
    during = world([pod(0), pod(1)], written=record(under_way(0), under_way(1)))
    committed = world([pod(0), pod(1)], written=record(opening(0, V1), opening(1, V1), committed=V1))
    served = world([pod(0), pod(1)], written=record(row(0, V1), row(1, V1), committed=V1))
    assert history(HEALTHY, during, committed, served) == [[], ["WeightsCommitted"], []], "every step of a training brings that"
    mixture = row(1, None, gate=False, state=EngineState.DIRTY, closed=Refusal(GateReason.DIRTY, "The engine holds a mixture."))
    assert ("Warning", "EngineLost") in reasons(during, world([pod(0), pod(1)], written=record(row(0), mixture)))


@pytest.mark.parametrize("mode", ["Colocated", "Hybrid"])
def test_a_sleep_that_the_trainer_asked_for_is_no_news_and_one_by_the_spec_is(mode: str) -> None:
    tags = ["kv_cache", "weights"]
    engine = {"image": "example.org/engine:1", "gpuResource": "", "memorySaver": True, "weightsCpuBackup": mode == "Colocated"}
    custom = cr(mode=mode, sharing={"resourceClaimName": "gpus-{engine}"}, engine=engine)
    current = revision(SGLangRollout.model_validate(custom))

    def seen(*released: str, lent: tuple[str, ...] = (), state: FleetState = FleetState.ACTIVE) -> FleetView:
        rows = [row(index, gate=not released).model_copy(update={"released": list(released)}) for index in range(2)]
        spec = {**custom["spec"], "state": "Asleep" if state is FleetState.ASLEEP else "Active"}
        written = record(*rows).model_copy(update={"lent": list(lent), "state": state})
        return world([pod(0, current=current), pod(1, current=current)], written=written, custom={**custom, "spec": spec})

    awake, asleep, waking = seen(), seen(*tags, lent=("kv_cache", "weights")), seen(*tags)
    by_spec = seen(*tags, state=FleetState.ASLEEP)
    assert history(awake, asleep, waking, awake, asleep) == [[], [], [], []], "each step brings one"
    assert history(awake, by_spec, awake) == [["Asleep"], ["Ready"]]
    assert history(awake, asleep, by_spec, asleep, waking, awake) == [[], ["Asleep"], [], [], []]
    lost = world([pod(0, current=current), pod(1, ready=False, current=current)], written=record(row(0)), custom=custom)
    assert history(lost, asleep, awake) == [[], ["EngineServing", "Ready"]], "more engines serve than before the sleep"


def test_a_lost_trainer_for_whom_the_fleet_pauses_is_told_once_and_loses_no_engine() -> None:
    lost = world([pod(0), pod(1)], written=record(row(0), row(1)).model_copy(update={"waits_for_trainer": True}))
    assert reasons(HEALTHY, lost) == [("Warning", "TrainerLost")]
    assert history(HEALTHY, lost, lost, HEALTHY) == [["TrainerLost"], [], ["Ready"]]


def sleeping(*released: str, comparing: bool = False, **written: object) -> FleetView:
    """Two engines that have released memory, or have it back and are being compared."""
    told = {"released": list(released), "comparing": comparing}
    rows = [row(index, None, gate=False, state=EngineState.UNKNOWN).model_copy(update=told) for index in range(2)]
    return world([pod(0), pod(1)], written=record(*rows).model_copy(update=written))


@pytest.mark.parametrize("lent", [None, []], ids=["own GPUs", "shared GPUs"])
def test_a_wake_is_no_news_until_the_comparison_finds_other_weights(lent: list[str] | None) -> None:
    asleep = sleeping("kv_cache", "weights", lent=None if lent is None else ["kv_cache", "weights"])
    comparing, wrong = sleeping(comparing=True, lent=lent), sleeping(lent=lent)
    assert history(HEALTHY, asleep, comparing, HEALTHY, asleep) == [[], [], [], []], "each step brings one"
    assert history(HEALTHY, asleep, comparing, wrong)[-1] == ["EngineLost", "EngineLost"]


def test_engines_that_spec_state_wakes_are_not_lost_meanwhile() -> None:
    by_spec = sleeping("kv_cache", "weights", state=FleetState.ASLEEP)
    by_spec = replace(by_spec, cr={**by_spec.cr, "spec": {**by_spec.cr["spec"], "state": "Asleep"}})
    by_spec = replace(by_spec, rollout=SGLangRollout.model_validate(by_spec.cr))
    waking, comparing = sleeping("kv_cache", "weights"), sleeping(comparing=True)
    assert history(HEALTHY, by_spec, waking, comparing, HEALTHY) == [["Asleep"], [], [], ["Ready"]]


def test_an_update_after_which_more_engines_serve_than_before_is_told() -> None:
    lost = world([pod(0), pod(1, ready=False)], written=record(row(0, V1), committed=V1))
    back = world([pod(0), pod(1)], written=record(row(0, V1), row(1, BASE, gate=False), committed=V1))
    during = world([pod(0), pod(1)], written=record(under_way(0), under_way(1), committed=V1))
    served = world([pod(0), pod(1)], written=record(row(0, V2), row(1, V2), committed=V2))
    whole = world([pod(0), pod(1)], written=record(row(0, V1), row(1, V1), committed=V1))
    told = ["EngineServing", "WeightsCommitted", "Ready"]
    assert history(whole, lost, back, during, served) == [["EngineLost"], [], [], told]
    opened = world([pod(0), pod(1)], written=record(opening(0, V2), opening(1, V2), committed=V2))
    failed = world([pod(0), pod(1)], written=record(row(0, V1), row(1, BASE, gate=False), committed=V1))
    next_one = world([pod(0), pod(1)], written=record(under_way(0), under_way(1), committed=V2))
    again = [during, failed, during, opened, served, next_one, served]
    assert history(whole, lost, *again) == [["EngineLost"], [], [], [], ["WeightsCommitted"], ["EngineServing", "Ready"], [], []], "once"
    away = replace(served, children=world([pod(0), pod(1)], router=False).children)
    assert "EngineServing" not in history(whole, away, during, served)[-1], "only the router was away"


def test_a_partial_commit_names_who_was_left_behind() -> None:
    last = partial("engine demo-engine-1 could not end the session: no answer")
    after = world([pod(0), pod(1)], written=record(row(0, V2), row(1, None, gate=False, state=EngineState.DIRTY), committed=V2, last=last))
    told = {event.reason: event for event in find_events(build_status(HEALTHY, NOW), build_status(after, NOW))}
    assert told["WeightsPartlyCommitted"].type == "Warning"
    assert "step-2 is committed on 1 engine;" in told["WeightsPartlyCommitted"].message
    assert "demo-engine-1" in told["WeightsPartlyCommitted"].message
    assert "WeightUpdateFailed" not in told


def test_a_new_run_is_told() -> None:
    one = world([pod(0), pod(1)], written=record(row(0, V2), row(1, V2), committed=V2))
    fresh = Version(run=2, step=1, label="step-1")
    two = world([pod(0), pod(1)], written=record(row(0, fresh), row(1, fresh), committed=fresh))
    assert reasons(one, two) == [("Normal", "NewRun"), ("Normal", "WeightsCommitted")]


def test_a_failed_update_is_told_once() -> None:
    failed = world([pod(0), pod(1)], written=record(row(0), row(1), failed="engine demo-engine-0: timeout"))
    assert reasons(HEALTHY, failed) == [("Warning", "WeightUpdateFailed")]
    assert reasons(failed, failed) == []


def test_a_pause_that_was_given_up_is_told_and_needs_nobody() -> None:
    why = "the pause was given up: nothing was heard of the trainer for 120 s (weights.deadlines.idleSeconds)"
    last = partial(why).model_copy(update={"outcome": UpdateOutcome.ABORTED, "engines": []})
    after = world([pod(0), pod(1)], written=record(row(0), row(1), last=last))
    status = build_status(after, NOW)
    told = {event.reason: event for event in find_events(build_status(HEALTHY, NOW), status)}
    assert set(told) == {"WeightUpdateAborted"}
    assert told["WeightUpdateAborted"].message == f"The fleet keeps the weights it had: {why}."
    degraded = next(condition for condition in status["conditions"] if condition["type"] == "Degraded")
    assert degraded["status"] == "False"


def test_a_rolling_update_starts_and_finishes() -> None:
    rolling = world([pod(0, current="older"), pod(1)], written=record(row(0), row(1)))
    assert ("Normal", "RollingUpdateStarted") in reasons(HEALTHY, rolling)
    assert ("Normal", "RollingUpdateFinished") in reasons(rolling, HEALTHY)


def test_a_name_that_is_taken_is_told() -> None:
    taken = build_status(HEALTHY, NOW, Failure(Reason.NAME_TAKEN, "Service demo-router exists."))
    (told,) = find_events(build_status(HEALTHY, NOW), taken)
    assert (told.type, told.reason, told.message) == ("Warning", "NameTaken", "Service demo-router exists.")


def test_an_object_that_cannot_be_read_is_told_at_once() -> None:
    assert reasons(None, world_of_nonsense()) == [("Warning", "InvalidSpec")]


def world_of_nonsense() -> FleetView:
    from sglang_rollout.controller.decide.view import build_fleet_view

    custom: dict[str, Any] = cr(model={})
    return build_fleet_view(custom, [], [])
