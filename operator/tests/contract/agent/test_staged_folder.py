"""Transport Staged in one pod whose engine has data-parallel replicas: the stand-in loads versions as folders."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from threading import Timer
from typing import Any

import pytest

from sglang_rollout.checkpoints.format import build_header
from sglang_rollout.testing import StandIn, info
from sglang_rollout.testing.policy import default_state
from sglang_rollout.wire.reasons import GateReason, RefusalCode
from sglang_rollout.wire.staged import Shard, StagedTensor
from sglang_rollout.wire.states import BASE, EngineState, Version
from tests.contract.agent.test_staged import SECONDS, is_serving, right_tokens, tokens
from tests.contract.support.agent_here import PodHere, run_agent
from tests.contract.support.agent_pod import until
from tests.contract.support.staged_versions import Source, StagedVersion, activate, commit, serve_version, stage
from tests.support.staged import LIMIT, TICKET, fill_shard, update_id


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """Folder of the stand-in's model."""
    folder, tensors = tmp_path / "model", default_state()
    folder.mkdir()
    header = build_header((name, "F32", tuple(held.shape)) for name, held in tensors.items())
    (folder / "model.safetensors").write_bytes(header + b"".join(held.data for held in tensors.values()))
    (folder / "config.json").write_text('{"architectures": ["LlamaForCausalLM"]}')
    return folder


@pytest.fixture
def engine(model: Path) -> Iterator[StandIn]:
    with StandIn(weight_version="base", data=2, model=model) as made:
        yield made


@pytest.fixture
async def pod(engine: StandIn, tmp_path: Path) -> AsyncIterator[PodHere]:
    async with run_agent(tmp_path, engine.url, data=2) as made:
        await made.open_with_base()
        yield made


async def test_a_version_is_loaded_and_loaded_again_after_a_restart(pod: PodHere, source: Source, engine: StandIn) -> None:
    made = source.make(1)
    await stage(pod, source, made)
    loaded = await activate(pod, made)
    assert loaded.status == 200, loaded.body
    assert loaded.body["flushed"]
    assert len(loaded.body["checksums"]) == 2, "one for each replica"
    assert (await pod.status()).paused
    await commit(pod, made)
    assert await tokens(pod) == right_tokens(made)
    again = await activate(pod, made)
    assert again.body["checksums"] == loaded.body["checksums"]
    engine.restart()
    await until(lambda: is_serving(pod, made), SECONDS, "the engine serves its own copy")


async def test_a_load_in_place_leaves_no_session_and_keeps_the_pod_open_for_the_next(pod: PodHere, source: Source) -> None:
    one, two = source.make(1), source.make(2)
    await serve_version(pod, source, one)
    await serve_version(pod, source, two, keep=(one,))
    assert await tokens(pod) == right_tokens(two)
    assert not (await pod.status()).session


@pytest.mark.parametrize("path", ["/model_info", "/get_model_info"])
async def test_the_model_keeps_its_name_and_path(pod: PodHere, source: Source, model: Path, path: str) -> None:
    """SGLang reports the folder, which the agent deletes two versions later."""
    made = source.make(1)
    await serve_version(pod, source, made)
    async with pod.http.get(f"{pod.engine_url}/model_info") as reply:
        assert (await reply.json())["model_path"] == str(pod.volume / made.update)
    found = (await pod.ask("GET", path)).body
    assert (found["model_path"], found["served_model_name"], found["weight_version"]) == (str(model), str(model), "step-1")
    assert (await pod.ask("GET", "/v1/models")).body["data"][0]["id"] == str(model)


# --- refusals and failures ---------------------------------------------------------------------------------------------


async def check_unchanged(pod: PodHere, engine: StandIn) -> None:
    status = await pod.status()
    assert (status.state, status.version, status.gate_open, status.paused) == (EngineState.CLEAN, BASE, True, False)
    assert engine.alive
    assert not engine.deaths


async def test_a_file_that_has_lost_bytes_is_refused_before_the_engine_is_called(pod: PodHere, source: Source, engine: StandIn) -> None:
    made = source.make(1)
    await stage(pod, source, made)
    file = pod.volume / made.update / "00001.safetensors"
    file.write_bytes(file.read_bytes()[:-1])
    answer = await activate(pod, made)
    assert (answer.status, answer.body["code"], answer.body["wrote"]) == (409, RefusalCode.CONFLICT, False)
    assert "bytes, not" in answer.body["message"]
    await check_unchanged(pod, engine)


