"""The status of a fleet, by its state."""

from __future__ import annotations

import json

import pytest

from sglang_rollout.agent.state import EngineRecord, State, closed_reason
from sglang_rollout.api.status import Reason
from sglang_rollout.api.v1alpha1 import SGLangRollout
from sglang_rollout.controller.decide.plan import Failure
from sglang_rollout.controller.decide.status import build_status
from sglang_rollout.controller.decide.transitions import find_events
from sglang_rollout.controller.decide.view import FleetView, build_fleet_view
from sglang_rollout.controller.render.hashing import revision
from sglang_rollout.wire.reasons import GateReason, Refusal
from sglang_rollout.wire.record import (
    MAX_RECENT_CHARACTERS,
    MAX_RECENT_UPDATES,
    AdapterRow,
    EndedUpdate,
    EngineRow,
    GroupRow,
    Record,
    UpdateOutcome,
    UpdateReason,
)
from sglang_rollout.wire.states import BASE, EngineState, Version
from tests.unit.controller.support.worlds import (
    NOW,
    V1,
    V2,
    Object,
    condition,
    cr,
    crashed,
    opening,
    partial,
    pod,
    ready,
    record,
    row,
    status_of,
    under_way,
    unschedulable,
    waiting,
    world,
)


def test_serving_fleet() -> None:
    status = status_of(world([pod(0), pod(1)], written=record(row(0, V1), row(1, V1), committed=V1)))
    assert status["ready"] == "2/2"
    assert (status["replicas"], status["readyReplicas"], status["updatedReplicas"]) == (2, 2, 2)
    assert status["observedGeneration"] == 4
    weights = {"committedVersion": "step-1", "run": 1, "step": 1, "epoch": 3, "worldSize": 0}
    assert status["weights"] == weights | {"oldestServing": "step-1", "newestServing": "step-1", "skew": 0, "stale": 0}
    assert status["endpoints"]["url"] == "http://demo-router.default.svc:30000"
    assert status["endpoints"]["generate"] == "http://demo-generate.default.svc:30005"
    assert status["endpoints"]["discovery"] == "http://demo-router.default.svc:30000/fleet"
    assert {one["type"]: one["status"] for one in status["conditions"]} == {
        "Ready": "True",
        "Available": "True",
        "Progressing": "False",
        "RouterReady": "True",
        "WeightsConsistent": "True",
        "WaitingForWeights": "False",
        "NetworkIsolated": "Unknown",
        "Degraded": "False",
    }
    assert [row["phase"] for row in status["engines"]] == ["Serving", "Serving"]
    assert condition(status, "Ready")["message"] == "All 2 engines serve version step-1."
    alone = status_of(world([pod(0)], custom=cr(replicas=1), written=record(row(0, V1), committed=V1)))
    assert condition(alone, "Ready")["message"] == "The engine serves version step-1."


def test_a_fleet_of_one_engine_is_described_in_the_singular() -> None:
    alone = world([pod(0)], written=record(row(0, V1), committed=V1), custom=cr(1))
    assert ready(alone)[2] == "The engine serves version step-1."
    with_surplus = world([pod(0)], written=record(row(0, V1), committed=V1), custom=cr(2, elastic={"base": 1}))
    assert ready(with_surplus)[2].startswith("The engine of the base serves version step-1, and 0 of 1 surplus engines.")


def test_recent_updates_have_authors_bytes_and_reasons() -> None:
    older = EndedUpdate(
        version=V1, outcome=UpdateOutcome.COMMITTED, finished=NOW, phases_ms={"total": 1200}, author="ml/Job/anne", bytes=64
    )
    last = EndedUpdate(
        version=V2,
        outcome=UpdateOutcome.FAILED,
        finished=NOW,
        message="engine demo-engine-0 did not take the tensors",
        author="ml/Job/ben",
        reason=UpdateReason.ENGINE_FAILED,
    )
    written = record(row(0, V1), committed=V1, last=last).model_copy(update={"author": "ml/Job/anne", "earlier_updates": [older]})
    weights = status_of(world([pod(0), pod(1)], written=written))["weights"]
    assert weights["author"] == "ml/Job/anne"
    assert weights["lastUpdate"]["author"] == "ml/Job/ben"
    assert weights["recentUpdates"] == [
        {
            "version": "step-2",
            "author": "ml/Job/ben",
            "outcome": "Failed",
            "finished": NOW,
            "reason": "EngineFailed",
            "message": "engine demo-engine-0 did not take the tensors",
        },
        {
            "version": "step-1",
            "author": "ml/Job/anne",
            "outcome": "Committed",
            "finished": NOW,
            "milliseconds": 1200,
            "bytes": 64,
            "reason": "",
            "message": "",
        },
    ]


