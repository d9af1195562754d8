"""The header X-Weight-Version of an answer names the version that the engine held when the request arrived."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from sglang_rollout.wire.ports import VERSION_HEADER
from sglang_rollout.wire.states import Version
from tests.contract.agent.test_http import update
from tests.contract.support.agent_pod import BASE_WIRE, Pod, run_pod, until
from tests.contract.support.stub_engine import StubEngine

pytestmark = pytest.mark.router


async def header(pod: Pod) -> str | None:
    return named((await pod.generate()).headers)


def named(headers: dict[str, str]) -> str | None:
    return {name.lower(): value for name, value in headers.items()}.get(VERSION_HEADER.lower())


async def commit(pod: Pod, version: Version) -> None:
    await update(pod, version)
    assert (await pod.status(version.model_dump())).gate_open
    await pod.control("/continue_generation")
    await pod.control("/destroy_weights_update_group", {"group_name": "g"})


async def test_answers_name_the_version_and_refusals_do_not(pod: Pod) -> None:
    await until(pod.engine_up, 60, "the agent sees the engine")
    assert await header(pod) is None
    await pod.open_with_base()
    assert await header(pod) == "base"
    for n, label in enumerate(("step 1", "step-2; e, 100%", "a\\b\"c'd#e"), 1):
        await commit(pod, Version(run=1, step=n, label=label))
        assert await header(pod) == label
    assert named((await pod.ask("GET", "/agent/health")).headers) is None
    await pod.control("/begin_weight_update")
    assert await pod.is_closed()
    assert await header(pod) is None


async def test_answer_names_the_version_at_the_time_of_its_request(pod: Pod, stub: StubEngine) -> None:
    await pod.open_with_base()
    stub.hold_answers = asyncio.Event()
    started = asyncio.create_task(header(pod))
    await asyncio.wait_for(stub.asked.wait(), 5)
    await commit(pod, Version(run=1, step=1, label="new"))
    later = asyncio.create_task(header(pod))
    await asyncio.sleep(0.2)
    assert not started.done()
    stub.hold_answers.set()
    assert (await started, await later) == ("base", "new")


async def test_restarted_haproxy_gets_the_version_again(pod: Pod) -> None:
    await pod.open_with_base()
    await commit(pod, Version(run=1, step=1, label="one"))
    await pod.gate.end()
    await pod.gate.start()
    await until(pod.agent_answers, 60, "haproxy is back")
    await until(pod.is_open, 60, "the agent opens it")
    assert await header(pod) == "one"


async def test_restarted_agent_names_the_version_of_its_record(pod: Pod) -> None:
    await pod.open_with_base()
    version = Version(run=1, step=1, label="one")
    await commit(pod, version)
    await pod.agent.end()
    await pod.agent.start()
    await until(pod.agent_answers, 60, "the agent is back")
    await pod.status(version.model_dump())
    await until(pod.is_open, 60, "the gate opens")
    assert await header(pod) == "one"


async def test_gate_of_an_older_release_opens(stub: StubEngine, tmp_path: Path) -> None:
    async with run_pod(tmp_path, stub.url, start=False) as pod:
        line = [part.replace("gate.sock", "other.sock") if part.endswith("gate.sock") else part for part in pod.gate.args]
        config = tmp_path / "old.cfg"
        await _print(line, config)
        text = config.read_text().replace("other.sock mode", "gate.sock mode")
        newer = ("txn.version", "no_tokenizer", "model_does_not_generate")
        config.write_text("\n".join(row for row in text.splitlines() if not any(word in row for word in newer)) + "\n")
        haproxy = await asyncio.create_subprocess_exec("haproxy", "-W", "-db", "-f", str(config))
        try:
            await pod.agent.start()
            await until(pod.agent_answers, 40, "the agent answers through the gate")
            await pod.status(BASE_WIRE)
            await until(pod.is_open, 60, "the gate opens")
            assert await header(pod) is None
        finally:
            haproxy.kill()
            await haproxy.wait()


async def _print(line: list[str], path: Path) -> None:
    import sys

    with path.open("wb") as out:
        process = await asyncio.create_subprocess_exec(sys.executable, "-m", "sglang_rollout.cli", *line, "--print", stdout=out)
        assert await process.wait() == 0
