"""The status of a fleet without serving engines on purpose: scaled to zero, suspended, paused, asleep."""

from __future__ import annotations

import pytest

from sglang_rollout.api.v1alpha1 import SGLangRollout
from sglang_rollout.controller.decide.status import build_status
from sglang_rollout.controller.decide.transitions import find_events
from sglang_rollout.controller.render.hashing import revision
from sglang_rollout.wire.states import BASE, EngineState, FleetState
from tests.unit.controller.support.worlds import NOW, V1, Object, condition, cr, pod, ready, record, row, status_of, world


def test_scaled_to_zero_is_ready() -> None:
    assert ready(world([], written=record(), custom=cr(replicas=0)))[:2] == ("True", "ScaledToZero")


def test_suspended_fleet_says_what_is_kept() -> None:
    seen = world([], written=record(), custom=cr(replicas=2, state="Suspended"))
    status, reason, message = ready(seen)
    assert (status, reason) == ("False", "Suspended")
    assert message.startswith("Suspended by spec.state: no engine runs. Kept: version ")
    assert build_status(seen, NOW)["ready"] == "0/0"


def test_fleet_paused_by_the_spec_is_not_degraded() -> None:
    rows = [row(0, V1, gate=False), row(1, V1, gate=False)]
    written = record(*rows, committed=V1).model_copy(update={"state": FleetState.PAUSED})
    seen = world([pod(0), pod(1)], written=written, custom=cr(state="Paused"))
    message = "Paused by spec.state: 2 of 2 engines are paused and hold version step-1. Weight updates are accepted."
    assert ready(seen) == ("False", "Paused", message)
    status = status_of(seen)
    assert [engine["phase"] for engine in status["engines"]] == ["Paused", "Paused"]
    assert condition(status, "WeightsConsistent")["status"] == "True"
    assert condition(status, "Degraded")["status"] == "False"
    resuming = world([pod(0), pod(1)], written=written)
    assert ready(resuming)[1:] == ("Paused", "spec.state is Active again: 2 of 2 engines have not resumed yet.")


def test_fleet_paused_for_a_lost_trainer_says_what_resumes_it() -> None:
    """``trainerLease.onLoss: Pause``: gates are open, and nothing generates until a trainer calls."""
    written = record(row(0, V1), row(1, V1), committed=V1).model_copy(update={"waits_for_trainer": True})
    seen = world([pod(0), pod(1)], written=written)
    status, reason, message = ready(seen)
    assert (status, reason) == ("False", "TrainerLost")
    assert message.startswith(
        "The trainer is lost, and weights.trainerLease.onLoss is Pause: 2 of 2 engines are paused and hold version step-1."
    )
    assert "POST /continue_generation" in message
    found = status_of(seen)
    assert [engine["phase"] for engine in found["engines"]] == ["Paused", "Paused"]
    assert found["ready"] == "0/2"
    assert condition(found, "Available")["status"] == "False"
    assert condition(found, "WeightsConsistent")["status"] == "True"
    assert condition(found, "Degraded")["reason"] == "TrainerLost"


def test_problem_comes_before_the_pause() -> None:
    written = record(row(0, V1, gate=False), row(1, BASE, gate=False), committed=V1).model_copy(update={"state": FleetState.PAUSED})
    found = ready(world([pod(0), pod(1)], written=written, custom=cr(state="Paused")))
    assert found[:2] == ("False", "WaitingForWeights"), found


def test_sleeping_fleet_lists_released_memory() -> None:
    tags = ["kv_cache", "weights", "cuda_graph"]
    rows = [row(index, None, gate=False, state=EngineState.UNKNOWN).model_copy(update={"released": tags}) for index in range(2)]
    written = record(*rows, committed=V1).model_copy(update={"state": FleetState.ASLEEP})
    engine = {"image": "example.org/engine:1", "gpuResource": "", "memorySaver": True}
    custom = cr(state="Asleep", engine=engine)
    current = revision(SGLangRollout.model_validate(custom))
    seen = world([pod(0, current=current), pod(1, current=current)], written=written, custom=custom)
    message = "Asleep by spec.state: 2 of 2 engines have released their memory. Kept: version step-1."
    assert ready(seen) == ("False", "Asleep", message)
    status = status_of(seen)
    assert [(one["phase"], one["message"]) for one in status["engines"]] == [
        ("Asleep", "spec.state is Asleep; released: kv_cache, weights, cuda_graph.")
    ] * 2
    assert condition(status, "Degraded")["status"] == "False"


def shared(mode: str = "Colocated", claim: str = "judge-gpus-{engine}") -> Object:
    engine = {"image": "example.org/engine:1", "gpuResource": "", "memorySaver": True, "weightsCpuBackup": mode == "Colocated"}
    return cr(mode=mode, sharing={"resourceClaimName": claim}, engine=engine)


@pytest.mark.parametrize(("mode", "apart"), [("Colocated", False), ("Hybrid", False), ("Hybrid", True)])
def test_fleet_asleep_for_its_trainer_is_not_degraded(mode: str, apart: bool) -> None:
    """``apart``: said at each engine's own URL."""
    tags = ["kv_cache", "weights"]
    rows = [row(index, None, gate=False, state=EngineState.UNKNOWN).model_copy(update={"released": tags}) for index in range(2)]
    released_to_trainer = (
        {"released_to_trainer": [], "released_at_engines": {one.name: tags for one in rows}} if apart else {"released_to_trainer": tags}
    )
    written = record(*rows).model_copy(update=released_to_trainer)
    custom = shared(mode)
    current = revision(SGLangRollout.model_validate(custom))
    pods = [pod(0, current=current), pod(1, current=current)]
    seen = world(pods, written=written, custom=custom)
    message = "Asleep: the trainer uses the memory of 2 of 2 engines. It wakes them by resume_memory_occupation."
    assert ready(seen) == ("True", "AsleepForTrainer", message)
    status = status_of(seen)
    assert status["ready"] == "2/2"
    assert condition(status, "Available")["status"] == "True"
    assert [(one["phase"], one["message"]) for one in status["engines"]] == [
        ("Asleep", "the trainer uses its memory; released: kv_cache, weights.")
    ] * 2
    assert condition(status, "Degraded")["status"] == "False"
    before = status_of(world(pods, written=record(row(0), row(1)), custom=custom))
    assert find_events(before, status) == []
    assert find_events(status, before) == []
    down = [pods[0], pod(1, ready=False, current=current)]
    assert ready(world(down, written=written, custom=custom))[:2] == ("False", "PodsNotReady")


def test_other_claims_change_the_revision() -> None:
    one, other = (revision(SGLangRollout.model_validate(shared(claim=claim))) for claim in ("judge-gpus-{engine}", "others-{engine}"))
    assert one != other
