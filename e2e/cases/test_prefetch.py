"""`model.prefetch`: nodes download the model before an engine starts, and status reports a failed download."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest

from e2e import stand_in
from e2e.cases.conftest import ready, remove
from e2e.kube import Kubectl, condition, eventually

NEAR = "near"
FOLDER = f"{stand_in.SHARED}/prefetched"


def command(script: str) -> dict[str, list[str]]:
    return {"command": ["sh", "-c", script]}


@pytest.fixture
def near(kubectl: Kubectl, operator: Kubectl) -> Iterator[str]:
    """Create a rollout without engines whose download fails, and return its name."""
    remove(kubectl, NEAR)
    kubectl.apply(stand_in.code())
    document = stand_in.rollout(NEAR, replicas=0)
    document["spec"]["model"] = {
        "path": "/models/tiny",
        "servedName": "tiny",
        "prefetch": True,
        "volume": {"hostPath": FOLDER},
        "download": command("echo 'error: no such repository' >&2; exit 4"),
    }
    # Only root can write to the folder that the kubelet creates, and this image has another user. The user of SGLang's image is root.
    document["spec"]["podTemplate"]["spec"]["initContainers"].append({"name": "download", "securityContext": {"runAsUser": 0}})
    kubectl.apply(document)
    yield NEAR
    remove(kubectl, NEAR)


def test_nodes_have_the_model_before_an_engine_starts(kubectl: Kubectl, near: str) -> None:
    def progress() -> dict[str, object]:
        found: dict[str, object] = kubectl.get("sglr", near).get("status", {}).get("prefetch", {})
        return found

    def change(**spec: object) -> None:
        kubectl("patch", "sglr", near, "--type=merge", "-p", json.dumps({"spec": spec}))

    eventually("status reports the failure", lambda: "the download exited with code 4" in str(progress().get("message")))
    assert condition(kubectl.get("sglr", near), "Degraded")["reason"] == "PrefetchFailed"

    # The folder outlives the case, so its file names this run.
    run = kubectl.get("sglr", near)["metadata"]["uid"]
    change(model={"download": command(f"mkdir -p $(MODEL_PATH) && echo {run} > $(MODEL_PATH)/config.json")})
    eventually("all nodes have the model", lambda: (found := progress()).get("wanted") and found["ready"] == found["wanted"])

    change(replicas=1, model={"download": command("true")})
    eventually("the rollout is Ready", lambda: ready(kubectl, near), within=180, every=1)
    assert kubectl.exec(f"{near}-engine-0-0", "cat", "/models/tiny/config.json", container="engine").strip() == run

    change(model={"prefetch": False})
    selector = f"rollout.sglang.io/rollout={near},app.kubernetes.io/component=prefetch"
    eventually("the DaemonSet is gone", lambda: not kubectl.list("daemonsets", selector))
    eventually("the pods of the DaemonSet are gone", lambda: not kubectl.list("pods", selector))
    assert ready(kubectl, near)
