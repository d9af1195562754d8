"""Transport Staged in one pod, as processes: a real agent, a real gate, a stand-in engine, and the data port of a store."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
from e2e.held_tensors import changed_state

from sglang_rollout.plugin.install import LOADER
from sglang_rollout.testing import StandIn, expected_tokens
from sglang_rollout.wire.agent import SyncRequest
from sglang_rollout.wire.ports import AGENT_ACTIVATE, AGENT_RUN
from sglang_rollout.wire.reasons import GateReason
from sglang_rollout.wire.states import BASE, EngineState
from tests.contract.support.agent_pod import BASE_WIRE, Pod, run_pod, until
from tests.contract.support.staged_versions import (
    Source,
    StagedVersion,
    activate,
    commit,
    serve_version,
    stage,
)
from tests.support.ports import free_port

pytestmark = [pytest.mark.router, pytest.mark.timeout(180)]

SECONDS = 40.0
PROMPT = [4, 5, 6]


@pytest.fixture
def engine() -> Iterator[StandIn]:
    with StandIn(weight_version="base", loaders=[LOADER]) as made:
        yield made


@pytest.fixture
async def pod(engine: StandIn, tmp_path: Path) -> AsyncIterator[Pod]:
    async with run_pod(tmp_path, engine.url, data_port=free_port()) as made:
        await made.open_with_base()
        yield made


async def tokens(pod: Pod) -> list[int]:
    """Return tokens that the engine generates through the gate; none if the gate is closed."""
    answer = await pod.ask("POST", "/generate", {"input_ids": PROMPT, "sampling_params": {"max_new_tokens": 6}})
    assert answer.status in (200, 503), answer.body
    return list(answer.body["output_ids"]) if answer.status == 200 else []


def right_tokens(made: StagedVersion) -> list[int]:
    return expected_tokens(made.tensors, PROMPT, 6)


async def is_serving(pod: Pod, made: StagedVersion) -> bool:
    status = await pod.status(**made.committed)
    return status.gate_open and not status.paused and await tokens(pod) == right_tokens(made)


async def loading(pod: Pod) -> None:
    async def has_begun() -> bool:
        return (await pod.status()).reason is GateReason.UPDATE_IN_PROGRESS

    await until(has_begun, SECONDS, "the load has begun")


async def test_a_version_is_copied_loaded_committed_and_served(pod: Pod, source: Source, engine: StandIn) -> None:
    made, base = source.make(1), await tokens(pod)
    status = (await stage(pod, source, made)).body
    size = sum(len(held.data) for held in made.tensors.values())
    counted = {"bytes": size, "transferred": size, "received": size}
    assert status["staged"] == [{"update": made.update, "version": made.version.model_dump(), "digest": made.digest, **counted}]
    assert await tokens(pod) == base, "a copy changes nothing in the engine"
    answer = await activate(pod, made)
    assert answer.status == 200, answer.body
    assert set(answer.body["seconds"]) == {"pause", "load", "flush", "verify"}
    assert len(answer.body["checksums"]) == 1
    held = await pod.status()
    assert (held.state, held.version, held.gate_open, held.paused) == (EngineState.CLEAN, made.version, False, True)
    assert held.reason is GateReason.NOT_COMMITTED
    ran = await pod.control(AGENT_RUN, made.committed)
    assert ran.status == 200, ran.body
    assert await tokens(pod) == right_tokens(made)
    assert (await pod.generate()).body["meta_info"]["weight_version"] == "step-1"


async def test_an_engine_serves_a_committed_version_as_soon_as_it_has_loaded_it(pod: Pod, source: Source) -> None:
    one, two = source.make(1), source.make(2)
    await serve_version(pod, source, one)
    await stage(pod, source, two, keep=(one,))
    answer = await activate(pod, two, sync=SyncRequest.model_validate(two.committed))
    assert (answer.status, answer.body["running"]) == (200, True), answer.body
    assert await is_serving(pod, two)


async def test_an_agent_that_dies_while_copying_deletes_the_unfinished_copy(pod: Pod, source: Source) -> None:
    done, begun = source.make(1), source.make(2, sealed=False)
    await stage(pod, source, done)
    await stage(pod, source, begun, keep=(done,))
    await pod.agent.end()
    await pod.agent.start()
    await until(pod.engine_up, SECONDS, "the agent is back")
    assert [copy.update for copy in (await pod.status()).staged] == [done.update]
    copy = source.copies.get(begun.update)
    assert copy is not None
    begun.digest = copy.seal(begun.version).digest
    assert (await stage(pod, source, begun, keep=(done,))).status == 200


async def test_a_refusal_before_the_first_write_leaves_the_engine_serving_its_version(pod: Pod, source: Source, engine: StandIn) -> None:
    one, two = source.make(1), source.make(2)
    await serve_version(pod, source, one)
    await stage(pod, source, two, keep=(one,))
    engine.faults.add("refuse", "load")
    answer = await activate(pod, two)
    assert (answer.status, answer.body["wrote"], answer.body["success"]) == (409, False, False)
    assert "refused on purpose" in answer.body["message"]
    assert engine.weight_version == "step-1", "SGLang has taken over the label, and the agent has set it back"
    status = await pod.status()
    assert (status.state, status.version, status.gate_open, status.session, status.paused) == (
        EngineState.CLEAN, one.version, True, False, False,
    )  # fmt: skip
    assert await tokens(pod) == right_tokens(one)
    assert (await activate(pod, two)).status == 200, "the next attempt has its own verdicts"
    assert (await commit(pod, two)).gate_open
    assert await tokens(pod) == right_tokens(two)


async def test_a_pod_with_another_transport_has_no_such_calls(engine: StandIn, source: Source, tmp_path: Path) -> None:
    async with run_pod(tmp_path, engine.url) as pod:
        await pod.open_with_base()
        made = source.make(1)
        assert (await stage(pod, source, made)).status == 404
        assert (await pod.control(AGENT_ACTIVATE, {})).status == 404


async def test_a_fence_ends_a_load(pod: Pod, source: Source, engine: StandIn) -> None:
    made = source.make(1)
    await stage(pod, source, made)
    engine.faults.add("slow", "write", seconds=2)
    load = asyncio.create_task(activate(pod, made))
    await loading(pod)
    status = await pod.fence()
    assert (status.state, status.session, status.paused) == (EngineState.DIRTY, False, False)
    answer = await load
    assert (answer.status, answer.body["wrote"]) == (409, True)
    assert await pod.is_closed()
    assert (await activate(pod, made)).status == 200
    assert (await commit(pod, made)).gate_open


async def test_an_agent_that_restarts_during_a_load_counts_the_engine_as_dirty(pod: Pod, source: Source, engine: StandIn) -> None:
    made = source.make(1)
    await stage(pod, source, made)
    engine.faults.add("slow", "write", seconds=2)
    load = asyncio.create_task(activate(pod, made))
    await loading(pod)
    await pod.agent.end()
    await asyncio.gather(load, return_exceptions=True)
    await pod.agent.start()
    await until(pod.engine_up, SECONDS, "the agent is back")
    status = await pod.status()
    assert (status.state, status.reason) == (EngineState.DIRTY, GateReason.DIRTY)
    assert (await activate(pod, made)).status == 200
    assert (await commit(pod, made)).gate_open
    assert await tokens(pod) == right_tokens(made)


async def test_verdicts_prove_after_a_restart_of_the_agent_that_nothing_was_written(pod: Pod, source: Source, engine: StandIn) -> None:
    made = source.make(1)
    await stage(pod, source, made)
    engine.faults.add("refuse", "load")
    engine.faults.add("slow", "end", seconds=3)
    load = asyncio.create_task(activate(pod, made))

    async def has_refused() -> bool:
        return bool(list(pod.verdicts.glob("*/rank-0.json")))

    await until(has_refused, SECONDS, "the loader refuses")
    await pod.agent.end()
    await asyncio.gather(load, return_exceptions=True)
    await pod.agent.start()

    await until(pod.engine_up, SECONDS, "the agent is back")

    async def is_base_again() -> bool:
        status = await pod.status(BASE_WIRE)
        return status.gate_open and status.version == BASE and not status.session

    await until(is_base_again, SECONDS, "the engine holds base, as before")
    assert engine.weight_version == "base"
    fewer = source.make(2, without=next(iter(made.tensors)))
    await stage(pod, source, fewer)
    assert (await activate(pod, fewer)).status == 200, "no tensor of the refused version is in the engine"


async def test_a_restarted_engine_loads_its_own_copy_without_a_coordinator(pod: Pod, source: Source, engine: StandIn) -> None:
    made = source.make(1)
    await serve_version(pod, source, made)
    engine.restart()

    async def serves() -> bool:
        status = await pod.status()
        return (status.version, status.cohort) == (made.version, ["e0"]) and await tokens(pod) == right_tokens(made)

    await until(serves, SECONDS, "the engine serves the committed version again")


async def test_a_pause_waits_until_the_engine_has_loaded_its_own_copy(pod: Pod, source: Source, engine: StandIn) -> None:
    made = source.make(1)
    await serve_version(pod, source, made)
    engine.faults.add("slow", "write", seconds=1)
    engine.restart()
    await loading(pod)
    paused = await pod.control("/pause_generation", {"mode": "retract"})
    assert paused.status == 200, paused.body
    status = await pod.status(**made.committed)
    assert (status.version, status.paused) == (made.version, True)


async def test_the_own_copy_outlives_the_agent(pod: Pod, source: Source, engine: StandIn) -> None:
    made = source.make(1)
    await serve_version(pod, source, made)
    await pod.agent.end()
    await pod.agent.start()
    await until(pod.agent_answers, SECONDS, "the agent answers")
    await until(pod.is_open, SECONDS, "the gate opens by the record")
    engine.restart()
    await until(lambda: is_serving(pod, made), SECONDS, "the engine serves the committed version again")


async def test_a_restarted_agent_knows_which_tensors_a_load_has_written(pod: Pod, source: Source, engine: StandIn) -> None:
    one, two = source.make(1, without=next(iter(changed_state(1)))), source.make(2)
    await serve_version(pod, source, one)
    await stage(pod, source, two, keep=(one,))
    assert (await activate(pod, two, checksums=False)).status == 200
    await pod.agent.end()
    await pod.agent.start()
    await until(pod.agent_answers, SECONDS, "the agent answers")
    assert not (await pod.status(**one.committed)).gate_open
    assert (await activate(pod, one, checksums=False)).status == 409
    engine.restart()

    async def serves() -> bool:
        status = await pod.status()
        return status.gate_open and status.version == one.version

    await until(serves, SECONDS, "a restarted engine loads its own copy")


async def test_a_loader_that_hangs_ends_with_the_restart_of_the_engine(engine: StandIn, source: Source, tmp_path: Path) -> None:
    async with run_pod(tmp_path, engine.url, data_port=free_port(), with_boot_file=True, start=False) as pod:
        pod.boot("first")
        await pod.start()
        await pod.open_with_base()
        made = source.make(1)
        assert (await stage(pod, source, made)).status == 200
        engine.faults.add("hang", "write")
        load = asyncio.create_task(activate(pod, made))
        await loading(pod)
        assert (await pod.fence(stuck_after=0.5)).giving_up > 0
        assert (pod.boot_file.parent / "kill").exists()
        pod.boot("second")
        engine.restart()
        answer = await load
        assert (answer.status, answer.body["wrote"]) == (502, True)

        async def is_base() -> bool:
            status = await pod.status(BASE_WIRE)
            return status.boot_id == "second" and status.gate_open and not status.giving_up

        await until(is_base, SECONDS, "the new engine process serves base")
        assert (await activate(pod, made)).status == 200
