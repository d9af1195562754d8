"""The checkpoint check over HTTP: the real engine loads every folder that passes."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from e2e.engine import Engine, LabError, environment, start_engine

from sglang_rollout.checkpoints.folder import read_header
from sglang_rollout.wire.agent import UNCHECKED, CheckpointReply
from sglang_rollout.wire.ports import AGENT_CHECKPOINT
from tests.contract.support.agent_pod import Pod, run_pod, until
from tests.contract.support.stub_engine import stub_engine
from tests.support.ports import free_port
from tests.support.tiny_models import write_model

pytestmark = pytest.mark.router


async def ask(pod: Pod, **request: Any) -> CheckpointReply:
    answer = await pod.control(AGENT_CHECKPOINT, request)
    assert answer.status == 200, answer.body
    return CheckpointReply.model_validate(answer.body)


async def test_an_agent_checks_its_own_files_and_needs_the_token(tmp_path: Path) -> None:
    async with stub_engine() as stub, run_pod(tmp_path, stub.url) as pod:
        own, new = write_model(tmp_path / "own"), write_model(tmp_path / "new", fill=1, shards=2)
        assert (await pod.control(AGENT_CHECKPOINT, {"path": str(new)}, token="wrong")).status == 403
        assert (await pod.control(AGENT_CHECKPOINT, {})).status == 400
        reply = await ask(pod, path=str(new), model_path=str(own))
        assert (reply.refusal, reply.tensors, reply.compared) == (None, 4, True)
        (new / "config.json").write_text("{}")
        reply = await ask(pod, path=str(new), model_path=str(own))
        assert reply.refusal is not None
        assert "architectures" in reply.refusal.message
        assert "update_weights_from_disk" not in stub.calls


NAME = "org/tiny"
"""The engine's ``--model-path``: a name on the Hugging Face hub, of which its cache holds the files."""


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Hugging Face cache, laid out as huggingface_hub does."""
    repository = tmp_path_factory.mktemp("hub") / "models--org--tiny"
    commit = "0123456789abcdef0123456789abcdef01234567"
    shutil.copytree(environment.model(), repository / "snapshots" / commit)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(commit)
    return repository.parent


@pytest.fixture(scope="module")
def engine(cache: Path) -> Iterator[Engine]:
    try:
        environment.python(make=False)
    except LabError as error:
        pytest.skip(str(error))
    with start_engine(free_port(), args=["--model-path", NAME], env={"HF_HUB_CACHE": str(cache)}) as made:
        yield made


def reversed_head(folder: Path) -> Path:
    """The engine's model with the rows of its head in reverse order: other tokens, without any library."""
    shutil.copytree(environment.model(), folder)
    file = folder / "model.safetensors"
    header = read_header(file)
    entry = header.tensors["lm_head.weight"]
    data = bytearray(file.read_bytes())
    start, end = header.data_start + entry.start, header.data_start + entry.end
    row_bytes = (end - start) // entry.shape[0]
    rows = [data[at : at + row_bytes] for at in range(start, end, row_bytes)]
    data[start:end] = b"".join(reversed(rows))
    file.write_bytes(data)
    return folder


@pytest.mark.engine
@pytest.mark.timeout(420)
async def test_a_checkpoint_that_passes_is_loaded_by_the_real_engine(
    engine: Engine, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(cache))
    async with run_pod(tmp_path, engine.url) as pod:
        await until(pod.engine_up, 60, "the agent sees the engine")
        await pod.open_with_base()
        before = (await pod.generate(8)).body["output_ids"]
        new = reversed_head(tmp_path / "new")
        reply = await ask(pod, path=str(new))
        assert (reply.refusal, reply.compared, reply.unchecked) == (None, True, [])
        loaded = await pod.control("/update_weights_from_disk", {"model_path": str(new), "weight_version": "disk-1"})
        assert (loaded.status, loaded.body["success"]) == (200, True)
        status = await pod.status({"run": 0, "step": 0, "label": "base"})
        assert not status.gate_open, "the new version was not acknowledged"
        async with pod.http.post(f"{engine.url}/generate", json={"text": "alpha", "sampling_params": {"max_new_tokens": 8}}) as answer:
            assert (await answer.json())["output_ids"] != before
        # The very file that ends an engine's process is refused before any engine hears of it.
        file = new / "model.safetensors"
        file.write_bytes(file.read_bytes()[:-1])
        refused = (await ask(pod, path=str(new), model_path=str(environment.model()))).refusal
        assert refused is not None
        assert "it is truncated" in refused.message
        other = other_architecture(tmp_path / "other")
        refused = (await ask(pod, path=str(other))).refusal
        assert refused is not None, "also after an update"
        assert f"the engine's model {cache}" in refused.message


def other_architecture(folder: Path) -> Path:
    """A checkpoint with other weights that SGLang loads silently, because every shape is right."""
    shutil.copytree(environment.model(), folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2"}))
    return folder


@pytest.mark.engine
@pytest.mark.timeout(420)
async def test_an_agent_without_the_engines_cache_compares_with_what_the_engine_reports(
    engine: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in a pod, where only the engine's container has the cache."""
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "nothing"))
    async with run_pod(tmp_path, engine.url) as pod:
        await until(pod.engine_up, 60, "the agent sees the engine")
        reply = await ask(pod, path=str(environment.model()))
        assert (reply.refusal, reply.compared, reply.unchecked) == (None, False, [*UNCHECKED])
        refused = await ask(pod, path=str(other_architecture(tmp_path / "other")))
        assert refused.refusal is not None
        assert "the engine reports ['LlamaForCausalLM']" in refused.refusal.message
