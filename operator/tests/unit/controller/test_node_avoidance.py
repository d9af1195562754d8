"""Which nodes are avoided: a bad node is distinguished from a bad spec, and most nodes stay usable."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_rollout.api.v1alpha1 import SGLangRollout
from sglang_rollout.controller.decide.node_avoidance import MIN_NODES_PER_AVOIDED, decide_avoidance, seconds_until_expiry
from sglang_rollout.controller.decide.status import build_status
from sglang_rollout.controller.decide.transitions import find_events
from sglang_rollout.controller.decide.view import FleetView
from sglang_rollout.controller.render.hashing import revision
from sglang_rollout.wire.agent import termination_message
from tests.unit.controller.support.worlds import NOW, cr, record, row, unschedulable, world
from tests.unit.controller.support.worlds import pod as plain_pod

Object = dict[str, Any]
POLICY = {"avoidNodes": {"failures": 3, "withinSeconds": 3600, "forSeconds": 7200}}
CURRENT = revision(SGLangRollout.model_validate(cr()))


OTHER_POD_FAILED = termination_message("pod demo-engine-1-1 has ended")


def at(minutes: int) -> str:
    """Return the time ``minutes`` after 02:00. The current time is 03:00."""
    return f"2026-11-21T{2 + minutes // 60:02}:{minutes % 60:02}:00Z"


def ended(time: str | None, *, code: int = 1, message: str = "CUDA error: uncorrectable ECC error") -> Object:
    return {"terminated": {"exitCode": code, "reason": "Error", "message": message, "finishedAt": time}}


def pod(index: int, node: str, *ends: Object, ready: bool = True, **more: Any) -> Object:
    """Return a pod on a node. ``ends`` are the ends of its engine container."""
    container: Object = {"name": "engine", "ready": ready, "started": ready, "restartCount": len(ends), "state": {"running": {}}}
    container |= dict(zip(("lastState", "state"), ends, strict=False))
    made = plain_pod(index, ready=ready, status={"containerStatuses": [container]}, **more)
    made["spec"]["nodeName"] = node
    return made


def failure(minutes: int, node: str = "bad", engine: int = 1, of: str = CURRENT) -> Object:
    """Return a row of ``status.nodeFailures``."""
    return {
        "node": node,
        "engine": f"demo-engine-{engine}",
        "revision": of,
        "time": at(minutes),
        "reason": "Error",
        "message": "exited with code 1",
    }


def seen(*pods: Object, failures: tuple[Object, ...] = (), avoided: tuple[Object, ...] = (), policy: Object | None = None) -> FleetView:
    """Return a fleet with failures and avoided nodes in its status."""
    status = {"nodeFailures": list(failures), "avoidedNodes": list(avoided)}
    scheduling = POLICY if policy is None else policy
    return world(list(pods), written=record(row(0), row(1)), custom=cr(len(pods), status=status, scheduling=scheduling))


def avoided(world: FleetView, now: str = NOW) -> list[str]:
    return [node.node for node in decide_avoidance(world, now).nodes]


GOOD, BAD = pod(0, "good"), pod(1, "bad", ended(at(55)), ready=False)
TWICE = (failure(10), failure(30))


def test_third_failure_within_an_hour_avoids_the_node() -> None:
    (found,) = decide_avoidance(seen(GOOD, BAD, failures=TWICE), NOW).nodes
    assert (found.node, found.since, found.until) == ("bad", NOW, at(180))
    assert found.message == (
        "engines failed there 3 times since 2026-11-21T02:10:00Z, demo-engine-1 at 2026-11-21T02:55:00Z: exited with code 1: CUDA error:"
        " uncorrectable ECC error."
    )


def test_shortest_accepted_window_can_be_reached() -> None:
    policy = {"avoidNodes": {"failures": 3, "withinSeconds": 121, "forSeconds": 600}}
    minute_by_minute = seen(GOOD, pod(1, "bad", ended(at(60)), ready=False), failures=(failure(58), failure(59)), policy=policy)
    assert avoided(minute_by_minute) == ["bad"]


def test_failure_is_counted_once() -> None:
    fleet = seen(GOOD, BAD)
    first = build_status(fleet, NOW)
    assert [one["time"] for one in first["nodeFailures"]] == [at(55)]
    fleet.cr["status"] = first
    assert build_status(fleet, at(61)) == first


@pytest.mark.parametrize(
    ("why", "fleet"),
    [
        ("two failures are too few", seen(GOOD, BAD, failures=TWICE[:1])),
        ("a failure counts for an hour", seen(GOOD, BAD, failures=(failure(0), failure(30)))),
        ("another spec failed", seen(GOOD, BAD, failures=tuple(failure(minute, of="older") for minute in (10, 30)))),
        ("no engine is up elsewhere", seen(pod(0, "good", ready=False), BAD, failures=TWICE)),
        ("the engine that is up has another spec", seen(pod(0, "good", current="older"), BAD, failures=TWICE)),
        ("the other node fails engines, too", seen(GOOD, BAD, failures=(*TWICE, failure(20, "good", 0)))),
        ("only the node itself has an engine that is up", seen(pod(0, "bad"), BAD, failures=TWICE)),
        ("the spec does not set the field", seen(GOOD, BAD, failures=TWICE, policy={})),
        ("the pod is going away", seen(GOOD, pod(1, "bad", ended(at(55)), deletionTimestamp=NOW), failures=TWICE)),
        ("it ended well", seen(GOOD, pod(1, "bad", ended(at(55), code=0)), failures=TWICE)),
        ("the time of the end is unknown", seen(GOOD, pod(1, "bad", ended(None, code=137)), failures=TWICE)),
        (
            "another pod of the engine failed",
            seen(GOOD, pod(1, "bad", ended(at(55), message=OTHER_POD_FAILED)), failures=TWICE),
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_node_is_not_avoided(why: str, fleet: FleetView) -> None:
    assert avoided(fleet) == [], why


def disrupted() -> Object:
    made = pod(1, "bad", ended(at(55)), ready=False)
    made["status"]["conditions"].append({"type": "DisruptionTarget", "status": "True", "reason": "PreemptionByScheduler"})
    return made


def refused() -> Object:
    made = plain_pod(1, ready=False, status={"phase": "Failed", "reason": "UnexpectedAdmissionError"}, creationTimestamp=at(55))
    made["spec"]["nodeName"] = "bad"
    return made


def test_preemption_is_not_a_failure_and_a_refusal_of_the_kubelet_is() -> None:
    assert avoided(seen(GOOD, disrupted(), failures=TWICE)) == []
    assert avoided(seen(GOOD, refused(), failures=TWICE)) == ["bad"]


def test_reboot_of_a_node_is_one_failure() -> None:
    rebooted = [pod(index, "bad", ended(f"2026-11-21T02:55:{index:02}Z", code=255)) for index in range(1, 9)]
    assert avoided(seen(GOOD, *rebooted, failures=TWICE[:1])) == []
    (found,) = decide_avoidance(seen(GOOD, *rebooted, failures=TWICE), NOW).nodes
    assert found.message.startswith("engines failed there 3 times since 2026-11-21T02:10:00Z, demo-engine-8 at 2026-11-21T02:55:08Z: ")


def kept(node: str, since: int = 0) -> Object:
    return {"node": node, "reason": "EnginesFailed", "message": "engines failed there.", "since": at(since), "until": at(since + 120)}


def test_node_is_avoided_until_its_time_ends_and_old_failures_do_not_count_again() -> None:
    quiet = seen(GOOD, pod(1, "third"), failures=TWICE, avoided=(kept("bad", 30),))
    assert avoided(quiet, at(149)) == ["bad"]
    assert avoided(quiet, at(150)) == []
    assert decide_avoidance(quiet, at(150)).failures == []


def test_at_most_a_quarter_of_the_nodes_is_avoided() -> None:
    pods = [pod(index, f"node-{index}") for index in range(8)]
    worst = [failure(minute, f"node-{node}", node) for node, times in ((1, 3), (2, 4), (3, 5)) for minute in range(10, 10 + times)]
    assert avoided(seen(*pods, failures=tuple(worst))) == ["node-3", "node-2"]
    assert avoided(seen(*pods, failures=tuple(worst), avoided=(kept("node-7"), kept("node-6")))) == ["node-7", "node-6"]


nodes = st.sampled_from([f"node-{index}" for index in range(9)])


@given(
    places=st.lists(st.tuples(nodes, st.booleans()), max_size=12),
    failed=st.lists(st.tuples(st.sampled_from(["node-0", "node-1", "node-2", "node-3"]), st.integers(0, 59)), max_size=40),
    before=st.sets(nodes, max_size=2),
)
@settings(deadline=None, max_examples=60)
def test_three_quarters_of_the_nodes_stay_usable(places: list[tuple[str, bool]], failed: list[tuple[str, int]], before: set[str]) -> None:
    pods = [pod(index, node, ready=ready) for index, (node, ready) in enumerate(places)]
    fleet = seen(*pods, failures=tuple(failure(minute, node) for node, minute in failed), avoided=tuple(map(kept, sorted(before))))
    found = decide_avoidance(fleet, NOW)
    new = {node.node for node in found.nodes} - before
    assert before <= {node.node for node in found.nodes}
    used = {node for node, _ in places} | before | {node for node, _ in failed}
    assert not new or len(new | before) <= max(1, len(used) // MIN_NODES_PER_AVOIDED)
    failing = {failure.node for failure in found.failures}
    assert not new or any(ready and node not in failing for node, ready in places), "there must be a better node"
    # The same view with the new status leads to the same decision.
    fleet.cr["status"] = {
        "avoidedNodes": [node.model_dump(by_alias=True) for node in found.nodes],
        "nodeFailures": [failure.model_dump(by_alias=True) for failure in found.failures],
    }
    assert decide_avoidance(fleet, NOW) == found


def test_avoidance_has_events_for_start_and_end() -> None:
    before, after = seen(GOOD, BAD, failures=TWICE[:1]), seen(GOOD, BAD, failures=TWICE)
    old, new = build_status(before, NOW), build_status(after, NOW)
    events = {event.reason: event for event in find_events(old, new)}
    assert events["NodeAvoided"].type == "Warning"
    assert events["NodeAvoided"].message.startswith("Node bad is avoided until 2026-11-21T05:00:00Z: engines failed there 3 times since")
    again = {event.reason: event.message for event in find_events(new, old)}
    assert again["NodeAllowedAgain"] == "Engines may use node bad again."


def test_fleet_with_an_avoided_node_is_ready_and_degraded() -> None:
    fine = seen(GOOD, pod(1, "third"), avoided=(kept("bad"),))
    found = {one["type"]: one for one in build_status(fine, NOW)["conditions"]}
    assert found["Ready"]["status"] == "True"
    assert (found["Degraded"]["status"], found["Degraded"]["reason"]) == ("True", "NodesAvoided")
    assert found["Degraded"]["message"] == "Node bad is avoided until 2026-11-21T04:00:00Z: engines failed there."


def test_unschedulable_engine_lists_avoided_nodes() -> None:
    homeless = plain_pod(
        1, ready=False, status=unschedulable("0/2 nodes are available: 1 node(s) didn't match Pod's node affinity/selector")
    )
    homeless["spec"] = {}
    status = build_status(seen(GOOD, homeless, avoided=(kept("bad"),)), NOW)
    assert status["engines"][1]["message"].endswith("affinity/selector. Avoided because engines failed there (status.avoidedNodes): bad.")


def test_status_has_no_nodes_without_the_field() -> None:
    status = build_status(seen(GOOD, BAD, failures=TWICE, avoided=(kept("bad"),), policy={}), NOW)
    assert not {"avoidedNodes", "nodeFailures"} & status.keys()


def test_expiry_of_the_first_node_is_computed() -> None:
    assert seconds_until_expiry({"avoidedNodes": [kept("bad", 30), kept("worse", 10)]}, at(125)) == 300
    assert seconds_until_expiry({}, NOW) is None


def test_setting_the_field_restarts_no_engine() -> None:
    asked = [{"avoidNodes": {}}, {"avoidNodes": {"failures": 5}}]
    assert {revision(SGLangRollout.model_validate(cr(scheduling=scheduling))) for scheduling in asked} == {CURRENT}
    placed: list[Object] = [{"nodeSelector": {"gpu": "h200"}}, {"nodeSelector": {"gpu": "h200"}, "avoidNodes": {}}]
    same = [revision(SGLangRollout.model_validate(cr(scheduling=scheduling))) for scheduling in placed]
    assert same[0] == same[1] != CURRENT
