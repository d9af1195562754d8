"""The check of a folder before an engine loads it."""

from __future__ import annotations

import asyncio
import json
import os
import struct
import threading
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_rollout.agent import checkpoint
from sglang_rollout.agent.checkpoint import CheckpointCheck, check, own_tensors
from sglang_rollout.agent.engine_model import EngineModel, hub_folder
from sglang_rollout.checkpoints.folder import Model, read_model
from sglang_rollout.checkpoints.format import build_header, parse_header
from sglang_rollout.wire.agent import CheckpointReply, CheckpointRequest
from tests.support.tiny_models import INDEX, TENSORS, file_bytes, write_model


@pytest.fixture
def own(tmp_path: Path) -> Path:
    return write_model(tmp_path / "own")


def model(folder: Path | None) -> EngineModel:
    return EngineModel(str(folder) if folder else None)


def verdict(found: Path | str, own: Path | None) -> str:
    """Return why the checkpoint is refused; empty if it is accepted."""
    return message_of(check(str(found), model(own)))


def message_of(reply: CheckpointReply) -> str:
    return reply.refusal.message if reply.refusal is not None else ""


@pytest.mark.parametrize("shards", [0, 1, 3])
def test_a_complete_checkpoint_of_the_same_model_passes(tmp_path: Path, own: Path, shards: int) -> None:
    reply = check(str(write_model(tmp_path / "new", shards=shards)), model(own))
    assert (reply.refusal, reply.compared) == (None, True)
    assert (reply.tensors, reply.bytes) == (4, (32 + 16 + 4 + 32) * 4)


@pytest.mark.parametrize("dtype", ["BF16", "F16", "F64"])
def test_float_types_are_converted_by_the_engine(tmp_path: Path, own: Path, dtype: str) -> None:
    other = {name: (dtype, shape) for name, (_, shape) in TENSORS.items()}
    assert verdict(write_model(tmp_path / "new", other), own) == ""


def test_without_the_engines_model_only_the_files_are_checked(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "new", {"a": ("I8", (3,))}, architectures=["Other"])
    for unknown in (None, tmp_path / "nowhere", Path("org/model-7b"), Path("/" + "x" * 300)):
        reply = check(str(folder), model(unknown))
        assert (reply.refusal, reply.compared) == (None, False)


def test_an_agent_lists_the_tensors_of_its_engines_model(own: Path) -> None:
    reply = own_tensors(model(own))
    assert (reply.refusal, reply.compared, set(reply.names or [])) == (None, True, set(TENSORS))
    assert reply.shapes == {name: list(shape) for name, (_, shape) in TENSORS.items()}
    assert own_tensors(EngineModel("org/model-7b")).names is None


def test_the_shape_of_packed_values_is_not_reported(tmp_path: Path) -> None:
    packed = write_model(tmp_path / "packed", {"a": ("I8", (3,)), "b": ("BF16", (2, 3))})
    assert own_tensors(model(packed)).shapes == {"a": None, "b": [2, 3]}


async def test_a_request_without_a_folder_lists_the_engines_tensors(own: Path) -> None:
    reply = await CheckpointCheck().run(CheckpointRequest(path="", names=True), model(own))
    assert set(reply.names or []) == set(TENSORS)


@given(st.data())
@settings(deadline=None, max_examples=150)
def test_truncation_at_any_byte_is_refused(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    folder = write_model(tmp_path_factory.mktemp("cut"), shards=data.draw(st.sampled_from([0, 2])))
    file = data.draw(st.sampled_from(sorted(folder.glob("*.safetensors"))))
    whole = file.read_bytes()
    cut = data.draw(st.integers(0, len(whole) - 1))
    file.write_bytes(whole[:cut])
    assert file.name in verdict(folder, None)
    file.write_bytes(whole)
    assert verdict(folder, None) == ""


@given(
    st.dictionaries(st.text(min_size=1, max_size=8), st.tuples(st.sampled_from(["F32", "BF16"]), st.lists(st.integers(1, 4), max_size=3)))
)
def test_a_written_header_is_read_back(tensors: dict[str, tuple[str, list[int]]]) -> None:
    tensors.pop("__metadata__", None)
    header = build_header((name, dtype, tuple(shape)) for name, (dtype, shape) in tensors.items())
    assert len(header) % 8 == 0
    parsed = parse_header(header[8:])
    assert {name: (entry.dtype, list(entry.shape)) for name, entry in parsed.tensors.items()} == tensors
    assert parsed.data_start == len(header)


def entry(dtype: str, shape: list[Any], start: Any, end: Any) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}


