"""The batch server splits batches for a scripted smg, joins and cancels them, and forwards other bodies unchanged."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from sglang_rollout.api.limits_spec import Limits
from sglang_rollout.batches import client, routes, sending
from sglang_rollout.wire.access import CALLER_HEADER, RELAYED_CALLER_HEADER
from sglang_rollout.wire.ports import BATCHES_HEALTH, VERSION_HEADER
from tests.contract.support.coordinator_process import Lab, fleet_lab


class Script:
    """smg's data paths: echo the request, or do what the first word of ``text`` names."""

    def __init__(self) -> None:
        self.seen: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        self.running = self.most = self.cancelled = 0
        self.version = "7"

    async def __call__(self, request: web.Request) -> web.StreamResponse:
        raw = await request.read()
        body = json.loads(raw)
        self.seen.append(body)
        self.headers.append({name.lower(): value for name, value in request.headers.items()})
        self.running += 1
        self.most = max(self.most, self.running)
        try:
            return await self.answer(request, body, raw)
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        finally:
            self.running -= 1

    async def answer(self, request: web.Request, body: dict[str, Any], raw: bytes) -> web.StreamResponse:
        what, _, argument = str(body.get("text", "")).partition(" ")
        if what == "sleep":
            await asyncio.sleep(float(argument))
        if what == "refuse":
            return web.json_response({"error": {"message": "temperature must be positive"}}, status=400)
        if what == "late":
            await asyncio.sleep(0.1)
            refusal = "above_limit: top_logprobs_num is 2000, above the limit of 1024."
            return web.json_response({"object": "error", "message": refusal, "type": "400", "param": None, "code": 400}, status=400)
        if what == "busy":
            return web.Response(status=503, text="full", headers={"Retry-After": "3"})
        sample = {"text": f"<{body.get('text')}>", "output_ids": body.get("input_ids", []), "meta_info": {"id": body.get("rid")}}
        headers = {VERSION_HEADER: argument if what == "version" else self.version}
        if body.get("stream"):
            return await self.stream(request, what, sample, headers)
        count = (body.get("sampling_params") or {}).get("n", 1)
        return web.json_response(sample if count == 1 else [{**sample, "sample": i} for i in range(count)], headers=headers)

    async def stream(self, request: web.Request, what: str, sample: dict[str, Any], headers: dict[str, str]) -> web.StreamResponse:
        reply = web.StreamResponse(headers={"Content-Type": "text/event-stream", **headers})
        await reply.prepare(request)
        if what == "wrong":
            await reply.write(b'data: {"error":{"message":"bad","code":400}}\n\ndata: [DONE]\n\n')
            return reply
        for count in range(3):
            event = json.dumps({**sample, "count": count, "padding": "x" * (300_000 if what == "long" else 1)}).encode()
            await reply.write(b"data: " + event[:10])  # an event arrives in pieces
            await asyncio.sleep(0.01)
            await reply.write(event[10:] + b"\n\n: keep-alive\n\n")
            if what == "break":
                assert request.transport is not None
                request.transport.abort()
                return reply
        await reply.write(b"data: [DONE]\n\n")
        return reply


@pytest.fixture
def script() -> Script:
    return Script()


@pytest.fixture
async def lab(tmp_path: Path, script: Script, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Lab]:
    monkeypatch.setattr(client, "MAX_BATCH_PROMPTS", 8)
    async with fleet_lab(tmp_path) as made:
        made.smg.answer_tokens = script
        yield made


async def stream(lab: Lab, body: dict[str, Any]) -> tuple[int, list[Any]]:
    """Return status and events. A complete stream ends with ``DONE``."""
    async with lab.session.post(lab.url_of("/generate"), json={**body, "stream": True}) as reply:
        lines = (await reply.text()).splitlines()
        data = [line.removeprefix("data: ") for line in lines if line.startswith("data: ")]
        return reply.status, [json.loads(line) if line != "[DONE]" else "DONE" for line in data]


