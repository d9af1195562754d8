"""Sessions of a drained engine, with the real processes and three stand-ins, while clients send requests."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from itertools import groupby
from pathlib import Path

import pytest

from sglang_rollout.testing import StandInFleet
from tests.contract.support.agent_pod import Pod, until
from tests.contract.support.complete_fleet import CompleteFleet, complete_fleet

pytestmark = [pytest.mark.router, pytest.mark.timeout(120)]

SESSIONS = [f"game-{number}" for number in range(12)]


@pytest.mark.parametrize("policy", ["CacheAware", "ConsistentHash"])
async def test_the_sessions_of_a_drained_engine_move_once_without_a_failed_request(policy: str, tmp_path: Path) -> None:
    with StandInFleet(engines=3, weight_version="base", token_seconds=0.003) as engines:
        async with complete_fleet(tmp_path, engines.urls, policy=policy) as fleet:
            await fleet.serving(3)
            await all_routed(fleet)
            answered: dict[str, list[str]] = defaultdict(list)
            stop = asyncio.Event()
            async with asyncio.TaskGroup() as clients:  # a failed request ends all clients
                for name in SESSIONS:
                    clients.create_task(client(fleet, name, answered[name], stop))
                await turns(answered, 3)
                before = {name: gates[-1] for name, gates in answered.items()}
                left = before[SESSIONS[0]]
                at = next(index for index, pod in enumerate(fleet.pods) if pod.url == left)
                (fleet.pods[at].boot_file.parent / "drain").touch()  # as the preStop hook does
                await until(lambda: drained(fleet.pods[at]), 30, "no request runs on the engine")
                engines[at].kill()
                await turns(answered, 10)
                stop.set()

    assert len(set(before.values())) > 1, "the sessions use several engines"
    for name, gates in answered.items():
        path = [gate for gate, _ in groupby(gates)]
        assert len(path) == (2 if before[name] == left else 1), f"{name} went {path}"


async def ask(fleet: CompleteFleet, session: str) -> str:
    """Return the gate that answered."""
    body = {"input_ids": [5, 6], "session_id": session, "sampling_params": {"max_new_tokens": 30, "ignore_eos": True}}
    answer = await fleet.ask("POST", "/generate", body)
    assert answer.status == 200, answer
    return answer.headers["x-smg-routed-worker-id"]


async def client(fleet: CompleteFleet, session: str, gates: list[str], stop: asyncio.Event) -> None:
    while not stop.is_set():
        gates.append(await ask(fleet, session))


async def turns(answered: dict[str, list[str]], number: int) -> None:
    """Wait until every session has this number of further answers."""
    begun = {name: len(gates) for name, gates in answered.items()}

    async def done() -> bool:
        return all(len(answered[name]) >= count + number for name, count in begun.items())

    await until(done, 60, f"{number} answers for each session")


async def drained(left: Pod) -> bool:
    return (left.boot_file.parent / "drained").exists()


async def all_routed(fleet: CompleteFleet) -> None:
    """Wait until smg lists every engine."""
    unused = iter(range(10_000))

    async def listed() -> bool:
        body = {"input_ids": [5], "sampling_params": {"max_new_tokens": 1}}
        answers = [await fleet.ask("POST", "/generate", body | {"session_id": f"new-{next(unused)}"}) for _ in range(20)]
        return len({answer.headers.get("x-smg-routed-worker-id") for answer in answers if answer.status == 200}) == len(fleet.pods)

    await until(listed, 60, "smg lists every engine")
