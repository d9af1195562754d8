"""The weight store: its objects, its place in plan and status, and a change of the transport to Staged."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import sglang_rollout
from sglang_rollout.api.intent import Intent
from sglang_rollout.api.v1alpha1 import SGLangRollout
from sglang_rollout.controller.decide.drift import stamp
from sglang_rollout.controller.decide.plan import Apply, Delete, make_plan
from sglang_rollout.controller.decide.prerequisites import Cluster
from sglang_rollout.controller.decide.status import build_status
from sglang_rollout.controller.decide.transitions import find_events
from sglang_rollout.controller.decide.view import FleetView
from sglang_rollout.controller.render import names, render_all
from sglang_rollout.controller.render.engines import engine_statefulsets
from sglang_rollout.controller.render.hashing import revision
from sglang_rollout.controller.render.store import store_objects
from sglang_rollout.kube.resources import find_mounted_secrets
from sglang_rollout.wire.reasons import GateReason, Refusal
from sglang_rollout.wire.record import EngineRow, GroupRow, Record, StoreReport, StoreState
from sglang_rollout.wire.states import BASE, EngineState, Version
from tests.unit.controller.support.worlds import (
    NOW,
    SETTINGS,
    V1,
    V2,
    Object,
    condition,
    cr,
    opening,
    pod,
    ready,
    record,
    row,
    status_of,
    under_way,
    world,
)

STAGING: Object = {"sizeLimit": "20Gi"}
LATER = "2027-01-01T00:00:00Z"
GIB = 1024
"""Mebibytes of a gibibyte, the unit of the rendered sizes."""


def staged(replicas: int = 2, *, staging: Object | None = None, store: Object | None = None, **spec: Any) -> Object:
    weights = {"transport": "Staged", "staging": STAGING if staging is None else staging, **({"store": store} if store else {})}
    return cr(replicas, weights=weights, **spec)


def rollout(**fields: Any) -> SGLangRollout:
    return SGLangRollout.model_validate(staged(**fields))


def made(wanted: SGLangRollout, kind: str) -> Object:
    return next(one for one in store_objects(wanted, SETTINGS) if one["kind"] == kind)


def pod_of(wanted: SGLangRollout) -> Object:
    spec: Object = made(wanted, "StatefulSet")["spec"]["template"]["spec"]
    return spec


def agent_of(wanted: SGLangRollout) -> Object:
    containers = engine_statefulsets(wanted, SETTINGS)[0]["spec"]["template"]["spec"]["initContainers"]
    return next(one for one in containers if one["name"] == "agent")


def memory(container: Object) -> tuple[str, str]:
    return container["resources"]["requests"]["memory"], container["resources"]["limits"]["memory"]


# --- objects -----------------------------------------------------------------------------------------------------------


def test_other_transports_have_no_store() -> None:
    assert store_objects(SGLangRollout.model_validate(cr()), SETTINGS) == []


@pytest.mark.parametrize(("copies", "medium", "size"), [(2, "Memory", 40 * GIB + 64), (1, "Memory", 20 * GIB + 64), (2, "Disk", 45583)])
def test_volumes_have_room_for_the_copies(copies: int, medium: str, size: int) -> None:
    wanted = rollout(staging={"sizeLimit": "20Gi", "copies": copies, "medium": medium})
    template = engine_statefulsets(wanted, SETTINGS)[0]["spec"]["template"]["spec"]
    for spec in (template, pod_of(wanted)):
        (volume,) = (one["emptyDir"] for one in spec["volumes"] if one["name"] == "rollout-staged")
        assert volume == {**({"medium": "Memory"} if medium == "Memory" else {}), "sizeLimit": f"{size}Mi"}


def test_the_writer_of_a_volume_in_memory_has_its_bytes_in_addition() -> None:
    wanted = rollout(store={"resources": {"limits": {"memory": "6Gi"}}}, engine={**cr()["spec"]["engine"], "agentResources": {}})
    added = 40 * GIB + 64
    assert memory(agent_of(wanted)) == (f"{added + 128}Mi", f"{added + GIB}Mi")
    assert memory(pod_of(wanted)["containers"][0]) == (f"{added + GIB}Mi", f"{added + 6 * GIB}Mi")


def test_the_writer_of_a_volume_on_disk_requests_a_node_with_room_for_it() -> None:
    wanted = rollout(staging={"sizeLimit": "20Gi", "medium": "Disk"})
    for container in (agent_of(wanted), pod_of(wanted)["containers"][0]):
        assert container["resources"]["requests"]["ephemeral-storage"] == "45583Mi"
    assert memory(agent_of(wanted)) == ("128Mi", "1Gi")


def test_the_store_has_its_own_credential_and_no_token_of_an_account() -> None:
    wanted = rollout()
    spec = pod_of(wanted)
    (control,) = (one["secret"] for one in spec["volumes"] if one["name"] == "control")
    assert find_mounted_secrets({"spec": spec}) == {"demo-credentials"}
    assert control["items"] == [{"key": "demo-store", "path": "token"}]
    secret = next(one for one in render_all(wanted, SETTINGS, "t0ken") if one["metadata"]["name"] == "demo-credentials")
    assert set(secret["data"]) == {"demo-engine-0", "demo-engine-1", "demo-store"}
    assert len(set(secret["data"].values())) == 3
    assert spec["automountServiceAccountToken"] is False


def test_the_store_runs_the_image_of_the_engines_as_their_user() -> None:
    overlay = {
        "spec": {
            "imagePullSecrets": [{"name": "registry"}],
            "securityContext": {"runAsNonRoot": True, "fsGroup": 7},
            "containers": [{"name": "engine", "securityContext": {"runAsUser": 1000, "privileged": True}}],
            "hostIPC": True,
        }
    }
    spec = pod_of(rollout(podTemplate=overlay))
    assert spec["imagePullSecrets"] == [{"name": "registry"}]
    assert spec["securityContext"] == {"seccompProfile": {"type": "RuntimeDefault"}, "runAsNonRoot": True, "fsGroup": 7}
    assert spec["containers"][0]["image"] == "example.org/engine:1"
    context = spec["containers"][0]["securityContext"]
    assert (context["runAsUser"], context["capabilities"], context["readOnlyRootFilesystem"]) == (1000, {"drop": ["ALL"]}, True)
    assert "privileged" not in context
    assert "hostIPC" not in spec


def test_the_store_has_the_network_settings_of_the_engines_and_nodes_of_its_own() -> None:
    engine = {**cr()["spec"]["engine"], "network": {"interface": "net1"}, "checkMemoryBalance": False}
    spec = pod_of(
        rollout(engine=engine, store={"scheduling": {"priorityClassName": "weights"}}, scheduling={"nodeSelector": {"gpu": "yes"}})
    )
    assert {one["name"] for one in spec["containers"][0]["env"]} == {"HOME", "PYTHONUNBUFFERED", "NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"}
    assert spec["priorityClassName"] == "weights"
    assert "nodeSelector" not in spec
    assert spec["containers"][0]["resources"]["limits"].keys() == {"memory"}


def test_a_store_with_a_gpu_runs_on_a_node_like_those_of_the_engines() -> None:
    like_engines = {
        "nodeSelector": {"gpu": "yes"},
        "tolerations": [{"key": "gpu", "operator": "Exists"}],
        "affinity": {"nodeAffinity": {"a": 1}, "podAntiAffinity": {"b": 2}},
        "priorityClassName": "engines",
    }
    own = {"gpu": {"resource": "amd.com/gpu"}, "scheduling": {"nodeSelector": {"gpu": "small"}}}
    spec = pod_of(rollout(store=own, scheduling=like_engines, podTemplate={"spec": {"runtimeClassName": "nvidia"}}))
    assert spec["containers"][0]["resources"]["limits"]["amd.com/gpu"] == "1"
    assert (spec["nodeSelector"], spec["tolerations"]) == ({"gpu": "small"}, like_engines["tolerations"])
    assert spec["affinity"] == {"nodeAffinity": {"a": 1}}, "other pods of the engines' affinity do not concern it"
    assert (spec["runtimeClassName"], "priorityClassName" in spec) == ("nvidia", False)


def test_the_init_container_copies_a_package_that_the_start_script_finds(tmp_path: Path) -> None:
    spec = pod_of(rollout())
    target = tmp_path / "package"
    copy = [sys.executable, "-c", spec["initContainers"][0]["command"][2].replace(names.PACKAGE_DIR, str(target))]
    environment = {**os.environ, "PYTHONPATH": str(Path(sglang_rollout.__path__[0]).parent)}
    for _ in range(2):  # the kubelet runs it again with a restarted pod sandbox
        subprocess.run(copy, env=environment, check=True, timeout=60)
    assert (target / "sglang_rollout/cli.py").is_file()
    (tmp_path / "bin").mkdir()
    python = tmp_path / "bin/python3"
    python.write_text('#!/bin/sh\necho "$PYTHONPATH $*"\n')
    python.chmod(0o755)
    start = [*spec["containers"][0]["command"], *spec["containers"][0]["args"]]
    start[2] = start[2].replace(names.PACKAGE_DIR, str(target))
    environment = {"PATH": f"{tmp_path}/bin:/usr/bin:/bin", "PYTHONPATH": "/of-the-image"}
    said = subprocess.run(start, env=environment, check=True, timeout=60, capture_output=True, text=True).stdout
    assert said.startswith(f"{target}:/of-the-image -m sglang_rollout.cli store --name demo-store ")


def test_the_intent_names_the_store() -> None:
    config_map = next(one for one in render_all(rollout(), SETTINGS) if one["metadata"]["name"] == "demo-intent")
    store = Intent.model_validate_json(config_map["data"]["intent.json"]).store
    assert store is not None
    assert (store.name, store.url, store.data_url) == (
        "demo-store",
        "http://demo-store.default.svc:30030",
        "http://demo-store.default.svc:30031",
    )


def test_an_engine_restarts_for_its_volume_and_not_for_the_rest_of_staging() -> None:
    plain = revision(SGLangRollout.model_validate(cr()))
    assert revision(SGLangRollout.model_validate(cr(weights={"transport": "Disk"}))) == plain
    assert revision(rollout()) != plain
    restarting = ({"copies": 1}, {"medium": "Disk"})
    for changed in ({"sizeLimit": "21Gi"}, *({**STAGING, **each} for each in restarting)):
        assert revision(rollout(staging=changed)) != revision(rollout())
    assert revision(
        rollout(staging={**STAGING, "fanout": 9, "trainerPause": "Defer"}, store={"resources": {"requests": {"cpu": "3"}}})
    ) == revision(rollout())


# --- plan --------------------------------------------------------------------------------------------------------------


def store_pod(wanted: Object, *, up: bool = True, current: bool = True, status: Object | None = None) -> Object:
    template = made(SGLangRollout.model_validate(wanted), "StatefulSet")["spec"]["template"]
    labels = {**template["metadata"]["labels"], **({} if current else {names.LABEL_REVISION: "old"})}
    said = {"conditions": [{"type": "Ready", "status": "True" if up else "False"}], **(status or {})}
    return {"metadata": {"name": "demo-store-0", "uid": "s", "labels": labels}, "spec": {"nodeName": "node-1"}, "status": said}


def engine(index: int, wanted: Object, *, up: bool = True) -> Object:
    found = pod(index, current=revision(SGLangRollout.model_validate(wanted)), ready=up)
    found["spec"]["volumes"] = [{"name": "rollout-staged"}]
    return found


def fleet(pods: list[Object], written: Record | None, wanted: Object) -> FleetView:
    """Return a fleet in which every child is applied and seen by its controller."""
    seen = world(pods, written=written, custom=wanted)
    children = dict(seen.children)
    protected = written is not None and bool(written.joined or written.under_way)
    for child in render_all(SGLangRollout.model_validate(wanted), SETTINGS, token="t0ken", is_store_protected=protected):
        key = (child["kind"], child["metadata"]["name"])
        live = {**seen.children[key], **stamp(child)}
        live["metadata"] = {**live["metadata"], "generation": 1, "uid": f"{key}"}
        children[key] = {**live, "status": {"readyReplicas": 1, "observedGeneration": 1}}
    return replace(seen, children=children)


def deleted(seen: FleetView) -> list[str]:
    return [one.name for one in make_plan(seen, SETTINGS, NOW).actions if isinstance(one, Delete)]


def in_group(*rows: EngineRow) -> Record:
    group = GroupRow(name="weights", epoch=1, world_size=2, master="10.0.0.1:1234", backend="gloo", places=[])
    return record(*rows).model_copy(update={"joined": [group]})


def test_an_outdated_store_is_replaced_while_it_is_not_in_use() -> None:
    wanted = staged()
    engines = [engine(0, wanted), engine(1, wanted)]
    rows = (row(0), row(1))
    old = store_pod(wanted, current=False)
    assert deleted(fleet([*engines, store_pod(wanted)], record(*rows), wanted)) == []
    assert deleted(fleet([*engines, old], record(*rows), wanted)) == ["demo-store-0"]
    assert deleted(fleet([*engines, old], in_group(*rows), wanted)) == []
    assert deleted(fleet([*engines, old], record(*rows).model_copy(update={"under_way": V2}), wanted)) == []
    broken = store_pod(wanted, current=False, up=False)
    assert deleted(fleet([*engines, broken], in_group(*rows), wanted)) == ["demo-store-0"]


def budget(written: Record) -> tuple[list[int], bool]:
    """Return ``minAvailable`` of the budgets that a plan writes, and whether the operator looks again later."""
    seen = fleet([store_pod(staged())], record(), staged())
    plan = make_plan(replace(seen, record=written), SETTINGS, NOW)
    written_budgets = [one.object["spec"] for one in plan.actions if isinstance(one, Apply) and one.object["kind"] == "PodDisruptionBudget"]
    return [spec["minAvailable"] for spec in written_budgets], plan.requeue_after is not None


def test_the_budget_holds_up_drains_only_while_the_store_is_in_use() -> None:
    opened = record().model_copy(update={"under_way": V2})
    assert budget(record()) == ([], False)
    assert budget(in_group()) == ([1], False)
    assert budget(opened.model_copy(update={"under_way_since": "2026-11-21T02:59:50.000Z"})) == ([1], False)
    assert budget(opened) == ([1], False), "an earlier release of the coordinator does not write when the update was opened"


def test_a_short_update_writes_no_budget() -> None:
    young = record().model_copy(update={"under_way": V2, "under_way_since": "2026-11-21T02:59:51.000Z"})
    assert budget(young) == ([], True)
    assert budget(young.model_copy(update={"joined": in_group().joined})) == ([1], False)


def test_another_transport_removes_the_objects_of_the_store() -> None:
    seen = fleet([], record(), staged())
    plain = SGLangRollout.model_validate(cr())
    changed = replace(seen, cr=cr(), rollout=plain)
    actions = [one for one in make_plan(changed, SETTINGS, NOW).actions if isinstance(one, Delete)]
    assert {(one.kind, one.name) for one in actions} == {
        (kind, "demo-store") for kind in ("NetworkPolicy", "Service", "StatefulSet", "PodDisruptionBudget")
    }


def test_engines_made_for_another_transport_do_not_wait_for_one_another() -> None:
    wanted = staged(3)
    old = [pod(index, current="old") for index in range(3)]
    serving = record(row(0, V1), row(1, V1), row(2, V1), committed=V1)
    assert deleted(fleet([*old, store_pod(wanted)], serving, wanted)) == ["demo-engine-2-0"]
    waiting = record(row(0, V1), row(1, V1), row(2, None, gate=False, state=EngineState.UNKNOWN), committed=V1)
    pods = [*old[:2], engine(2, wanted), store_pod(wanted)]
    assert deleted(fleet(pods, waiting, wanted)) == [], "engine 2 waits for weights, and the others serve"
    pushed = record(row(0, V1, gate=False), row(1, V1, gate=False), row(2, V2), committed=V2)
    assert deleted(fleet(pods, pushed, wanted)) == ["demo-engine-1-0"]
    busy = pushed.model_copy(update={"under_way": V2})
    assert deleted(fleet(pods, busy, wanted)) == []


# --- status ------------------------------------------------------------------------------------------------------------


def loaded(index: int, version: Version) -> EngineRow:
    """Return the row of an engine that has loaded a version of the open update, and whose gate the coordinator has closed itself."""
    return row(index, version, gate=False, closed=Refusal(GateReason.UPDATE_IN_PROGRESS, "A weight update is in progress."))


@pytest.mark.parametrize(
    ("rows", "committed"),
    [
        ((loaded(0, V2), row(1, V1)), V1),
        ((opening(0, V2), row(1, V1)), V1),
        ((loaded(0, V2), under_way(1)), V2),
        ((opening(0, V2), under_way(1)), V2),
    ],
    ids=["canary", "canary asked", "activate", "activate asked"],
)
def test_engines_that_load_a_version_are_not_lost(rows: tuple[EngineRow, ...], committed: Version) -> None:
    wanted = staged()
    pods = [engine(0, wanted), engine(1, wanted), store_pod(wanted)]
    before = build_status(fleet(pods, record(row(0, V1), row(1, V1), committed=V1), wanted), NOW)
    updating = record(*rows, committed=committed).model_copy(update={"under_way": V2})
    during = build_status(fleet(pods, updating, staged(status=before)), LATER)
    assert during["engines"][0]["phase"] == "Updating"
    assert condition(during, "Ready")["reason"] == "UpdatingWeights"
    after = build_status(fleet(pods, record(row(0, V2), row(1, V2), committed=V2), staged(status=during)), LATER)
    found = [*find_events(before, during), *find_events(during, after)]
    assert {event.reason for event in found} == {"WeightsCommitted"}


def test_an_engine_without_the_version_waits_for_a_copy_and_not_for_the_trainer() -> None:
    wanted = staged()
    pods = [engine(0, wanted), engine(1, wanted), store_pod(wanted)]
    behind = in_group(row(0, V1), row(1, BASE, gate=False)).model_copy(update={"committed": V1})
    message = "holds version base, the fleet serves step-1: it loads a staged copy, or takes the trainer's next weight update."
    assert message in ready(fleet(pods, behind, wanted))[2]


@pytest.mark.parametrize("restarts", [0, 1, 3])
def test_a_store_that_ended_once_starts_again_without_help(restarts: int) -> None:
    wanted = staged()
    ended = {"name": "store", "image": "x", "restartCount": restarts, "state": {"terminated": {"exitCode": 1, "reason": "Error"}}}
    store = store_pod(wanted, up=False, status={"containerStatuses": [ended]})
    seen = fleet([engine(0, wanted), engine(1, wanted), store], record(row(0), row(1)), wanted)
    message = ready(seen)[2]
    assert "Pod demo-store-0: container store exited with code 1" in message
    assert message.endswith("; it is starting again.")
    assert ("restarted" in message) is (restarts > 0)
    assert condition(status_of(seen), "Degraded")["status"] == "False"


@pytest.mark.parametrize(
    ("store", "says", "degraded"),
    [
        (None, "It is starting.", "False"),
        ({}, "It is starting.", "False"),
        (
            {"conditions": [{"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": "no memory"}]},
            "no memory",
            "True",
        ),
        (
            {"containerStatuses": [{"name": "store", "image": "x", "state": {"waiting": {"reason": "ErrImagePull", "message": "denied"}}}]},
            "Pod demo-store-0: container store: image 'x' cannot be pulled (denied).",
            "True",
        ),
    ],
    ids=["no pod", "starting", "unschedulable", "no image"],
)
def test_status_says_why_the_store_is_not_ready(store: Object | None, says: str, degraded: str) -> None:
    wanted = staged()
    stores = [] if store is None else [store_pod(wanted, up=False, status=store)]
    seen = fleet([engine(0, wanted), engine(1, wanted), *stores], record(row(0), row(1)), wanted)
    status, reason, message = ready(seen)
    assert (status, reason) == ("False", "StoreNotReady")
    assert message.startswith("The weight store is not ready, so the fleet takes no new weights. ")
    assert says in message
    found = status_of(seen)
    assert condition(found, "Degraded")["status"] == degraded
    assert condition(found, "Available")["status"] == "True"
    assert found["ready"] == "2/2"


def test_status_says_that_the_store_asks_for_a_gpu_if_no_node_has_one() -> None:
    lacking = {
        "conditions": [{"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": "3 Insufficient nvidia.com/gpu."}]
    }
    for store, asks in (({"gpu": {}}, True), (None, False)):
        wanted = staged(store=store)
        pods = [engine(0, wanted), engine(1, wanted), store_pod(wanted, up=False, status=lacking)]
        message = ready(fleet(pods, record(row(0), row(1)), wanted))[2]
        assert "no node can take it: 3 Insufficient nvidia.com/gpu." in message
        assert message.endswith("It asks for one nvidia.com/gpu (weights.store.gpu), beside those of the engines.") is asks


def test_status_quotes_why_the_pod_of_the_store_cannot_be_created() -> None:
    wanted = staged()
    seen = fleet([engine(0, wanted), engine(1, wanted)], record(row(0), row(1)), wanted)
    seen = replace(seen, cluster=Cluster(creation_errors={"demo-store": "exceeded quota"}))
    assert ready(seen)[2].endswith("The pod of StatefulSet demo-store cannot be created: exceeded quota.")


def waiting(reason: str) -> Object:
    return {"containerStatuses": [{"name": "store", "image": "x", "state": {"waiting": {"reason": reason, "message": "denied"}}}]}


@pytest.mark.parametrize(
    ("pod_status", "reason", "says"),
    [
        (None, "StoreNotReady", "It is starting."),
        ({}, "StoreNotReady", "It is starting."),
        (
            {
                "conditions": [
                    {
                        "type": "PodScheduled",
                        "status": "False",
                        "reason": "Unschedulable",
                        "message": 'persistentvolumeclaim "weights" not found',
                    }
                ]
            },
            "Unschedulable",
            'persistentvolumeclaim "weights" not found.',
        ),
        (waiting("ImagePullBackOff"), "ImagePullFailed", "image 'x' cannot be pulled (denied)."),
        (waiting("CreateContainerConfigError"), "CreateFailed", "cannot be created: denied."),
        (
            {
                "containerStatuses": [
                    {
                        "name": "store",
                        "image": "x",
                        "restartCount": 4,
                        "state": {"waiting": {"reason": "CrashLoopBackOff"}},
                        "lastState": {"terminated": {"exitCode": 1, "message": "OSError: no such volume"}},
                    }
                ]
            },
            "StoreCrashed",
            "Pod demo-store-0: container store exited with code 1: OSError: no such volume (restarted 4 times).",
        ),
    ],
    ids=["no pod", "starting", "claim", "image", "config", "crash"],
)
def test_store_ready_says_why_the_pod_is_not_ready(pod_status: Object | None, reason: str, says: str) -> None:
    wanted = staged()
    stores = [] if pod_status is None else [store_pod(wanted, up=False, status=pod_status)]
    seen = fleet([engine(0, wanted), engine(1, wanted), *stores], record(row(0), row(1)), wanted)
    found = condition(status_of(seen), "StoreReady")
    assert (found["status"], found["reason"]) == ("False", reason)
    assert says in found["message"]


@pytest.mark.parametrize(
    ("report", "status", "reason", "says"),
    [
        (None, "Unknown", "NotReported", "has not reported about the weight store"),
        (StoreReport(state=StoreState.COMPLETE), "True", "StoreRunning", ""),
        (StoreReport(state=StoreState.FETCHING), "False", "StoreLacksVersion", "lacks version step-1, and is fetching it."),
        (
            StoreReport(state=StoreState.LACKING, message="No pod has it: push again."),
            *("False", "StoreLacksVersion", "lacks version step-1. No pod has it: push again."),
        ),
        (StoreReport(state=StoreState.AWAY), "False", "StoreNotReady", "does not answer the coordinator"),
    ],
    ids=["not reported", "complete", "fetching", "lacking", "away"],
)
def test_store_ready_says_whether_the_store_has_the_version(report: StoreReport | None, status: str, reason: str, says: str) -> None:
    wanted = staged()
    written = record(row(0, V1), row(1, V1), committed=V1).model_copy(update={"store": report})
    seen = fleet([engine(0, wanted), engine(1, wanted), store_pod(wanted)], written, wanted)
    found = condition(status_of(seen), "StoreReady")
    assert (found["status"], found["reason"]) == (status, reason)
    assert says in found["message"]
    assert ready(seen)[0] == "True", "the fleet serves, and takes a push"


def test_store_ready_is_unknown_without_a_record_and_missing_with_another_transport() -> None:
    wanted = staged()
    unknown = condition(status_of(fleet([store_pod(wanted)], None, wanted)), "StoreReady")
    assert (unknown["status"], unknown["reason"]) == ("Unknown", "NotReported")
    assert "StoreReady" not in {one["type"] for one in status_of(world([], written=record()))["conditions"]}


def test_a_snapshot_that_cannot_be_written_needs_attention_and_nothing_else_changes() -> None:
    wanted = staged()
    problem = "The volume of /snapshots is full."
    noted = record(row(0), row(1)).model_copy(update={"snapshot_problem": problem})
    seen = fleet([engine(0, wanted), engine(1, wanted), store_pod(wanted)], noted, wanted)
    found = condition(status_of(seen), "Degraded")
    assert (found["status"], found["reason"], found["message"]) == ("True", "SnapshotFailed", problem)
    assert ready(seen)[:2] == ("True", "AllServing")


def test_events_report_a_lost_store() -> None:
    wanted = staged()
    engines = [engine(0, wanted), engine(1, wanted)]
    before = build_status(fleet([*engines, store_pod(wanted)], record(row(0), row(1)), wanted), NOW)
    assert condition(before, "Ready")["reason"] == "AllServing"
    after = build_status(fleet([*engines, store_pod(wanted, up=False)], record(row(0), row(1)), wanted), NOW)
    assert [(event.type, event.reason) for event in find_events(before, after)] == [("Warning", "StoreNotReady")]
    assert [(event.type, event.reason) for event in find_events(after, before)] == [("Normal", "Ready")]


@pytest.mark.parametrize(
    ("store", "kind"),
    [
        ({}, "Normal"),
        ({"conditions": [{"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": "no claim"}]}, "Warning"),
    ],
    ids=["starting", "unschedulable"],
)
def test_events_of_a_new_fleet_warn_of_a_store_that_needs_a_person(store: Object, kind: str) -> None:
    wanted = staged()
    pods = [engine(0, wanted), engine(1, wanted), store_pod(wanted, up=False, status=store)]
    before = build_status(fleet(pods, record(row(0)), wanted), NOW)
    assert condition(before, "Ready")["reason"] not in {"StoreNotReady", "AllServing"}
    after = build_status(fleet(pods, record(row(0), row(1)), wanted), NOW)
    assert [(event.type, event.reason) for event in find_events(before, after) if event.reason == "StoreNotReady"] == [
        (kind, "StoreNotReady")
    ]