async def test_answers_come_in_the_order_of_the_prompts(lab: Lab, script: Script) -> None:
    prompts = [f"sleep {0.2 - 0.01 * i:.2f}" for i in range(20)]
    body = {"text": prompts, "rid": [f"r{i}" for i in range(20)], "sampling_params": [{"sampling_seed": i} for i in range(20)]}
    status, _, found = await lab.post("/generate", body)
    assert status == 200
    assert [(sample["text"], sample["meta_info"]["id"]) for sample in found] == [(f"<{text}>", f"r{i}") for i, text in enumerate(prompts)]
    assert sorted(item["sampling_params"]["sampling_seed"] for item in script.seen) == list(range(20))
    assert script.most == 8, "the number of requests is limited"


async def test_samples_of_one_prompt_stay_together(lab: Lab) -> None:
    _, _, found = await lab.post("/generate", {"text": ["a", "b"], "sampling_params": {"n": 2}})
    assert [(sample["text"], sample["sample"]) for sample in found] == [("<a>", 0), ("<a>", 1), ("<b>", 0), ("<b>", 1)]
    assert await lab.post("/generate", {"text": []}) == (200, "OK", [])


async def test_headers_reach_every_request_and_the_versions_come_back(lab: Lab, script: Script) -> None:
    hidden = {"Authorization": "Bearer x", CALLER_HEADER: "10.0.0.1", RELAYED_CALLER_HEADER: "10.0.0.2"}
    sent = {**hidden, "X-SMG-Routing-Key": "k", "Accept-Encoding": "gzip"}
    async with lab.session.post(lab.url_of("/generate"), json={"text": ["a", "b"]}, headers=sent) as reply:
        assert reply.headers[VERSION_HEADER] == "7"
        await reply.read()
    assert [headers["x-smg-routing-key"] for headers in script.headers] == ["k"] * 2
    assert not any(name.lower() in headers for name in hidden for headers in script.headers), "engines run model code"
    assert {headers["accept-encoding"] for headers in script.headers} == {"identity"}
    async with lab.session.post(lab.url_of("/generate"), json={"text": ["version 8", "a", "version 8"]}) as reply:
        assert reply.headers[VERSION_HEADER] == "8, 7"


@pytest.mark.parametrize(
    ("text", "status", "shown"),
    [("refuse", 400, {"error": {"message": "temperature must be positive"}}), ("busy", 503, "full")],
)
async def test_a_failed_item_ends_the_batch_with_its_answer(lab: Lab, script: Script, text: str, status: int, shown: object) -> None:
    for extra in ({}, {"stream": True}):
        found, _, body = await asyncio.wait_for(lab.post("/generate", {"text": ["sleep 30", text, "sleep 30"], **extra}), 5)
        assert (found, body) == (status, shown)
    await lab.until("the others are cancelled", lambda: _is(lambda: script.cancelled == 4))


async def test_a_batch_is_cancelled_when_its_client_disconnects(lab: Lab, script: Script) -> None:
    for extra in ({}, {"stream": True}):
        asking = asyncio.create_task(lab.post("/generate", {"text": ["sleep 30"] * 3, **extra}))
        await lab.until("all run", lambda: _is(lambda: script.running == 3))
        asking.cancel()
        await lab.until("all are cancelled", lambda: _is(lambda: script.running == 0), within=3)
    assert script.cancelled == 6


async def test_the_items_of_a_streamed_batch_share_one_stream(lab: Lab) -> None:
    status, events = await stream(lab, {"text": ["a", "long", "sleep 0.1"]})
    assert status == 200
    assert events.pop() == "DONE"
    for index, text in enumerate(["a", "long", "sleep 0.1"]):
        assert [(event["text"], event["count"]) for event in events if event["index"] == index] == [(f"<{text}>", i) for i in range(3)]
    assert len(events) == 9
    assert await stream(lab, {"text": []}) == (200, ["DONE"])


