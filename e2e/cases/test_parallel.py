"""One engine with two ranks in one pod: tensor parallel, and a mixture of experts with and without expert parallelism. Real SGLang.

On a CPU, SGLang needs a patch for expert parallelism (``SGLANG_CPU_PATCHES=expert-parallel``, images/engine-cpu/README.md).
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from e2e.cases.actions import forward, generate, push, serving
from e2e.cases.conftest import NAME, ready, remove, remove_stand
from e2e.cases.ranks import checksums, two_ranks
from e2e.kube import Kubectl, eventually

KINDS = {
    "tp": ("/models/tiny", {"tensor": 2}, ""),
    "moe": ("/models/tiny-moe", {"tensor": 2}, ""),
    "ep": ("/models/tiny-moe", {"tensor": 2, "expert": 2}, "expert-parallel"),
}


@pytest.fixture(params=KINDS)
def ranks(request: pytest.FixtureRequest, kubectl: Kubectl, operator: Kubectl, client: str) -> Iterator[str]:
    """Create a rollout of one such engine, and return its name, which is the kind's name."""
    name = str(request.param)
    model, parallelism, patches = KINDS[name]
    remove_stand(kubectl)
    remove(kubectl, NAME)  # the node has no room for both fleets
    made = two_ranks(name, patches=patches, parallelism=parallelism)
    made["spec"]["model"] = {"path": model, "servedName": name}
    kubectl.apply(made)
    eventually("the rollout is Ready", lambda: ready(kubectl, name), within=400, every=2)
    yield name
    remove(kubectl, name)


def test_update_reaches_every_rank(kubectl: Kubectl, ranks: str) -> None:
    model, engine = KINDS[ranks][0], f"{ranks}-engine-0"
    base = checksums(kubectl, engine)
    with kubectl.forward(f"svc/{ranks}-router", 30000) as url:
        serving(url, 1)
        first = forward(kubectl, model, 0)
        assert generate(url).json()["output_ids"] == first
        answers = push(kubectl, ranks, "1", seed=1, model=model)
        pushed = checksums(kubectl, engine)
        assert set(pushed).isdisjoint(base), "every rank's weights changed"
        expected = forward(kubectl, model, 1)
        assert answers["engines"][engine] == {"ids": expected, "version": "1"}
        assert generate(url).json()["output_ids"] == expected

        push(kubectl, ranks, "2", seed=0, model=model)
        assert checksums(kubectl, engine) == base, "every rank holds exactly its initial weights"
        assert generate(url).json()["output_ids"] == first