async def test_another_shape_than_the_models_is_refused_before_the_engine_is_called(pod: PodHere, source: Source, engine: StandIn) -> None:
    copy, version = source.copies.open(update_id(1), TICKET, LIMIT), Version(run=1, step=1, label="step-1")
    name = next(iter(default_state()))
    fill_shard(copy, Shard(tensors=[StagedTensor(name=name, dtype="F32", shape=[2, 1])]), bytes(8))
    made = StagedVersion(version, copy.update, copy.seal(version).digest, {})
    await stage(pod, source, made)
    answer = await activate(pod, made)
    assert (answer.status, answer.body["code"], answer.body["wrote"]) == (409, RefusalCode.INVALID_REQUEST, False)
    assert f"Tensor {name} has shape [2, 1]" in answer.body["message"]
    await check_unchanged(pod, engine)


async def test_a_call_that_fails_may_have_written(pod: PodHere, source: Source, engine: StandIn) -> None:
    made = source.make(1)
    await stage(pod, source, made)
    engine.faults.add("unavailable", "disk")
    answer = await activate(pod, made)
    assert answer.body["wrote"] is True
    status = await pod.status()
    assert (status.state, status.reason) == (EngineState.DIRTY, GateReason.DIRTY)
    assert await pod.is_closed()
    assert (await activate(pod, made)).status == 200
    assert (await commit(pod, made)).gate_open


async def test_verdicts_of_the_engines_container_prove_nothing(pod: PodHere, source: Source, engine: StandIn) -> None:
    made = source.make(1)
    await stage(pod, source, made)

    def forge() -> None:
        for folder in pod.verdicts.iterdir():
            (folder / "rank-0.json").write_text(f'{{"ok": false, "wrote": false, "message": "", "id": "{folder.name}"}}')

    engine.faults.on_hit = lambda _: forge()
    engine.faults.add("unavailable", "disk")
    answer = await activate(pod, made)
    assert list(pod.verdicts.glob("*/rank-0.json"))
    assert answer.body["wrote"] is True
    assert (await pod.status()).state is EngineState.DIRTY


async def test_an_engine_that_dies_in_the_load_is_base_afterwards(pod: PodHere, source: Source, engine: StandIn) -> None:
    made = source.make(1)
    await stage(pod, source, made)
    engine.faults.add("die", "disk")
    answer = await activate(pod, made)
    assert (answer.status, answer.body["wrote"]) == (502, True)
    engine.start()
    await pod.open_with_base()
    assert (await activate(pod, made)).status == 200


async def test_an_engine_that_ends_shortly_after_it_has_failed_a_load_is_known_to_be_gone(
    pod: PodHere, source: Source, engine: StandIn
) -> None:
    """A process of the engine has ended: the others answer, and end some milliseconds later. The coordinator then asks at once."""
    made = source.make(1)
    await stage(pod, source, made)
    engine.faults.on_hit = lambda _: Timer(0.3, engine.kill).start()
    engine.faults.add("unavailable", "disk")
    answer = await activate(pod, made)
    assert answer.body["wrote"] is True
    assert pod.running is not None
    assert not pod.running.state.up, "known without another poll"


async def test_replicas_that_differ_do_not_serve(pod: PodHere, source: Source, engine: StandIn, monkeypatch: pytest.MonkeyPatch) -> None:
    made, right = source.make(1), info.checksums
    await stage(pod, source, made)

    def unequal(boot: Any) -> dict[str, Any]:
        found = right(boot)
        found["ranks"][1]["per_gpu_checksum"] = "0" * 64
        return found

    monkeypatch.setattr(info, "checksums", unequal)
    answer = await activate(pod, made)
    assert (answer.body["code"], answer.body["wrote"]) == (RefusalCode.FORBIDDEN, True)
    assert (await pod.status()).state is EngineState.DIRTY
    monkeypatch.setattr(info, "checksums", right)
    assert (await activate(pod, made)).status == 200


async def test_an_agent_that_expects_one_replica_refuses(engine: StandIn, source: Source, tmp_path: Path) -> None:
    async with run_agent(tmp_path, engine.url) as pod:
        await pod.open_with_base()
        made = source.make(1)
        await stage(pod, source, made)
        answer = await activate(pod, made)
        assert (answer.status, answer.body["code"], answer.body["wrote"]) == (409, RefusalCode.NOT_OFFERED, False)
        assert "--data-size 2" in answer.body["message"]
        await check_unchanged(pod, engine)
