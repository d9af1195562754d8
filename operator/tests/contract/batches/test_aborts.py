"""Aborts, pauses and sleep reach the prompts that wait in the batch server. smg is scripted, and engines are simulated."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from sglang_rollout.batches import client
from sglang_rollout.coordinator import aborts
from sglang_rollout.sglang.api import PauseMode
from sglang_rollout.wire.states import FleetState, describe_state
from tests.contract.support.coordinator_process import Lab, fleet_lab

PLACES = 3
ALL = {"abort_all": True}
OWN = {"type": "abort", "message": "Abort in waiting queue"}
"""Finish reason of a prompt that no engine had."""
ENGINES = {"type": "abort", "message": "Aborted"}
"""Finish reason of a prompt that an engine had."""


class Engine:
    """Engines behind smg: a prompt runs until an abort comes that names it, or ``done`` is set."""

    def __init__(self) -> None:
        self.lab: Lab
        self.seen: list[str] = []
        self.late = 0.0
        """Seconds that a prompt is on its way."""
        self.is_deaf = False
        """True: aborts have no effect."""
        self.is_closed = False
        """True: the gates answer 503."""
        self.done = asyncio.Event()

    def aborts(self, rid: str) -> int:
        bodies = self.lab.agents[0].bodies_of("/abort_request") if not self.is_deaf else []
        return sum(bool(body.get("abort_all")) or (body.get("rid") == rid) for body in bodies)

    async def __call__(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        if self.is_closed:
            return web.Response(status=503, text="closed")
        self.seen.append(body["text"])
        await asyncio.sleep(self.late)
        before = self.aborts(body.get("rid"))
        while self.aborts(body.get("rid")) == before and not self.done.is_set():
            await asyncio.sleep(0.01)
        reason = {"type": "length"} if self.done.is_set() else ENGINES
        sample = {"text": body["text"], "meta_info": {"id": body.get("rid"), "finish_reason": reason}}
        if body.get("stream"):
            text = f"data: {json.dumps(sample)}\n\ndata: [DONE]\n\n"
            return web.Response(text=text, content_type="text/event-stream")
        return web.json_response(sample)


@pytest.fixture
async def engine() -> Engine:
    return Engine()


@pytest.fixture
async def lab(tmp_path: Path, engine: Engine, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Lab]:
    monkeypatch.setattr(client, "MAX_BATCH_PROMPTS", PLACES)
    async with fleet_lab(tmp_path) as made:
        engine.lab = made
        made.smg.answer_tokens = engine
        yield made


def prompts(number: int = 10) -> list[str]:
    return [f"p{index}" for index in range(number)]


async def begin(lab: Lab, engine: Engine, body: dict[str, Any], running: int = PLACES) -> asyncio.Task[tuple[int, str, Any]]:
    """Send a batch, and return its answer when this number of prompts runs."""
    engine.seen.clear()
    engine.done.clear()
    asked = asyncio.create_task(lab.post("/generate", body))
    await lab.until("prompts run", lambda: _is(len(engine.seen) == running))
    return asked


async def _is(value: bool) -> bool:
    return value


def reasons(samples: list[Any]) -> list[Any]:
    return [sample["meta_info"]["finish_reason"] for sample in samples]


async def test_waiting_prompts_end_with_the_batch_and_new_ones_are_served(lab: Lab, engine: Engine) -> None:
    asked = await begin(lab, engine, {"text": prompts(), "rid": prompts(), "return_logprob": True})
    assert (await lab.post("/abort_request", ALL))[0] == 200
    status, _, found = await asyncio.wait_for(asked, 20)
    assert (status, len(found), len(engine.seen)) == (200, 10, PLACES)
    assert reasons(found) == [ENGINES] * PLACES + [OWN] * 7
    waited = found[5]
    assert 0 < waited["meta_info"].pop("e2e_latency") < 5
    label = (await lab.document())["committed"]["label"]
    assert waited == {
        "text": "",
        "output_ids": [],
        "meta_info": {
            "id": "p5",
            "finish_reason": OWN,
            "weight_version": label,
            "weight_versions": [{"version": label, "start": 0, "end": 0}],
            "input_token_logprobs": [],
            "output_token_logprobs": [],
            "output_token_logprobs_length": 0,
            "completion_tokens": 0,
        },
    }
    engine.done.set()
    status, _, found = await lab.post("/generate", {"text": prompts()})
    assert (status, reasons(found)) == (200, [{"type": "length"}] * 10)


async def test_a_streamed_batch_has_an_event_for_each_aborted_sample(lab: Lab, engine: Engine) -> None:
    for samples in (1, 2):
        body = {"text": prompts(), "sampling_params": {"n": samples}}
        asked = await begin(lab, engine, {**body, "stream": True})
        assert (await lab.post("/abort_request", ALL))[0] == 200
        status, _, text = await asyncio.wait_for(asked, 20)
        *events, end = [line.removeprefix("data: ") for line in text.splitlines() if line]
        waited = [event for event in map(json.loads, events) if event["meta_info"]["finish_reason"] == OWN]
        assert (status, end, len(engine.seen)) == (200, "[DONE]", PLACES)
        assert sorted(event["index"] for event in waited) == list(range(PLACES * samples, 10 * samples))
        asked = await begin(lab, engine, body)
        await lab.post("/abort_request", ALL)
        _, _, found = await asyncio.wait_for(asked, 20)
        assert reasons(found).count(OWN) == samples * 7


async def test_an_abort_names_the_beginning_of_request_ids(lab: Lab, engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in SGLang, where an abort counts only if a request has exactly its ID."""
    monkeypatch.setattr(aborts, "ROUND_SECONDS", 0.05)
    for rid, ended in (("x_1", {10, 11}), ("x", {*range(12)}), ("x_", set()), ("", set())):
        asked = await begin(lab, engine, {"text": prompts(12), "rid": "x"})
        assert (await lab.post("/abort_request", {"rid": rid}))[0] == 200
        engine.done.set()
        _, _, found = await asyncio.wait_for(asked, 20)
        assert {index for index, reason in enumerate(reasons(found)) if reason == OWN} == ended