@pytest.mark.parametrize(
    ("header", "words"),
    [
        ({"a": entry("F32", [2], 0, 4)}, "needs 8"),
        ({"a": entry("F32", [2], 4, 12)}, "hole before tensor a"),
        ({"b": entry("F32", [2], 4, 12)}, "overlap before tensor b"),
        ({"a": entry("F3", [2], 0, 8)}, "unknown type F3"),
        ({"a": entry("F32", [-2], 0, 8)}, "without a type, a shape and a byte range"),
        ({"a": entry("F32", [True], 0, 4)}, "without a type, a shape and a byte range"),
        ({"a": {"dtype": "F32"}}, "without a type, a shape and a byte range"),
        ({"a": 7}, "without a type, a shape and a byte range"),
    ],
)
def test_an_inconsistent_header_is_refused(tmp_path: Path, header: dict[str, Any], words: str) -> None:
    folder = write_model(tmp_path / "new")
    (folder / "model.safetensors").write_bytes(file_bytes({"a": ("F32", (2,))}, **header))
    assert words in verdict(folder, None)


def test_a_file_that_is_not_safetensors_is_refused(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "new")
    file = folder / "model.safetensors"
    whole = file.read_bytes()
    for content, words in [
        (b"\x80\x02}q\x00X\x0a\x00a pickle", "does not begin with the length"),
        (struct.pack("<Q", 4) + b"[{}]", "not a JSON object"),
        (struct.pack("<Q", 4) + b"{{{{", "not JSON"),
        (struct.pack("<Q", 900) + b"{}", "ends within its header"),
        (whole + b"x", "extra bytes after its tensors"),
        (b"", "too few"),
    ]:
        file.write_bytes(content)
        assert words in verdict(folder, None)


def test_a_path_that_this_pod_does_not_see_names_the_mount(tmp_path: Path) -> None:
    reason = verdict(tmp_path / "nowhere", None)
    assert "in this engine's pod" in reason
    assert "podTemplate" in reason
    assert "absolute" in verdict("models/x", None)
    (tmp_path / "file").write_text("")
    assert "is a file" in verdict(tmp_path / "file", None)


def test_a_folder_without_a_model_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "new"
    folder.mkdir()
    assert "config.json is missing" in verdict(folder, None)
    (folder / "config.json").write_text("{}")
    assert "neither model.safetensors nor" in verdict(folder, None)
    (folder / "pytorch_model.bin").write_bytes(b"x")
    assert "Save the model as safetensors" in verdict(folder, None)
    (folder / "model-00001-of-00002.safetensors").write_bytes(file_bytes({"a": ("F32", (2,))}))
    assert "still being written" in verdict(folder, None)
    (folder / "config.json").write_text("{")
    assert "config.json is not JSON" in verdict(folder, None)


def test_without_an_index_all_weights_files_are_checked(tmp_path: Path, own: Path) -> None:
    folder = write_model(tmp_path / "new")
    (folder / "extra.safetensors").write_bytes(file_bytes({"model.norm.weight": ("F32", (4,))}))
    assert "it is not defined which one is used" in verdict(folder, own)
    (folder / "extra.safetensors").rename(folder / "consolidated.safetensors")
    assert verdict(folder, own) == ""  # Mistral's second copy, which SGLang leaves out


def test_an_index_must_match_the_files(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "new", shards=2)
    index = json.loads((folder / INDEX).read_text())
    first, second = sorted(set(index["weight_map"].values()))

    def with_map(**changes: Any) -> str:
        (folder / INDEX).write_text(json.dumps({"weight_map": {**index["weight_map"], **changes}}))
        return verdict(folder, None)

    assert f"{first} does not contain tensor ghost" in with_map(ghost=first)
    assert "model-9.safetensors is missing" in with_map(ghost="model-9.safetensors")
    assert "not a safetensors file of this folder" in with_map(ghost="../x.safetensors")
    assert "no weight_map" in with_map(ghost=7)
    moved = next(name for name, file in index["weight_map"].items() if file == first)
    assert f"contains tensor {moved}, which" not in with_map(**{moved: second})  # reported as not held by the second
    del index["weight_map"][moved]
    assert f"{first} contains tensor {moved}, which" in with_map()


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"architectures": ["Qwen2ForCausalLM"]}, "architectures is ['Qwen2ForCausalLM'], the engine's model"),
        ({"model_type": "qwen2"}, "model_type is 'qwen2'"),
        ({"num_attention_heads": 4}, "num_attention_heads is 4"),
        ({"quantization_config": {"quant_method": "fp8"}}, "quantization_config is {'quant_method': 'fp8'}"),
    ],
)
def test_another_architecture_with_equal_shapes_is_refused(tmp_path: Path, own: Path, config: dict[str, Any], words: str) -> None:
    assert words in verdict(write_model(tmp_path / "new", **config), own)


