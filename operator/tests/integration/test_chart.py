"""The Helm chart, checked by helm and a real API server."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from e2e.cluster.controlplane import ControlPlane
from e2e.cluster.fixtures import kubernetes_api  # noqa: F401 - a fixture

from tests.support.paths import CHARTS

pytestmark = pytest.mark.controlplane

CHART = CHARTS / "sglang-rollout-operator"
NAMESPACE = "chart"


def helm(api: ControlPlane, *words: str, check: bool = True) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(
        [str(api.binaries / "helm"), *words], env=api.environment, capture_output=True, text=True, check=False, timeout=120
    )
    assert not check or done.returncode == 0, done.stderr
    return done


@pytest.fixture(scope="module")
def api(kubernetes_api: ControlPlane) -> ControlPlane:  # noqa: F811
    kubernetes_api.kubectl("create", "namespace", NAMESPACE)
    # The level that the chart promises: the API server warns about every pod template that does not meet it.
    kubernetes_api.kubectl("label", "namespace", NAMESPACE, "pod-security.kubernetes.io/warn=restricted")
    kubernetes_api.kubectl("create", "namespace", "watched")
    return kubernetes_api


def rendered(api: ControlPlane, *words: str) -> list[dict[str, Any]]:
    text = helm(api, "template", "x", str(CHART), "-n", NAMESPACE, "--kube-version=1.34.3", *words).stdout
    return [document for document in yaml.safe_load_all(text) if document]


def test_lint_is_clean(api: ControlPlane) -> None:
    done = helm(api, "lint", "--strict", str(CHART), "--kube-version=1.34.3", check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "1 chart(s) linted, 0 chart(s) failed" in done.stdout
    assert "[WARNING]" not in done.stdout


@pytest.mark.parametrize(
    "values",
    [
        (),
        ("--set", "rbac.scope=Namespace", "--set", "watchNamespaces={watched}"),
        ("--set", "metrics.service=false", "--set", "log.format=json", "--set", "images.pullSecrets={mine}"),
    ],
    ids=["cluster", "namespace", "options"],
)
def test_rendered_objects_are_accepted_as_restricted(api: ControlPlane, values: tuple[str, ...]) -> None:
    text = json.dumps({"apiVersion": "v1", "kind": "List", "items": rendered(api, *values)})
    done = api.kubectl("apply", "--server-side", "--dry-run=server", "-f", "-", stdin=text)
    assert "would violate PodSecurity" not in done.stderr


def test_the_namespace_scope_has_no_cluster_rights(api: ControlPlane) -> None:
    objects = rendered(api, "--set", "rbac.scope=Namespace", "--set", "watchNamespaces={a,b}")
    kinds = [made["kind"] for made in objects]
    assert "ClusterRole" not in kinds
    assert [made["metadata"]["namespace"] for made in objects if made["kind"] == "Role"] == ["a", "b"]
    deployment = next(made for made in objects if made["kind"] == "Deployment")
    args = deployment["spec"]["template"]["spec"]["containers"][0]["args"]
    assert args[:2] == ["--namespace=a", "--namespace=b"]


def test_the_cluster_scope_may_list_nodes(api: ControlPlane) -> None:
    role = next(
        made
        for made in rendered(api)
        if made["kind"] == "ClusterRole" and not made["metadata"]["name"].endswith(("edit", "view", "callers"))
    )
    assert {"apiGroups": [""], "resources": ["nodes"], "verbs": ["list"]} in role["rules"]


def test_no_account_has_the_rights_for_callers_of_other_namespaces_by_default(api: ControlPlane) -> None:
    objects = rendered(api)
    (role,) = (made for made in objects if made["kind"] == "ClusterRole" and made["metadata"]["name"].endswith("callers"))
    assert role["rules"] == [{"apiGroups": [""], "resources": ["pods", "namespaces"], "verbs": ["list", "watch"]}]
    assert not [made for made in objects if made.get("roleRef", {}).get("name") == role["metadata"]["name"]]


def test_operator_can_run_on_tainted_nodes_with_a_private_registry(api: ControlPlane) -> None:
    amounts = {"cpu": "1", "memory": "1Gi"}
    resources = {"requests": amounts, "limits": amounts}
    values = {
        "tolerations": [{"key": "dedicated", "operator": "Exists"}],
        "nodeSelector": {"pool": "system"},
        "affinity": {"nodeAffinity": {}},
        "priorityClassName": "high",
        "resources": resources,
        "images": {"pullSecrets": ["registry"]},
        "serviceAccount": {"annotations": {"role": "operator"}},
    }
    words = [word for name, value in values.items() for word in ("--set-json", f"{name}={json.dumps(value)}")]
    objects = {made["kind"]: made for made in rendered(api, *words)}
    spec = objects["Deployment"]["spec"]["template"]["spec"]
    assert {name: spec[name] for name in ("tolerations", "nodeSelector", "affinity", "priorityClassName")} == {
        name: values[name] for name in ("tolerations", "nodeSelector", "affinity", "priorityClassName")
    }
    assert spec["imagePullSecrets"] == [{"name": "registry"}]
    assert spec["containers"][0]["resources"] == resources
    assert objects["ServiceAccount"]["metadata"]["annotations"] == {"role": "operator"}


def test_images_can_be_named_by_digest(api: ControlPlane) -> None:
    digests = {name: f"sha256:{letter * 64}" for name, letter in (("operator", "a"), ("coordinator", "b"), ("router", "c"))}
    values = ("--set", "images.registry=r.example.org/x", "--set-json", f"images.digests={json.dumps(digests)}")
    deployment = next(made for made in rendered(api, *values) if made["kind"] == "Deployment")
    container = deployment["spec"]["template"]["spec"]["containers"][0]
    assert container["image"] == f"r.example.org/x/operator@{digests['operator']}"
    for name in ("coordinator", "router"):
        assert f"--{name}-image=r.example.org/x/{name}@{digests[name]}" in container["args"]
    done = helm(api, "template", "x", str(CHART), "--kube-version=1.34.3", "--set", "images.digests.router=latest", check=False)
    assert "images.digests.router is no digest" in done.stderr


def test_admission_policy_can_be_left_out(api: ControlPlane) -> None:
    kinds = {made["kind"] for made in rendered(api)}
    assert {"ValidatingAdmissionPolicy", "ValidatingAdmissionPolicyBinding"} <= kinds
    left = {made["kind"] for made in rendered(api, "--set", "admissionPolicy.create=false")}
    assert kinds - left == {"ValidatingAdmissionPolicy", "ValidatingAdmissionPolicyBinding"}
    assert {made["kind"] for made in rendered(api, "--kube-version=1.29.0")} == left, "Kubernetes 1.29 lacks the kind"


def test_flags_of_the_operator_follow_the_values(api: ControlPlane) -> None:
    allow = {
        "hostPaths": ["/a", "/b"],
        "serviceAccounts": ["ml/x"],
        "hostNetwork": True,
        "hostIPC": True,
        "privileged": True,
    }

    def flags(*words: str) -> list[str]:
        deployment = next(made for made in rendered(api, *words) if made["kind"] == "Deployment")
        args = deployment["spec"]["template"]["spec"]["containers"][0]["args"]
        return [word for word in args if word.startswith("--allow-")]

    assert flags() == []
    wanted = ["--allow-host-path=/a", "--allow-host-path=/b", "--allow-service-account=ml/x"]
    assert flags("--set-json", f"allow={json.dumps(allow)}") == [
        *wanted,
        *("--allow-host-ipc", "--allow-host-network", "--allow-privileged"),
    ]


def test_a_wrong_value_is_refused(api: ControlPlane) -> None:
    done = helm(api, "template", "x", str(CHART), "--kube-version=1.34.3", "--set", "rbac.scop=Cluster", check=False)
    assert done.returncode != 0
    assert "scop" in done.stderr


def printer_columns(api: ControlPlane, crd: str) -> list[dict[str, str]]:
    return api.get("crd", crd)["spec"]["versions"][0].get("additionalPrinterColumns") or []


def test_crd_follows_an_upgrade_and_outlives_the_release(api: ControlPlane, tmp_path: Path) -> None:
    name = "sglangrollouts.rollout.sglang.io"
    older = tmp_path / "older"
    shutil.copytree(CHART, older)
    file = older / "files/crds/sglangrollouts.yaml"
    definition = yaml.safe_load(file.read_text())
    del definition["spec"]["versions"][0]["additionalPrinterColumns"]
    file.write_text(yaml.safe_dump(definition))
    api.kubectl("delete", "crd", name, "--ignore-not-found")
    helm(api, "install", "x", str(older), "-n", NAMESPACE)
    assert not printer_columns(api, name)
    helm(api, "upgrade", "x", str(CHART), "-n", NAMESPACE)
    assert printer_columns(api, name), "the upgrade did not reach it"
    helm(api, "uninstall", "x", "-n", NAMESPACE)
    assert api.get("crd", name)["metadata"]["name"] == name
