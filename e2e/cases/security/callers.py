"""Pods that call a fleet, and the fleet's ``spec.security``."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from e2e import machine_token, stand_in
from e2e.kube import Kubectl
from sglang_rollout.api.security_spec import Security, token_audience

REACH = (Path(__file__).parent / "reach.py").read_text()
ELSEWHERE = Kubectl("e2e-elsewhere")
"""A namespace without a fleet."""
SILENT = 0
"""Status of a request whose connection was not accepted."""
Answer = tuple[int, str, str]
"""Status, code and message of an answer."""


def send(kubectl: Kubectl, pod: str, requests: list[dict[str, Any]], *, container: str = "", seconds: float = 20) -> list[Answer]:
    """Send requests from a pod, all at the same time, and return the answers in the same order."""
    words = ("python3", "-", str(seconds), json.dumps(requests))
    found = json.loads(kubectl.exec(pod, *words, container=container, stdin=REACH).strip().splitlines()[-1])
    return [(status, code, message) for status, code, message in found]


def reach(kubectl: Kubectl, pod: str, *urls: str, method: str = "GET", container: str = "", seconds: float = 4) -> list[int]:
    """Send a request to each URL from a pod, and return the statuses. Agents drop forbidden packets without an answer."""
    parts = [urlsplit(url) for url in urls]
    requests = [{"address": part.netloc, "method": method, "path": part.path} for part in parts]
    return [status for status, *_ in send(kubectl, pod, requests, container=container, seconds=seconds)]


def caller_pod(name: str, *, host_network: bool = False) -> dict[str, Any]:
    """Return a pod that can run ``reach.py``, with the label ``app: NAME``."""
    container = {
        "name": "caller",
        "image": stand_in.trainer_pod(name)["spec"]["initContainers"][0]["image"],
        "imagePullPolicy": "IfNotPresent",
        "command": ["sleep", "infinity"],
        "resources": {"requests": {"cpu": "10m", "memory": "32Mi"}},
    }
    spec = {
        "containers": [container],
        "automountServiceAccountToken": False,
        "terminationGracePeriodSeconds": 0,
        "hostNetwork": host_network,
    }
    return {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name, "labels": {"app": name}}, "spec": spec}


def wait_for_pods(kubectl: Kubectl, *names: str) -> None:
    """Wait until pods are ready."""
    kubectl("wait", *(f"pod/{name}" for name in names), "--for=condition=Ready", "--timeout=90s", timeout=120)


@contextlib.contextmanager
def reported_pod(kubectl: Kubectl, name: str, address: str) -> Iterator[None]:
    """Create a pod that no node runs, whose status reports an address, and delete it at the end of the block.

    The record of a pod can be older than the use of its address. A scheduling gate keeps this pod from every node.
    """
    pod = caller_pod(name)
    pod["spec"]["schedulingGates"] = [{"name": "e2e.rollout.sglang.io/never"}]
    kubectl.apply(pod)
    try:
        report(kubectl, name, phase="Running", podIP=address, podIPs=[{"ip": address}])
        yield
    finally:
        kubectl("delete", "pod", name, "--ignore-not-found", "--force", "--grace-period=0")


def report(kubectl: Kubectl, name: str, **status: Any) -> None:
    """Change the status of a pod that no node runs."""
    kubectl("patch", "pod", name, "--subresource=status", "--type=merge", "-p", json.dumps({"status": status}))


def change_security(kubectl: Kubectl, rollout: str, **fields: object) -> None:
    """Replace ``spec.security``, except the token of this machine: its volume belongs to the router's pod, which would restart."""
    patch = [{"op": "add", "path": "/spec/security", "value": machine_token.security(**fields)}]
    kubectl("patch", "sglr", rollout, "--type=json", "-p", json.dumps(patch))


def account_token(kubectl: Kubectl, rollout: str, account: str, pod: str = "") -> str:
    """Return a new token of a ServiceAccount for a rollout, bound to a pod or to nothing."""
    bound = ["--bound-object-kind=Pod", f"--bound-object-name={pod}"] if pod else []
    audience = f"--audience={token_audience(Security(), kubectl.namespace, rollout)}"
    return kubectl("create", "token", account, audience, *bound).strip()
