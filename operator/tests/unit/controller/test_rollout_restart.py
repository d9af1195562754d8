"""``kubectl rollout restart`` of a child restarts its pods, in the order of a rolling update."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest

from sglang_rollout.controller.decide.plan import Delete, make_plan
from sglang_rollout.controller.decide.status import build_status
from sglang_rollout.controller.decide.view import FleetView
from sglang_rollout.wire.states import BASE
from tests.unit.controller.support.worlds import NOW, SETTINGS, Object, condition, cr, pod, record, row
from tests.unit.controller.test_weight_store import engine, staged, store_pod
from tests.unit.controller.test_weight_store import fleet as applied_fleet

RESTART = {"kubectl.kubernetes.io/restartedAt": "2026-11-21T02:00:00Z"}
EARLIER = {"kubectl.kubernetes.io/restartedAt": "2026-11-20T02:00:00Z"}


def restart(seen: FleetView, *names: str) -> FleetView:
    """Do what ``kubectl rollout restart sts/NAME`` does."""
    children = {key: copy.deepcopy(child) for key, child in seen.children.items()}
    for name in names:
        children["StatefulSet", name]["spec"]["template"]["metadata"].setdefault("annotations", {}).update(RESTART)
    return replace(seen, children=children)


def fleet(*pods: Object) -> FleetView:
    return applied_fleet(list(pods), record(row(0, BASE), row(1, BASE)), cr())


def deleted(seen: FleetView) -> list[str]:
    return [action.name for action in make_plan(seen, SETTINGS, NOW).actions if isinstance(action, Delete)]


def test_restart_of_all_engines_goes_engine_by_engine() -> None:
    both = ("demo-engine-0", "demo-engine-1")
    begun = restart(fleet(pod(0), pod(1)), *both)
    assert deleted(begun) == ["demo-engine-1-0"]
    progressing = condition(build_status(begun, NOW), "Progressing")
    assert (progressing["status"], progressing["reason"]) == ("True", "Updating")
    assert deleted(restart(fleet(pod(0), pod(1, ready=False, annotations=RESTART)), *both)) == [], "the other engine comes back first"
    assert deleted(restart(fleet(pod(0), pod(1, annotations=RESTART)), *both)) == ["demo-engine-0-0"]
    done = restart(fleet(pod(0, annotations=RESTART), pod(1, annotations=RESTART)), *both)
    assert deleted(done) == []
    assert build_status(done, NOW)["updatedReplicas"] == 2


def test_restart_of_one_engine_leaves_the_others() -> None:
    assert deleted(restart(fleet(pod(0), pod(1)), "demo-engine-0")) == ["demo-engine-0-0"]
    assert deleted(restart(fleet(pod(0, annotations=EARLIER), pod(1)), "demo-engine-0")) == ["demo-engine-0-0"], "a second restart"
    # A recreated StatefulSet has lost the annotation; its pods need no restart.
    assert deleted(fleet(pod(0, annotations=EARLIER), pod(1))) == []


@pytest.mark.parametrize("in_use", [False, True])
def test_weight_store_restarts_while_it_is_not_in_use(in_use: bool) -> None:
    wanted = staged()
    written = record(row(0), row(1)).model_copy(update={"under_way": BASE if in_use else None})
    pods = [engine(0, wanted), engine(1, wanted), store_pod(wanted)]
    assert deleted(restart(applied_fleet(pods, written, wanted), "demo-store")) == ([] if in_use else ["demo-store-0"])
