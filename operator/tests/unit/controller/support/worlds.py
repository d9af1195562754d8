"""Fleets for tests of the status: a rollout, its objects as if applied, and pods; and readers of the status."""

from __future__ import annotations

from typing import Any

from sglang_rollout.agent.state import EngineRecord, State, closed_reason
from sglang_rollout.api.v1alpha1 import SGLangRollout
from sglang_rollout.controller.decide.plan import Failure
from sglang_rollout.controller.decide.status import build_status
from sglang_rollout.controller.decide.view import FleetView, build_fleet_view
from sglang_rollout.controller.render import names, render_all
from sglang_rollout.controller.render.common import Settings
from sglang_rollout.controller.render.hashing import revision
from sglang_rollout.wire.reasons import Refusal
from sglang_rollout.wire.record import EndedUpdate, EngineRow, Record, UpdateOutcome
from sglang_rollout.wire.states import BASE, EngineState, Version

SETTINGS = Settings(coordinator_image="example.org/coordinator:1", router_image="example.org/router:1")
NOW = "2026-11-21T03:00:00Z"
Object = dict[str, Any]

V1 = Version(run=1, step=1, label="step-1")
V2 = Version(run=1, step=2, label="step-2")


def cr(replicas: int = 2, status: Object | None = None, **spec: Any) -> Object:
    made: Object = {
        "apiVersion": "rollout.sglang.io/v1alpha1",
        "kind": "SGLangRollout",
        "metadata": {"name": "demo", "namespace": "default", "uid": "u", "generation": 4},
        "spec": {
            "replicas": replicas,
            "model": {"path": "/models/tiny"},
            "engine": {"image": "example.org/engine:1", "gpuResource": ""},
            **spec,
        },
    }
    return {**made, "status": status} if status else made


def pod(index: int, *, ready: bool = True, current: str | None = None, status: Object | None = None, **more: Any) -> Object:
    """Return a pod of an engine. ``status`` replaces parts of the kubelet's report."""
    engine = names.engine_name("demo", index)
    name = revision(SGLangRollout.model_validate(cr())) if current is None else current
    said = {"conditions": [{"type": "Ready", "status": "True" if ready else "False"}], "containerStatuses": [], **(status or {})}
    return {
        "metadata": {
            "name": names.engine_pod(engine),
            "labels": {**names.selector("demo", "engine", engine), names.LABEL_REVISION: name},
            **more,
        },
        "spec": {"nodeName": "node-1"},
        "status": said,
    }


def crashed(*, code: int = 1, message: str = "", restarts: int = 3, waiting: bool = True, reason: str = "Error") -> Object:
    """Return the status of a pod whose engine container ended."""
    ended = {"terminated": {"exitCode": code, "reason": reason, "message": message}}
    state = {"waiting": {"reason": "CrashLoopBackOff", "message": "back-off"}} if waiting else {"running": {}}
    container = {"name": "engine", "ready": False, "started": False, "restartCount": restarts, "state": state, "lastState": ended}
    return {"containerStatuses": [container]}


def waiting(reason: str, message: str, *, container: str = "engine") -> Object:
    """Return the status of a pod with a container that does not start."""
    said = {"name": container, "image": "example.org/x:1", "ready": False, "state": {"waiting": {"reason": reason, "message": message}}}
    return {"containerStatuses": [said]}


def unschedulable(message: str) -> Object:
    """Return the status of an unschedulable pod."""
    return {
        "conditions": [{"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": message}],
    }


def row(
    index: int, version: Version | None = BASE, *, gate: bool = True, state: EngineState = EngineState.CLEAN, closed: Refusal | None = None
) -> EngineRow:
    why = {} if closed is None else {"reason": closed.code, "message": closed.message}
    return EngineRow(name=names.engine_name("demo", index), state=state, version=version, boot_id="b", gate_open=gate, **why)


def under_way(index: int) -> EngineRow:
    """Return the row of an engine during an update, as its agent reports it."""
    said = closed_reason(State(record=EngineRecord(state=EngineState.DIRTY), up=True))
    return row(index, None, gate=False, state=EngineState.DIRTY, closed=said)


def opening(index: int, version: Version) -> EngineRow:
    """Return the row of an engine whose agent has not received the commit of its version yet."""
    said = closed_reason(State(record=EngineRecord(state=EngineState.CLEAN, version=version, committed=BASE), up=True, informed=True))
    return row(index, version, gate=False, closed=said)


def partial(reason: str) -> EndedUpdate:
    """Return a partial update: one engine did not commit."""
    return EndedUpdate(version=V2, outcome=UpdateOutcome.PARTIAL, message=reason, finished=NOW, engines=["demo-engine-0"])


def record(*rows: EngineRow, committed: Version = BASE, failed: str = "", last: EndedUpdate | None = None) -> Record:
    if failed:
        last = EndedUpdate(version=V2, outcome=UpdateOutcome.FAILED, message=failed, finished=NOW)
    return Record(term=1, epoch=3, committed=committed, engines=list(rows), last_update=last)


def world(
    pods: list[Object],
    *,
    written: Record | None = None,
    router: bool = True,
    custom: Object | None = None,
    extra: tuple[Object, ...] = (),
) -> FleetView:
    """Return a fleet whose children are all applied. ``written``: the coordinator's record; ``router``: True if the router runs."""
    custom = custom or cr()
    children = render_all(SGLangRollout.model_validate({**custom, "status": None}), SETTINGS, token="t0ken")
    for child in children:
        child["metadata"]["generation"] = 1
        if child["kind"] == "Deployment":
            child["status"] = {"observedGeneration": 1, "readyReplicas": int(router)}
        if written and child["metadata"]["name"] == "demo-weights":
            child["data"] = {names.WEIGHTS_KEY: written.model_dump_json()}
    return build_fleet_view(custom, [*children, *extra], pods)


def status_of(seen: FleetView, failure: Failure | None = None) -> Object:
    return build_status(seen, NOW, failure)


def condition(status: Object, kind: str) -> Object:
    return next(one for one in status["conditions"] if one["type"] == kind)


def ready(seen: FleetView, failure: Failure | None = None) -> tuple[str, str, str]:
    found = condition(status_of(seen, failure), "Ready")
    return found["status"], found["reason"], found["message"]