def test_long_messages_and_many_updates_keep_the_list_of_updates_small() -> None:
    update = EndedUpdate(
        version=V2.model_copy(update={"label": "€" * 256}),
        outcome=UpdateOutcome.FAILED,
        finished=NOW,
        message="€" * 4000,
        author="a" * 2000,
        reason=UpdateReason.OTHER,
    )
    written = record(row(0, V1), committed=V1, last=update).model_copy(update={"earlier_updates": [update] * 50})
    updates = status_of(world([pod(0), pod(1)], written=written))["weights"]["recentUpdates"]
    assert len(updates) == MAX_RECENT_UPDATES
    assert all(len(row["message"]) == MAX_RECENT_CHARACTERS and row["message"].endswith("…") for row in updates)
    assert len(json.dumps(updates, ensure_ascii=False).encode()) < 30_000


def test_the_base_version_is_called_base() -> None:
    status = status_of(world([pod(0), pod(1)], written=record(row(0), row(1))))
    assert status["weights"]["committedVersion"] == "base"


def test_status_before_anything_exists() -> None:
    status = status_of(world([], router=False))
    assert "weights" not in status
    assert condition(status, "Ready")["reason"] == "RouterNotReady"
    assert condition(status, "WeightsConsistent")["status"] == "Unknown"
    assert [row["phase"] for row in status["engines"]] == ["Pending", "Pending"]


def test_an_unchanged_fleet_has_an_unchanged_status() -> None:
    pods, written = [pod(0), pod(1, ready=False)], record(row(0))
    before = status_of(world(pods, written=written))
    again = build_status(world(pods, written=written, custom=cr(status=before)), "2026-11-22T00:00:00Z")
    assert again == before


def test_only_a_condition_that_changed_has_a_new_time() -> None:
    before = status_of(world([pod(0), pod(1)], written=record(row(0), row(1))))
    later = "2026-11-22T00:00:00Z"
    after = build_status(world([pod(0), pod(1, ready=False)], written=record(row(0)), custom=cr(status=before)), later)
    assert condition(after, "Ready")["lastTransitionTime"] == later
    assert condition(after, "Available")["lastTransitionTime"] == NOW


TRACEBACK = """\
Traceback (most recent call last):
  File "/sgl/server.py", line 5, in <module>
OSError: /models/none does not exist
[2026-11-21] Received sigquit from a child process. It usually means the child failed.
"""


@pytest.mark.parametrize(
    ("said", "reason", "parts"),
    [
        (
            crashed(code=2, message="launch_server.py: error: unrecognized arguments: --nonsense\n"),
            "EngineCrashed",
            ["demo-engine-1", "container engine", "code 2", "unrecognized arguments: --nonsense", "restarted 3 times"],
        ),
        (crashed(message=TRACEBACK), "EngineCrashed", ["OSError: /models/none does not exist"]),
        (crashed(message=TRACEBACK, waiting=False, restarts=1), "PodsNotReady", ["OSError", "starting again"]),
        (crashed(code=137, reason="OOMKilled"), "EngineCrashed", ["OOMKilled", "memory"]),
        (
            waiting("ImagePullBackOff", 'Back-off pulling image "x": not found'),
            "ImagePullFailed",
            ["demo-engine-1", "container engine", "example.org/x:1", "not found"],
        ),
        (
            crashed(message="huggingface_hub.errors.HFValidationError: Repo id must be in the form 'repo_name' or 'a/b': '/models/x'."),
            "EngineCrashed",
            ["'/models/x'", "the container has no folder of this name", "check the path and its volume"],
        ),
        (waiting("ErrImageNeverPull", "not present"), "ImagePullFailed", ["not present"]),
        (waiting("CreateContainerConfigError", 'secret "hf" not found'), "CreateFailed", ['secret "hf" not found']),
        (
            unschedulable("0/3 nodes are available: 3 Insufficient nvidia.com/gpu."),
            "InsufficientCapacity",
            ["demo-engine-1", "Insufficient nvidia.com/gpu"],
        ),
        ({}, "PodsNotReady", ["demo-engine-1", "starting"]),
    ],
)
def test_status_says_why_an_engine_does_not_start(said: Object, reason: str, parts: list[str]) -> None:
    seen = world([pod(0), pod(1, ready=False, status=said)], written=record(row(0)))
    status, found, message = ready(seen)
    assert (status, found) == ("False", reason)
    for part in parts:
        assert part in message
    assert condition(status_of(seen), "Available")["status"] == "True", "the other engine serves"


