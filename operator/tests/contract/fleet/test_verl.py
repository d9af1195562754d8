"""What verl's HTTP server adapter (``AsyncHttpServerAdapter``, 0.9.1) says to a server, said to a fleet and to each of its engines.

Complete fleets, of stand-ins and of real engines. With weights (``spec.mode: Hybrid``): test_hybrid.py.
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
"""Of ``sleep`` and ``wake_up`` for servers that take no weights."""
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
    """The same assertions are run against both."""
    return list(request.getfixturevalue(request.param))


async def call(fleet: CompleteFleet, method: str, path: str, body: Any = None, at: str | None = None) -> Any:
    """As the adapter does: anything but a 2xx is an error, and the body is JSON or nothing."""
    answer = await fleet.ask(method, path, body, at)
    assert 200 <= answer.status < 300, f"{path}: {answer}"
    return answer.body


async def tokens(fleet: CompleteFleet, at: str | None = None) -> list[int]:
    return list((await fleet.generate(PROMPT, at))["output_ids"])


async def abort_all_ends_a_long_request(fleet: CompleteFleet, at: str | None = None) -> None:
    asked = asyncio.create_task(fleet.generate(LONG, at))
    await asyncio.sleep(0.5)
    assert not asked.done(), "it was to run for seconds"
    await call(fleet, "POST", "/abort_request", ALL, at)
    meta = (await asyncio.wait_for(asked, 20))["meta_info"]
    assert (meta["finish_reason"]["type"], meta["completion_tokens"] < 1500) == ("abort", True)


async def test_a_fleet_with_gpus_of_its_own_is_one_server_to_the_adapter(servers: list[str], tmp_path: Path) -> None:
    async with complete_fleet(tmp_path, servers) as fleet:
        await fleet.serving(2)
        assert len((await call(fleet, "GET", "/v1/models"))["data"]) == 1
        own = await tokens(fleet, servers[0])
        assert [await tokens(fleet) for _ in range(4)] == [own] * 4, "as the engine itself says, whichever it is"
        await abort_all_ends_a_long_request(fleet)
        await call(fleet, "POST", "/abort_request", {"rid": "r1", "abort_all": False})
        await call(fleet, "GET", "/flush_cache")
        held = [(await fleet.generate(PROMPT, server))["meta_info"]["cached_tokens"] for server in servers]
        assert held == [0, 0], "every engine has flushed its cache"
        # verl's checkpoint engine has the cache released while weights come, and nothing else.
        await call(fleet, "POST", "/release_memory_occupation", CACHE)
        assert await fleet.released() == [{"kv_cache"}] * 2
        await fleet.serving(0)
        await call(fleet, "POST", "/resume_memory_occupation", CACHE)
        await fleet.serving(2)
        assert await tokens(fleet) == own


async def refused_with(fleet: CompleteFleet, reason: str) -> bool:
    """The front looks every second whether the coordinator has a reason."""
    answer = await fleet.ask("POST", "/generate", PROMPT)
    assert answer.status == 503, answer
    return bool(answer.body["error"]["message"] == reason)


@pytest.fixture
async def judge(servers: list[str], tmp_path: Path) -> AsyncIterator[CompleteFleet]:
    async with complete_fleet(tmp_path, servers, FleetMode.COLOCATED) as fleet:

        async def asleep() -> bool:
            return await fleet.released() == [set(TAGS["tags"])] * 2

        await until(asleep, 60, "it sleeps")
        try:
            yield fleet
        finally:
            await call(fleet, "POST", "/resume_memory_occupation", TAGS)


async def test_a_judge_on_the_trainers_gpus_wakes_judges_and_sleeps(judge: CompleteFleet) -> None:
    said = []
    for _ in range(2):
        await until(lambda: refused_with(judge, RELEASED_TO_TRAINER), 10, "who asks for tokens is told who has the memory")
        assert (await judge.ask("GET", "/fleet/held")).status == 200, "the front sends requests to whoever can say why"
        await call(judge, "POST", "/resume_memory_occupation", TAGS)
        assert (await judge.document())["serving"] == 2, "before it is answered: the adapter generates at once"
        await call(judge, "GET", "/flush_cache")
        said += [await tokens(judge), *[await tokens(judge, pod.url) for pod in judge.pods]]
        await abort_all_ends_a_long_request(judge)
        await call(judge, "POST", "/release_memory_occupation", TAGS)
        assert await judge.released() == [set(TAGS["tags"])] * 2
    assert said == [said[0]] * 6, "the weights are the same after every sleep"


async def test_an_engine_wakes_and_sleeps_by_calls_at_its_own_url(judge: CompleteFleet) -> None:
    one, other = (pod.url for pod in judge.pods)
    await call(judge, "POST", "/resume_memory_occupation", TAGS, one)
    assert await judge.released() == [set(), set(TAGS["tags"])]
    first = await tokens(judge, one)
    assert (await judge.ask("POST", "/generate", PROMPT, other)).status == 503
    assert await tokens(judge) == first, "the fleet is that engine now"
    await call(judge, "GET", "/flush_cache", at=one)
    await abort_all_ends_a_long_request(judge, one)
    await call(judge, "POST", "/release_memory_occupation", TAGS, one)
    await call(judge, "POST", "/resume_memory_occupation", TAGS, other)
    assert await judge.released() == [set(TAGS["tags"]), set()]
    assert await tokens(judge, other) == first
