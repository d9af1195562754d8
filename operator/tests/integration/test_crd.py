"""The CRD and all rendered objects, checked by a real API server."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from e2e.cluster.controlplane import ControlPlane
from e2e.cluster.fixtures import kubernetes_api  # noqa: F401 - a fixture
from e2e.cluster.say import wait_until
from e2e.pages import Block, Runner, blocks_for

from sglang_rollout.api.crdgen import crd_yaml
from sglang_rollout.controller.decide.drift import read_ownership
from sglang_rollout.controller.decide.plan import Apply, make_plan
from sglang_rollout.controller.decide.status import build_status
from sglang_rollout.controller.decide.view import FleetView, build_fleet_view
from sglang_rollout.controller.render.common import Settings
from sglang_rollout.controller.render.names import CHILD_KINDS, FIELD_MANAGER, LABEL_ROLLOUT
from sglang_rollout.wire.record import MAX_RECENT_UPDATES
from tests.support.allowed import ANYTHING
from tests.support.paths import GOLDEN_INPUTS, REPOSITORY

pytestmark = pytest.mark.controlplane

HERE = Path(__file__).parent
SETTINGS = Settings(coordinator_image="example.org/coordinator:1", router_image="example.org/router:1")
# PodGroups are no part of Kubernetes: controller/test_optional_kinds_and_nodes.py applies them to a server with their CRD.
VALID = sorted(
    [*(path for path in GOLDEN_INPUTS.glob("*.yaml") if not path.stem.startswith("gang")), *(REPOSITORY / "examples").glob("rollout*.yaml")]
)


@pytest.fixture(scope="module")
def api(kubernetes_api: ControlPlane) -> ControlPlane:  # noqa: F811
    kubernetes_api.kubectl("apply", "--server-side", "-f", "-", stdin=crd_yaml())
    kubernetes_api.wait_for_crd("sglangrollouts.rollout.sglang.io")
    # Established is not yet published: discovery (short names) and OpenAPI (explain) follow a moment later.
    what = "the API server does not publish the definition"
    wait_until(lambda: kubernetes_api.kubectl("explain", "sglr.spec", check=False).returncode == 0, seconds=30, what=what, every=0.5)
    return kubernetes_api


@pytest.fixture(scope="module")
def refusals(api: ControlPlane) -> str:
    """Return the messages of kubectl about all invalid objects. Each message names its file."""
    done = api.kubectl("apply", "--dry-run=server", "-f", str(HERE / "invalid"), check=False)
    assert not done.stdout.strip(), f"accepted: {done.stdout}"
    return done.stderr


@pytest.mark.parametrize("path", sorted((HERE / "invalid").glob("*.yaml")), ids=lambda path: path.stem)
def test_invalid_object_is_refused_with_a_message(refusals: str, path: Path) -> None:
    expected = path.read_text().splitlines()[0].removeprefix("# expect: ")
    assert f'{path.name}":' in refusals, "it was accepted"
    assert expected in refusals.split(f'{path.name}":', 1)[1].split("Error from server", 1)[0]


ACCEPTED: dict[str, dict[str, Any]] = {
    "a model from an object store": {"model": {"path": "s3://models/qwen"}},
    "a model beside the engine": {"model": {"path": "./models/qwen..7b"}},
    "a path with a colon and a name": {"model": {"path": "/models/qwen:7b", "servedName": "policy"}},
    "adapters for all modules": {"engine": {"lora": {"maxRank": 8, "targetModules": ["all"]}}},
    "experts' kernels for adapters": {
        "engine": {"moeRunnerBackend": "lora_triton", "lora": {"maxRank": 8, "targetModules": ["q_proj"], "backend": "triton_v2"}}
    },
    "the same by arguments": {"engine": {"moeRunnerBackend": "lora_triton", "args": ["--enable-lora", "--lora-backend", "triton_v2"]}},
    "a port of its own network": {"engine": {"args": ["--kv-events-config", "{}"], "acceptFlags": ["--kv-events-config"]}},
    "a new flag with its value": {"engine": {"args": ["--no-such-flag=-1", "--sleep-on-idle"], "acceptFlags": ["--no-such-flag"]}},
    "values that are no flags": {"engine": {"args": ["--json-model-override-args", '{"a": -1}', "--stream-interval", "-1"]}},
    "code in the router": {"router": {"args": ["--enable-wasm", "--log-level", "debug"], "acceptFlags": ["--enable-wasm"]}},
    "experts that move": {"weights": {"verify": "Off"}, "engine": {"parallelism": {"tensor": 2, "expert": 2}, "eplb": True}},
    "one failure is enough": {"scheduling": {"avoidNodes": {"failures": 1, "withinSeconds": 60, "forSeconds": 60}}},
    "three failures in little more than two minutes": {"scheduling": {"avoidNodes": {"failures": 3, "withinSeconds": 121}}},
    "another label of a group": {"podTemplate": {"metadata": {"labels": {"scheduling.x-k8s.io/pod-group": "mine"}}}},
    "an account of its own": {"podTemplate": {"spec": {"serviceAccountName": "mine"}}},
    "nulls in the router's pod": {"router": {"podTemplate": {"spec": {"containers": None, "serviceAccountName": None, "overhead": None}}}},
    "a variable of smg": {
        "router": {"podTemplate": {"spec": {"containers": [{"name": "smg", "env": [{"name": "RUST_LOG", "value": "x"}]}]}}}
    },
    "variables of another container": {
        "podTemplate": {"spec": {"containers": [{"name": "beside", "image": "b:1", "env": [{"name": "SGLANG_RUST_SERVER", "value": "1"}]}]}}
    },
}


def test_valid_edge_cases_are_accepted(api: ControlPlane) -> None:
    for number, (what, spec) in enumerate(ACCEPTED.items()):
        made = {"model": {"path": "m"}, **spec, "engine": {"image": "i", **spec.get("engine", {})}}
        rollout = {"apiVersion": "rollout.sglang.io/v1alpha1", "kind": "SGLangRollout", "metadata": {"name": f"a{number}"}, "spec": made}
        done = api.kubectl("apply", "--dry-run=server", "-f", "-", stdin=yaml.safe_dump(rollout), check=False)
        assert done.returncode == 0, f"{what}: {done.stderr}"


def _shown() -> Iterator[tuple[Block, dict[str, Any]]]:
    """Yield the object of each YAML block of the pages. A part of a spec is completed to a small rollout."""
    for block in blocks_for(Runner.YAML):
        shown = yaml.safe_load(block.text)
        if "apiVersion" not in shown:
            spec = {"model": {"path": "m"}, "engine": {"image": "i"}}
            spec |= {key: spec.get(key, {}) | part for key, part in shown.items()}
            shown = {"apiVersion": "rollout.sglang.io/v1alpha1", "kind": "SGLangRollout", "metadata": {"name": "shown"}, "spec": spec}
        yield block, shown


def test_every_object_of_the_documentation_is_accepted(api: ControlPlane) -> None:
    shown = list(_shown())
    assert {document["kind"] for _, document in shown} == {"SGLangRollout", "ResourceClaim", "Pod", "NetworkPolicy"}
    for block, document in shown:
        done = api.kubectl("apply", "--dry-run=server", "-f", "-", stdin=yaml.safe_dump(document), check=False)
        assert done.returncode == 0, f"{block}: {done.stderr}"


def test_explain_describes_every_field_of_the_spec(api: ControlPlane) -> None:
    text = api.kubectl("explain", "sglr.spec", "--recursive=false").stdout
    assert "Number of engines" in text
    assert "<no description>" not in text


@pytest.mark.parametrize("path", VALID, ids=lambda path: path.stem)
def test_rendered_objects_are_accepted_and_a_second_pass_changes_nothing(api: ControlPlane, path: Path) -> None:
    """The second pass sees the objects with the defaults of the API server."""
    namespace = f"crd-{path.stem}"
    _applied(api, namespace, "demo", path)
    after = make_plan(_observe(api, namespace, "demo"), SETTINGS, allowed=ANYTHING)

    assert [(a.object["kind"], a.object["metadata"]["name"], a.reason) for a in after.actions if isinstance(a, Apply)] == []
    assert after.actions == ()
    api.kubectl("delete", "namespace", namespace, "--wait=false")


def test_status_is_stored_completely_and_printed(api: ControlPlane) -> None:
    name, namespace = "shown", "crd-status"
    cr = _applied(api, namespace, name, REPOSITORY / "examples/rollout-cpu.yaml")
    record: dict[str, Any] = {
        "term": 3,
        "epoch": 5,
        "committed": {"run": 1, "step": 4, "label": "step-4"},
        "engines": [
            {
                "name": f"{name}-engine-0",
                "state": "clean",
                "version": {"run": 1, "step": 4, "label": "step-4"},
                "boot_id": "b",
                "gate_open": True,
            }
        ],
        "last_update": {
            "version": {"run": 1, "step": 4, "label": "step-4"},
            "outcome": "Committed",
            "finished": "2026-11-21T03:00:00Z",
            "phases_ms": {"total": 120},
            "engines": [f"{name}-engine-0"],
            "author": "ml/Job/train",
            "bytes": 2**53,
        },
        "author": "ml/Job/train",
    }
    failed = {**record["last_update"], "outcome": "Failed", "reason": "EngineFailed", "message": "€" * 4000, "author": "a" * 2000}
    record["earlier_updates"] = [failed] * (MAX_RECENT_UPDATES - 1)
    # Controllers make the pods meanwhile; a status from before them is another one.
    wait_until(
        lambda: len(_observe(api, namespace, name).pods) == 3,
        seconds=30,
        what="the pods of two engines and a router are not made",
        every=0.5,
    )
    patch = json.dumps({"data": {"weights.json": json.dumps(record)}})
    api.kubectl("patch", "configmap", f"{name}-weights", "-n", namespace, "--type=merge", "--patch-file=/dev/stdin", stdin=patch)

    status = build_status(_observe(api, namespace, name), "2026-11-21T03:00:00Z")
    body = {"apiVersion": cr["apiVersion"], "kind": cr["kind"], "metadata": cr["metadata"], "status": status}
    api.kubectl("apply", "--server-side", f"--field-manager={FIELD_MANAGER}", "--subresource=status", "-f", "-", stdin=json.dumps(body))

    world = _observe(api, namespace, name)
    assert world.cr["status"] == status, "the API server changed or dropped something: the status would be written in every reconcile"
    assert build_status(world, "2026-11-22T00:00:00Z") == status
    assert make_plan(world, SETTINGS, allowed=ANYTHING).actions == (), "the record of the coordinator must not look like drift"
    columns = api.kubectl("get", "sglr", name, "-n", namespace, "-o", "wide").stdout
    assert "step-4" in columns
    assert "0/2" in columns
    path = f"/apis/rollout.sglang.io/v1alpha1/namespaces/{namespace}/sglangrollouts/{name}/scale"
    scale = json.loads(api.kubectl("get", "--raw", path).stdout)
    assert scale["spec"]["replicas"] == 2
    assert LABEL_ROLLOUT in scale["status"]["selector"]


def test_the_mode_of_a_rollout_cannot_change(api: ControlPlane) -> None:
    _applied(api, "crd-mode", "demo", GOLDEN_INPUTS / "colocated.yaml")
    patch = '{"spec": {"mode": "Standalone", "sharing": null}}'
    done = api.kubectl("patch", "sglr", "demo", "-n", "crd-mode", "--type=merge", "--patch-file=/dev/stdin", stdin=patch, check=False)
    assert done.returncode != 0
    assert "mode cannot change" in done.stderr
    api.kubectl("delete", "namespace", "crd-mode", "--wait=false")


def test_changed_or_deleted_child_is_seen(api: ControlPlane) -> None:
    name, namespace = "drift", "crd-drift"
    _applied(api, namespace, name, REPOSITORY / "examples/rollout-cpu.yaml")
    known = _ownership(_observe(api, namespace, name))
    assert make_plan(replace(_observe(api, namespace, name), ownership=known), SETTINGS, allowed=ANYTHING).actions == ()
    api.kubectl("delete", "service", f"{name}-router", "-n", namespace)
    api.kubectl("patch", "service", f"{name}-engines", "-n", namespace, "-p", '{"spec": {"selector": {"more": "than-ours"}}}')
    api.kubectl("scale", "statefulset", f"{name}-engine-1", "-n", namespace, "--replicas=0")
    api.kubectl("label", "deployment", f"{name}-router", "-n", namespace, "app.kubernetes.io/name=other", "--overwrite")
    api.kubectl("patch", "role", f"{name}-router", "-n", namespace, "--type=json", "-p", '[{"op": "remove", "path": "/rules/0"}]')

    changed = replace(_observe(api, namespace, name), ownership=known)
    actions = make_plan(changed, SETTINGS, allowed=ANYTHING).actions

    assert {(a.object["kind"], a.object["metadata"]["name"], a.reason) for a in actions if isinstance(a, Apply)} == {
        ("Role", f"{name}-router", "another client changed it"),
        ("Service", f"{name}-router", "does not exist"),
        ("Service", f"{name}-engines", "another client changed it"),
        ("Deployment", f"{name}-router", "another client changed it"),
        ("StatefulSet", f"{name}-engine-1", "another client changed it"),
    }
    _execute(api, changed)
    healed = _observe(api, namespace, name)
    assert make_plan(replace(healed, ownership=_ownership(healed)), SETTINGS, allowed=ANYTHING).actions == ()
    assert _ownership(healed).items() >= {uid: fields for uid, fields in known.items() if uid in _ownership(healed)}.items()
    assert "more" not in api.get("service", f"{name}-engines", "-n", namespace)["spec"]["selector"], "it selects nothing"


def test_an_apply_without_a_difference_is_not_stored(api: ControlPlane) -> None:
    """A restarted operator applies every child once."""
    name, namespace = "restarted", "crd-restarted"
    _applied(api, namespace, name, REPOSITORY / "examples/rollout-cpu.yaml")
    # Controllers write the status of their objects meanwhile; the operator's fields must stay as they are.
    before = _observe(api, namespace, name)
    first_look = replace(before, ownership={})
    reasons = {action.reason for action in make_plan(first_look, SETTINGS, allowed=ANYTHING).actions if isinstance(action, Apply)}
    assert reasons == {"first apply of this operator process"}
    _execute(api, first_look)
    after = _observe(api, namespace, name)
    assert _ownership(after) == _ownership(before)
    quiet = {key for key, child in before.children.items() if key[0] in {"Role", "RoleBinding", "ConfigMap", "Secret", "ServiceAccount"}}
    assert len(quiet) >= 5
    versions = [{key: view.children[key]["metadata"]["resourceVersion"] for key in quiet} for view in (before, after)]
    assert versions[0] == versions[1]


def _ownership(world: FleetView) -> dict[str, str]:
    return {child["metadata"]["uid"]: read_ownership(child) for child in world.children.values()}


def _applied(api: ControlPlane, namespace: str, name: str, path: Path) -> dict[str, Any]:
    """Apply the custom resource of a file, and all children that the plan wants, in a new namespace."""
    api.kubectl("create", "namespace", namespace)
    cr: dict[str, Any] = yaml.safe_load(path.read_text())
    cr["metadata"] = {"name": name, "namespace": namespace}
    api.kubectl("apply", "-f", "-", stdin=yaml.safe_dump(cr))
    if "status" in cr:
        # What the operator remembers: it changes what is rendered.
        manager = f"--field-manager={FIELD_MANAGER}"
        remembered = json.dumps({key: value for key, value in cr.items() if key != "spec"})
        api.kubectl("apply", "--server-side", manager, "--subresource=status", "-f", "-", stdin=remembered)
    _execute(api, _observe(api, namespace, name))
    return cr


def _observe(api: ControlPlane, namespace: str, name: str) -> FleetView:
    """Return the view of the operator."""
    kinds = ",".join([*(kind.plural for kind in CHILD_KINDS), "pods"])
    found: list[dict[str, Any]] = api.get(kinds, "--show-managed-fields", "-n", namespace, "-l", f"{LABEL_ROLLOUT}={name}")["items"]
    pods = [item for item in found if item["kind"] == "Pod"]
    return build_fleet_view(api.get("sglr", name, "-n", namespace), [item for item in found if item not in pods], pods)


def _execute(api: ControlPlane, world: FleetView) -> None:
    objects = []
    for action in make_plan(world, SETTINGS, allowed=ANYTHING, new_key="t0ken").actions:
        assert isinstance(action, Apply)
        objects.append(action.object)
    manager = f"--field-manager={FIELD_MANAGER}"
    text = "\n---\n".join(json.dumps(made) for made in objects)
    api.kubectl("apply", "--server-side", "--force-conflicts", manager, "-f", "-", stdin=text)
