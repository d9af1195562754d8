"""The agent and the gate in front of the real SGLang server, with real gloo groups."""

from __future__ import annotations

import asyncio
import json
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from e2e.engine import Engine, LabError, environment, start_engine

from sglang_rollout.wire.states import BASE, EngineState, Version
from tests.contract.support.agent_pod import BASE_WIRE, Answer, Pod, run_pod, until
from tests.support.paths import TRAINERS, package_variables
from tests.support.ports import free_port

pytestmark = [pytest.mark.router, pytest.mark.engine, pytest.mark.timeout(420)]

TRAINER = TRAINERS / "one_update.py"


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    try:
        environment.python(make=False)
    except LabError as error:
        pytest.skip(str(error))
    with start_engine(free_port()) as made:
        yield made


@pytest.fixture
async def pod(engine: Engine, tmp_path: Path) -> AsyncIterator[Pod]:
    async with run_pod(tmp_path, engine.url) as made:
        await until(made.engine_up, 60, "the agent sees the engine")
        yield made


@asynccontextmanager
async def trainer(
    pod: Pod, *, scale: float, tensors: str = "", ranks: int = 1
) -> AsyncIterator[tuple[asyncio.subprocess.Process, dict[str, Any]]]:
    """A trainer that has opened a group with the engine, and the body of its update call."""
    port, group = free_port(), f"group-{time.monotonic_ns()}"
    model = environment.model()
    process = await asyncio.create_subprocess_exec(
        *(str(environment.python(make=False)), str(TRAINER), str(model), str(port), group, str(scale), str(ranks)),
        *([tensors] if tensors else []),
        env=package_variables(),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.DEVNULL,
    )
    assert process.stdout is not None
    try:
        body = {
            "master_address": "127.0.0.1",
            "master_port": port,
            "rank_offset": 1,
            "world_size": 1 + ranks,
            "group_name": group,
            "backend": "gloo",
        }
        joined = await pod.control("/init_weights_update_group", body)
        assert joined.status == 200, joined.body
        described = json.loads(await asyncio.wait_for(process.stdout.readline(), 60))
        yield process, {**described, "group_name": group, "flush_cache": False}
        await pod.control("/destroy_weights_update_group", {"group_name": group})
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


async def go(process: asyncio.subprocess.Process) -> None:
    assert process.stdin is not None
    process.stdin.write(b"\n")
    await process.stdin.drain()


async def push(pod: Pod, version: Version, ranks: int = 1) -> None:
    """A complete update over gloo, acknowledged and committed."""
    async with trainer(pod, scale=1 + 0.1 * version.step, ranks=ranks) as (process, body):
        boot = (await pod.status()).boot_id
        assert (await pod.control("/pause_generation", {"mode": "retract"})).status == 200
        assert (await pod.control("/begin_weight_update")).status == 200
        update = asyncio.create_task(pod.control("/update_weights_from_distributed", body))
        await go(process)
        assert (await update).status == 200, (await update).body
        assert (await pod.control("/end_weight_update")).status == 200
        assert (await pod.ack(version, boot)).status == 200
        assert (await pod.status(version.model_dump())).gate_open
        assert (await pod.control("/continue_generation")).status == 200


async def test_the_gate_opens_only_after_a_sync_and_serves_base(pod: Pod) -> None:
    assert await pod.is_closed()
    status = await pod.status()
    assert (status.state, status.version, status.tensor_size) == (EngineState.CLEAN, BASE, 1)
    await pod.open_with_base()
    answer = await pod.generate()
    assert answer.body["meta_info"]["weight_version"] == "base"


