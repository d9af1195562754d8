"""Requests during which engines end, with the real processes and stand-ins."""

from __future__ import annotations

from pathlib import Path

import pytest
import requests

from sglang_rollout.testing import StandInFleet
from tests.contract.fleet.test_sessions_while_draining import all_routed
from tests.contract.support.complete_fleet import complete_fleet

pytestmark = [pytest.mark.router, pytest.mark.timeout(120)]

PROMPT = {"input_ids": [5, 6], "sampling_params": {"max_new_tokens": 3}}
LONG = {**PROMPT, "sampling_params": {"max_new_tokens": 3, "custom_params": {"padding": "x" * 70_000}}}
"""Longer than the front can repeat, so the batch server forwards this request to smg."""
BATCH = {**PROMPT, "input_ids": [[5, 6], [7]]}
CONTINUATION = {**PROMPT, "sampling_params": {"max_new_tokens": 3, "stop_regex": "x"}}
"""smg would drop stop_regex, so an engine gets this request from the batch server."""


def end_during_generation(url: str) -> None:
    """Let the next request for tokens end the engine, a moment after its arrival: haproxy reports an earlier end as a failed connection."""
    for fault in ({"kind": "slow", "seconds": 0.1}, {"kind": "die"}):
        requests.post(f"{url}/stand_in/faults", json={"phase": "generate", **fault}, timeout=5).raise_for_status()


@pytest.mark.parametrize("body", [PROMPT, LONG, CONTINUATION], ids=["prompt", "long", "direct"])
async def test_a_request_ends_at_most_two_engines(body: dict[str, object], tmp_path: Path) -> None:
    with StandInFleet(engines=4, weight_version="base") as engines:
        async with complete_fleet(tmp_path, engines.urls) as fleet:
            await fleet.serving(4)
            await all_routed(fleet)
            for url in engines.urls:
                end_during_generation(url)
            answer = await fleet.ask("POST", "/generate", body)
            assert (answer.status, answer.body["error"]["code"]) == (502, "engine_broke_off"), answer
            assert [engine.alive for engine in engines.engines].count(False) == 2


async def test_a_batch_that_ends_every_engine_is_answered_and_not_repeated(tmp_path: Path) -> None:
    with StandInFleet(engines=3, weight_version="base") as engines:
        async with complete_fleet(tmp_path, engines.urls) as fleet:
            await fleet.serving(3)
            await all_routed(fleet)
            for url in engines.urls:
                end_during_generation(url)
            answer = await fleet.ask("POST", "/generate", BATCH)
            assert answer.status in (502, 503), answer  # 503 if smg knows already that no engine is left


@pytest.mark.parametrize("body", [PROMPT, BATCH, CONTINUATION], ids=["prompt", "batch", "direct"])
async def test_a_request_whose_engine_ends_is_answered_by_another_engine(body: dict[str, object], tmp_path: Path) -> None:
    with StandInFleet(engines=3, weight_version="base") as engines:
        async with complete_fleet(tmp_path, engines.urls) as fleet:
            await fleet.serving(3)
            await all_routed(fleet)
            end_during_generation(engines.urls[0])
            answers = [await fleet.ask("POST", "/generate", body) for _ in range(3)]
            assert [answer.status for answer in answers] == [200, 200, 200], answers
            assert not engines[0].alive
