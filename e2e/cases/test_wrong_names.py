"""A trainer pushes names that the model of its SGLang engines does not have, and one correct push repairs the fleet.

No pod is deleted: the pods of the engines are the same at the end.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from e2e.cases.actions import KILL, ask_engines, document, forward, push, serving
from e2e.cases.conftest import ready, remove, remove_stand, sample
from e2e.kube import Kubectl, Refused, eventually

NAME, TINY = "names", "/models/tiny"
WRONG = "policy."
TRANSPORTS: dict[str, dict[str, Any]] = {"Distributed": {}, "Staged": {"transport": "Staged", "staging": {"sizeLimit": "32Mi"}}}


@pytest.fixture(params=TRANSPORTS)
def wrong_names(kubectl: Kubectl, operator: Kubectl, client: str, request: pytest.FixtureRequest) -> Iterator[str]:
    """Create a rollout of two SGLang engines with a transport, and forward its URL to this machine."""
    remove_stand(kubectl)
    remove(kubectl, NAME)
    rollout = sample(NAME)
    rollout["spec"]["weights"] |= TRANSPORTS[request.param]
    kubectl.apply(rollout)
    eventually("the rollout is Ready", lambda: ready(kubectl, NAME), within=300, every=1)
    with kubectl.forward(f"svc/{NAME}-router", 30000) as url:
        serving(url, 2)
        yield url
    remove(kubectl, NAME)


def answers(kubectl: Kubectl, url: str) -> list[tuple[list[int], str]]:
    """Return what each engine generates, and the version that it names."""
    found = ask_engines(kubectl, url)
    return [(found[name]["output_ids"], found[name]["meta_info"]["weight_version"]) for name in sorted(found)]


def pods(kubectl: Kubectl) -> list[str]:
    """Return the UIDs of the engines' pods."""
    return [str(kubectl.get("pod", f"{NAME}-engine-{index}-0")["metadata"]["uid"]) for index in (0, 1)]


def restart(kubectl: Kubectl, url: str, index: int) -> None:
    """Kill an engine, and wait until it is up again. With transport Distributed it waits for weights then."""
    before = document(url)["members"][index]["boot_id"]
    kubectl.exec(f"{NAME}-engine-{index}-0", "sh", "-c", KILL, container="engine")

    def up() -> bool:
        row = document(url)["members"][index]
        return row["state"] == "clean" and row["boot_id"] not in {before, None}

    eventually("the engine is up again", up, within=240, every=1)


def test_one_correct_push_repairs_a_fleet_whose_trainer_used_wrong_names(kubectl: Kubectl, wrong_names: str) -> None:
    url, began = wrong_names, pods(kubectl)
    base = forward(kubectl, TINY, 0)

    with pytest.raises(Refused, match="is not in the engines' model"):
        push(kubectl, NAME, "10", seed=1, prefix=WRONG)
    assert (document(url)["committed"]["label"], document(url)["serving"]) == ("base", 2), "refused before the first byte"

    wrong = push(kubectl, NAME, "10", seed=1, prefix=WRONG, check=False)
    assert "do not fit the engines' model" in wrong["unchecked"]
    serving(url, 2)
    assert answers(kubectl, url) == [(base, "10")] * 2, "SGLang ignores names that its model does not have"
    assert kubectl.get("sglr", NAME)["status"]["weights"]["lastUpdate"]["unchecked"]

    restart(kubectl, url, 1)
    right = push(kubectl, NAME, "11", seed=2)
    assert right["unchecked"] == ""
    serving(url, 2)
    assert answers(kubectl, url) == [(forward(kubectl, TINY, 2), "11")] * 2
    assert pods(kubectl) == began, "no pod was deleted"
