"""One engine with two ranks in one pod: tensor parallel, and a mixture of experts with the experts spread over the ranks. Real SGLang.

On a CPU SGLang needs a correction for spread experts (``SGLANG_CPU_PATCHES=expert-parallel``, images/engine-cpu/README.md).
"""

from __future__ import annotations

import json
import pathlib
from collections.abc import Iterator

import pytest

from e2e.cases.actions import generate, push, serving
from e2e.cases.conftest import NAME, ready, remove, remove_stand, sample
from e2e.cases.ranks import checksums
from e2e.engine import environment
from e2e.kube import Kubectl, eventually

FORWARD = (pathlib.Path(__file__).parent / "forward.py").read_text()
KINDS = {"tp": ("/models/tiny", {"tensor": 2}, ""), "ep": ("/models/tiny-moe", {"tensor": 2, "expert": 2}, "expert-parallel")}


@pytest.fixture(params=KINDS)
def ranks(request: pytest.FixtureRequest, kubectl: Kubectl, operator: Kubectl, client: str) -> Iterator[str]:
    """A Ready rollout of one such engine; its name, which is that of the kind."""
    name = str(request.param)
    model, parallelism, patches = KINDS[name]
    remove_stand(kubectl)
    remove(kubectl, NAME)  # there is no room for it beside this one
    made = sample(name, parallelism=parallelism)
    made["spec"] |= {"replicas": 1, "model": {"path": model, "servedName": name}}
    settings = {"SGLANG_CPU_OMP_THREADS_BIND": "0|1", "SGLANG_CPU_PATCHES": patches, **environment.SEVERAL_RANKS}
    made["spec"]["engine"]["env"] += [{"name": key, "value": value} for key, value in settings.items()]
    kubectl.apply(made)
    eventually("the rollout is Ready", lambda: ready(kubectl, name), within=400, every=2)
    yield name
    remove(kubectl, name)


def forward(kubectl: Kubectl, model: str, seed: int) -> list[int]:
    """What a plain forward pass answers."""
    return list(json.loads(kubectl.exec("client", "python", "-", model, str(seed), stdin=FORWARD, timeout=120).strip().splitlines()[-1]))


def test_an_update_reaches_every_rank(kubectl: Kubectl, ranks: str) -> None:
    model = KINDS[ranks][0]
    base = checksums(kubectl, f"{ranks}-engine-0")
    with kubectl.forward(f"svc/{ranks}-router", 30000) as url:
        serving(url, 1)
        assert generate(url).json()["output_ids"] == forward(kubectl, model, 0)
        answers = push(kubectl, ranks, "1", seed=1, model=model)
        pushed = checksums(kubectl, f"{ranks}-engine-0")
        assert set(pushed).isdisjoint(base), "every rank holds something else now"
        expected = forward(kubectl, model, 1)
        assert answers["engines"][f"{ranks}-engine-0"] == {"ids": expected, "version": "1"}
        assert generate(url).json()["output_ids"] == expected