def test_restart_in_a_crash_loop_is_not_a_recovery() -> None:
    def seen(*, waiting: bool, status: Object | None = None) -> FleetView:
        broken = pod(1, ready=False, status=crashed(message=TRACEBACK, waiting=waiting))
        return world([pod(0), broken], written=record(row(0)), custom=cr(status=status))

    before = status_of(seen(waiting=True))
    after = status_of(seen(waiting=False, status=before))
    assert after == before


def test_a_sidecar_without_its_image_is_named() -> None:
    said = {"initContainerStatuses": waiting("ErrImagePull", "denied", container="gate")["containerStatuses"]}
    _, reason, message = ready(world([pod(0), pod(1, ready=False, status=said)], written=record(row(0))))
    assert reason == "ImagePullFailed"
    assert "container gate" in message


def test_engines_with_the_same_problem_are_counted() -> None:
    said = crashed(message="ValueError: no")
    _, _, message = ready(world([pod(0, ready=False, status=said), pod(1, ready=False, status=said)], written=record()))
    assert "1 more engine for the same reason" in message


def test_engine_outside_the_process_group_says_what_helps() -> None:
    written = record(row(0, V1), row(1, BASE, gate=False), committed=V1)
    group = GroupRow(name="g", epoch=3, world_size=2, master="10.0.0.9:1", backend="nccl", places=[0])
    outside = ready(world([pod(0), pod(1)], written=written.model_copy(update={"joined": [group]})))[2]
    assert "it needs a new process group, or a snapshot on disk (weights.catchUp.disk)" in outside
    both = group.model_copy(update={"places": [0, 1]})
    inside = ready(world([pod(0), pod(1)], written=written.model_copy(update={"joined": [both]})))[2]
    assert "waits for the trainer's next weight update" in inside


def test_restarted_engine_waits_for_weights() -> None:
    seen = world([pod(0), pod(1)], written=record(row(0, V1), row(1, BASE, gate=False), committed=V1))
    status, reason, message = ready(seen)
    assert (status, reason) == ("False", "WaitingForWeights")
    assert "demo-engine-1" in message
    assert "holds version base, the fleet serves step-1" in message
    said = status_of(seen)
    assert said["ready"] == "1/2"
    assert condition(said, "WeightsConsistent")["reason"] == "WaitingForWeights"
    assert said["engines"][1]["phase"] == "Waiting"


def test_engine_with_part_of_an_update_has_diverged() -> None:
    dirty = row(1, None, gate=False, state=EngineState.DIRTY)
    seen = world([pod(0), pod(1)], written=record(row(0, V1), dirty, committed=V1, failed="engine demo-engine-1: timeout"))
    assert ready(seen)[1] == "WeightsDiverged"
    degraded = condition(status_of(seen), "Degraded")
    assert (degraded["status"], degraded["reason"]) == ("True", "UpdateFailed")
    assert "step-2" in degraded["message"]
    assert "timeout" in degraded["message"]


@pytest.mark.parametrize(
    ("closed", "message"),
    [
        (closed_reason(State(record=EngineRecord(state=EngineState.DIRTY, failed=True), up=True)), ""),
        (Refusal(GateReason.NOT_UP, "the engine is not up: it crashed"), " The engine is not up: it crashed."),
        (Refusal(GateReason.NOT_UP, "demo-engine-1 is away."), " demo-engine-1 is away."),
    ],
)
def test_what_the_agent_adds_to_a_sentence_is_a_sentence_that_says_more(closed: Refusal, message: str) -> None:
    dirty = row(1, None, gate=False, state=EngineState.DIRTY, closed=closed)
    said = status_of(world([pod(0), pod(1)], written=record(row(0, V1), dirty, committed=V1)))["engines"][1]["message"]
    assert said == f"it holds part of an unfinished weight update and waits for a complete one.{message}"


