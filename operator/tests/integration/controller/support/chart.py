"""The chart's objects around an operator that runs as a process of the test."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path

import yaml
from e2e.cluster.controlplane import ControlPlane

from sglang_rollout.kube.resources import Object
from tests.integration.controller.support.operator_process import OperatorProcess
from tests.support.paths import CHARTS

LEFT_OUT = frozenset({"CustomResourceDefinition", "Deployment", "Service"})


def kubeconfig_of(api: ControlPlane, namespace: str, account: str, path: Path) -> Path:
    """Return a kubeconfig with the token of a ServiceAccount."""
    token = api.kubectl("create", "token", account, "-n", namespace).stdout.strip()
    config = yaml.safe_load(api.kubeconfig.read_text())
    config["users"][0]["user"] = {"token": token}
    path.write_text(yaml.safe_dump(config))
    return path


class Release:
    """A release of the chart: its ServiceAccount, roles and admission policy exist, its Deployment does not."""

    def __init__(self, api: ControlPlane, namespace: str, folder: Path, *values: str) -> None:
        self._api = api
        command = [str(api.binaries / "helm"), "template", namespace, str(CHARTS / "sglang-rollout-operator"), "-n", namespace]
        command += ["--kube-version=1.34.3", *(f"--set-json={value}" for value in values)]
        done = subprocess.run(command, env=api.environment, capture_output=True, text=True, check=True, timeout=120)
        found = [document for document in yaml.safe_load_all(done.stdout) if document]
        self.objects: list[Object] = [obj for obj in found if obj["kind"] not in LEFT_OUT]
        deployment = next(obj for obj in found if obj["kind"] == "Deployment")
        self.arguments = deployment["spec"]["template"]["spec"]["containers"][0]["args"]
        api.kubectl("apply", "-f", "-", stdin=self._list())
        self.kubeconfig = kubeconfig_of(api, namespace, namespace, folder / "operator.kubeconfig")
        flags = tuple(word for word in self.arguments if word.startswith(("--namespace=", "--allow-")))
        self.operator = OperatorProcess(self.kubeconfig, [], folder / "release.log", flags=flags)

    def delete(self) -> None:
        self._api.kubectl("delete", "-f", "-", "--ignore-not-found", stdin=self._list())

    def _list(self) -> str:
        return json.dumps({"apiVersion": "v1", "kind": "List", "items": self.objects})


InstallChart = Callable[..., Release]
