"""One reconcile calls the steps in the right order. The steps are stand-ins."""

from __future__ import annotations

from typing import Any

import pytest
from prometheus_client import generate_latest

from sglang_rollout.api.status import Reason
from sglang_rollout.controller import reconcile as module
from sglang_rollout.controller.apply import Outcome
from sglang_rollout.controller.decide.plan import Failure, Plan
from sglang_rollout.controller.decide.transitions import EventToPost
from sglang_rollout.controller.decide.view import FleetView
from sglang_rollout.controller.metrics import Metrics
from sglang_rollout.controller.reconcile import Reconciler, Result, ready_status
from sglang_rollout.controller.render.common import Settings
from sglang_rollout.kube.errors import ApiUnavailable, Conflict, KubeError, NotFound, Refused

KEY = ("n", "demo")
NEWS = EventToPost("Normal", "Ready", "all is well", "Ready")


def world(generation: int, **changes: Any) -> FleetView:
    metadata = {"name": "demo", "namespace": "n", "uid": "u", "generation": generation, **changes.pop("metadata", {})}
    cr = {"apiVersion": "rollout.sglang.io/v1alpha1", "kind": "SGLangRollout", "metadata": metadata, **changes}
    return FleetView(cr=cr, rollout=None)


class Stage:
    """Stands in for the API server and ``decide``, and records the calls."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.worlds: list[FleetView | None] = [world(1)]
        self.outcome = Outcome(0)
        self.plan = Plan()
        self.done: list[str] = []
        self.applied: list[tuple[dict[str, Any], str]] = []
        self.error: KubeError | None = None
        self.metrics = Metrics()
        monkeypatch.setattr(module, "observe", self.observe)
        monkeypatch.setattr(module, "make_plan", self.make_plan)
        monkeypatch.setattr(module, "execute_plan", self.execute)
        monkeypatch.setattr(module, "build_status", self.build_status)
        monkeypatch.setattr(module, "find_events", lambda _old, _new: [NEWS])

    async def observe(self, *_: Any) -> FleetView | None:
        self.done.append("observe")
        return self.worlds.pop(0)

    def make_plan(self, *_: Any, **__: Any) -> Plan:
        self.done.append("plan")
        return self.plan

    async def execute(self, *_: Any) -> Outcome:
        self.done.append("execute")
        return self.outcome

    def build_status(self, seen: FleetView, now: str, failure: Failure | None = None) -> dict[str, Any]:
        generation = seen.cr["metadata"]["generation"]
        conditions = [{"type": "Ready", "status": "True"}]
        return {"observedGeneration": generation, "conditions": conditions, "failure": failure}

    async def apply(self, obj: dict[str, Any], *, subresource: str) -> None:
        self.done.append("status")
        self.applied.append((obj, subresource))
        if self.error:
            raise self.error

    async def post(self, _rollout: Any, event: EventToPost) -> None:
        self.done.append(f"event {event.reason}")

    def reconciler(self) -> Reconciler:
        settings = Settings(coordinator_image="f", router_image="r")
        return Reconciler(self, settings, events=self, metrics=self.metrics, now=lambda: "now")  # type: ignore[arg-type]

    async def run(self) -> Result:
        return await self.reconciler().reconcile(KEY)


@pytest.fixture
def stage(monkeypatch: pytest.MonkeyPatch) -> Stage:
    return Stage(monkeypatch)


async def test_change_passes_all_steps_and_status_uses_a_fresh_view(stage: Stage) -> None:
    stage.worlds, stage.outcome, stage.plan = [world(1), world(2)], Outcome(3), Plan((), 5.0)
    assert await stage.run() == Result("ok", 5.0)
    assert stage.done == ["observe", "plan", "execute", "observe", "status", "event Ready"]
    ((body, subresource),) = stage.applied
    assert subresource == "status"
    assert body["status"]["observedGeneration"] == 2
    assert body["metadata"] == {"name": "demo", "namespace": "n", "uid": "u"}
    series = f'rollouts{{namespace="{KEY[0]}",ready="True",rollout="{KEY[1]}"}} 1.0'
    assert series in generate_latest(stage.metrics.registry).decode()


async def test_steady_fleet_is_only_read(stage: Stage) -> None:
    status = stage.build_status(world(1), "")
    stage.worlds = [world(1, status=status)]
    assert await stage.run() == Result("ok")
    assert stage.done == ["observe", "plan", "execute"]


@pytest.mark.parametrize(("planned", "then"), [(None, 7.0), (5.0, 5.0), (10.0, 7.0)])
async def test_requeue_when_an_avoided_node_expires(
    stage: Stage, monkeypatch: pytest.MonkeyPatch, planned: float | None, then: float
) -> None:
    stage.plan = Plan((), planned)
    monkeypatch.setattr(module, "seconds_until_expiry", lambda _status, _now: 7.0)
    assert await stage.run() == Result("ok", then)


@pytest.mark.parametrize("seen", [None, world(1, metadata={"deletionTimestamp": "2026-01-01T00:00:00Z"})])
async def test_missing_or_terminating_rollout_is_left_to_the_garbage_collector(stage: Stage, seen: FleetView | None) -> None:
    stage.metrics.set_ready(KEY, "True")
    stage.worlds = [seen]
    assert await stage.run() == Result("gone")
    assert stage.done == ["observe"]
    assert "rollouts{" not in generate_latest(stage.metrics.registry).decode()


async def test_rollout_deleted_during_a_reconcile_is_gone(stage: Stage) -> None:
    stage.worlds, stage.outcome = [world(1), None], Outcome(1)
    assert await stage.run() == Result("gone")


async def test_refusal_reaches_the_status_and_is_retried(stage: Stage) -> None:
    stage.outcome = Outcome(0, Failure(Reason.APPLY_FAILED, "no such field"))
    assert await stage.run() == Result("refused", retry=True)
    assert stage.applied[0][0]["status"]["failure"] == stage.outcome.failure


async def test_a_failure_is_logged_once_until_it_changes(stage: Stage, caplog: pytest.LogCaptureFixture) -> None:
    reconciler = stage.reconciler()
    for message in ("no such field", "no such field", "quota", "", "quota"):
        stage.worlds = [world(1), world(1)]
        stage.outcome = Outcome(0, Failure(Reason.APPLY_FAILED, message) if message else None)
        await reconciler.reconcile(KEY)
    logged = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert logged == [f"{KEY[0]}/{KEY[1]}: {message}" for message in ("no such field", "quota", "quota")]


async def test_failed_planning_reaches_the_status_and_is_retried(
    stage: Stage, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: Any, **__: Any) -> Plan:
        raise TypeError("'int' object is not iterable")

    monkeypatch.setattr(module, "make_plan", fail)
    assert await stage.run() == Result("refused", retry=True)
    failure = stage.applied[0][0]["status"]["failure"]
    assert failure.reason is Reason.APPLY_FAILED
    assert "TypeError: 'int' object is not iterable" in failure.message
    assert "spec.podTemplate" in failure.message
    assert "Traceback" in caplog.text
    assert "execute" not in stage.done


@pytest.mark.parametrize("error", [NotFound("gone"), Conflict("another uid")])
async def test_no_event_if_the_rollout_is_gone(stage: Stage, error: KubeError) -> None:
    stage.error = error
    assert (await stage.run()).name == "ok"
    assert "event Ready" not in stage.done


async def test_no_event_before_the_status_is_written(stage: Stage) -> None:
    stage.error = ApiUnavailable("away")
    with pytest.raises(ApiUnavailable):
        await stage.run()
    assert "event Ready" not in stage.done


async def test_refused_status_names_the_crd(stage: Stage) -> None:
    stage.error = Refused("status.x: unknown", code=422)
    with pytest.raises(Refused, match="is the installed CRD of this release"):
        await stage.run()


def test_ready_status_of_a_status_without_conditions() -> None:
    assert ready_status({}) == "Unknown"
