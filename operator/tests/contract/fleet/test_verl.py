"""Calls of verl's HTTP server adapter (``AsyncHttpServerAdapter``, 0.9.1) to a fleet and to each of its engines.

The fleets have stand-ins or real engines. ``test_hybrid.py`` has the calls with weights (``spec.mode: Hybrid``).
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from sglang_rollout.wire.states import RELEASED_TO_TRAINER, FleetMode
from tests.contract.support.agent_pod import until
from tests.contract.support.complete_fleet import CompleteFleet, complete_fleet

pytestmark = [pytest.mark.router, pytest.mark.timeout(420)]

TAGS = {"tags": ["kv_cache", "weights"]}
"""Tags of ``sleep`` and ``wake_up`` for servers that accept no weights."""
CACHE = {"tags": ["kv_cache"]}
ALL = {"rid": "", "abort_all": True}
PROMPT = {
    "input_ids": list(range(11, 43)),
    "sampling_params": {"temperature": 0, "max_new_tokens": 6, "ignore_eos": True},
    "return_logprob": True,
}
LONG = {"input_ids": [11, 22, 33], "sampling_params": {"temperature": 0, "max_new_tokens": 1500, "ignore_eos": True}}


@pytest.fixture(params=["stand_in_pair", pytest.param("sglang_pair", marks=pytest.mark.engine)], ids=["stand-in", "sglang"])
def servers(request: pytest.FixtureRequest) -> list[str]:
    """Return the URLs of two stand-ins or of two real engines."""
    return list(request.getfixturevalue(request.param))


async def call(fleet: CompleteFleet, method: str, path: str, body: Any = None, at: str | None = None) -> Any:
    """Call as the adapter does: any status but 2xx is an error, and the body is JSON or empty."""
    answer = await fleet.ask(method, path, body, at)
    assert 200 <= answer.status < 300, f"{path}: {answer}"
    return answer.body


async def tokens(fleet: CompleteFleet, at: str | None = None) -> list[int]:
    return list((await fleet.generate(PROMPT, at))["output_ids"])


async def abort_all_ends_a_long_request(fleet: CompleteFleet, at: str | None = None) -> None:
    asked = asyncio.create_task(fleet.generate(LONG, at))
    await asyncio.sleep(0.5)
    assert not asked.done(), "the request runs for seconds"
    await call(fleet, "POST", "/abort_request", ALL, at)
    meta = (await asyncio.wait_for(asked, 20))["meta_info"]
    assert (meta["finish_reason"]["type"], meta["completion_tokens"] < 1500) == ("abort", True)


async def test_a_standalone_fleet_is_one_server_for_the_adapter(servers: list[str], tmp_path: Path) -> None:
    async with complete_fleet(tmp_path, servers) as fleet:
        await fleet.serving(2)
        assert len((await call(fleet, "GET", "/v1/models"))["data"]) == 1
        own = await tokens(fleet, servers[0])
        assert [await tokens(fleet) for _ in range(4)] == [own] * 4, "the answers of the engines"
        await abort_all_ends_a_long_request(fleet)
        await call(fleet, "POST", "/abort_request", {"rid": "r1", "abort_all": False})
        await call(fleet, "GET", "/flush_cache")
        held = [(await fleet.generate(PROMPT, server))["meta_info"]["cached_tokens"] for server in servers]
        assert held == [0, 0], "every engine has flushed its cache"
        # verl's checkpoint engine releases only the cache during an update.
        await call(fleet, "POST", "/release_memory_occupation", CACHE)
        assert await fleet.released() == [{"kv_cache"}] * 2
        await fleet.serving(0)
        await call(fleet, "POST", "/resume_memory_occupation", CACHE)
        await fleet.serving(2)
        assert await tokens(fleet) == own


async def refused_with(fleet: CompleteFleet, message: str) -> bool:
    """Return whether the fleet refuses a data request with this message. The front asks the coordinator every second."""
    answer = await fleet.ask("POST", "/generate", PROMPT)
    assert answer.status == 503, answer
    return bool(answer.body["error"]["message"] == message)


@pytest.fixture
async def judge(servers: list[str], tmp_path: Path) -> AsyncIterator[CompleteFleet]:
    async with complete_fleet(tmp_path, servers, FleetMode.COLOCATED) as fleet:

        async def asleep() -> bool:
            return await fleet.released() == [set(TAGS["tags"])] * 2

        await until(asleep, 60, "the fleet sleeps")
        try:
            yield fleet
        finally:
            await call(fleet, "POST", "/resume_memory_occupation", TAGS)


async def test_a_colocated_judge_wakes_judges_and_sleeps(judge: CompleteFleet) -> None:
    answers = []
    for _ in range(2):
        await until(lambda: refused_with(judge, RELEASED_TO_TRAINER), 60, "a data request is refused with the cause")
        assert (await judge.ask("GET", "/fleet/held")).status == 200, "the front sends data requests to the coordinator"
        await call(judge, "POST", "/resume_memory_occupation", TAGS)
        assert (await judge.document())["serving"] == 2, "the engines serve before the answer, because the adapter generates at once"
        await call(judge, "GET", "/flush_cache")
        answers += [await tokens(judge), *[await tokens(judge, pod.url) for pod in judge.pods]]
        await abort_all_ends_a_long_request(judge)
        await call(judge, "POST", "/release_memory_occupation", TAGS)
        assert await judge.released() == [set(TAGS["tags"])] * 2
    assert answers == [answers[0]] * 6, "the weights are the same after every sleep"


async def test_an_engine_wakes_and_sleeps_by_calls_to_its_own_url(judge: CompleteFleet) -> None:
    one, other = (pod.url for pod in judge.pods)
    await call(judge, "POST", "/resume_memory_occupation", TAGS, one)
    assert await judge.released() == [set(), set(TAGS["tags"])]
    first = await tokens(judge, one)
    assert (await judge.ask("POST", "/generate", PROMPT, other)).status == 503
    assert await tokens(judge) == first, "the other engine serves the fleet"
    await call(judge, "GET", "/flush_cache", at=one)
    await abort_all_ends_a_long_request(judge, one)
    await call(judge, "POST", "/release_memory_occupation", TAGS, one)
    await call(judge, "POST", "/resume_memory_occupation", TAGS, other)
    assert await judge.released() == [set(TAGS["tags"]), set()]
    assert await tokens(judge, other) == first