STEADY = ("Ready", "Available", "RouterReady", "WeightsConsistent", "WaitingForWeights", "Degraded")
"""Conditions that a training step without incidents leaves as they are."""


def serving_status() -> Object:
    return status_of(world([pod(0), pod(1)], written=record(row(0, V1), row(1, V1), committed=V1)))


def closed(index: int, version: Version, code: GateReason) -> EngineRow:
    return row(index, version, gate=False, closed=Refusal(code, "m"))


@pytest.mark.parametrize(
    "written",
    [
        record(under_way(0), under_way(1), committed=V1),
        record(row(0, V1), under_way(1), committed=V1),
        record(opening(0, V2), opening(1, V2), committed=V2),
        record(closed(0, V2, GateReason.GATE_NOT_READY), row(1, V2), committed=V2),
        record(opening(0, V2), row(1, V1), committed=V1).model_copy(update={"under_way": V2}),
    ],
    ids=["all-engines", "one-engine", "just-committed", "gate-opens", "canary"],
)
def test_fleet_stays_ready_during_a_weight_update(written: Record) -> None:
    before = serving_status()
    during = status_of(world([pod(0), pod(1)], written=written, custom=cr(status=before)))
    assert (during["ready"], during["readyReplicas"], during["weights"]["stale"]) == ("2/2", 2, 0)
    for kind in STEADY:
        assert condition(during, kind)["status"] == condition(before, kind)["status"], condition(during, kind)
    assert condition(during, "Ready")["reason"] == "UpdatingWeights"
    progressing = condition(during, "Progressing")
    assert (progressing["status"], progressing["reason"]) == ("True", "UpdatingWeights")
    assert "Updating" in {engine["phase"] for engine in during["engines"]}
    assert {event.reason for event in find_events(before, during)} <= {"WeightsCommitted", "NewRun"}


def test_open_update_is_progressing_while_all_engines_serve() -> None:
    """With transport Staged, engines generate while the version arrives."""
    written = record(row(0, V1), row(1, V1), committed=V1).model_copy(update={"under_way": V2})
    progressing = condition(status_of(world([pod(0), pod(1)], written=written)), "Progressing")
    assert (progressing["status"], progressing["reason"]) == ("True", "UpdatingWeights")
    assert "step-2" in progressing["message"]


def test_weight_update_does_not_make_a_lost_engine_ready() -> None:
    lost = status_of(world([pod(0), pod(1, ready=False)], written=record(row(0, V1), row(1, V1), committed=V1)))
    updating = record(under_way(0), under_way(1), committed=V1)
    during = status_of(world([pod(0), pod(1)], written=updating, custom=cr(status=lost)))
    found = condition(during, "Ready")
    assert (during["ready"], found["status"], found["reason"]) == ("1/2", "False", "UpdatingWeights")
    assert "demo-engine-1" in found["message"]


def test_engine_that_leaves_an_update_dirty_is_not_ready() -> None:
    updating = record(under_way(0), under_way(1), committed=V1)
    during = status_of(world([pod(0), pod(1)], written=updating, custom=cr(status=serving_status())))
    dirty = row(1, None, gate=False, state=EngineState.DIRTY)
    after = status_of(world([pod(0), pod(1)], written=record(row(0, V1), dirty, committed=V1), custom=cr(status=during)))
    found = condition(after, "Ready")
    assert (after["ready"], found["status"], found["reason"]) == ("1/2", "False", "WeightsDiverged")


def test_callers_that_the_coordinator_may_not_watch_need_attention() -> None:
    written = record(row(0, V2), row(1, V2), committed=V2)
    said = status_of(world([pod(0), pod(1)], written=written.model_copy(update={"callers_forbidden": True})))
    degraded = condition(said, "Degraded")
    assert (degraded["status"], degraded["reason"]) == ("True", "NotAllowed")
    assert "ServiceAccount demo-router" in degraded["message"]
    assert condition(said, "Ready")["status"] == "True"


