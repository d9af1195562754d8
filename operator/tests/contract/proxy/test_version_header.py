"""The header X-Weight-Version of an answer names the version that the engine held when the request arrived."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from sglang_rollout.wire.ports import VERSION_HEADER
from sglang_rollout.wire.states import Version
from tests.contract.agent.test_http import update
from tests.contract.support.agent_pod import BASE_WIRE, Pod, pod, until
from tests.contract.support.stub_engine import StubEngine, stub_engine

pytestmark = pytest.mark.router


@pytest.fixture
async def engine() -> AsyncIterator[StubEngine]:
    async with stub_engine() as made:
        yield made


@pytest.fixture
async def lab(engine: StubEngine, tmp_path: Path) -> AsyncIterator[Pod]:
    async with pod(tmp_path, engine.url) as made:
        yield made


async def header(lab: Pod) -> str | None:
    return named((await lab.generate()).headers)


def named(headers: dict[str, str]) -> str | None:
    return {name.lower(): value for name, value in headers.items()}.get(VERSION_HEADER.lower())


async def commit(lab: Pod, version: Version) -> None:
    await update(lab, version)
    assert (await lab.status(version.model_dump())).gate_open
    await lab.control("/continue_generation")
    await lab.control("/destroy_weights_update_group", {"group_name": "g"})


async def test_answers_name_the_version_and_refusals_do_not(lab: Pod) -> None:
    await until(lab.engine_up, 10, "the agent sees the engine")
    assert await header(lab) is None
    await lab.open_with_base()
    assert await header(lab) == "base"
    for n, label in enumerate(("step 1", "step-2; e, 100%", "a\\b\"c'd#e"), 1):
        await commit(lab, Version(run=1, step=n, label=label))
        assert await header(lab) == label
    assert named((await lab.ask("GET", "/agent/health")).headers) is None
    await lab.control("/begin_weight_update")
    assert await lab.is_closed()
    assert await header(lab) is None


async def test_answer_names_the_version_at_the_time_of_its_request(lab: Pod, engine: StubEngine) -> None:
    await lab.open_with_base()
    engine.hold_answers = asyncio.Event()
    started = asyncio.create_task(header(lab))
    await asyncio.wait_for(engine.asked.wait(), 5)
    await commit(lab, Version(run=1, step=1, label="new"))
    later = asyncio.create_task(header(lab))
    await asyncio.sleep(0.2)
    assert not started.done()
    engine.hold_answers.set()
    assert (await started, await later) == ("base", "new")


async def test_restarted_haproxy_gets_the_version_again(lab: Pod) -> None:
    await lab.open_with_base()
    await commit(lab, Version(run=1, step=1, label="one"))
    await lab.gate.end()
    await lab.gate.start()
    await until(lab.agent_answers, 10, "haproxy is back")
    await until(lab.is_open, 3, "the agent opens it")
    assert await header(lab) == "one"


async def test_restarted_agent_names_the_version_of_its_record(lab: Pod) -> None:
    await lab.open_with_base()
    version = Version(run=1, step=1, label="one")
    await commit(lab, version)
    await lab.agent.end()
    await lab.agent.start()
    await until(lab.agent_answers, 10, "the agent is back")
    await lab.status(version.model_dump())
    await until(lab.is_open, 5, "the gate opens")
    assert await header(lab) == "one"


async def test_gate_of_an_older_release_opens(engine: StubEngine, tmp_path: Path) -> None:
    async with pod(tmp_path, engine.url, start=False) as lab:
        line = [part.replace("gate.sock", "other.sock") if part.endswith("gate.sock") else part for part in lab.gate.args]
        config = tmp_path / "old.cfg"
        await _print(line, config)
        text = config.read_text().replace("other.sock mode", "gate.sock mode")
        newer = ("txn.version", "txn.vocabulary", "txn.adapters", "txn.refused", "no_tokenizer", "model_does_not_generate", "lua")
        config.write_text("\n".join(row for row in text.splitlines() if not any(word in row for word in newer)) + "\n")
        haproxy = await asyncio.create_subprocess_exec("haproxy", "-W", "-db", "-f", str(config))
        try:
            await lab.agent.start()
            await until(lab.agent_answers, 40, "the agent answers through the gate")
            await lab.status(BASE_WIRE)
            await until(lab.is_open, 5, "the gate opens")
            assert await header(lab) is None
        finally:
            haproxy.kill()
            await haproxy.wait()


async def _print(line: list[str], path: Path) -> None:
    import sys

    with path.open("wb") as out:
        process = await asyncio.create_subprocess_exec(sys.executable, "-m", "sglang_rollout.cli", *line, "--print", stdout=out)
        assert await process.wait() == 0
