"""What status says while the router does not run."""

from __future__ import annotations

import pytest
from worlds import Object, condition, pod, ready, record, row, status_of, unschedulable, world

from sglang_rollout.core import names
from sglang_rollout.core.world import World

TAINTED = "0/2 nodes are available: 2 node(s) had untolerated taint(s)"
QUOTA = 'pods "demo-router-5c9" is forbidden: exceeded quota: small'


def without_router(said: Object | None, *, failure: str = "") -> World:
    """Two engines that are up, and a router whose pod has the status ``said``; None: no pod."""
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
def test_status_says_why_the_router_does_not_run(seen: World, says: str, degraded: str) -> None:
    assert ready(seen) == ("False", "RouterNotReady", says)
    assert condition(status_of(seen), "RouterReady")["message"] == says
    assert condition(status_of(seen), "Degraded")["status"] == degraded
