"""`model.download`: status reports a failure, and a corrected download fills a volume that the engine and its agent can only read."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest

from e2e import stand_in
from e2e.cases.conftest import ready, remove
from e2e.kube import Kubectl, Refused, condition, eventually

FILES = "files"
POD = f"{FILES}-engine-0-0"


@pytest.fixture
def failing(kubectl: Kubectl, operator: Kubectl) -> Iterator[str]:
    """Create a rollout whose download fails, and return its name."""
    remove(kubectl, FILES)
    kubectl.apply(stand_in.code())
    document = stand_in.rollout(FILES, replicas=1)
    command = ["sh", "-c", "echo 'error: no such repository' >&2; exit 4"]
    document["spec"]["model"] = {"path": "/models/tiny", "servedName": "tiny", "offline": True, "download": {"command": command}}
    kubectl.apply(document)
    yield FILES
    remove(kubectl, FILES)


def test_model_is_downloaded_before_the_engine_starts(kubectl: Kubectl, failing: str) -> None:
    def message() -> str:
        return condition(kubectl.get("sglr", failing), "Ready")["message"]

    eventually("status reports the failure", lambda: "container download exited with code 4: error: no such repository" in message())

    command = ["sh", "-c", "mkdir -p $(MODEL_PATH) && echo fetched > $(MODEL_PATH)/config.json"]
    kubectl("patch", "sglr", failing, "--type=merge", "-p", json.dumps({"spec": {"model": {"download": {"command": command}}}}))
    eventually("the rollout is Ready", lambda: ready(kubectl, failing), within=180, every=1)
    assert kubectl.exec(POD, "cat", "/models/tiny/config.json", container="engine").strip() == "fetched"
    assert "HF_HUB_OFFLINE=1" in kubectl.exec(POD, "env", container="engine").splitlines()
    for container in ("engine", "agent"):
        with pytest.raises(Refused, match="Read-only file system"):
            kubectl.exec(POD, "sh", "-c", "echo changed > /models/tiny/config.json", container=container)
