"""The steps of docs/how-to/upgrade.md that come before the upgrade, with helm and a real API server."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml
from e2e.cluster.controlplane import ControlPlane
from e2e.cluster.fixtures import kubernetes_api  # noqa: F401 - a fixture

from tests.integration.test_chart import CHART, helm
from tests.support.paths import GOLDEN_INPUTS

pytestmark = pytest.mark.controlplane

CRD = "files/crds/sglangrollouts.yaml"
NAMESPACE = "upgrade"
SECURITY = {"trainers": {"namespaceSelector": {"matchLabels": {"team": "training"}}}}


@pytest.fixture
def earlier_chart(tmp_path: Path) -> Path:
    """Return a copy of the chart whose CustomResourceDefinition has no ``spec.security``."""
    chart = tmp_path / "chart"
    shutil.copytree(CHART, chart)
    crd = yaml.safe_load((chart / CRD).read_text())
    spec = crd["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]["spec"]
    del spec["properties"]["security"]
    spec["x-kubernetes-validations"] = [rule for rule in spec["x-kubernetes-validations"] if "self.security" not in rule["rule"]]
    (chart / CRD).write_text(yaml.safe_dump(crd))
    return chart


def test_callers_can_be_named_before_the_upgrade(kubernetes_api: ControlPlane, earlier_chart: Path) -> None:  # noqa: F811
    api = kubernetes_api
    api.kubectl("create", "namespace", NAMESPACE)
    helm(api, "install", "operator", str(earlier_chart), "-n", NAMESPACE)
    api.wait_for_crd("sglangrollouts.rollout.sglang.io")
    rollout: dict[str, Any] = yaml.safe_load((GOLDEN_INPUTS / "minimal-cpu.yaml").read_text())
    rollout["metadata"] = {"name": "demo", "namespace": NAMESPACE}
    api.kubectl("create", "-f", "-", stdin=json.dumps(rollout))
    patch = json.dumps({"spec": {"security": SECURITY}})
    words = ("-n", NAMESPACE, "patch", "sglangrollouts.rollout.sglang.io", "demo", "--type=merge", "-p", patch)
    api.kubectl(*words, check=False)
    assert "security" not in stored_spec(api), "the earlier definition drops the field"

    api.kubectl("apply", "--server-side", "--force-conflicts", "-f", str(CHART / CRD))
    api.kubectl(*words)
    assert stored_spec(api)["security"]["trainers"] == SECURITY["trainers"]
    helm(api, "upgrade", "operator", str(CHART), "-n", NAMESPACE, "--reset-then-reuse-values")
    assert stored_spec(api)["security"]["trainers"] == SECURITY["trainers"]


def stored_spec(api: ControlPlane) -> dict[str, Any]:
    """Return the stored spec of the rollout."""
    found = api.kubectl("-n", NAMESPACE, "get", "sglangrollouts.rollout.sglang.io", "demo", "-o", "json")
    return dict(json.loads(found.stdout)["spec"])
