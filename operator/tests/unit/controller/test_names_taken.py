"""Objects that have the name of a child: which belong to the rollout, and what waits for those that do not."""

from __future__ import annotations

from typing import Any

import pytest

from sglang_rollout.api.status import Reason
from sglang_rollout.api.v1alpha1 import SGLangRollout
from sglang_rollout.controller.decide.plan import WORKLOADS, Apply, make_plan
from sglang_rollout.controller.decide.view import build_fleet_view
from sglang_rollout.controller.render import render_all
from sglang_rollout.kube.resources import Object
from tests.unit.controller.support.worlds import NOW, SETTINGS, cr, status_of

KINDS = ["ServiceAccount", "Role", "RoleBinding", "Secret", "ConfigMap", "NetworkPolicy", "Service"]
EARLIER = {"apiVersion": "rollout.sglang.io/v1alpha1", "kind": "SGLangRollout", "name": "demo", "uid": "earlier", "controller": True}
STRANGER = {"apiVersion": "example.org/v1", "kind": "Tenant", "name": "demo", "uid": "t", "controller": True}


def fleet_with(kind: str, **metadata: Any) -> Any:
    """Return the view of a rollout of which one child exists, with this metadata."""
    document = cr()
    child = next(child for child in render_all(SGLangRollout.model_validate(document), SETTINGS, "token") if child["kind"] == kind)
    live: Object = {**child, "metadata": {**child["metadata"], **metadata}}
    return build_fleet_view(document, [live], [])


def applied(fleet: Any) -> set[str]:
    return {action.object["kind"] for action in make_plan(fleet, SETTINGS, NOW, new_key="key").actions if isinstance(action, Apply)}


@pytest.mark.parametrize("kind", KINDS)
def test_no_workload_is_written_while_a_leftover_has_the_name_of_what_it_uses(kind: str) -> None:
    for metadata in ({"ownerReferences": [EARLIER]}, {"deletionTimestamp": NOW}):
        fleet = fleet_with(kind, **metadata)
        plan = make_plan(fleet, SETTINGS, NOW, new_key="key")
        assert plan.refusal is None, "it goes by itself"
        assert plan.requeue_after is not None
        assert not applied(fleet) & WORKLOADS
        assert applied(fleet), "other children do not wait"


def test_a_workload_that_goes_holds_up_no_other() -> None:
    assert applied(fleet_with("Deployment", deletionTimestamp=NOW)) >= {"StatefulSet"}


@pytest.mark.parametrize("kind", [*KINDS, "StatefulSet", "Deployment"])
@pytest.mark.parametrize("owner", [STRANGER, {**EARLIER, "name": "other"}], ids=["another controller", "another rollout"])
def test_a_label_does_not_take_an_object_from_its_controller(kind: str, owner: Object) -> None:
    fleet = fleet_with(kind, ownerReferences=[owner])
    plan = make_plan(fleet, SETTINGS, NOW, new_key="key")
    assert not plan.actions
    assert plan.refusal
    assert plan.refusal.reason is Reason.NAME_TAKEN
    assert f"{kind} demo-" in plan.refusal.message
    ready = next(found for found in status_of(fleet, plan.refusal)["conditions"] if found["type"] == "Ready")
    assert (ready["status"], ready["reason"]) == ("False", "NameTaken")


@pytest.mark.parametrize("kind", KINDS)
def test_an_object_without_a_controller_is_handed_over_by_its_label(kind: str) -> None:
    assert applied(fleet_with(kind, ownerReferences=[])) >= {"StatefulSet", "Deployment", kind}
