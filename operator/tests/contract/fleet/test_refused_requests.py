"""The reason of the plug-in reaches the user through front, batch server, smg and gate, and in the client."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path
from typing import Any

import pytest
import requests

from sglang_rollout.testing import StandInFleet
from sglang_rollout.trainer import GenerateFailed, connect
from sglang_rollout.wire.errors import read_error
from tests.contract.support import plugin_requests as table
from tests.contract.support.complete_fleet import complete_fleet
from tests.contract.support.local_fleet import Urls

pytestmark = [pytest.mark.router, pytest.mark.timeout(420)]

FEW = table.FEW
BIASED, LONG = {**FEW, "logit_bias": {"5": 1e39}}, "alpha " * 10_000
BIAS = "logit_bias has a value outside the numbers of 32 bits."
CHARACTERS = "text has 60000 characters, which is more than 16 for each of the 2048 tokens of the model's context."
LISTS: list[tuple[dict[str, Any], str, str]] = [
    ({"text": ["a", "b", "c"], "sampling_params": [FEW, BIASED, FEW]}, table.ENDS, BIAS),
    ({"input_ids": [[5], [6]], "sampling_params": [FEW, BIASED]}, table.ENDS, BIAS),
    ({"text": ["a", LONG, "b"], "sampling_params": FEW}, table.ABOVE, CHARACTERS),
    ({"text": ["a", LONG], "sampling_params": {**FEW, "n": 2}}, table.ABOVE, CHARACTERS),
]
"""Lists of prompts of which one is refused."""
BY_OTHERS = re.compile("^(Invalid JSON data: )?Failed to (deserialize|parse)|^1 validation error|^input_ids cannot be empty")
"""Refusals of smg, of SGLang for a number that smg has written as null, because it exceeds 32 bits, and of SGLang for an empty prompt."""


def find_error(answer: Any) -> Any:
    """Return the error of an answer, or of an event of a stream: samples of other prompts of a batch may come after it."""
    events = answer if isinstance(answer, list) else [answer]
    return next(filter(None, (read_error({"message": event} if isinstance(event, str) else event) for event in events)), None)


def check_lists(url: str) -> None:
    for body, code, sentence in LISTS:
        for stream in (False, True):
            status, answer = table.send(url, "/generate", body, stream=stream)
            error = find_error(answer)
            assert error is not None, answer
            assert (status in (400, 200 if stream else 400), error.code, error.message) == (True, code, sentence), answer


def check_table(url: str) -> None:
    """Check that requests are refused with the plug-in's code, or by what reads them before it."""
    wrong, model = [], requests.get(f"{url}/v1/models", timeout=10).json()["data"][0]["id"]
    for path, body, code in (*table.HOSTILE, *table.EMPTY, *table.HEAVY):
        for stream in (False, True):
            sent = {**body, "model": model} if "model" in body else body
            status, answer = table.send(url, path, sent, stream=stream)
            error = find_error(answer)
            is_refused = status in (400, 422) or (stream and status == 200)
            if not is_refused or error is None or (error.code != code and not BY_OTHERS.search(error.message)):
                wrong.append((path, str(body)[:100], stream, status, str(answer)[:300], code))
    assert wrong == []


def check_client(url: str) -> None:
    with connect(url, timeout=60) as fleet:
        for prompts, params, code, sentence in (
            (["a", "b"], [FEW, BIASED], table.ENDS, BIAS),
            (["a", LONG], FEW, table.ABOVE, CHARACTERS),
        ):
            with pytest.raises(GenerateFailed) as raised:
                fleet.generate(prompts, sampling_params=params)  # type: ignore[arg-type]
            assert raised.value.code == code
            (failed,) = raised.value.failed
            assert (failed.prompt_index, failed.code, failed.reason) == (1, code, f"refused with HTTP 400: {sentence}")


def check_all(url: str) -> None:
    check_lists(url)
    check_client(url)
    check_table(url)


async def test_a_refusal_of_stand_ins_reaches_the_user(tmp_path: Path) -> None:
    with StandInFleet(engines=2, weight_version="base") as engines:
        async with complete_fleet(tmp_path, engines.urls) as fleet:
            await fleet.serving(2)
            await fleet.generate({"text": "a", "sampling_params": FEW})
            await asyncio.to_thread(check_all, fleet.url)
            assert [engine.deaths for engine in engines] == [[], []]


@pytest.mark.engine
def test_a_refusal_of_real_engines_reaches_the_user(urls: Urls) -> None:
    check_all(urls.fleet)