def test_updates_that_sglang_refuses_need_attention_before_the_first_push() -> None:
    why = "SGLang refuses every update of the weights in engine demo-engine-1: splits are active."
    said = status_of(world([pod(0), pod(1)], written=record(row(0), row(1)).model_copy(update={"updates_refused": why})))
    degraded = condition(said, "Degraded")
    assert (degraded["status"], degraded["reason"], degraded["message"]) == ("True", "UpdatesRefused", why)
    assert condition(said, "Ready")["status"] == "True", "the fleet serves the weights that it has"


def test_a_partial_commit_needs_attention_until_all_serve() -> None:
    left = row(1, BASE, gate=False)
    last = partial("engine demo-engine-1 could not end the session: no answer")
    degraded = condition(status_of(world([pod(0), pod(1)], written=record(row(0, V2), left, committed=V2, last=last))), "Degraded")
    assert (degraded["status"], degraded["reason"]) == ("True", "PartlyCommitted")
    assert "Version step-2 is committed on 1 engine;" in degraded["message"]
    assert "demo-engine-1 could not end the session" in degraded["message"]
    healed = status_of(world([pod(0), pod(1)], written=record(row(0, V2), row(1, V2), committed=V2, last=last)))
    assert condition(healed, "Degraded")["status"] == "False"


def test_record_alone_does_not_make_an_engine_serve() -> None:
    seen = world([pod(0), pod(1, ready=False)], written=record(row(0), row(1)))
    assert status_of(seen)["ready"] == "1/2"


def test_no_engine_serves_without_a_router() -> None:
    seen = world([pod(0), pod(1)], written=record(row(0), row(1)), router=False)
    assert status_of(seen)["ready"] == "0/2"
    assert ready(seen)[1] == "RouterNotReady"


def test_ready_counts_only_engines_of_the_current_revision() -> None:
    seen = world([pod(0, current="older"), pod(1)], written=record(row(0), row(1)))
    status, reason, message = ready(seen)
    assert (status, reason) == ("False", "Updating")
    assert "1 of 2 engines are made from the current spec" in message
    said = status_of(seen)
    assert (said["updatedReplicas"], said["readyReplicas"]) == (1, 2)
    assert condition(said, "Progressing")["reason"] == "Updating"


def test_waiting_rolling_update_names_the_cause() -> None:
    behind = record(row(0, V2), row(1, BASE, gate=False), committed=V2)
    _, _, message = ready(world([pod(0, current="older"), pod(1)], written=behind))
    assert "waits for this: Engine demo-engine-1" in message


def test_refused_apply_comes_first() -> None:
    seen = world([pod(0), pod(1)], written=record(row(0), row(1)))
    sentence = "StatefulSet demo-engine-0 was refused: spec.template.spec.volumes[4].name: Duplicate value"
    for reason in (Reason.APPLY_FAILED, Reason.NAME_TAKEN):
        assert ready(seen, Failure(reason, sentence)) == ("False", reason, sentence)
        assert condition(status_of(seen, Failure(reason, sentence)), "Degraded")["reason"] == reason


def test_long_adapter_names_are_cut_and_stay_unique() -> None:
    names = ["a" * 256 + "x", "a" * 256 + "y", "b"]
    rows = [AdapterRow(name=name, path="/" * 5000, by_spec=False, loaded=1, wanted=2, message="r" * 40_000) for name in names]
    written = record(row(0), row(1)).model_copy(update={"adapters": rows})
    shown = status_of(world([pod(0), pod(1)], written=written))["adapters"]
    assert [(one["name"], len(one["path"]), len(one["message"])) for one in shown] == [("a" * 256, 4096, 2000), ("b", 4096, 2000)]


def test_adapters_are_reported_and_change_no_revision() -> None:
    rows = [AdapterRow(name="math", path="/m", by_spec=True, loaded=1, wanted=2, message="engine demo-engine-1: no such path")]
    written = record(row(0), row(1)).model_copy(update={"adapters": rows})
    (shown,) = status_of(world([pod(0), pod(1)], written=written))["adapters"]
    assert shown == {
        "name": "math",
        "path": "/m",
        "loaded": 1,
        "wanted": 2,
        "reason": "AdapterFailed",
        "message": "engine demo-engine-1: no such path",
    }

    def made(rank: int, *adapters: str) -> str:
        lora = {"maxRank": rank, "targetModules": ["all"], "adapters": [{"name": name, "path": f"/{name}"} for name in adapters]}
        return revision(SGLangRollout.model_validate(cr(engine={"image": "e:1", "lora": lora})))

    assert made(8) == made(8, "a") == made(8, "a", "b"), "adapters restart no engine"
    assert made(8) != made(16)