@pytest.mark.parametrize("text", [["a", "late"], ["late", "a"]])
async def test_a_prompt_that_is_refused_after_the_stream_began_ends_it_with_its_reason(lab: Lab, text: list[str]) -> None:
    refusal = "above_limit: top_logprobs_num is 2000, above the limit of 1024."
    status, events = await stream(lab, {"text": text})
    assert (status, events[-1]) == (200, "DONE")
    assert events[-2] == {"error": {"message": refusal, "type": "invalid_request_error", "code": 400, "retryable": False}}
    status, _, body = await lab.post("/generate", {"text": text})
    assert (status, body["message"]) == (400, refusal)


async def test_a_broken_stream_ends_without_done(lab: Lab) -> None:
    status, events = await stream(lab, {"text": ["break", "sleep 30"]})
    assert status == 200
    assert "broke the connection" in events[-1]["error"]["message"]
    assert "DONE" not in events
    status, events = await stream(lab, {"text": ["sleep 30", "wrong"]})
    assert (status, events[-2]["error"]["message"], events[-1]) == (200, "bad", "DONE")


async def test_an_invalid_batch_is_refused_with_sglangs_message(lab: Lab, script: Script) -> None:
    status, _, body = await lab.post("/generate", {"text": ["a", "b"], "rid": ["x", "x"]})
    assert (status, body) == (400, {"error": {"message": "Duplicate request IDs detected within the request: ['x']"}})
    assert script.seen == []


@pytest.mark.parametrize(
    ("data", "code"),
    [
        (b'{"text": ["a", "b", "c", "d", "e"]}', "above_limit"),
        (b'{"text": ["a", "b"], "sampling_params": {"n": 9}}', "above_limit"),
        (b'[{"text": ["a"]}]', "unreadable_body"),
        ('{"text": ["a"]}'.encode("utf-16"), "unreadable_body"),
        (b"no json", "unreadable_body"),
    ],
    ids=range(5),
)
async def test_a_batch_that_the_engines_cannot_refuse_is_refused(lab: Lab, script: Script, data: bytes, code: str) -> None:
    await lab.end_batches()
    await lab.start_batches(limits=Limits(prompts_per_request=4, samples_per_request=16, samples_per_prompt=16))
    status, _, body = await lab.call("POST", "/generate", data=data)
    assert (status, body["error"]["code"], body["error"]["type"]) == (400, code, "invalid_request_error")
    assert script.seen == []
    assert (await lab.post("/generate", {"text": ["a"] * 4, "sampling_params": {"n": 4}}))[0] == 200


@pytest.mark.parametrize("more", [{}, {"stream": True}])
async def test_a_lone_surrogate_is_forwarded_to_smg(lab: Lab, script: Script, more: dict[str, Any]) -> None:
    """A text that was cut inside an emoji."""
    status, _, body = await lab.post("/generate", {"text": ["sleep 30", "refuse \ud83d"], **more})
    assert (status, body) == (400, {"error": {"message": "temperature must be positive"}})
    assert "refuse \ud83d" in [item["text"] for item in script.seen]


async def test_other_bodies_are_forwarded_unchanged(lab: Lab, script: Script) -> None:
    seen: list[bytes] = []

    async def raw(request: web.Request) -> web.StreamResponse:
        seen.append(await request.read())
        return web.Response(body=b"as it is", status=418, headers={"X-Kept": "yes", "Content-Type": "text/plain"})

    lab.smg.answer_tokens = raw
    data = b'{"text" : "one"}'
    async with lab.session.post(lab.url_of("/generate"), data=data) as reply:
        assert (reply.status, await reply.read(), reply.headers["X-Kept"]) == (418, b"as it is", "yes")
    assert seen == [data]
    lab.smg.answer_tokens = script
    status, events = await stream(lab, {"text": "one"})
    assert (status, len(events), events[-1]) == (200, 4, "DONE")


