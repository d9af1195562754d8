"""The gate, a real haproxy with the real agent over a stub engine: when it opens and closes."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
from pathlib import Path

import aiohttp
import pytest
from yarl import URL

from sglang_rollout.sglang.api import GENERATING_PATHS
from sglang_rollout.wire.access import CALLER_HEADER
from sglang_rollout.wire.ports import AGENT_HEALTH, AGENT_SYNC, BROKEN_HEADER
from tests.contract.proxy.test_front import client_at, unfinished_bodies
from tests.contract.support.agent_pod import BASE_WIRE, Pod, run_pod, until
from tests.contract.support.stub_engine import StubEngine
from tests.support.ports import free_port

pytestmark = pytest.mark.router


async def test_gate_is_closed_until_a_coordinator_names_the_committed_version(pod: Pod) -> None:
    await until(pod.engine_up, 60, "the agent sees the engine")
    closed = await pod.generate()
    assert closed.status == 503
    assert closed.headers["Retry-After"] == "1"
    assert closed.body["error"]["code"] == "engine_closed"
    await asyncio.sleep(1)
    assert await pod.is_closed()
    await pod.open_with_base()
    assert await pod.is_open()


async def test_an_encoded_path_reaches_neither_engine_nor_agent(pod: Pod, stub: StubEngine) -> None:
    await pod.open_with_base()
    for path in ("/%67enerate", "/agent%2Fgate", "/%68ealth"):
        async with pod.http.post(URL(pod.url + path, encoded=True), json={"input_ids": [1]}) as reply:
            assert (reply.status, (await reply.json())["error"]["code"]) == (400, "encoded_path")
    assert not stub.asked.is_set()


async def test_an_engine_gets_neither_the_token_nor_the_address_of_a_caller(pod: Pod, stub: StubEngine) -> None:
    await pod.open_with_base()
    body = {"text": "a", "sampling_params": {"max_new_tokens": 1}}
    secret = {"Authorization": "Bearer s3cret", CALLER_HEADER: "10.0.0.1", "X-Kept": "1"}
    assert (await pod.ask("POST", "/generate", body, secret)).status == 200
    assert "x-kept" in stub.headers
    assert {"authorization", CALLER_HEADER.lower()}.isdisjoint(stub.headers)


async def test_engine_that_does_not_generate_gets_no_request_for_tokens(stub: StubEngine, tmp_path: Path) -> None:
    stub.generates = False
    async with run_pod(tmp_path, stub.url) as pod:
        await until(pod.engine_up, 60, "the agent sees the engine")
        assert (await pod.ask("POST", "/classify", {"text": "a"})).body["error"]["code"] == "engine_closed"
        await pod.open_with_base()
        assert (await pod.ask("POST", "/classify", {"text": "a"})).status == 200
        assert stub.bodies["classify"] == {"text": "a"}
        for path in GENERATING_PATHS:
            refused = await pod.ask("POST", path, {"text": "a", "sampling_params": {"max_new_tokens": 1}})
            assert (refused.status, refused.body["error"]["code"]) == (400, "model_does_not_generate")
        assert not stub.asked.is_set()


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
async def test_silent_agent_closes_the_gate_and_streams_continue(pod: Pod, number: int) -> None:
    await pod.open_with_base()
    first = asyncio.Event()
    stream = asyncio.create_task(pod.stream(80, first))  # 4 s
    await first.wait()
    pod.agent.send(number)
    took = await until(pod.is_closed, 3, "the gate closes")
    assert took < 2
    assert await stream == (80, True)
    assert await pod.is_closed()


async def test_restarted_agent_opens_the_gate_by_its_record(pod: Pod) -> None:
    await pod.open_with_base()
    await pod.agent.end()
    await until(pod.is_closed, 60, "the gate closes")
    await pod.agent.start()
    took = await until(pod.is_open, 60, "the gate opens again, without a coordinator")
    assert took > 2, "a restarted agent first waits whether a coordinator knows better"


async def test_coordinator_with_a_newer_version_keeps_the_gate_closed(pod: Pod) -> None:
    await pod.open_with_base()
    await pod.agent.end()
    await pod.agent.start()
    await until(pod.agent_answers, 60, "the agent is back")
    await pod.status({"run": 1, "step": 1, "label": "1"})
    await asyncio.sleep(4)
    assert await pod.is_closed()


async def test_restarted_haproxy_is_opened_again(pod: Pod) -> None:
    await pod.open_with_base()
    await pod.gate.end()
    await pod.gate.start()
    await until(pod.agent_answers, 60, "haproxy is back")
    await until(pod.is_open, 60, "the agent opens it")
    assert (await pod.generate()).status == 200
    assert (await pod.status(BASE_WIRE)).gate_open


async def test_stopped_engine_closes_the_gate(pod: Pod, stub: StubEngine) -> None:
    await pod.open_with_base()
    await stub.stop()
    assert (await pod.generate()).status == 503  # at once: nothing listens
    await until(lambda: _reason(pod, "not up"), 60, "the agent sees it")


@pytest.mark.parametrize("size", [10, 70_000], ids=["small", "large"])
async def test_an_engine_that_breaks_off_is_reported_in_a_form_that_smg_does_not_repeat(pod: Pod, stub: StubEngine, size: int) -> None:
    """The front repeats a small request once, and the batch server a large one."""
    await pod.open_with_base()
    stub.hold_answers = asyncio.Event()
    running = asyncio.create_task(pod.generate(text="a" * size))
    await stub.asked.wait()
    await stub.stop()
    answer = await running
    assert (answer.status, answer.body["error"]["code"]) == (501, "engine_broke_off")
    assert BROKEN_HEADER.lower() in {name.lower() for name in answer.headers}


async def test_status_is_not_open_while_haproxy_is_stopped(pod: Pod) -> None:
    await pod.open_with_base()
    await pod.gate.end()
    async with aiohttp.ClientSession(connector=aiohttp.UnixConnector(str(pod.agent_socket))) as beside_the_gate:
        status = await Pod(pod.folder, pod.engine_url, beside_the_gate).status(BASE_WIRE)
    assert not status.gate_open
    assert "haproxy" in status.message


async def test_flood_of_requests_does_not_lock_out_the_agent(stub: StubEngine, tmp_path: Path) -> None:
    async with run_pod(tmp_path, stub.url, start=False) as pod:
        pod.gate.args += ["--maxconn", "64"]
        await pod.start()
        await pod.open_with_base()
        connector = aiohttp.TCPConnector(limit=0, force_close=True)
        async with aiohttp.ClientSession(connector=connector) as many:
            body = {"text": "a", "stream": True, "sampling_params": {"max_new_tokens": 60}}

            async def one() -> int:
                async with many.post(pod.url + "/generate", json=body) as reply:
                    await reply.read()
                    return reply.status

            flood = [asyncio.create_task(one()) for _ in range(52)]
            await asyncio.sleep(1)
            assert (await asyncio.wait_for(pod.ask("GET", AGENT_HEALTH), 2)).status == 200
            statuses = await asyncio.gather(*flood)
        assert statuses.count(200) == 48
        assert statuses.count(503) == 4


async def test_one_client_cannot_use_up_all_connections(stub: StubEngine, tmp_path: Path) -> None:
    async with run_pod(tmp_path, stub.url, start=False) as pod:
        pod.gate.args += ["--maxconn", "64"]
        await pod.start()
        await until(pod.agent_answers, 60, "the agent answers")
        async with unfinished_bodies(pod.gate_port, {"127.0.0.2": 128}):
            for _ in range(5):
                assert (await asyncio.wait_for(pod.ask("GET", AGENT_HEALTH), 5)).status == 200


async def test_an_address_whose_calls_are_refused_gets_no_further_answer_of_the_agent(pod: Pod) -> None:
    await until(pod.agent_answers, 60, "the agent answers")
    async with client_at("127.0.0.2") as http:

        async def call() -> int:
            async with http.post(pod.url + AGENT_SYNC, json={"committed": None}) as reply:
                return reply.status

        statuses = [await call() for _ in range(1001)]
        assert set(statuses) == {401}
        assert await call() == 429
    assert (await pod.ask("GET", AGENT_HEALTH)).status == 200


@pytest.mark.parametrize("files", [256, 20000])
async def test_haproxy_starts_under_a_low_limit_on_open_files(tmp_path: Path, files: int) -> None:
    port = free_port()
    line = [sys.executable, "-m", "sglang_rollout.cli", "proxy", "front", "--listen", f"127.0.0.1:{port}", "--runtime-dir", str(tmp_path)]
    limited = ["/bin/sh", "-c", f'ulimit -n {files}; exec "$@"', "sh", *line]
    with subprocess.Popen(limited, stderr=subprocess.PIPE) as process:
        try:

            async def listens() -> bool:
                assert process.poll() is None, process.stderr.read() if process.stderr else ""
                try:
                    _, writer = await asyncio.open_connection("127.0.0.1", port)
                except OSError:
                    return False
                writer.close()
                return True

            await until(listens, 60, "haproxy listens")
        finally:
            process.kill()


async def _reason(pod: Pod, words: str) -> bool:
    return words in (await pod.status()).message
