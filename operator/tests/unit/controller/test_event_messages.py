"""Which changes of status post Events."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest

from sglang_rollout.api.status import Reason
from sglang_rollout.api.v1alpha1 import SGLangRollout
from sglang_rollout.controller.decide.plan import Failure
from sglang_rollout.controller.decide.status import build_status
from sglang_rollout.controller.decide.transitions import find_events
from sglang_rollout.controller.decide.view import FleetView, build_fleet_view
from sglang_rollout.controller.render.hashing import revision
from sglang_rollout.wire.reasons import GateReason, Refusal
from sglang_rollout.wire.record import EndedUpdate, GroupFailure, UpdateOutcome
from sglang_rollout.wire.states import BASE, EngineState, FleetState, Version
from tests.unit.controller.support.worlds import NOW, V1, V2, cr, crashed, opening, partial, pod, record, row, under_way, world


def reasons(before: FleetView | None, after: FleetView) -> list[tuple[str, str]]:
    old = None if before is None else build_status(before, NOW)
    return [(event.type, event.reason) for event in find_events(old, build_status(after, NOW))]


def history(*seen: FleetView) -> list[list[str]]:
    """Return the reasons of the Events of each step. The steps are a minute apart, and each starts with the last status."""
    posted, old = [], None
    for minute, one in enumerate(seen):
        new = build_status(replace(one, cr={**one.cr, "status": old}), f"2026-11-21T03:{minute:02}:00Z")
        posted.append([event.reason for event in find_events(old, new)])
        old = new
    return posted[1:]


HEALTHY = world([pod(0), pod(1)], written=record(row(0), row(1)))


def test_unchanged_status_has_no_event() -> None:
    assert reasons(HEALTHY, HEALTHY) == []


def test_first_status_has_an_event_with_the_url() -> None:
    assert reasons(None, world([], router=False)) == [("Normal", "Accepted")]


def test_engine_that_serves_has_an_event() -> None:
    before = world([pod(0), pod(1, ready=False)], written=record(row(0)))
    assert reasons(before, HEALTHY) == [("Normal", "EngineServing"), ("Normal", "Ready")]


def test_lost_engine_has_a_warning() -> None:
    after = world([pod(0), pod(1, ready=False)], written=record(row(0), row(1)))
    assert reasons(HEALTHY, after) == [("Warning", "EngineLost")]


def test_absent_router_is_one_event_and_loses_no_engine() -> None:
    away = world([pod(0), pod(1)], written=record(row(0), row(1)), router=False)
    assert reasons(HEALTHY, away) == [("Warning", "RouterNotReady")]
    assert reasons(away, HEALTHY) == [("Normal", "Ready")]


def test_engine_lost_during_an_absence_of_the_router_has_a_warning() -> None:
    away = world([pod(0), pod(1)], written=record(row(0), row(1)), router=False)
    down = world([pod(0), pod(1, ready=False)], written=record(row(0), row(1)), router=False)
    assert ("Warning", "EngineLost") in reasons(away, down)
    dirty = world([pod(0), pod(1)], written=record(row(0), row(1, gate=False, state=EngineState.DIRTY)))
    assert reasons(away, dirty) == [("Warning", "EngineLost")]
    assert reasons(dirty, away) == [("Normal", "RouterNotReady")], "it was lost before"


def test_engine_that_first_serves_after_the_router_returns_has_an_event() -> None:
    away = world([pod(0), pod(1)], router=False)
    assert reasons(away, HEALTHY) == [("Normal", "EngineServing"), ("Normal", "EngineServing"), ("Normal", "Ready")]


def test_crash_loop_has_one_event() -> None:
    first = world([pod(0), pod(1, ready=False, status=crashed(message="ValueError: a"))], written=record(row(0)))
    later = world([pod(0), pod(1, ready=False, status=crashed(message="ValueError: a", restarts=9))], written=record(row(0)))
    assert reasons(HEALTHY, first) == [("Warning", "EngineFailed")]
    assert reasons(first, later) == [], "one Event for all restarts"


def test_committed_version_has_an_event() -> None:
    one = world([pod(0), pod(1)], written=record(row(0, V1), row(1, V1), committed=V1))
    two = world([pod(0), pod(1)], written=record(row(0, V2), row(1, V2), committed=V2))
    assert reasons(HEALTHY, one) == [("Normal", "WeightsCommitted")]
    (event,) = find_events(build_status(one, NOW), build_status(two, NOW))
    assert event.message == "The fleet serves version step-2 (run 1)."
    assert event.key == "WeightsCommitted", "one Event object, however many versions"


def test_update_loses_no_engine() -> None:
    during = world([pod(0), pod(1)], written=record(under_way(0), under_way(1)))
    committed = world([pod(0), pod(1)], written=record(opening(0, V1), opening(1, V1), committed=V1))
    served = world([pod(0), pod(1)], written=record(row(0, V1), row(1, V1), committed=V1))
    assert history(HEALTHY, during, committed, served) == [[], ["WeightsCommitted"], []], "every training step has an update"
    mixture = row(1, None, gate=False, state=EngineState.DIRTY, closed=Refusal(GateReason.DIRTY, "The engine holds a mixture."))
    assert ("Warning", "EngineLost") in reasons(during, world([pod(0), pod(1)], written=record(row(0), mixture)))


@pytest.mark.parametrize("mode", ["Colocated", "Hybrid"])
def test_sleep_by_the_spec_has_events_and_sleep_for_the_trainer_has_none(mode: str) -> None:
    tags = ["kv_cache", "weights"]
    engine = {"image": "example.org/engine:1", "gpuResource": "", "memorySaver": True, "weightsCpuBackup": mode == "Colocated"}
    custom = cr(mode=mode, sharing={"resourceClaimName": "gpus-{engine}"}, engine=engine)
    current = revision(SGLangRollout.model_validate(custom))

    def seen(*released: str, released_to_trainer: tuple[str, ...] = (), state: FleetState = FleetState.ACTIVE) -> FleetView:
        rows = [row(index, gate=not released).model_copy(update={"released": list(released)}) for index in range(2)]
        spec = {**custom["spec"], "state": "Asleep" if state is FleetState.ASLEEP else "Active"}
        written = record(*rows).model_copy(update={"released_to_trainer": list(released_to_trainer), "state": state})
        return world([pod(0, current=current), pod(1, current=current)], written=written, custom={**custom, "spec": spec})

    awake, asleep, waking = seen(), seen(*tags, released_to_trainer=("kv_cache", "weights")), seen(*tags)
    by_spec = seen(*tags, state=FleetState.ASLEEP)
    assert history(awake, asleep, waking, awake, asleep) == [[], [], [], []], "every training step has a sleep"
    assert history(awake, by_spec, awake) == [["Asleep"], ["Ready"]]
    assert history(awake, asleep, by_spec, asleep, waking, awake) == [[], ["Asleep"], [], [], []]
    lost = world([pod(0, current=current), pod(1, ready=False, current=current)], written=record(row(0)), custom=custom)
    assert history(lost, asleep, awake) == [[], ["EngineServing"]], "more engines serve than before the sleep"


def test_lost_trainer_has_one_event_and_loses_no_engine() -> None:
    lost = world([pod(0), pod(1)], written=record(row(0), row(1)).model_copy(update={"waits_for_trainer": True}))
    assert reasons(HEALTHY, lost) == [("Warning", "TrainerLost")]
    assert history(HEALTHY, lost, lost, HEALTHY) == [["TrainerLost"], [], ["Ready"]]


def sleeping(*released: str, comparing: bool = False, **written: object) -> FleetView:
    """Return two engines whose memory is released, or restored and being compared."""
    changes = {"released": list(released), "comparing": comparing}
    rows = [row(index, None, gate=False, state=EngineState.UNKNOWN).model_copy(update=changes) for index in range(2)]
    return world([pod(0), pod(1)], written=record(*rows).model_copy(update=written))


@pytest.mark.parametrize("released_to_trainer", [None, []], ids=["own GPUs", "shared GPUs"])
def test_wake_has_no_event_unless_the_comparison_finds_other_weights(released_to_trainer: list[str] | None) -> None:
    asleep = sleeping("kv_cache", "weights", released_to_trainer=None if released_to_trainer is None else ["kv_cache", "weights"])
    comparing, wrong = sleeping(comparing=True, released_to_trainer=released_to_trainer), sleeping(released_to_trainer=released_to_trainer)
    assert history(HEALTHY, asleep, comparing, HEALTHY, asleep) == [[], [], [], []], "every training step has a sleep"
    assert history(HEALTHY, asleep, comparing, wrong)[-1] == ["EngineLost", "EngineLost"]


def test_engines_that_the_spec_wakes_are_not_lost() -> None:
    by_spec = sleeping("kv_cache", "weights", state=FleetState.ASLEEP)
    by_spec = replace(by_spec, cr={**by_spec.cr, "spec": {**by_spec.cr["spec"], "state": "Asleep"}})
    by_spec = replace(by_spec, rollout=SGLangRollout.model_validate(by_spec.cr))
    waking, comparing = sleeping("kv_cache", "weights"), sleeping(comparing=True)
    assert history(HEALTHY, by_spec, waking, comparing, HEALTHY) == [["Asleep"], [], [], ["Ready"]]


def test_update_that_recovers_a_lost_engine_has_events() -> None:
    lost = world([pod(0), pod(1, ready=False)], written=record(row(0, V1), committed=V1))
    back = world([pod(0), pod(1)], written=record(row(0, V1), row(1, BASE, gate=False), committed=V1))
    during = world([pod(0), pod(1)], written=record(under_way(0), under_way(1), committed=V1))
    served = world([pod(0), pod(1)], written=record(row(0, V2), row(1, V2), committed=V2))
    whole = world([pod(0), pod(1)], written=record(row(0, V1), row(1, V1), committed=V1))
    expected = ["EngineServing", "WeightsCommitted", "Ready"]
    assert history(whole, lost, back, during, served) == [["EngineLost"], [], [], expected]
    opened = world([pod(0), pod(1)], written=record(opening(0, V2), opening(1, V2), committed=V2))
    failed = world([pod(0), pod(1)], written=record(row(0, V1), row(1, BASE, gate=False), committed=V1))
    next_one = world([pod(0), pod(1)], written=record(under_way(0), under_way(1), committed=V2))
    again = [during, failed, during, opened, served, next_one, served]
    assert history(whole, lost, *again) == [["EngineLost"], [], [], [], ["WeightsCommitted"], ["EngineServing", "Ready"], [], []], "once"
    away = replace(served, children=world([pod(0), pod(1)], router=False).children)
    assert "EngineServing" not in history(whole, away, during, served)[-1], "only the router was away"


def test_partial_commit_names_the_engine_that_failed() -> None:
    last = partial("engine demo-engine-1 could not end the session: no answer")
    after = world([pod(0), pod(1)], written=record(row(0, V2), row(1, None, gate=False, state=EngineState.DIRTY), committed=V2, last=last))
    events = {event.reason: event for event in find_events(build_status(HEALTHY, NOW), build_status(after, NOW))}
    assert events["WeightsPartlyCommitted"].type == "Warning"
    assert "step-2 is committed on 1 engine;" in events["WeightsPartlyCommitted"].message
    assert "demo-engine-1" in events["WeightsPartlyCommitted"].message
    assert "WeightUpdateFailed" not in events


def test_new_run_has_an_event() -> None:
    one = world([pod(0), pod(1)], written=record(row(0, V2), row(1, V2), committed=V2))
    fresh = Version(run=2, step=1, label="step-1")
    two = world([pod(0), pod(1)], written=record(row(0, fresh), row(1, fresh), committed=fresh))
    assert reasons(one, two) == [("Normal", "NewRun"), ("Normal", "WeightsCommitted")]


def pushed(version: Version, author: str) -> FleetView:
    written = record(row(0, version), row(1, version), committed=version)
    return world([pod(0), pod(1)], written=written.model_copy(update={"author": author}))


def test_another_author_has_an_event() -> None:
    one, two = pushed(V1, "ml/Job/anne"), pushed(V2, "ml/Job/ben")
    events = {event.reason: event for event in find_events(build_status(one, NOW), build_status(two, NOW))}
    assert set(events) == {"WeightsCommitted", "AuthorChanged"}
    assert events["AuthorChanged"].type == "Normal"
    assert events["AuthorChanged"].message == "ml/Job/ben pushed version step-2; ml/Job/anne pushed version step-1."


@pytest.mark.parametrize(("before", "after"), [("", "ml/Job/anne"), ("ml/Job/anne", "ml/Job/anne"), ("ml/Job/anne", "")])
def test_the_first_author_and_an_unknown_author_have_no_event(before: str, after: str) -> None:
    assert reasons(pushed(V1, before), pushed(V2, after)) == [("Normal", "WeightsCommitted")]


ANNE, BEN, EVE = "ml/Job/anne", "ml/Job/ben", "ml/Job/eve"


def after_updates(*authors: str, outcomes: tuple[UpdateOutcome, ...] = ()) -> FleetView:
    """Return a fleet whose step-1, step-2, … were pushed by these authors. An empty text is an unknown author."""
    results = outcomes or (UpdateOutcome.COMMITTED,) * len(authors)
    updates = []
    for step, (author, outcome) in enumerate(zip(authors, results, strict=True), 1):
        version, finished = Version(run=1, step=step, label=f"step-{step}"), f"2026-01-01T00:00:0{step}.000Z"
        updates.append(EndedUpdate(version=version, outcome=outcome, finished=finished, author=author))
    last = next(update for update in reversed(updates) if update.outcome in {UpdateOutcome.COMMITTED, UpdateOutcome.PARTIAL})
    written = record(row(0, last.version), row(1, last.version), committed=last.version, last=updates[-1])
    more = {"author": last.author, "earlier_updates": updates[-2::-1]}
    return world([pod(0), pod(1)], written=written.model_copy(update=more))


def changes_of_authors(*worlds: FleetView) -> list[str]:
    statuses = [build_status(one, NOW) for one in worlds]
    events = [event for old, new in itertools.pairwise(statuses) for event in find_events(old, new)]
    return [event.message for event in events if event.reason == "AuthorChanged"]


def test_no_change_of_the_author_is_lost_between_two_reconciles() -> None:
    second, third = (
        f"{BEN} pushed version step-2; {ANNE} pushed version step-1.",
        f"{ANNE} pushed version step-3; {BEN} pushed version step-2.",
    )
    assert changes_of_authors(after_updates(ANNE), after_updates(ANNE, BEN)) == [second]
    assert changes_of_authors(after_updates(ANNE), after_updates(ANNE, BEN, ANNE)) == [third], "the same author as before"
    assert changes_of_authors(after_updates(ANNE), after_updates(ANNE, BEN, ANNE, ANNE)) == [third]
    across = f"{BEN} pushed version step-3; {ANNE} pushed version step-1."
    assert changes_of_authors(after_updates(ANNE), after_updates(ANNE, "", BEN)) == [across]
    assert changes_of_authors(after_updates(ANNE), after_updates(ANNE, ""), after_updates(ANNE, "", BEN)) == [across]
    both = f"{EVE} pushed version step-3; {BEN} pushed version step-2."
    assert changes_of_authors(after_updates(ANNE), after_updates(ANNE, BEN, EVE)) == [both], "one Event names the last two"
    assert changes_of_authors(after_updates(ANNE, BEN), after_updates(ANNE, BEN), after_updates(ANNE, BEN, BEN)) == [], "reported before"
    assert changes_of_authors(after_updates(ANNE), after_updates(ANNE, ""), after_updates(ANNE, "", ANNE)) == []


def test_an_update_that_did_not_commit_changes_no_author() -> None:
    outcomes = (UpdateOutcome.COMMITTED, UpdateOutcome.FAILED, UpdateOutcome.ABORTED)
    assert changes_of_authors(after_updates(ANNE), after_updates(ANNE, BEN, EVE, outcomes=outcomes)) == []
    found = changes_of_authors(after_updates(ANNE), after_updates(ANNE, BEN, outcomes=(UpdateOutcome.COMMITTED, UpdateOutcome.PARTIAL)))
    assert found == [f"{BEN} pushed version step-2; {ANNE} pushed version step-1."], "some engines committed it"


def test_failed_update_has_one_event() -> None:
    failed = world([pod(0), pod(1)], written=record(row(0), row(1), failed="engine demo-engine-0: timeout"))
    assert reasons(HEALTHY, failed) == [("Warning", "WeightUpdateFailed")]
    assert reasons(failed, failed) == []


def test_aborted_pause_has_a_warning_and_does_not_degrade() -> None:
    why = "the pause was given up: nothing was heard of the trainer for 120 s (weights.deadlines.idleSeconds)"
    last = partial(why).model_copy(update={"outcome": UpdateOutcome.ABORTED, "engines": []})
    after = world([pod(0), pod(1)], written=record(row(0), row(1), last=last))
    status = build_status(after, NOW)
    events = {event.reason: event for event in find_events(build_status(HEALTHY, NOW), status)}
    assert set(events) == {"WeightUpdateAborted"}
    assert events["WeightUpdateAborted"].message == f"The fleet keeps the weights it had: {why}."
    degraded = next(condition for condition in status["conditions"] if condition["type"] == "Degraded")
    assert degraded["status"] == "False"


def test_a_snapshot_that_fails_has_one_warning() -> None:
    problem = "The snapshot of version 1/3 could not be written: the volume is full."
    failed = world([pod(0), pod(1)], written=record(row(0), row(1)).model_copy(update={"snapshot_problem": problem}))
    (event,) = find_events(build_status(HEALTHY, NOW), build_status(failed, NOW))
    assert (event.type, event.reason, event.message) == ("Warning", "SnapshotFailed", problem)
    assert reasons(failed, failed) == []


def test_a_process_group_that_does_not_open_has_one_warning() -> None:
    failure = GroupFailure(code="RankZeroAbsent", message="Rank 0 did not open it.")
    failed = world([pod(0), pod(1)], written=record(row(0), row(1)).model_copy(update={"group_failure": failure}))
    status = build_status(failed, NOW)
    assert status["weights"]["processGroupFailure"] == {"reason": "RankZeroAbsent", "message": "Rank 0 did not open it."}
    (event,) = find_events(build_status(HEALTHY, NOW), status)
    assert (event.type, event.reason, event.message) == ("Warning", "ProcessGroupFailed", "Rank 0 did not open it.")
    assert reasons(failed, failed) == []


def test_rolling_update_has_events_for_start_and_end() -> None:
    rolling = world([pod(0, current="older"), pod(1)], written=record(row(0), row(1)))
    assert ("Normal", "RollingUpdateStarted") in reasons(HEALTHY, rolling)
    assert ("Normal", "RollingUpdateFinished") in reasons(rolling, HEALTHY)


def test_taken_name_has_a_warning() -> None:
    taken = build_status(HEALTHY, NOW, Failure(Reason.NAME_TAKEN, "Service demo-router exists."))
    (event,) = find_events(build_status(HEALTHY, NOW), taken)
    assert (event.type, event.reason, event.message) == ("Warning", "NameTaken", "Service demo-router exists.")


def test_invalid_spec_has_a_warning_at_once() -> None:
    assert reasons(None, build_fleet_view(cr(model={}), [], [])) == [("Warning", "InvalidSpec")]