async def test_a_prompt_on_its_way_to_an_engine_is_aborted_too(lab: Lab, engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(aborts, "ROUND_SECONDS", 0.2)
    engine.late = 0.3
    asked = await begin(lab, engine, {"text": prompts()})
    assert (await lab.post("/abort_request", ALL))[0] == 200
    assert asked.done() or engine.aborts("") > 1, "the call was answered after the prompts had ended"
    _, _, found = await asyncio.wait_for(asked, 20)
    assert reasons(found) == [ENGINES] * PLACES + [OWN] * 7


async def test_a_prompt_that_no_engine_ends_is_cancelled(lab: Lab, engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a prompt that smg sends again and again while the gates are closed."""
    monkeypatch.setattr(aborts, "ROUND_SECONDS", 0.05)
    engine.is_deaf = True
    for stream in (False, True):
        asked = await begin(lab, engine, {"text": prompts(), "stream": stream})
        assert (await lab.post("/abort_request", ALL))[0] == 200
        status, _, found = await asyncio.wait_for(asked, 20)
        assert (status, len(engine.seen)) == (200, PLACES)
        assert str(found).count("Abort in waiting queue") == 10


SINGLE: dict[str, dict[str, Any]] = {
    "/generate": {"text": "a", "rid": "r", "sampling_params": {"stop_regex": "x"}},
    "/v1/completions": {"model": "m", "prompt": [5, 6], "rid": "r"},
    "/v1/chat/completions": {"model": "m", "messages": [{"role": "user", "content": "a"}], "top_k": 0, "rid": "r"},
}
"""Requests that bypass smg."""


async def test_a_request_that_waits_for_an_engine_ends(lab: Lab, engine: Engine) -> None:
    async def closed(request: web.Request) -> web.StreamResponse:
        engine.seen.append(request.path)
        return web.Response(status=503)

    async def aborted(path: str, body: dict[str, Any]) -> tuple[int, Any]:
        engine.seen.clear()
        asked = asyncio.create_task(lab.post(path, body))
        await lab.until("the engines refuse", lambda: _is(len(engine.seen) >= 2))
        assert (await lab.post("/abort_request", ALL))[0] == 200
        status, _, found = await asyncio.wait_for(asked, 20)
        return status, found

    for agent in lab.agents:
        agent.answer_tokens = closed
    for path, body in SINGLE.items():
        for stream in (False, True):
            status, found = await aborted(path, {**body, "stream": stream})
            if stream:
                *_, event, end = [line.removeprefix("data: ") for line in found.splitlines() if line]
                assert end == "[DONE]"
                found = json.loads(event)
            ended, name = (found["meta_info"]["finish_reason"]["type"], found["meta_info"]) if path == "/generate" else (
                found["choices"][0]["finish_reason"], found
            )  # fmt: skip
            assert (status, ended, name["id"]) == (200, "abort", "r")
    status, found = await aborted("/v1/embeddings", {"model": "m", "input": "a"})
    assert (status, "aborted" in found["error"]["message"]) == (400, True)


async def test_a_trainers_pause_ends_waiting_prompts_only_in_mode_abort(lab: Lab, engine: Engine) -> None:
    asked = await begin(lab, engine, {"text": prompts()})
    assert (await lab.post("/pause_generation", {"mode": "retract"}))[0] == 200
    assert (await lab.post("/continue_generation", {}))[0] == 200
    engine.done.set()
    _, _, found = await asyncio.wait_for(asked, 20)
    assert reasons(found) == [{"type": "length"}] * 10
    asked = await begin(lab, engine, {"text": prompts()})
    lab.agents[0].slow["/pause_generation"] = 0.5
    pause = asyncio.create_task(lab.post("/pause_generation", {}))
    await lab.until("the engines pause", lambda: _is(len(lab.agents[0].bodies_of("/pause_generation")) == 2))
    engine.done.set()  # places become free during the pause
    _, _, found = await asyncio.wait_for(asked, 20)
    assert reasons(found) == [{"type": "length"}] * PLACES + [OWN] * 7
    assert (await pause)[0] == 200


async def test_prompts_wait_while_the_spec_pauses_the_fleet_and_get_the_reason_of_a_sleep(lab: Lab, engine: Engine) -> None:
    asked = await begin(lab, engine, {"text": prompts()})
    await lab.set_state(FleetState.PAUSED)
    engine.is_closed = True
    engine.done.set()  # places become free
    await asyncio.sleep(0.6)
    assert (asked.done(), len(engine.seen)) == (False, PLACES)
    engine.is_closed = False
    await lab.set_state(FleetState.ACTIVE)
    _, _, found = await asyncio.wait_for(asked, 20)
    assert reasons(found) == [{"type": "length"}] * 10

    asked = await begin(lab, engine, {"text": prompts()})
    await lab.set_state(FleetState.PAUSED)
    assert (await lab.post("/abort_request", ALL))[0] == 200
    _, _, found = await asyncio.wait_for(asked, 20)
    assert reasons(found) == [ENGINES] * PLACES + [OWN] * 7
    await lab.set_state(FleetState.ACTIVE)

    await lab.until("the batch server knows", lambda: serves(lab))
    asked = await begin(lab, engine, {"text": prompts()})
    await lab.set_state(FleetState.ASLEEP)
    await asyncio.sleep(0.3)  # the batch server's view of the fleet is at most that old
    engine.done.set()
    status, _, found = await asyncio.wait_for(asked, 20)
    assert (status, found["error"]["message"], len(engine.seen)) == (503, describe_state(FleetState.ASLEEP), PLACES)


async def test_a_pause_of_the_spec_in_mode_abort_ends_waiting_prompts(
    tmp_path: Path, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client, "MAX_BATCH_PROMPTS", PLACES)
    async with fleet_lab(tmp_path, pause_mode=PauseMode.ABORT) as lab:
        engine.lab, lab.smg.answer_tokens = lab, engine
        asked = await begin(lab, engine, {"text": prompts()})
        await lab.set_state(FleetState.PAUSED)
        await lab.until("the engines pause", lambda: _is(bool(lab.agents[0].bodies_of("/pause_generation"))))
        engine.done.set()
        _, _, found = await asyncio.wait_for(asked, 20)
        assert reasons(found) == [{"type": "length"}] * PLACES + [OWN] * 7


async def serves(lab: Lab) -> bool:
    return (await lab.post("/generate", {"text": []}))[0] == 200


async def test_an_abort_needs_no_batch_server_and_no_engine(lab: Lab) -> None:
    await lab.end_batches()
    assert (await lab.post("/abort_request", ALL))[0] == 200
    for agent in lab.agents:
        await agent.stop()
    await lab.serving(0)
    assert (await lab.post("/abort_request", ALL))[0] in {200, 502}
