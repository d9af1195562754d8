"""An engine whose process runs but does not answer is restarted, unless it is silent for a known reason."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from sglang_rollout.wire.ports import AGENT_SYNC
from tests.contract.support.agent_pod import BASE_WIRE, Pod, pod, until
from tests.contract.support.stub_engine import StubEngine, stub_engine

pytestmark = pytest.mark.router
HEALTH = "health_generate"
SILENCE = 2.0


@pytest.fixture
async def engine() -> AsyncIterator[StubEngine]:
    async with stub_engine() as made:
        yield made


@pytest.fixture
async def lab(engine: StubEngine, tmp_path: Path) -> AsyncIterator[Pod]:
    async with pod(tmp_path, engine.url, with_boot_file=True, start=False) as made:
        made.boot("first")
        await made.start()
        await made.open_with_base()
        await made.control(AGENT_SYNC, {"committed": BASE_WIRE, "silent": SILENCE})
        yield made


def kill_file(lab: Pod) -> Path:
    return lab.boot_file.parent / "kill"


async def killed(lab: Pod) -> bool:
    return kill_file(lab).exists()


async def test_the_restart_of_an_engine_that_stopped_generating_is_requested(lab: Pod, engine: StubEngine) -> None:
    await until(lambda: asked(engine, 8), 30, "the agent asks again and again while all is well")
    assert not await killed(lab)
    engine.held[HEALTH] = asyncio.Event()
    await until(lambda: killed(lab), 30, "the agent asks the kubelet for a restart")
    assert (await lab.status()).gate_open  # /model_info still answers, and so may requests that run


async def test_the_checks_of_a_restarted_engine_start_from_zero(lab: Pod, engine: StubEngine) -> None:
    engine.held[HEALTH] = asyncio.Event()
    await until(lambda: killed(lab), 30, "the agent asks the kubelet for a restart")
    kill_file(lab).unlink()  # as the start of the engine's container does
    engine.held.pop(HEALTH).set()
    lab.boot("second")
    before = engine.calls.count(HEALTH)
    await until(lambda: asked(engine, before + 8), 30, "the agent checks the restarted engine")
    assert not await killed(lab)


async def test_a_paused_engine_is_not_restarted(lab: Pod, engine: StubEngine) -> None:
    assert (await lab.control("/pause_generation")).status == 200
    engine.held[HEALTH] = asyncio.Event()
    await asyncio.sleep(0.1)
    asked_before = engine.calls.count(HEALTH)
    await asyncio.sleep(3 * SILENCE)
    assert not await killed(lab)
    assert engine.calls.count(HEALTH) == asked_before
    assert (await lab.control("/continue_generation")).status == 200
    await until(lambda: killed(lab), 30, "not paused any more, it has no reason left")


async def test_a_fence_restarts_an_engine_that_does_not_resume(lab: Pod, engine: StubEngine) -> None:
    engine.held["continue_generation"] = asyncio.Event()
    assert (await lab.control("/pause_generation")).status == 200
    await lab.fence(stuck_after=1.0)
    await until(lambda: killed(lab), 30, "the call that lets it run again is not answered either")


async def test_a_fence_restarts_an_engine_that_never_receives_its_tensors(lab: Pod, engine: StubEngine) -> None:
    engine.held["end_weight_update"] = asyncio.Event()
    assert (await lab.control("/begin_weight_update")).status == 200
    await lab.fence(stuck_after=1.0)
    await until(lambda: killed(lab), 30, "the agent asks the kubelet for a restart")


async def test_an_engine_that_answers_late_is_not_restarted(lab: Pod, engine: StubEngine) -> None:
    engine.held["end_weight_update"] = asyncio.Event()
    assert (await lab.control("/begin_weight_update")).status == 200
    await lab.fence(stuck_after=1.0)
    await until(lambda: killed(lab), 30, "the agent asks the kubelet for a restart")
    engine.held["end_weight_update"].set()
    await until(lambda: no_kill_file(lab), 30, "the request is withdrawn before the kubelet has seen it")


async def no_kill_file(lab: Pod) -> bool:
    return not kill_file(lab).exists()


async def asked(engine: StubEngine, times: int) -> bool:
    return engine.calls.count(HEALTH) >= times
