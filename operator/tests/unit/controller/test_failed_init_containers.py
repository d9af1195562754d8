"""Status of an engine whose init container fails: the download of its model, or a container of the user."""

from __future__ import annotations

from typing import Any

import pytest

from sglang_rollout.controller.decide.status import build_status
from tests.unit.controller.support.worlds import NOW, cr, pod, record, row, world

Object = dict[str, Any]
FAILED: Object = {"terminated": {"exitCode": 3, "reason": "Error", "message": "error: no such repository\n"}}
ENDED: Object = {"terminated": {"exitCode": 0, "reason": "Completed"}}


def status_of(name: str, state: Object, before: Object | None = None, *, last: Object = FAILED) -> Object:
    # The kubelet reports a container without probes as started as soon as it runs.
    container = {"name": name, "ready": state == ENDED, "started": "running" in state, "restartCount": 2, "state": state, "lastState": last}
    fetching = pod(1, ready=False, status={"initContainerStatuses": [container]})
    fetching["spec"]["initContainers"] = [{"name": one} for one in ("download", "my-own")] + [{"name": "gate", "restartPolicy": "Always"}]
    return build_status(world([pod(0), fetching], written=record(row(0)), custom=cr(status=before)), NOW)


@pytest.mark.parametrize("name", ["download", "my-own"])
def test_failure_is_reported_until_the_container_succeeds(name: str) -> None:
    backing_off = status_of(name, {"waiting": {"reason": "CrashLoopBackOff"}})
    engine = backing_off["engines"][1]
    message = f"container {name} exited with code 3: error: no such repository (restarted 2 times)."
    assert (engine["phase"], engine["reason"], engine["message"]) == ("Failed", "EngineCrashed", message)
    assert status_of(name, {"running": {}}, backing_off) == backing_off, "the container is being retried"
    assert status_of(name, FAILED, backing_off) == backing_off
    through = status_of(name, ENDED, backing_off)["engines"][1]
    assert (through["phase"], through["message"]) == ("Starting", "it is starting.")


def test_repeated_init_container_that_succeeded_is_not_a_failure() -> None:
    engine = status_of("download", {"running": {}}, last=ENDED)["engines"][1]
    assert (engine["phase"], engine["message"]) == ("Starting", "it is starting.")


def test_restarted_sidecar_is_not_a_failure() -> None:
    engine = status_of("gate", {"running": {}})["engines"][1]
    assert (engine["phase"], engine["message"]) == ("Starting", "it is starting.")
