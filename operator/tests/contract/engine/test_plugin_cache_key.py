"""The cache key of a version in a real engine: no prompt reads a prefix of older weights, also if no update flushes the cache."""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from e2e.engine import environment

from tests.contract.support.plugin_engines import PluginEngine, start_plugin_engine

pytestmark = [pytest.mark.engine, pytest.mark.timeout(420)]

PROMPT = list(range(100, 500))


@pytest.fixture(scope="module", params=[pytest.param(False, id="newest"), pytest.param(True, id="oldest", marks=pytest.mark.long)])
def keyed(request: pytest.FixtureRequest, engine_environment: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[PluginEngine]:
    with start_plugin_engine(tmp_path_factory.mktemp("keyed"), old=request.param) as engine:
        yield engine


def update(engine: PluginEngine, label: str | None) -> None:
    """Load the same weights again, without a flush of the cache."""
    body: dict[str, Any] = {"model_path": str(environment.model()), "flush_cache": False}
    status, answer = engine.post("/update_weights_from_disk", body | ({"weight_version": label} if label else {}))
    assert (status, answer["success"]) == (200, True), answer


def cached(engine: PluginEngine, **body: Any) -> int:
    return int(engine.generate(**({"input_ids": PROMPT} | body))["meta_info"]["cached_tokens"])


def test_a_prefix_of_older_weights_is_not_used(keyed: PluginEngine) -> None:
    """Also if a trainer uses a label again in another run, or sends none."""
    for label in ("v1", "v1", None):
        cached(keyed)
        assert cached(keyed) == 399
        update(keyed, label)
        assert cached(keyed) == 0


def test_without_the_key_a_prefix_of_older_weights_is_used(engine_environment: None, tmp_path: Path) -> None:
    with start_plugin_engine(tmp_path, cache_key=False) as engine:
        found = engine.wait_for_proof(1, cache_key=False)
        assert "sets no cache key of the version" in str(found.missing(1)), "a fleet with PerVersion keeps the gate closed"
        cached(engine)
        update(engine, "v1")
        assert cached(engine) == 399


def test_a_key_of_the_caller_still_separates(keyed: PluginEngine) -> None:
    cached(keyed, extra_key="team-a")
    assert cached(keyed, extra_key="team-a") == 399
    assert cached(keyed, extra_key="team-b") == 0
    update(keyed, "v2")
    assert cached(keyed, extra_key="team-a") == 0


def test_each_prompt_of_a_batch_has_the_key(keyed: PluginEngine) -> None:
    def both() -> list[int]:
        status, answers = keyed.post("/generate", {"input_ids": [PROMPT, PROMPT[::-1]], "sampling_params": {"max_new_tokens": 2}})
        assert status == 200
        return [one["meta_info"]["cached_tokens"] for one in answers]

    both()
    assert both() == [399, 399]
    update(keyed, "v3")
    assert both() == [0, 0]


@pytest.mark.parametrize("mode", ["abort", "retract", "in_place"])
def test_a_request_that_is_held_during_an_update_has_the_new_key(keyed: PluginEngine, mode: str) -> None:
    cached(keyed)
    assert keyed.post("/pause_generation", {"mode": mode})[0] == 200
    with ThreadPoolExecutor(1) as pool:
        held = pool.submit(cached, keyed)
        time.sleep(1)
        update(keyed, f"held-{mode}")
        assert not held.done()
        assert keyed.post("/continue_generation", {})[0] == 200
        assert held.result(60) == 0


def test_a_retracted_request_reads_no_prefix_of_older_weights(keyed: PluginEngine) -> None:
    """Its own prefix is computed again and belongs to the new version."""
    running = {"input_ids": PROMPT[::2], "sampling_params": {"temperature": 0, "max_new_tokens": 1200, "ignore_eos": True}}
    with ThreadPoolExecutor(1) as pool:
        future = pool.submit(keyed.generate, **running)
        time.sleep(1)
        assert keyed.post("/pause_generation", {"mode": "retract"})[0] == 200
        assert not future.done()
        update(keyed, "retracted")
        assert keyed.post("/continue_generation", {})[0] == 200
        meta = future.result(120)["meta_info"]
    assert meta["num_retractions"] == 1
    assert [span["version"] for span in meta["weight_versions"]][-1] == "retracted"
    assert cached(keyed, input_ids=PROMPT[::2]) == len(PROMPT[::2]) - 1
