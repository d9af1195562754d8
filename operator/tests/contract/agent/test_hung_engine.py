"""An engine whose process runs but does not answer is restarted, unless it is silent for a known reason."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from sglang_rollout.wire.ports import AGENT_FENCE, AGENT_SYNC
from tests.contract.support.agent_pod import BASE_WIRE, Pod, run_pod, until
from tests.contract.support.stub_engine import StubEngine

pytestmark = pytest.mark.router
HEALTH = "health_generate"
SILENCE = 2.0


@pytest.fixture
async def pod(stub: StubEngine, tmp_path: Path) -> AsyncIterator[Pod]:
    async with run_pod(tmp_path, stub.url, with_boot_file=True, start=False) as made:
        made.boot("first")
        await made.start()
        await made.open_with_base()
        await made.control(AGENT_SYNC, {"committed": BASE_WIRE, "silent": SILENCE})
        yield made


def kill_file(pod: Pod) -> Path:
    return pod.boot_file.parent / "kill"


async def killed(pod: Pod) -> bool:
    return kill_file(pod).exists()


async def test_the_restart_of_an_engine_that_stopped_generating_is_requested(pod: Pod, stub: StubEngine) -> None:
    await until(lambda: asked(stub, 8), 30, "the agent asks again and again while all is well")
    assert not await killed(pod)
    stub.held[HEALTH] = asyncio.Event()
    await until(lambda: killed(pod), 30, "the agent asks the kubelet for a restart")
    assert (await pod.status()).gate_open  # /model_info still answers, and so may requests that run


async def test_the_checks_of_a_restarted_engine_start_from_zero(pod: Pod, stub: StubEngine) -> None:
    stub.held[HEALTH] = asyncio.Event()
    await until(lambda: killed(pod), 30, "the agent asks the kubelet for a restart")
    kill_file(pod).unlink()  # as the start of the engine's container does
    stub.held.pop(HEALTH).set()
    pod.boot("second")
    before = stub.calls.count(HEALTH)
    await until(lambda: asked(stub, before + 8), 30, "the agent checks the restarted engine")
    assert not await killed(pod)


async def test_a_paused_engine_is_not_restarted(pod: Pod, stub: StubEngine) -> None:
    assert (await pod.control("/pause_generation")).status == 200
    stub.held[HEALTH] = asyncio.Event()
    await asyncio.sleep(0.1)
    asked_before = stub.calls.count(HEALTH)
    await asyncio.sleep(3 * SILENCE)
    assert not await killed(pod)
    assert stub.calls.count(HEALTH) == asked_before
    assert (await pod.control("/continue_generation")).status == 200
    await until(lambda: killed(pod), 30, "the engine, which is not paused now, is restarted")


async def test_a_fence_restarts_an_engine_that_does_not_resume(pod: Pod, stub: StubEngine) -> None:
    stub.held["continue_generation"] = asyncio.Event()
    assert (await pod.control("/pause_generation")).status == 200
    await pod.fence(stuck_after=1.0)
    await until(lambda: killed(pod), 30, "an engine that does not answer the resume is restarted")


async def test_a_fence_restarts_an_engine_that_never_receives_its_tensors(pod: Pod, stub: StubEngine) -> None:
    stub.held["end_weight_update"] = asyncio.Event()
    assert (await pod.control("/begin_weight_update")).status == 200
    await pod.fence(stuck_after=1.0)
    await until(lambda: killed(pod), 30, "the agent asks the kubelet for a restart")


async def test_an_engine_that_answers_late_is_not_restarted(pod: Pod, stub: StubEngine) -> None:
    stub.held["end_weight_update"] = asyncio.Event()
    assert (await pod.control("/begin_weight_update")).status == 200
    await pod.fence(stuck_after=1.0)
    await until(lambda: killed(pod), 30, "the agent asks the kubelet for a restart")
    stub.held["end_weight_update"].set()
    await until(lambda: no_kill_file(pod), 30, "the request is withdrawn before the kubelet has seen it")


async def test_a_check_of_the_agent_makes_no_flush_fail(pod: Pod, stub: StubEngine) -> None:
    """SGLang refuses to flush its cache while it computes a token, also the token of a health check."""
    check = stub.held[HEALTH] = asyncio.Event()
    before = stub.calls.count(HEALTH)
    await until(lambda: asked(stub, before + 1), 30, "the agent checks the engine")
    stub.failing.add("flush_cache")
    flush = asyncio.create_task(pod.control("/flush_cache"))
    await until(lambda: flushed(stub, 1), 30, "the engine refuses the flush")
    stub.failing.clear()
    check.set()
    assert (await flush).status == 200
    assert stub.calls.count("flush_cache") == 2


async def flushed(stub: StubEngine, times: int) -> bool:
    return stub.calls.count("flush_cache") >= times


async def no_kill_file(pod: Pod) -> bool:
    return not kill_file(pod).exists()


async def asked(stub: StubEngine, times: int) -> bool:
    return stub.calls.count(HEALTH) >= times


async def test_a_fence_restarts_a_dirty_engine_whose_tensors_no_push_is_known_to_replace(pod: Pod, stub: StubEngine) -> None:
    assert (await pod.control("/begin_weight_update")).status == 200
    await pod.fence()
    await asyncio.sleep(1)
    assert not await killed(pod), "a later push may repair it"
    fenced = asyncio.create_task(pod.control(AGENT_FENCE, {"message": "unknown names", "restart": True}))
    await until(lambda: killed(pod), 30, "the agent asks the kubelet for a restart")
    assert (await pod.status()).giving_up > 0, "it takes no call until the engine has ended"
    pod.boot("second")
    await fenced
    status = await pod.status()
    assert (status.giving_up, await killed(pod)) == (0, False)


async def test_a_fence_restarts_no_clean_engine(pod: Pod) -> None:
    assert (await pod.control(AGENT_FENCE, {"message": "unknown names", "restart": True})).status == 200
    await asyncio.sleep(1)
    assert not await killed(pod)
