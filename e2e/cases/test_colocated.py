"""``mode: Colocated`` with real engines: a judge on its trainer's GPUs, which wakes and sleeps at the trainer's calls.

The calls are those of verl's server adapter, at the fleet's URL. On a CPU, a stand-in overwrites released memory
(images/engine-cpu/README.md), so weights that were not restored from their backup would generate other tokens.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import requests

from e2e.cases.actions import forward, generate, push
from e2e.cases.conftest import NAME, remove, remove_stand, sample
from e2e.kube import Kubectl, Refused, condition, eventually
from e2e.machine_token import HEADERS

JUDGE = "judge"
TAGS = {"tags": ["kv_cache", "weights"]}


@pytest.fixture
def judge(kubectl: Kubectl, operator: Kubectl, client: str) -> Iterator[str]:
    """Create a rollout of two sleeping engines on the client's node, and return its name."""
    remove_stand(kubectl)
    remove(kubectl, NAME)  # the node has no room for both fleets
    kubectl("label", "pod", client, f"app={JUDGE}", "--overwrite")
    made = sample(JUDGE, memorySaver=True, weightsCpuBackup=True)
    made["spec"] |= {"mode": "Colocated", "sharing": {"trainerLabels": {"app": JUDGE}}}
    kubectl.apply(made)
    eventually("the fleet sleeps", lambda: ready(kubectl)["reason"] == "AsleepForTrainer", within=400, every=2)
    yield JUDGE
    remove(kubectl, JUDGE)


def ready(kubectl: Kubectl) -> dict[str, str]:
    return condition(kubectl.get("sglr", JUDGE), "Ready")


def call(url: str, path: str, body: dict[str, Any] | None = None) -> None:
    """Send a call as verl does: GET if there is no body. Any status but 2xx is an error."""
    method = "GET" if body is None else "POST"
    reply = requests.request(method, url + path, json=body, headers=HEADERS, timeout=60)
    assert reply.ok, f"{path}: {reply.status_code} {reply.text}"


def test_judge_answers_with_its_initial_weights_after_each_sleep(kubectl: Kubectl, judge: str) -> None:
    expected = forward(kubectl, "/models/tiny", 0)
    with kubectl.forward(f"svc/{judge}-router", 30000) as url:
        for _ in range(2):
            assert "the trainer uses the memory of 2 of 2 engines" in ready(kubectl)["message"]
            asleep = generate(url)
            assert asleep.status_code == 503
            assert "No engine generates until the trainer calls /resume_memory_occupation" in asleep.text

            call(url, "/resume_memory_occupation", TAGS)
            call(url, "/flush_cache")
            # The router learns of open gates a moment later.
            eventually("the fleet generates", lambda: generate(url).ok)
            answers = [generate(url).json() for _ in range(6)]
            assert [answer["output_ids"] for answer in answers] == [expected] * 6
            eventually("the rollout serves", lambda: ready(kubectl)["reason"] == "AllServing")
            with pytest.raises(Refused, match="keeps the weights that it was started with"):
                push(kubectl, judge, "1", seed=1)
            assert generate(url).json()["output_ids"] == expected

            call(url, "/abort_request", {"rid": "", "abort_all": True})
            call(url, "/release_memory_occupation", TAGS)
            eventually("the fleet sleeps again", lambda: ready(kubectl)["reason"] == "AsleepForTrainer")
