"""An abort of all requests, at the URL of a fleet with the real processes and stand-ins, ends the prompts that wait in the batch server."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from sglang_rollout.batches.client import MAX_BATCH_PROMPTS
from sglang_rollout.testing import StandInFleet
from sglang_rollout.testing.app import STATE
from tests.contract.support.agent_pod import until
from tests.contract.support.complete_fleet import CompleteFleet, complete_fleet

pytestmark = [pytest.mark.router, pytest.mark.timeout(120)]

LONG = {"max_new_tokens": 900, "ignore_eos": True}
SHORT = {"max_new_tokens": 1, "ignore_eos": True}
PROMPTS = MAX_BATCH_PROMPTS + 36


async def test_no_prompt_that_was_sent_before_an_abort_starts_after_it(tmp_path: Path) -> None:
    with StandInFleet(engines=2, weight_version="base", token_seconds=1.0) as engines:
        async with complete_fleet(tmp_path, engines.urls) as fleet:
            await fleet.serving(2)
            await fleet.generate({"text": "a", "sampling_params": SHORT})
            body = {"text": [f"prompt {number}" for number in range(PROMPTS)], "sampling_params": LONG}
            for stream in (False, True):
                asked = asyncio.create_task(fleet.ask("POST", "/generate", {**body, "stream": stream}))
                await until(lambda: has_running(fleet, engines.urls, MAX_BATCH_PROMPTS), 60, "all places are taken")
                assert (await fleet.ask("POST", "/abort_request", {"abort_all": True})).status == 200
                assert await has_running(fleet, engines.urls, 0)
                answer = await asyncio.wait_for(asked, 20)
                assert answer.status == 200, answer
                reasons = [sample["meta_info"]["finish_reason"] for sample in last_samples(answer.body)]
                assert [reason["type"] for reason in reasons] == ["abort"] * PROMPTS
                assert [reason["message"] for reason in reasons].count("Abort in waiting queue") == PROMPTS - MAX_BATCH_PROMPTS
                after = await fleet.ask("POST", "/generate", {"text": ["a", "b"], "sampling_params": SHORT})
                assert [sample["meta_info"]["finish_reason"]["type"] for sample in after.body] == ["length"] * 2


async def has_running(fleet: CompleteFleet, urls: list[str], number: int) -> bool:
    """Return True if this number of requests runs on all engines together."""
    states = [(await fleet.ask("GET", STATE, at=url)).body for url in urls]
    return sum(int(state["requests"]) for state in states) == number


def last_samples(body: Any) -> list[Any]:
    """Return the samples of an answer, or the last event of each sample of a complete stream."""
    if not isinstance(body, str):
        return list(body)
    *events, end = [line.removeprefix("data: ") for line in body.splitlines() if line.startswith("data: ")]
    assert end == "[DONE]"
    return list({event["index"]: event for event in map(json.loads, events)}.values())
