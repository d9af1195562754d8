"""The router pod: scheduling, ``router.podTemplate``, and the status while the pod does not run."""

from __future__ import annotations

from typing import Any

import pytest

from sglang_rollout.api.pod_template import ROUTER_CONTAINERS
from sglang_rollout.api.v1alpha1 import SGLangRollout
from sglang_rollout.controller.decide.view import FleetView
from sglang_rollout.controller.render import names
from sglang_rollout.controller.render.router import router_deployment
from tests.unit.controller.support.worlds import SETTINGS, Object, condition, cr, pod, ready, record, row, status_of, unschedulable, world

TAINTED = "0/2 nodes are available: 2 node(s) had untolerated taint(s)"
QUOTA = 'pods "demo-router-5c9" is forbidden: exceeded quota: small'


def template(**router: Any) -> Object:
    made: Object = router_deployment(SGLangRollout.model_validate(cr(router=router)), SETTINGS)["spec"]["template"]
    return made


def without_router(said: Object | None, *, failure: str = "") -> FleetView:
    """Return two engines that are up, and a router whose pod has the status ``said``; None: no pod."""
    labels = names.labels("demo", names.COMPONENT_ROUTER)
    routers = [] if said is None else [{"metadata": {"name": "demo-router-x", "labels": labels}, "spec": {}, "status": said}]
    seen = world([pod(0), pod(1), *routers], written=record(row(0), row(1)), router=False)
    if failure:
        conditions = [{"type": "ReplicaFailure", "status": "True", "reason": "FailedCreate", "message": failure}]
        seen.children["Deployment", "demo-router"]["status"]["conditions"] = conditions
    return seen


@pytest.mark.parametrize(
    ("seen", "says", "degraded"),
    [
        (without_router(unschedulable(TAINTED)), f"Router pod demo-router-x: no node can take it: {TAINTED}.", "False"),
        (without_router({}), "Router pod demo-router-x waits for the scheduler.", "False"),
        (without_router(None, failure=QUOTA), f"The pod of Deployment demo-router cannot be created: {QUOTA}.", "True"),
        (without_router(None), "The router is starting.", "False"),
    ],
    ids=["tainted", "no scheduler", "not created", "starting"],
)
def test_status_shows_why_the_router_does_not_run(seen: FleetView, says: str, degraded: str) -> None:
    assert ready(seen) == ("False", "RouterNotReady", says)
    assert condition(status_of(seen), "RouterReady")["message"] == says
    assert condition(status_of(seen), "Degraded")["status"] == degraded


def test_a_paused_router_is_reported_until_it_is_resumed() -> None:
    seen = world([pod(0), pod(1)], written=record(row(0), row(1)))
    seen.children["Deployment", "demo-router"]["spec"]["paused"] = True
    degraded = condition(status_of(seen), "Degraded")
    assert (degraded["status"], degraded["reason"]) == ("True", "RouterPaused")
    assert degraded["message"].endswith("Run kubectl rollout resume deployment/demo-router.")
    assert ready(seen)[0] == "True", "the fleet works"
    seen = world([pod(0), pod(1)], written=record(row(0), row(1)))
    assert condition(status_of(seen), "Degraded")["status"] == "False"


def test_rules_protect_every_container_of_the_router() -> None:
    assert tuple(one["name"] for one in template()["spec"]["containers"]) == ROUTER_CONTAINERS


def test_overlay_keeps_the_labels_of_the_router_pod() -> None:
    overlay = {
        "metadata": {"labels": {"team": "rl", names.LABEL_ROLLOUT: "other"}, "annotations": {names.ANNOTATION_ACCOUNT: "x", "note": "y"}},
        "spec": {"tolerations": [{"operator": "Exists"}], "containers": [{"name": "smg", "env": [{"name": "RUST_LOG", "value": "debug"}]}]},
    }
    scheduling = {"tolerations": [{"key": "pool", "operator": "Exists"}], "priorityClassName": "high"}
    made = template(podTemplate=overlay, scheduling=scheduling, serviceAccountAnnotations={"role": "a"})
    assert made["metadata"]["labels"] == {**names.labels("demo", "router"), "team": "rl"}
    assert made["spec"]["tolerations"] == [{"operator": "Exists"}]
    assert made["spec"]["priorityClassName"] == "high"
    smg = next(one for one in made["spec"]["containers"] if one["name"] == "smg")
    assert [one["name"] for one in smg["env"]] == ["HOME", "RUST_LOG"]
    annotations = made["metadata"]["annotations"]
    assert annotations["note"] == "y"
    other = template(serviceAccountAnnotations={"role": "b"})["metadata"]["annotations"]
    assert annotations[names.ANNOTATION_ACCOUNT] not in {"x", other[names.ANNOTATION_ACCOUNT]}