async def test_an_update_is_served_with_its_version(pod: Pod) -> None:
    await pod.open_with_base()
    before = (await pod.generate(16)).body["text"]
    version = Version(run=1, step=1, label="step-1")
    await push(pod, version)
    after = (await pod.generate(16)).body
    assert after["meta_info"]["weight_version"] == "step-1"
    assert after["text"] != before
    # The agent's death closes the gate for new requests. Running requests continue. The record reopens the gate.
    first = asyncio.Event()
    stream = asyncio.create_task(pod.stream(600, first))
    await first.wait()
    await pod.agent.end()
    assert await until(pod.is_closed, 3, "the gate closes") < 2
    assert (await stream)[1]
    await pod.agent.start()
    await until(pod.is_open, 30, "the gate opens by the record")


async def test_no_mixture_is_served_after_a_trainer_dies_during_an_update(pod: Pod) -> None:
    """Held and running requests are cut, the gate stays closed, and the next complete update makes the engine clean."""
    # The engine was updated by an earlier test and this agent is new: nothing can be proved about its weights.
    version = Version(run=1, step=2, label="step-2")
    await push(pod, version)
    first = asyncio.Event()
    stream = asyncio.create_task(pod.stream(1500, first))
    await first.wait()
    async with trainer(pod, scale=2.0, tensors="3") as (process, body):
        assert (await pod.control("/pause_generation", {"mode": "retract"})).status == 200
        held = asyncio.create_task(pod.generate(8))
        await asyncio.sleep(0.3)
        assert not held.done()
        assert (await pod.control("/begin_weight_update")).status == 200
        assert await pod.is_closed()
        update = asyncio.create_task(pod.control("/update_weights_from_distributed", body))
        await go(process)
        assert (await asyncio.wait_for(update, 60)).status == 400
        assert (await pod.control("/continue_generation")).status == 409
        status = await pod.fence()
    assert (status.state, status.session, status.paused, status.gate_open) == (EngineState.DIRTY, False, False, False)
    assert (await stream)[1] is False
    assert await outcome(held) in ("broken", "501", "503")
    await until(lambda: _idle(pod), 60, "nothing runs on the engine")
    assert await pod.is_closed()
    assert not (await pod.status(version.model_dump())).gate_open
    await push(pod, Version(run=1, step=3, label="step-3"))
    assert (await pod.generate()).body["meta_info"]["weight_version"] == "step-3"


async def test_an_engine_restarted_while_its_agent_is_down_never_answers_with_base(pod: Pod, engine: Engine) -> None:
    version = Version(run=1, step=4, label="step-4")
    await push(pod, version)
    seen: Counter[str] = Counter()
    stop = asyncio.Event()

    async def client() -> None:
        while not stop.is_set():
            seen[await outcome(pod.generate(1))] += 1
            await asyncio.sleep(0.02)

    asking = asyncio.create_task(client())
    await asyncio.sleep(0.5)
    await pod.agent.end()
    await asyncio.to_thread(engine.kill)
    engine.start()
    await asyncio.to_thread(engine.wait)
    await asyncio.sleep(2)
    assert "base" not in seen  # without agent
    await pod.agent.start()
    await until(pod.engine_up, 30, "the agent sees the new engine")
    await asyncio.sleep(4)  # longer than an agent waits before it believes its record
    status = await pod.status()
    assert (status.state, status.version, status.gate_open) == (EngineState.CLEAN, BASE, False)
    assert not (await pod.status(version.model_dump())).gate_open
    await asyncio.sleep(1)
    stop.set()
    await asking
    assert set(seen) <= {"step-4", "501", "503", "broken"}, seen  # 501: was running when the engine was killed
    assert seen["step-4"] > 0
    assert (await pod.status(BASE_WIRE)).gate_open


async def outcome(asked: Awaitable[Answer]) -> str:
    """The version that answered, else the status, or ``broken`` when the connection ended without an answer."""
    try:
        answer = await asked
    except aiohttp.ClientError:
        return "broken"
    return str(answer.body["meta_info"]["weight_version"]) if answer.status == 200 else str(answer.status)


async def _idle(pod: Pod) -> bool:
    loads = (await pod.ask("GET", "/v1/loads")).body["loads"]
    return all(load["num_running_reqs"] + load["num_waiting_reqs"] == 0 for load in loads)
