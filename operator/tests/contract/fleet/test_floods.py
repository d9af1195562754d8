"""Floods from one client, with the real processes: control calls are answered, no engine restarts, and a running request continues."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from pathlib import Path

import aiohttp
import pytest
from e2e.chaos.floods import MALFORMED_BODIES, REFUSED_CALLS, SLOW_BODIES, Flood, FloodKind
from yarl import URL

from sglang_rollout.testing import StandInFleet
from tests.contract.fleet.test_sessions_while_draining import all_routed
from tests.contract.proxy.test_front import unfinished_bodies
from tests.contract.support.agent_pod import until
from tests.contract.support.complete_fleet import CompleteFleet, complete_fleet

pytestmark = [pytest.mark.router, pytest.mark.timeout(120)]

CLIENT = "127.0.0.2"
CONNECTIONS = 128
TOKENS = 150
BATCH = json.dumps({"text": ["{" * 900] * 1100}).encode()
"""The batch server counts 240 bytes for each brace until it has sent all prompts, of which 1024 run at a time. Four of these batches take
all of its memory."""


@asynccontextmanager
async def bodies_that_do_not_end(fleet: CompleteFleet) -> AsyncIterator[None]:
    async with unfinished_bodies(URL(fleet.url).port or 0, {CLIENT: 2 * CONNECTIONS}):
        yield


@asynccontextmanager
async def connections_without_a_request(fleet: CompleteFleet) -> AsyncIterator[None]:
    writers = []
    for _ in range(2 * CONNECTIONS):
        with suppress(ConnectionError):  # above the limit of one client
            _, writer = await asyncio.open_connection("127.0.0.1", URL(fleet.url).port, local_addr=(CLIENT, 0))
            writers.append(writer)
    try:
        yield
    finally:
        for writer in writers:
            writer.close()


@asynccontextmanager
async def batches_that_take_all_memory(fleet: CompleteFleet) -> AsyncIterator[None]:
    statuses: list[int] = []
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(local_addr=(CLIENT, 0), limit=0)) as http:

        async def send() -> None:
            async with http.post(f"{fleet.url}/generate", data=BATCH) as reply:
                statuses.append(reply.status)

        async def refused() -> bool:
            return 503 in statuses

        async with asyncio.TaskGroup() as clients:
            sent = [clients.create_task(send()) for _ in range(16)]
            await until(refused, 60, "the batch server refuses a batch")
            yield
            for task in sent:
                task.cancel()


def messages_of(kind: FloodKind) -> Callable[[CompleteFleet], AbstractAsyncContextManager[None]]:
    """Return a flood of the fault matrix."""

    @asynccontextmanager
    async def send(fleet: CompleteFleet) -> AsyncIterator[None]:
        flood = Flood(kind, fleet.url, {})
        flood.start()
        try:
            yield
        finally:
            await asyncio.to_thread(flood.stop)
        flood.check({}, "")

    return send


FLOODS = {
    "bodies that do not end": bodies_that_do_not_end,
    "connections without a request": connections_without_a_request,
    "batches that take all memory": batches_that_take_all_memory,
    "refused calls": messages_of(REFUSED_CALLS),
    "slow bodies": messages_of(SLOW_BODIES),
    "malformed bodies": messages_of(MALFORMED_BODIES),
}


@pytest.mark.parametrize("flood", FLOODS.values(), ids=FLOODS)
async def test_a_flood_reaches_neither_control_calls_nor_engines(
    flood: Callable[[CompleteFleet], AbstractAsyncContextManager[None]], tmp_path: Path
) -> None:
    with StandInFleet(engines=2, weight_version="base", token_seconds=0.03) as engines:
        async with complete_fleet(tmp_path, engines.urls, connections=CONNECTIONS) as fleet:
            await fleet.serving(2)
            await all_routed(fleet)
            boots = await boot_ids(fleet)
            running = asyncio.create_task(stream(fleet))
            async with flood(fleet):
                for _ in range(10):
                    assert await boot_ids(fleet) == boots
                    answer = await fleet.ask("POST", "/abort_request", {"rid": "unknown"})
                    assert answer.status == 200, answer
            assert await running == TOKENS
            assert await boot_ids(fleet) == boots


async def stream(fleet: CompleteFleet) -> int:
    """Return the number of events of a complete stream."""
    body = {"input_ids": [5], "stream": True, "sampling_params": {"max_new_tokens": TOKENS, "ignore_eos": True}}
    async with fleet.http.post(f"{fleet.url}/generate", json=body) as reply:
        lines = [line async for line in reply.content if line.startswith(b"data: ")]
    assert lines[-1].startswith(b"data: [DONE]")
    return len(lines) - 1


async def boot_ids(fleet: CompleteFleet) -> list[str | None]:
    return [member["boot_id"] for member in (await fleet.document())["members"]]
