"""Status of ``model.prefetch``, which does not affect the engines."""

from __future__ import annotations

from typing import Any

import pytest

from sglang_rollout.api.v1alpha1 import SGLangRollout
from sglang_rollout.controller.decide.status import build_status
from sglang_rollout.controller.decide.view import FleetView
from sglang_rollout.controller.render import names, render_all
from sglang_rollout.controller.render.hashing import revision
from sglang_rollout.wire.states import BASE
from tests.unit.controller.support.worlds import NOW, SETTINGS, cr, pod, record, row, unschedulable, waiting, world

Object = dict[str, Any]
MODEL: Object = {
    "path": "/models/tiny",
    "prefetch": True,
    "volume": {"hostPath": "/data/models"},
    "download": {"command": ["fetch", "$(MODEL_PATH)"]},
}
TERMINATED: Object = {"terminated": {"exitCode": 3, "reason": "Error", "message": "error: no such repository\n"}}


def custom(**model: Any) -> Object:
    return cr(model=MODEL | model)


def on(node: int, *, ready: bool = False, current: bool = True, status: Object | None = None) -> Object:
    """Return the pod of the prefetch on a node."""
    made = next(one for one in render_all(SGLangRollout.model_validate(custom()), SETTINGS, "t") if one["kind"] == "DaemonSet")
    labels = made["spec"]["template"]["metadata"]["labels"]
    said = {"conditions": [{"type": "Ready", "status": "True" if ready else "False"}], **(status or {})}
    return {
        "metadata": {"name": f"demo-prefetch-{node}", "labels": labels if current else {**labels, names.LABEL_REVISION: "older"}},
        "spec": {"nodeName": f"node-{node}"},
        "status": said,
    }


def download(state: Object, last: Object | None = None) -> Object:
    """Return the status of a pod whose download is in ``state``. The kubelet reports a running container as started."""
    container = {"name": "download", "ready": False, "started": "running" in state, "restartCount": 2, "state": state}
    return {"initContainerStatuses": [{**container, "lastState": last or {}}]}


def seen(*prefetching: Object, wanted: int = 3, observed: int = 1) -> FleetView:
    """Return a fleet of two serving engines, and the pods of the prefetch."""
    current = revision(SGLangRollout.model_validate(custom()))
    engines = [pod(index, current=current) for index in range(2)]
    found = world([*engines, *prefetching], written=record(row(0), row(1), committed=BASE), custom=custom())
    found.children["DaemonSet", "demo-prefetch"]["status"] = {"observedGeneration": observed, "desiredNumberScheduled": wanted}
    return found


def report(found: FleetView) -> tuple[Object | None, str]:
    """Return ``status.prefetch`` and the reason of Degraded. The engines serve in every case."""
    status = build_status(found, NOW)
    conditions = {one["type"]: one for one in status["conditions"]}
    assert conditions["Ready"]["reason"] == "AllServing"
    assert status["replicas"] == 2
    return status.get("prefetch"), conditions["Degraded"]["reason"]


def test_nodes_with_the_model_are_counted() -> None:
    assert report(seen(on(1, ready=True), on(2, ready=True), on(3, status=download({"running": {}})))) == (
        {"ready": 2, "wanted": 3, "reason": "", "message": ""},
        "AsExpected",
    )


def test_pods_of_the_previous_model_are_not_counted() -> None:
    found, reason = report(seen(on(1, ready=True, current=False), on(2, ready=True)))
    assert (found, reason) == ({"ready": 1, "wanted": 3, "reason": "", "message": ""}, "AsExpected")


@pytest.mark.parametrize(
    "status",
    [
        download({"waiting": {"reason": "CrashLoopBackOff"}}, TERMINATED),
        download({"running": {}}, TERMINATED),
        download(TERMINATED),
    ],
    ids=["backing-off", "tried-again", "just-ended"],
)
def test_failed_download_is_reported_with_its_node_until_it_succeeds(status: Object) -> None:
    found, reason = report(seen(on(1, ready=True), on(2, status=status), on(3, status=status)))
    why = "pod demo-prefetch-2 on node node-2: the download exited with code 3: error: no such repository. (1 more)"
    assert (found, reason) == ({"ready": 1, "wanted": 3, "reason": "DownloadFailed", "message": why}, "PrefetchFailed")
    recovered = {**status, "conditions": [{"type": "Ready", "status": "True"}]}
    assert report(seen(on(2, status=recovered), wanted=1)) == ({"ready": 1, "wanted": 1, "reason": "", "message": ""}, "AsExpected")


@pytest.mark.parametrize(
    ("status", "code", "words"),
    [
        (waiting("ImagePullBackOff", "no such image", container="download"), "ImagePullFailed", "cannot be pulled (no such image)"),
        (unschedulable("Insufficient cpu"), "Unschedulable", "no room for its pod: Insufficient cpu."),
    ],
)
def test_unschedulable_prefetch_pod_is_reported(status: Object, code: str, words: str) -> None:
    found, reason = report(seen(on(1, status=status)))
    assert found is not None
    assert found["reason"] == code
    assert words in found["message"]
    assert reason == "PrefetchFailed"


def test_no_prefetch_status_before_nodes_are_counted() -> None:
    assert report(seen(on(1, ready=True), observed=0)) == (None, "AsExpected")


def test_no_prefetch_status_without_the_field() -> None:
    status = build_status(world([pod(0), pod(1)]), NOW)
    assert "prefetch" not in status


def test_prefetch_restarts_no_engine() -> None:
    with_it, without = (SGLangRollout.model_validate(custom(prefetch=on)) for on in (True, False))
    assert revision(with_it) == revision(without)
    older = {key: value for key, value in MODEL.items() if key != "prefetch"}
    assert revision(without) == revision(SGLangRollout.model_validate(cr(model=older)))


def test_overlay_without_the_download_has_no_prefetch() -> None:
    rollout = SGLangRollout.model_validate({**custom(), "spec": {**custom()["spec"], "podTemplate": {"spec": {"initContainers": None}}}})
    assert "DaemonSet" not in {one["kind"] for one in render_all(rollout, SETTINGS, "t")}
