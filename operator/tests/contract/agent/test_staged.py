"""Transport Staged in one pod: an agent, a stand-in engine, and the data port of a store. The gate exists in memory only."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
from e2e.held_tensors import changed_state

from sglang_rollout.agent.staged import stage as staging
from sglang_rollout.plugin.install import LOADER
from sglang_rollout.sglang.api import MODEL_INFO, ControlCall
from sglang_rollout.sglang.client import EngineError, Reply
from sglang_rollout.staging.payload import loader_payload
from sglang_rollout.testing import StandIn, expected_tokens
from sglang_rollout.wire.agent import SyncRequest
from sglang_rollout.wire.ports import AGENT_STAGE, DEADLINE_HEADER, STAGED, TICKET_HEADER
from sglang_rollout.wire.reasons import GateReason, RefusalCode
from sglang_rollout.wire.states import BASE, EngineState, FleetState
from tests.contract.support.agent_here import PodHere, run_agent
from tests.contract.support.agent_pod import BASE_WIRE, until
from tests.contract.support.staged_versions import (
    Source,
    StagedVersion,
    activate,
    commit,
    serve_version,
    stage,
)
from tests.support.staged import TICKET

SECONDS = 40.0
PROMPT = [4, 5, 6]


@pytest.fixture
def engine() -> Iterator[StandIn]:
    with StandIn(weight_version="base", loaders=[LOADER]) as made:
        yield made


@pytest.fixture
async def pod(engine: StandIn, tmp_path: Path) -> AsyncIterator[PodHere]:
    async with run_agent(tmp_path, engine.url) as made:
        await made.open_with_base()
        yield made


async def tokens(pod: PodHere) -> list[int]:
    """Return tokens that the engine generates."""
    body = {"input_ids": PROMPT, "sampling_params": {"max_new_tokens": 6}}
    async with pod.http.post(f"{pod.engine_url}/generate", json=body) as reply:
        assert reply.status == 200, await reply.text()
        return list((await reply.json())["output_ids"])


def right_tokens(made: StagedVersion) -> list[int]:
    return expected_tokens(made.tensors, PROMPT, 6)


async def is_serving(pod: PodHere, made: StagedVersion) -> bool:
    status = await pod.status(**made.committed)
    return status.gate_open and not status.paused and await tokens(pod) == right_tokens(made)


# --- copies ------------------------------------------------------------------------------------------------------------


async def test_a_copy_follows_a_version_that_still_arrives(pod: PodHere, source: Source) -> None:
    made = source.make(1, sealed=False)
    assert (await stage(pod, source, made)).status == 200
    copy = source.copies.get(made.update)
    assert copy is not None

    async def has_bytes() -> bool:
        found = (await pod.status()).staged
        return bool(found) and found[0].bytes == copy.index.bytes_arrived and not found[0].digest

    await until(has_bytes, SECONDS, "the pieces arrive before the end is known")
    made.digest = copy.seal(made.version).digest
    answer = await stage(pod, source, made)
    assert (answer.status, answer.body["staged"][0]["digest"]) == (200, made.digest)


async def test_other_pods_copy_from_the_agent_with_the_ticket_only(pod: PodHere, source: Source) -> None:
    made = source.make(1)
    await stage(pod, source, made)
    url = f"{pod.data_url}{STAGED}/{made.update}/index"
    async with pod.http.get(url, headers={TICKET_HEADER: TICKET}) as reply:
        entries = (await reply.json())["entries"]
    assert entries[-1]["end"]["digest"] == made.digest
    async with pod.http.get(url, headers={TICKET_HEADER: "other"}) as reply:
        assert (reply.status, (await reply.json())["code"]) == (403, RefusalCode.FORBIDDEN)


async def test_copies_that_are_not_kept_are_deleted(pod: PodHere, source: Source) -> None:
    one, two, three = source.make(1), source.make(2), source.make(3)
    await stage(pod, source, one)
    await stage(pod, source, two, keep=(one,))
    answer = await stage(pod, source, three, keep=(two,))
    assert [copy["update"] for copy in answer.body["staged"]] == [two.update, three.update]
    assert not (pod.volume / one.update).exists()
    refused = await activate(pod, one)
    assert (refused.status, refused.body["code"], refused.body["wrote"]) == (404, RefusalCode.NOT_FOUND, False)


async def test_refusals_of_copies_have_a_code(pod: PodHere, source: Source) -> None:
    made = source.make(1)
    large = await stage(pod, source, made, size_limit=100)
    assert (large.status, large.body["code"]) == (400, RefusalCode.INVALID_REQUEST)
    assert "100 bytes" in large.body["message"]
    wrong = await stage(pod, source, made, digest="0" * 64)
    assert (wrong.status, wrong.body["code"]) == (502, RefusalCode.UPSTREAM_FAILED)
    late = await stage(pod, source, made, update="f" * 32, deadline=0.5)
    assert (late.status, late.body["code"]) == (503, RefusalCode.UNAVAILABLE)
    assert (await stage(pod, source, made)).status == 200, "the next call succeeds"
    assert (await pod.control(AGENT_STAGE, {"update": "../x"})).status == 400


# --- loads that fail ---------------------------------------------------------------------------------------------------


async def test_a_file_that_has_lost_bytes_is_refused_by_the_loader(pod: PodHere, source: Source, engine: StandIn) -> None:
    made = source.make(1)
    await stage(pod, source, made)
    file = pod.volume / made.update / "00001.safetensors"
    file.write_bytes(file.read_bytes()[:-1])
    answer = await activate(pod, made)
    assert (answer.status, answer.body["wrote"]) == (409, False)
    assert "bytes, not" in answer.body["message"]
    assert (await pod.status()).version == BASE


@pytest.mark.parametrize("kind", ["oom", "drop"])
async def test_a_failure_after_the_first_write_or_without_verdicts_leaves_the_engine_dirty(
    pod: PodHere, source: Source, engine: StandIn, kind: str
) -> None:
    made = source.make(1)
    await stage(pod, source, made)
    engine.faults.add(kind, "write" if kind == "oom" else "load")
    answer = await activate(pod, made)
    assert (answer.status, answer.body["wrote"]) == (409, True)
    status = await pod.status()
    assert (status.state, status.reason, status.session) == (EngineState.DIRTY, GateReason.DIRTY, False)
    assert await pod.is_closed()
    assert (await pod.ack(made.version, status.boot_id)).status == 409
    assert (await pod.control("/continue_generation")).status == 409
    assert (await activate(pod, made)).status == 200
    assert (await commit(pod, made)).gate_open


async def test_verdicts_of_an_earlier_attempt_never_count(pod: PodHere, source: Source, engine: StandIn) -> None:
    one, two = source.make(1), source.make(2)
    await serve_version(pod, source, one)
    await stage(pod, source, two)
    stale = [json.loads(file.read_text()) for file in pod.verdicts.glob("*/rank-0.json")]
    assert [verdict["ok"] for verdict in stale] == [True]
    engine.faults.add("drop", "load")
    answer = await activate(pod, two)
    assert (answer.status, answer.body["wrote"]) == (409, True)
    assert (await pod.status()).state is EngineState.DIRTY


async def test_an_engine_that_dies_in_the_loader_is_base_afterwards(pod: PodHere, source: Source, engine: StandIn) -> None:
    made = source.make(1)
    await stage(pod, source, made)
    engine.faults.add("raise", "write")
    answer = await activate(pod, made)
    assert (answer.status, answer.body["wrote"]) == (502, True)
    engine.start()
    await until(pod.engine_up, SECONDS, "the agent sees the new engine")
    assert (await pod.status(BASE_WIRE)).version == BASE
    assert (await activate(pod, made)).status == 200


@pytest.mark.parametrize("rank", ["0", "3"])
async def test_every_rank_of_tensor_and_pipeline_must_have_loaded(source: Source, tmp_path: Path, rank: str) -> None:
    with StandIn(weight_version="base", loaders=[LOADER], tensor=2, pipeline=2) as engine:
        async with run_agent(tmp_path, engine.url, pipeline=2) as pod:
            await pod.open_with_base()
            made = source.make(1)
            await stage(pod, source, made)
            engine.faults.add("refuse", "load", value=rank)
            answer = await activate(pod, made)
            assert (answer.status, answer.body["wrote"]) == (409, True)
            assert "1 of 4 ranks" in answer.body["message"]
            assert (await pod.status()).state is EngineState.DIRTY
            engine.faults.add("refuse", "load")
            answer = await activate(pod, made)
            assert (answer.status, answer.body["wrote"]) == (409, False), "dirty as before"
            assert (await pod.status()).state is EngineState.DIRTY
            assert (await activate(pod, made)).status == 200


async def test_what_is_refused_before_the_engine_is_called(pod: PodHere, source: Source, engine: StandIn) -> None:
    made = source.make(1)
    await stage(pod, source, made)
    boot = str((await pod.status()).boot_id)
    other = await activate(pod, made, digest="0" * 64)
    assert (other.status, other.body["code"], other.body["wrote"]) == (409, RefusalCode.CONFLICT, False)
    gone = await activate(pod, made, boot_id="another")
    assert (gone.status, gone.body["code"], gone.body["wrote"]) == (409, GateReason.NOT_UP, False)
    assert (await pod.control("/begin_weight_update")).status == 200
    opened = await activate(pod, made, boot_id=boot)
    assert (opened.status, opened.body["code"], opened.body["wrote"]) == (409, RefusalCode.CONFLICT, False)
    await pod.fence()
    assert (await activate(pod, made)).status == 200


async def test_released_weights_are_not_overwritten(source: Source, tmp_path: Path) -> None:
    with StandIn(weight_version="base", loaders=[LOADER], memory_saver=True, weights_backup=True) as engine:
        async with run_agent(tmp_path, engine.url) as pod:
            await pod.open_with_base()
            made = source.make(1)
            await stage(pod, source, made)
            assert (await pod.control("/release_memory_occupation", {"tags": ["weights"]})).status == 200
            answer = await activate(pod, made)
            assert (answer.status, answer.body["code"], answer.body["wrote"]) == (409, GateReason.RELEASED, False)
            assert (await pod.control("/resume_memory_occupation", {"tags": ["weights"]})).status == 200
            assert (await activate(pod, made)).status == 200


@pytest.mark.parametrize(("mode", "flushed"), [("in_place", False), ("retract", True)])
async def test_requests_that_are_paused_in_place_keep_the_prefix_cache(source: Source, tmp_path: Path, mode: str, flushed: bool) -> None:
    with StandIn(weight_version="base", loaders=[LOADER], token_seconds=0.01) as engine:
        async with run_agent(tmp_path, engine.url) as pod:
            await pod.open_with_base()
            made = source.make(1)
            await stage(pod, source, made)
            body = {"input_ids": PROMPT, "sampling_params": {"max_new_tokens": 200}}
            running = asyncio.create_task(pod.http.post(f"{pod.engine_url}/generate", json=body))
            await asyncio.sleep(0.3)
            answer = await activate(pod, made, mode=mode)
            assert (answer.status, answer.body["flushed"]) == (200, flushed), answer.body
            await commit(pod, made)
            async with await running as reply:
                assert reply.status == 200


async def test_the_gate_opens_before_paused_requests_continue(pod: PodHere, source: Source, monkeypatch: pytest.MonkeyPatch) -> None:
    """The next request of a session would move to an older version if the gate was closed when the paused one is answered."""
    made, agent, is_open = source.make(1), pod.running, []
    assert agent is not None
    call = agent.engine.call

    async def watched(name: str, body: dict[str, Any]) -> Reply:
        if name == ControlCall.CONTINUE:
            is_open.append((await agent.gate.client.view()).up)
        return await call(name, body)

    monkeypatch.setattr(agent.engine, "call", watched)
    await stage(pod, source, made)
    answer = await activate(pod, made, sync=SyncRequest.model_validate(made.committed))
    assert (answer.status, answer.body["running"], is_open) == (200, True, [True]), answer.body


async def test_an_engine_without_the_loader_is_not_asked_to_load(source: Source, tmp_path: Path) -> None:
    with StandIn(weight_version="base") as engine:
        async with run_agent(tmp_path, engine.url) as pod:
            await pod.open_with_base()
            made = source.make(1)
            await stage(pod, source, made)
            answer = await activate(pod, made)
            assert (answer.status, answer.body["code"], answer.body["wrote"]) == (409, RefusalCode.NOT_OFFERED, False)
            assert (await pod.status()).gate_open


async def test_only_the_agent_may_use_the_loader(pod: PodHere, source: Source) -> None:
    """A payload of a coordinator could name any folder."""
    assert (await pod.control("/begin_weight_update")).status == 200
    payload = loader_payload({"folder": "/etc", "shards": [], "sizes": [], "verdicts": "/tmp"})
    answer = await pod.control("/update_weights_from_tensor", {"serialized_named_tensors": [payload], "load_format": LOADER})
    assert answer.status in (403, 501)


# --- calls that meet a load --------------------------------------------------------------------------------------------


async def loading(pod: PodHere) -> None:
    async def has_begun() -> bool:
        return (await pod.status()).reason is GateReason.UPDATE_IN_PROGRESS

    await until(has_begun, SECONDS, "the load has begun")


async def test_a_repeated_call_joins_the_load_and_a_lost_answer_is_safe(pod: PodHere, source: Source, engine: StandIn) -> None:
    made, other = source.make(1), source.make(2)
    await stage(pod, source, made)
    await stage(pod, source, other, keep=(made,))
    boot = str((await pod.status()).boot_id)
    engine.faults.add("slow", "write", seconds=3)
    lost = await activate(pod, made, boot_id=boot, headers={DEADLINE_HEADER: "0.5"})
    assert (lost.status, lost.body["wrote"]) == (504, True)
    again = asyncio.create_task(activate(pod, made, boot_id=boot))
    refused = await activate(pod, other, boot_id=boot)
    assert (refused.status, refused.body["code"], refused.body["wrote"]) == (409, RefusalCode.CONFLICT, False)
    kept = await stage(pod, source, other)
    assert {copy["update"] for copy in kept.body["staged"]} == {made.update, other.update}, "the copy in use stays"
    for path in ("/continue_generation", "/release_memory_occupation", "/flush_cache"):
        assert (await pod.control(path)).status == 409, path
    assert (await pod.ack(made.version, boot)).status == 409
    assert (await again).status == 200
    assert len(engine.fired) == 1
    assert (await activate(pod, made, boot_id=boot)).status == 200, "the engine holds it already"
    assert (await pod.status()).version == made.version


async def test_a_committed_version_that_no_pod_has_is_given_up_long_before_the_deadline(
    pod: PodHere, source: Source, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = source.make(1)
    await source.copies.keep(set())
    monkeypatch.setattr(staging, "_PATIENCE_SECONDS", 0.5)
    lost = await stage(pod, source, made, deadline=60)
    assert (lost.status, "No new byte" in lost.body["message"]) == (503, True), lost.body
    early = await stage(pod, source, made, version=None, deadline=2)
    assert "not complete in time; it continues" in early.body["message"], "the pods of an update wait for each other"


# --- without a coordinator ---------------------------------------------------------------------------------------------


async def test_a_load_of_its_own_is_repeated_after_a_failure(pod: PodHere, source: Source, engine: StandIn) -> None:
    made = source.make(1)
    await serve_version(pod, source, made)
    engine.faults.add("refuse", "load")
    engine.faults.add("oom", "write")
    engine.restart()
    await until(lambda: is_serving(pod, made), SECONDS, "the engine serves after two failures")
    assert [hit.kind for hit in engine.fired] == ["refuse", "oom"]


async def test_a_load_that_overtakes_the_coordinators_call_pauses_requests_as_the_policy_says(
    pod: PodHere, source: Source, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, two, agent = source.make(1), source.make(2), pod.running
    assert agent is not None
    post, modes = agent.engine.post, list[str]()

    async def note_mode(path: str, body: dict[str, Any], *, timeout: float) -> Reply:
        modes.extend([body["mode"]] if path == ControlCall.PAUSE.path else [])
        return await post(path, body, timeout=timeout)

    await serve_version(pod, source, one)
    await stage(pod, source, two, keep=(one,))
    monkeypatch.setattr(agent.engine, "post", note_mode)

    async def serves() -> bool:
        status = await pod.status(**two.committed, pause_mode="in_place")
        return status.gate_open and status.version == two.version

    await until(serves, SECONDS, "the engine serves")
    assert modes == ["in_place"]


async def test_weights_that_differ_from_the_last_load_do_not_serve(pod: PodHere, source: Source, engine: StandIn) -> None:
    made = source.make(1)
    await serve_version(pod, source, made)
    engine.faults.add("corrupt", "write")
    engine.restart()
    await until(lambda: is_serving(pod, made), SECONDS, "the next attempt loads the right bytes")
    assert [hit.kind for hit in engine.fired] == ["corrupt"]


@pytest.mark.parametrize("fault", ["oom", ""])
async def test_an_older_version_is_not_loaded_over_tensors_that_it_does_not_have(
    pod: PodHere, source: Source, engine: StandIn, fault: str
) -> None:
    """A load that failed may have written them, or one that succeeded and was not committed. No checksum would show it."""
    names = list(changed_state(1))
    one, two = source.make(1, without=names[0]), source.make(2)
    assert (await stage(pod, source, one)).status == 200
    assert (await activate(pod, one, checksums=False)).status == 200
    assert (await commit(pod, one)).gate_open
    await stage(pod, source, two, keep=(one,))
    if fault:
        engine.faults.add(fault, "write")
    assert (await activate(pod, two, checksums=False)).status == (409 if fault else 200)
    refused = await activate(pod, one, checksums=False)
    assert (refused.status, "tensors that this version does not have" in refused.body["message"]) == (409, True), refused.body
    assert refused.body["wrote"] is False
    assert not (await pod.status(**one.committed)).gate_open
    assert (await activate(pod, two, checksums=False)).status == 200


async def test_a_busy_engine_has_more_time_to_say_what_it_holds_before_a_load(
    pod: PodHere, source: Source, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, agent = source.make(1), pod.running
    assert agent is not None
    get = agent.engine.get

    async def answer_late(path: str, *, timeout: float) -> Reply:
        task = asyncio.current_task()
        if path == MODEL_INFO and timeout < 10 and task is not None and task.get_name().startswith("load of update"):
            raise EngineError(f"{path} was not answered within {timeout:g} s")
        return await get(path, timeout=timeout)

    await stage(pod, source, made)
    monkeypatch.setattr(agent.engine, "get", answer_late)
    assert (await activate(pod, made)).status == 200


async def test_tensors_of_a_version_that_the_loader_refused_are_not_demanded(pod: PodHere, source: Source, engine: StandIn) -> None:
    names = list(changed_state(1))
    one, two, three = source.make(1, without=names[0]), source.make(2), source.make(3, without=names[0])
    await serve_version(pod, source, one)
    await stage(pod, source, two, keep=(one,))
    engine.faults.add("refuse", "load")
    assert (await activate(pod, two)).body["wrote"] is False
    await stage(pod, source, three, keep=(one,))
    assert (await activate(pod, three)).status == 200


async def test_a_coordinators_call_waits_for_the_agents_own_load(pod: PodHere, source: Source, engine: StandIn) -> None:
    made = source.make(1)
    await serve_version(pod, source, made)
    engine.faults.add("slow", "write", seconds=3)
    engine.restart()
    await until(pod.engine_up, SECONDS, "the agent sees the new engine")
    await loading(pod)
    answer = await activate(pod, made)
    assert answer.status == 200, answer.body
    assert len(answer.body["checksums"]) == 1
    await until(lambda: is_serving(pod, made), SECONDS, "the engine serves")
    assert len(engine.fired) == 1, "it was loaded once"


async def test_a_paused_fleet_loads_its_own_copy_and_stays_closed(pod: PodHere, source: Source, engine: StandIn) -> None:
    made = source.make(1)
    await serve_version(pod, source, made)
    boot = (await pod.status()).boot_id
    paused: dict[str, Any] = {**made.committed, "spec_state": FleetState.PAUSED}
    assert (await pod.control("/agent/sync", paused)).status == 200
    engine.restart()

    async def holds_it() -> bool:
        status = await pod.status()
        return status.boot_id != boot and status.version == made.version

    await until(holds_it, SECONDS, "the new engine holds the committed version")
    assert (await pod.status()).reason is GateReason.PAUSED


async def test_an_engine_at_a_newer_version_is_left_to_the_coordinator(pod: PodHere, source: Source, engine: StandIn) -> None:
    one, two = source.make(1), source.make(2)
    await serve_version(pod, source, one)
    await stage(pod, source, two, keep=(one,))
    assert (await activate(pod, two)).status == 200
    await asyncio.sleep(2)  # several rounds of the watch
    assert (await pod.status(**one.committed)).version == two.version


async def test_a_load_of_its_own_that_hangs_is_given_up(pod: PodHere, source: Source, engine: StandIn) -> None:
    made, agent = source.make(1), pod.running
    assert agent is not None
    await serve_version(pod, source, made)
    assert (await pod.control("/agent/sync", {**made.committed, "lease": 1.0, "load": 3.0})).status == 200
    engine.faults.add("hang", "write")
    engine.restart()

    async def is_given_up() -> bool:
        return agent.giving_up_since is not None

    assert await until(is_given_up, SECONDS, "the agent gives the load up") > 1.5, (
        "not before its time is over, although no coordinator calls"
    )
    engine.restart()
    await until(lambda: is_serving(pod, made), SECONDS, "the next engine process serves")