COMMIT, OTHER = "1" * 40, "2" * 40


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A Hugging Face cache with two commits of a model: ``main``, and one with another architecture on branch ``pr/1``."""
    repository = tmp_path / "hub" / "models--org--model-7b"
    branches: list[tuple[str, str, dict[str, Any]]] = [("main", COMMIT, {}), ("pr/1", OTHER, {"architectures": ["Qwen2ForCausalLM"]})]
    for name, commit, config in branches:
        write_model(repository / "snapshots" / commit, **config)
        (repository / "refs" / name).parent.mkdir(parents=True, exist_ok=True)
        (repository / "refs" / name).write_text(commit)
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    return repository


@pytest.mark.parametrize(("revision", "fits"), [(None, True), (COMMIT, True), ("pr/1", False), (OTHER, False)])
def test_a_model_on_the_hub_is_compared_in_the_cache_of_its_revision(tmp_path: Path, hub: Path, revision: str | None, fits: bool) -> None:
    reply = check(str(write_model(tmp_path / "new")), EngineModel("org/model-7b", revision))
    if fits:
        assert (reply.refusal, reply.compared, reply.unchecked, reply.why_unchecked) == (None, True, [], "")
    else:
        assert f"the engine's model {hub / 'snapshots' / OTHER} has ['Qwen2ForCausalLM']" in message_of(reply)
    shapes = {**TENSORS, "model.norm.weight": ("F32", (8,))}
    assert "has shape [8], expected [4]" in message_of(check(str(write_model(tmp_path / "wide", shapes)), EngineModel("org/model-7b")))


@pytest.mark.parametrize(
    "variables",
    [{"HF_HUB_CACHE": "{}/hub"}, {"HUGGINGFACE_HUB_CACHE": "{}/hub"}, {"HF_HOME": "{}"}, {"XDG_CACHE_HOME": "{}/xdg"}, {}],
    ids=lambda variables: "+".join(variables) or "--download-dir",
)
def test_the_cache_is_found_as_huggingface_hub_finds_it(tmp_path: Path, hub: Path, variables: dict[str, str]) -> None:
    (tmp_path / "xdg").mkdir()
    (tmp_path / "xdg" / "huggingface").symlink_to(tmp_path)
    found = EngineModel("org/model-7b", download_dir=None if variables else str(tmp_path / "hub"))
    folder = hub_folder(found, {name: value.format(tmp_path) for name, value in variables.items()})
    assert folder is not None
    assert folder.resolve() == hub / "snapshots" / COMMIT


@pytest.mark.parametrize(
    "engine", [EngineModel("org/other"), EngineModel("../hub"), EngineModel("org/model-7b", "../../x"), EngineModel("s3://a/b")]
)
def test_a_model_outside_of_the_caches_is_not_found(hub: Path, engine: EngineModel) -> None:
    assert hub_folder(engine, os.environ) is None


def test_without_files_the_architecture_is_compared_with_the_one_that_the_engine_reports(tmp_path: Path) -> None:
    llama, qwen = write_model(tmp_path / "llama"), write_model(tmp_path / "qwen", architectures=["Qwen2ForCausalLM"])
    engine = EngineModel.reported("org/nowhere", {}, {"architectures": ["LlamaForCausalLM"], "model_type": "llama"})
    refused = check(str(qwen), engine)
    assert message_of(refused) == f"{qwen}/config.json: architectures is ['Qwen2ForCausalLM'], the engine reports ['LlamaForCausalLM']."
    reply = check(str(llama), engine)
    assert (reply.refusal, reply.compared, reply.unchecked) == (
        None,
        False,
        ["sizes and quantization", "names, types and shapes of tensors"],
    )
    assert reply.why_unchecked == "no Hugging Face cache that its pod can read holds the engine's model org/nowhere"
    unreadable = check(str(llama), EngineModel(str(tmp_path / "absent")))
    assert unreadable.unchecked[0] == "architecture"
    assert f"its pod cannot read the engine's model {tmp_path / 'absent'} (There is no" in unreadable.why_unchecked


@pytest.mark.parametrize(
    ("server_info", "model_info"),
    [
        ({}, {}),
        ({}, {"architectures": None}),
        ({"json_model_override_args": '{"architectures": ["Other"]}'}, {"architectures": ["Other"]}),
        ({}, {"architectures": ["DeepseekVL2ForCausalLM"]}),
    ],
    ids=["not reported", "null", "overridden on the command line", "renamed by SGLang"],
)
def test_an_unknown_architecture_of_the_engine_refuses_no_checkpoint(
    tmp_path: Path, server_info: dict[str, Any], model_info: dict[str, Any]
) -> None:
    reply = check(str(write_model(tmp_path / "new")), EngineModel.reported("org/nowhere", server_info, model_info))
    assert (reply.refusal, reply.unchecked[0]) == (None, "architecture")


def test_sizes_of_the_language_model_inside_a_larger_one_are_compared(tmp_path: Path) -> None:
    own = write_model(tmp_path / "own", text_config={"hidden_size": 4})
    assert "text_config.hidden_size is 8" in verdict(write_model(tmp_path / "new", text_config={"hidden_size": 8}), own)


def test_shapes_types_and_names_are_compared(tmp_path: Path, own: Path) -> None:
    changed = {**TENSORS, "model.norm.weight": ("F32", (8,)), "model.layers.0.mlp.weight": ("I8", (4, 4)), "new.weight": ("F32", (1,))}
    del changed["model.embed_tokens.weight"]
    reason = verdict(write_model(tmp_path / "new", changed), own)
    assert "tensor model.norm.weight has shape [8], expected [4]." in reason
    assert "tensor model.layers.0.mlp.weight is I8, expected F32" in reason
    assert "tensor new.weight is not in the engine's model" in reason
    assert "tensor model.embed_tokens.weight is missing; the engine would keep its old values." in reason


def test_a_checkpoint_may_omit_a_tied_head_but_no_untied_head(tmp_path: Path) -> None:
    without = {name: spec for name, spec in TENSORS.items() if name != "lm_head.weight"}
    for tied, fits in ((True, True), (False, False)):
        own = write_model(tmp_path / f"own-{tied}", tie_word_embeddings=tied)
        assert (verdict(write_model(tmp_path / f"new-{tied}", without, tie_word_embeddings=tied), own) == "") == fits


def test_requested_names_omit_a_tied_head(tmp_path: Path) -> None:
    for tied in (True, False):
        folder = write_model(tmp_path / str(tied), tie_word_embeddings=tied)
        names = check(str(folder), EngineModel(), names=True).names
        assert names is not None
        assert ("lm_head.weight" in names, "model.embed_tokens.weight" in names) == (not tied, True)
        assert check(str(folder), EngineModel()).names is None


def test_the_refusal_of_another_model_is_short(tmp_path: Path, own: Path) -> None:
    many = {f"layer.{number}": ("F32", (1,)) for number in range(500)}
    reason = verdict(write_model(tmp_path / "new", many), own)
    assert len(reason) < 5000
    assert reason.endswith("And 484 more problems.")


def test_the_digest_depends_on_the_content(tmp_path: Path, own: Path) -> None:
    one, same, other = (
        check(str(write_model(tmp_path / name, fill=fill)), model(own)).digest for name, fill in (("a", 1), ("b", 1), ("c", 2))
    )
    assert one == same != other


def test_files_that_the_agent_cannot_read_are_named(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "new")
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors").mkdir()
    assert "cannot be read here" in verdict("/" + "x" * 300, None)
    assert "cannot be read here" in verdict(folder, None)


async def test_a_volume_that_hangs_is_given_up_and_not_read_twice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    volume_answers, reads = threading.Event(), []

    def read(folder: Path, **options: Any) -> Model:
        reads.append(folder)
        volume_answers.wait()
        return read_model(folder, **options)

    monkeypatch.setattr(checkpoint, "read_model", read)
    checker, path = CheckpointCheck(), str(write_model(tmp_path / "new"))
    reply = await checker.run(CheckpointRequest(path=path, deadline=0.1), EngineModel())
    assert "was not read within 0.1 s" in message_of(reply)
    patient = CheckpointRequest(path=path, deadline=300)
    assert "still runs" in message_of(await checker.run(patient, EngineModel()))
    volume_answers.set()
    while "still runs" in message_of(reply := await checker.run(patient, EngineModel())):
        await asyncio.sleep(0.01)
    assert reply.refusal is None
    assert len(reads) == 2