def test_invalid_object_names_the_field() -> None:
    custom = cr(engine={"img": "x"})
    status = build_status(build_fleet_view(custom, [], []), NOW)
    found = condition(status, "Ready")
    assert (found["status"], found["reason"]) == ("False", "InvalidSpec")
    assert "spec.engine.image" in found["message"]


def test_unreadable_record_is_reported() -> None:
    seen = world([pod(0), pod(1)])
    seen.children["ConfigMap", "demo-weights"]["data"] = {"weights.json": "{nonsense"}
    again = build_fleet_view(seen.cr, list(seen.children.values()), [pod.raw for pod in seen.pods.values()])
    said = condition(status_of(again), "WeightsConsistent")
    assert said["status"] == "Unknown"
    assert "cannot be read" in said["message"]


def test_large_fleet_lists_engines_that_do_not_serve_first() -> None:
    pods = [pod(index, ready=index != 79) for index in range(80)]
    seen = world(pods, written=record(*(row(index) for index in range(80))), custom=cr(replicas=80))
    said = status_of(seen)
    assert said["ready"] == "79/80"
    assert len(said["engines"]) == 64
    assert said["engines"][0]["name"] == "demo-engine-79"


def test_engine_being_removed_is_listed() -> None:
    small = cr(replicas=1)
    leaving = {"apiVersion": "apps/v1", "kind": "StatefulSet", "metadata": {"name": "demo-engine-1"}}
    seen = world([pod(0), pod(1)], written=record(row(0), row(1)), custom=small, extra=(leaving,))
    said = status_of(seen)
    assert said["replicas"] == 2
    assert [row["phase"] for row in said["engines"]] == ["Serving", "Stopping"]
    assert condition(said, "Progressing")["reason"] == "Scaling"


def test_the_spread_of_served_versions_is_shown() -> None:
    written = record(row(0, V1), row(1, V2), committed=V2).model_copy(update={"history": [V1, V2], "world_size": 3})
    weights = status_of(world([pod(0), pod(1)], written=written))["weights"]
    assert (weights["oldestServing"], weights["newestServing"], weights["skew"]) == ("step-1", "step-2", 1)
    assert (weights["stale"], weights["worldSize"]) == (1, 3)


@pytest.mark.parametrize(
    "seen",
    [
        pytest.param(
            world([pod(0), pod(1, ready=False, status=crashed(message="ValueError: no such layer."))], written=record(row(0))), id="log"
        ),
        pytest.param(
            world([pod(0), pod(1, ready=False, status=waiting("CreateContainerError", "no such file."))], written=record(row(0))),
            id="create",
        ),
        pytest.param(
            world(
                [pod(0), pod(1, ready=False, status={"phase": "Failed", "reason": "Evicted", "message": "The node was low on memory. "})]
            ),
            id="evicted",
        ),
        pytest.param(
            world([pod(0), pod(1, ready=False, status=unschedulable("0/3 nodes are available: 3 Insufficient cpu."))]), id="scheduler"
        ),
        pytest.param(world([pod(0), pod(1, ready=False, status=unschedulable("no node fits"))]), id="no stop"),
        pytest.param(world([pod(0), pod(1)], written=record(row(0), row(1), failed="engine demo-engine-0: timeout.")), id="update"),
        pytest.param(world([pod(0), pod(1)], written=record(row(0), row(1), failed="engine demo-engine-0: timeout")), id="update without"),
    ],
)
def test_quotes_end_with_one_full_stop(seen: FleetView) -> None:
    status = status_of(seen)
    said = [one["message"] for one in status["conditions"]] + [row["message"] for row in status["engines"] if row.get("message")]
    assert [text for text in said if not text.endswith((".", ".)")) or ".." in text or " ." in text] == []