async def test_a_batch_may_be_larger_than_a_control_call(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    big = "x" * (9 * 2**20)
    status, _, found = await lab.post("/generate", {"text": ["a", big]})
    assert (status, len(found[1]["text"])) == (200, len(big) + 2)
    monkeypatch.setattr(routes, "MAX_BODY_BYTES", 2**20)
    status, _, body = await lab.post("/generate", {"text": ["a", big]})
    assert (status, "split it" in body["error"]["message"]) == (413, True)
    assert (await lab.post("/begin_weight_update", {"x": big}))[0] == 413


@pytest.mark.parametrize("head", ["Content-Length: 20000", "Transfer-Encoding: chunked"])
async def test_a_body_that_arrives_byte_by_byte_is_refused(lab: Lab, monkeypatch: pytest.MonkeyPatch, head: str) -> None:
    monkeypatch.setattr(routes, "BODY_SECONDS", 0.5)
    monkeypatch.setattr(routes, "BODY_BYTES_PER_SECOND", 100_000)
    host, port = lab.url_of("/generate").removeprefix("http://").removesuffix("/generate").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(f"POST /generate HTTP/1.1\r\nHost: localhost\r\n{head}\r\n\r\n".encode())
    began, answer = asyncio.get_running_loop().time(), asyncio.create_task(reader.readline())
    while not answer.done() and asyncio.get_running_loop().time() < began + 10:
        writer.write(b" " if "Length" in head else b"1\r\n \r\n")
        await asyncio.wait({answer}, timeout=0.05)
    assert answer.done()
    assert (await answer).startswith(b"HTTP/1.1 408 ")
    writer.close()


async def test_a_body_that_arrives_fast_enough_has_time_for_its_bytes(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(routes, "BODY_SECONDS", 0.2)
    monkeypatch.setattr(routes, "BODY_BYTES_PER_SECOND", 1000)

    async def pieces() -> AsyncIterator[bytes]:
        yield b'{"text": "a", "padding": "'
        for _ in range(5):
            await asyncio.sleep(0.1)
            yield b"x" * 1000
        yield b'"}'

    for headers in ({}, {"Content-Length": str(len(b'{"text": "a", "padding": ""}') + 5000)}):
        async with lab.session.post(lab.url_of("/generate"), data=pieces(), headers=headers) as reply:
            assert reply.status == 200


async def test_one_prompt_may_have_more_bytes_than_a_batch(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(routes, "MAX_BODY_BYTES", 2**20)
    assert (await lab.post("/generate", {"text": "a", "padding": "x" * 2**21}))[0] == 200
    await lab.end_batches()
    await lab.start_batches(limits=Limits(request_bytes=2**20))
    status, _, body = await lab.post("/generate", {"text": "a", "padding": "x" * 2**21})
    assert (status, body["error"]["code"]) == (400, "above_limit")


async def test_a_limited_number_of_prompts_of_a_batch_runs_at_a_time(lab: Lab, script: Script, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(routes, "MAX_RUNNING_PROMPTS", 3)
    for extra in ({}, {"stream": True}):
        status, _, found = await lab.post("/generate", {"text": ["sleep 0.02"] * 20, **extra})
        assert (status, len(found) > 0) == (200, True)
    assert script.most == 3


async def test_the_batch_server_answers_the_liveness_probe(lab: Lab) -> None:
    await lab.kill()
    await lab.smg.stop()
    async with lab.session.get(f"http://127.0.0.1:{lab.batches_port}{BATCHES_HEALTH}") as reply:
        assert (reply.status, await reply.json()) == (200, {"status": "ok"})


async def test_other_requests_do_not_wait_for_the_prompts_of_batches(lab: Lab, script: Script) -> None:
    async def answer(request: web.Request) -> web.StreamResponse:
        return web.json_response({"path": request.path})

    for agent in lab.agents:
        agent.answer_tokens = answer
    running = asyncio.create_task(lab.post("/generate", {"text": ["sleep 30"] * 20}))
    await lab.until("the batch takes all places", lambda: _is(lambda: script.running == 8))
    assert (await lab.post("/generate", {"text": "a"}))[0] == 200
    assert (await lab.post("/generate", {"text": "a", "sampling_params": {"stop_regex": "b"}}))[2] == {"path": "/generate"}
    assert (await lab.post("/tokenize", {"prompt": "a"}))[2] == {"path": "/tokenize"}
    running.cancel()


async def test_bodies_beyond_the_budget_are_refused_for_now(lab: Lab, script: Script) -> None:
    await lab.end_batches()
    await lab.start_batches(memory=24 * 2**20)
    large = "x" * 2**20
    running = asyncio.create_task(lab.post("/generate", {"text": ["sleep 30"], "padding": large}))
    await lab.until("the first batch runs", lambda: _is(lambda: script.running == 1))
    async with lab.session.post(lab.url_of("/generate"), json={"text": ["a"], "padding": large}) as reply:
        assert (reply.status, reply.headers["Retry-After"]) == (503, "1")
        assert "take all memory of the batch server" in (await reply.json())["error"]["message"]
    assert (await lab.post("/generate", {"text": ["a", "b"]}))[0] == 200, "small batches still fit"
    metrics = await lab.metrics_of_batches()
    assert "sglang_rollout_batches_refused_total 1.0" in metrics
    assert "sglang_rollout_batches_memory_bytes 0.0" not in metrics
    running.cancel()
    await lab.until("the first batch is cancelled", lambda: _is(lambda: script.running == 0))
    assert (await lab.post("/generate", {"text": ["a", large]}))[0] == 200
    status, _, body = await lab.post("/generate", {"text": ["a"], "other": [{}] * 2**14})
    assert (status, "split the batch" in body["error"]["message"]) == (413, True)
    assert "sglang_rollout_batches_memory_bytes 0.0" in await lab.metrics_of_batches()


async def test_the_large_bodies_of_one_address_leave_memory_for_others(lab: Lab, script: Script) -> None:
    await lab.end_batches()
    await lab.start_batches(memory=24 * 2**20)
    body = {"text": "sleep 30", "padding": "x" * 1_000_000}
    first, second = {CALLER_HEADER: "10.0.0.1"}, {CALLER_HEADER: "10.0.0.2"}
    running = asyncio.create_task(lab.session.post(lab.url_of("/generate"), json=body, headers=first).__aenter__())
    await lab.until("the first request runs", lambda: _is(lambda: script.running == 1))
    async with lab.session.post(lab.url_of("/generate"), json={**body, "text": "a"}, headers=first) as reply:
        assert (reply.status, reply.headers["Retry-After"]) == (503, "1")
        assert "from this address" in (await reply.json())["error"]["message"]
    async with lab.session.post(lab.url_of("/generate"), json={**body, "text": "a"}, headers=second) as reply:
        assert reply.status == 200
    running.cancel()


async def test_answers_beyond_the_budget_end_the_batch(lab: Lab) -> None:
    await lab.end_batches()
    await lab.start_batches(memory=24 * 2**20)
    long = "x" * 1_450_000
    status, _, body = await lab.post("/generate", {"text": [long], "sampling_params": {"n": 3}})
    assert (status, "split the batch, or stream it" in body["error"]["message"]) == (413, True)
    status, _, found = await lab.post("/generate", {"text": [long]})
    assert (status, found[0]["text"]) == (200, f"<{long}>"), "an answer counts once"


async def test_the_objects_of_a_body_count_until_its_last_prompt_is_sent(lab: Lab, script: Script) -> None:
    other: list[dict[str, str]] = [{}] * 2**14
    running = asyncio.create_task(lab.post("/generate", {"text": ["sleep 30"], "other": other}))
    await lab.until("the prompt runs", lambda: _is(lambda: script.running == 1))
    line = next(line for line in (await lab.metrics_of_batches()).splitlines() if line.startswith("sglang_rollout_batches_memory_bytes "))
    assert 0 < float(line.split()[1]) < 10 * len(json.dumps(other)), "only the request counts"
    running.cancel()


async def test_a_long_list_of_answers_arrives_whole(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(routes, "_BLOCK_BYTES", 64)
    prompts = [f"{number} " + "x" * (number % 100) for number in range(200)]
    status, _, found = await lab.post("/generate", {"text": prompts, "sampling_params": {"n": 2}})
    assert (status, [sample["text"] for sample in found]) == (200, [f"<{text}>" for text in prompts for _ in range(2)])


async def test_a_batch_continues_while_the_coordinator_is_away(lab: Lab) -> None:
    running = asyncio.create_task(lab.post("/generate", {"text": ["sleep 1", "a"]}))
    await asyncio.sleep(0.2)
    await lab.kill()
    assert (await running)[0] == 200
    assert (await lab.post("/generate", {"text": ["a", "b"]}))[0] == 200


async def test_a_batch_waits_while_smg_restarts_or_has_no_engines(lab: Lab, script: Script, monkeypatch: pytest.MonkeyPatch) -> None:
    lab.smg.answer_tokens = None
    asking = asyncio.create_task(lab.post("/generate", {"text": ["a", "b"]}))
    await asyncio.sleep(0.7)
    assert not asking.done()
    lab.smg.answer_tokens = script
    assert (await asking)[0] == 200
    monkeypatch.setattr(sending, "NO_WORKERS_SECONDS", 0.3)
    lab.smg.answer_tokens = None
    for body in ({"text": ["a"]}, {"text": ["a"], "stream": True}, {"text": "a"}):
        status, _, answer = await lab.post("/generate", body)
        assert (status, "GET /fleet" in answer["error"]["message"]) == (503, True)
    lab.smg.answer_tokens = script
    await lab.smg.stop()
    asking = asyncio.create_task(lab.post("/generate", {"text": ["a", "b"]}))
    await asyncio.sleep(0.7)
    assert not asking.done()
    await lab.smg.start()
    assert (await asking)[0] == 200


async def test_completions_of_token_ids_go_to_serving_engines_in_turn(lab: Lab, script: Script) -> None:
    seen: list[str] = []

    def engine(name: str, status: int = 200) -> Any:
        async def answer(request: web.Request) -> web.StreamResponse:
            assert (await request.json())["prompt"] == [1, 2]
            assert request.headers.get("Authorization") != "Bearer secret", "the control token is not for data paths"
            seen.append(name)
            return web.json_response({"from": name}, status=status)

        return answer

    first, second = lab.agents
    first.answer_tokens, second.answer_tokens = engine("e0"), engine("e1")
    for _ in range(4):
        assert (await lab.post("/v1/completions", {"prompt": [1, 2]}))[0] == 200
    assert (seen.count("e0"), seen.count("e1")) == (2, 2)
    first.answer_tokens = engine("e0", 503)
    for _ in range(4):
        assert (await lab.post("/v1/completions", {"prompt": [1, 2]}))[2] == {"from": "e1"}
    await lab.post("/v1/completions", {"prompt": ["a"]})
    assert script.seen == [{"prompt": ["a"]}]


async def test_a_request_with_fields_that_smg_drops_goes_to_an_engine(lab: Lab, script: Script) -> None:
    seen: list[str] = []

    def engine(name: str, status: int = 200) -> Any:
        async def answer(request: web.Request) -> web.StreamResponse:
            if status == 200:
                seen.append(name)
            return web.json_response({"from": name, "asked": await request.json()}, status=status)

        return answer

    async def rounds(session: str) -> set[str]:
        del seen[:]
        for _ in range(4):
            async with lab.session.post(lab.url_of("/generate"), json=biased, headers={"x-session-id": session}) as reply:
                assert (reply.status, (await reply.json())["asked"]) == (200, biased)
        return set(seen)

    first, second = lab.agents
    first.answer_tokens, second.answer_tokens = engine("e0"), engine("e1")
    biased = {"text": "a", "sampling_params": {"logit_bias": {"7": 1}}}
    kept = {session: await rounds(session) for session in map(str, range(12))}
    assert {len(engines) for engines in kept.values()} == {1}
    assert set().union(*kept.values()) == {"e0", "e1"}
    first.answer_tokens = engine("e0", 503)
    assert [await rounds(session) for session in kept] == [{"e1"}] * 12

    assert script.seen == []
    await lab.post("/generate", {"text": ["a", "b"], "sampling_params": [biased["sampling_params"], {"n": 1}]})
    await lab.post("/v1/chat/completions", {"messages": [], "n": 16})
    assert script.seen == [{"text": "b", "sampling_params": {"n": 1}}], "the other items of a batch go to smg"


async def _is(check: Any) -> bool:
    return bool(check())
