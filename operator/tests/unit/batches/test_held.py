"""Prompts that the batch server holds, and aborts."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from sglang_rollout.batches.aborted import AbortedError, Form
from sglang_rollout.batches.held import HeldRequest, HeldRequests
from sglang_rollout.wire.held import HeldAbort

ALL = HeldAbort(id="1", abort_all=True, weight_version="7")
NAMED = Form(rid="a")


@pytest.fixture
async def held() -> HeldRequests:
    return HeldRequests()


@pytest.fixture
async def request_of_a(held: HeldRequests) -> AsyncIterator[HeldRequest]:
    with held.open() as request:
        request.rids = frozenset({"a"})
        yield request


async def wait(request: HeldRequest, form: Form = NAMED) -> None:
    async with request.hold(form):
        await asyncio.sleep(60)


async def send(request: HeldRequest, *, seconds: float = 60.0) -> None:
    async with request.hold(NAMED) as prompt:
        with prompt.sending():
            await asyncio.sleep(seconds)


async def started(work: asyncio.Task[None]) -> asyncio.Task[None]:
    await asyncio.sleep(0)
    return work


async def test_a_waiting_prompt_ends_at_once(held: HeldRequests, request_of_a: HeldRequest) -> None:
    waiting = await started(asyncio.create_task(wait(request_of_a)))
    assert await held.abort(ALL) == 0
    with pytest.raises(AbortedError) as ended:
        await asyncio.wait_for(waiting, 1)
    assert (ended.value.form, ended.value.weight_version) == (NAMED, "7")


async def test_a_prompt_whose_turn_comes_after_the_abort_ends(held: HeldRequests, request_of_a: HeldRequest) -> None:
    await held.abort(ALL)
    with pytest.raises(AbortedError):
        await asyncio.wait_for(wait(request_of_a), 1)


async def test_a_repeated_abort_leaves_later_requests_alone(held: HeldRequests, request_of_a: HeldRequest) -> None:
    await held.abort(ALL)
    with held.open() as later:
        waiting = await started(asyncio.create_task(wait(later)))
        assert await held.abort(ALL) == 0
        await asyncio.sleep(0.01)
        assert not waiting.done()
        waiting.cancel()


async def test_a_sent_prompt_is_left_to_its_engine_for_a_while(held: HeldRequests, request_of_a: HeldRequest) -> None:
    sent = await started(asyncio.create_task(send(request_of_a)))
    assert await held.abort(ALL) == 1
    assert await held.abort(ALL.model_copy(update={"wait_seconds": 0.01})) == 1
    assert not sent.done()
    assert await held.abort(ALL.model_copy(update={"is_last": True})) == 1
    with pytest.raises(AbortedError):
        await asyncio.wait_for(sent, 1)
    assert await held.abort(ALL) == 0


async def test_an_abort_waits_for_the_answer_to_a_sent_prompt(held: HeldRequests, request_of_a: HeldRequest) -> None:
    sent = await started(asyncio.create_task(send(request_of_a, seconds=0.05)))
    assert await held.abort(ALL.model_copy(update={"wait_seconds": 30.0})) == 0
    await asyncio.wait_for(sent, 1)  # the prompt has the answer of its engine


async def test_an_aborted_prompt_is_not_sent_again(held: HeldRequests, request_of_a: HeldRequest) -> None:
    async def send_twice() -> None:
        async with request_of_a.hold(NAMED) as prompt:
            for _ in range(2):
                with prompt.sending():
                    await asyncio.sleep(0.01)

    sent = await started(asyncio.create_task(send_twice()))
    await held.abort(ALL)
    with pytest.raises(AbortedError):
        await asyncio.wait_for(sent, 1)


async def test_a_prompt_is_left_to_the_engine_that_answers_it(held: HeldRequests, request_of_a: HeldRequest) -> None:
    async def answered() -> str:
        async with request_of_a.hold(NAMED) as prompt:
            with prompt.sending():
                prompt.note_answer()
                await asyncio.sleep(0.05)
        return "whole"

    sent = asyncio.create_task(answered())
    await asyncio.sleep(0)
    assert await held.abort(ALL.model_copy(update={"is_last": True})) == 0
    assert await sent == "whole"


async def test_two_aborts_wait_for_the_same_prompt(held: HeldRequests, request_of_a: HeldRequest) -> None:
    sent = await started(asyncio.create_task(send(request_of_a)))
    for name in ("1", "2"):
        assert await held.abort(HeldAbort(id=name, abort_all=True)) == 1
    assert await held.abort(HeldAbort(id="1", abort_all=True, is_last=True)) == 1
    assert await held.abort(HeldAbort(id="2", abort_all=True, is_last=True)) == 1
    with pytest.raises(AbortedError):
        await sent


@pytest.mark.parametrize(("rid", "ends"), [("a", True), ("", False), ("b", False), ("ab", False)])
async def test_an_abort_by_id_needs_a_request_with_this_id(held: HeldRequests, request_of_a: HeldRequest, rid: str, ends: bool) -> None:
    waiting = await started(asyncio.create_task(wait(request_of_a, Form(rid="ab"))))
    await held.abort(HeldAbort(id="1", rid=rid))
    await asyncio.sleep(0.01)
    assert waiting.done() is ends
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)


async def test_thousands_of_aborted_prompts_do_not_block_other_requests(held: HeldRequests, request_of_a: HeldRequest) -> None:
    await held.abort(ALL)
    turns = 0

    async def others() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    other = asyncio.create_task(others())
    for _ in range(1000):
        with pytest.raises(AbortedError):
            await wait(request_of_a)
    other.cancel()
    assert turns >= 1000
