"""``mode: Colocated`` with real engines: a judge on its trainer's GPUs, which wakes when the trainer says so, and sleeps.

The calls are those of verl's server adapter, on the fleet's URL. On a CPU released memory is overwritten by a stand-in
(images/engine-cpu/README.md), so weights that did not come back from their backup would answer rubbish.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import requests

from e2e.cases.actions import forward, generate, push
from e2e.cases.conftest import NAME, remove, remove_stand, sample
from e2e.kube import Kubectl, Refused, condition, eventually

JUDGE = "judge"
TAGS = {"tags": ["kv_cache", "weights"]}


@pytest.fixture
def judge(kubectl: Kubectl, operator: Kubectl, client: str) -> Iterator[str]:
    """Two engines where the client is, asleep."""
    remove_stand(kubectl)
    remove(kubectl, NAME)  # there is no room for it beside this one
    kubectl("label", "pod", client, f"app={JUDGE}", "--overwrite")
    made = sample(JUDGE, memorySaver=True, weightsCpuBackup=True)
    made["spec"] |= {"mode": "Colocated", "sharing": {"trainerLabels": {"app": JUDGE}}}
    kubectl.apply(made)
    eventually("it is asleep", lambda: ready(kubectl)["reason"] == "AsleepForTrainer", within=400, every=2)
    yield JUDGE
    remove(kubectl, JUDGE)


def ready(kubectl: Kubectl) -> dict[str, str]:
    return condition(kubectl.get("sglr", JUDGE), "Ready")


def call(url: str, path: str, body: dict[str, Any] | None = None) -> None:
    """As verl does: no body means GET, and anything but a 2xx is an error."""
    method = "GET" if body is None else "POST"
    reply = requests.request(method, url + path, json=body, timeout=60)
    assert reply.ok, f"{path}: {reply.status_code} {reply.text}"


def test_a_judge_wakes_judges_and_sleeps_with_the_weights_it_was_started_with(kubectl: Kubectl, judge: str) -> None:
    expected = forward(kubectl, "/models/tiny", 0)
    with kubectl.forward(f"svc/{judge}-router", 30000) as url:
        for _ in range(2):
            assert "the trainer uses the memory of 2 of 2 engines" in ready(kubectl)["message"]
            asleep = generate(url)
            assert asleep.status_code == 503
            assert "nothing generates until the trainer calls /resume_memory_occupation" in asleep.text

            call(url, "/resume_memory_occupation", TAGS)
            call(url, "/flush_cache")
            # The router hears of open gates a moment later.
            eventually("it generates", lambda: generate(url).ok, within=10)
            answers = [generate(url).json() for _ in range(6)]
            assert [answer["output_ids"] for answer in answers] == [expected] * 6
            eventually("its status tells it", lambda: ready(kubectl)["status"] == "True", within=30)
            with pytest.raises(Refused, match="keeps the weights that it was started with"):
                push(kubectl, judge, "1", seed=1)
            assert generate(url).json()["output_ids"] == expected

            call(url, "/abort_request", {"rid": "", "abort_all": True})
            call(url, "/release_memory_occupation", TAGS)
            eventually("it sleeps again", lambda: ready(kubectl)["reason"] == "AsleepForTrainer", within=30)
