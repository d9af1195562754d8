"""The hooks on objects like SGLang's: keys of requests, tensors at the load, and errors of the hooks themselves."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_rollout.plugin import cache_key, names, process, requests
from sglang_rollout.plugin.cache_key import key_request, key_waiting_requests, make_key, refuse_streaming_session
from sglang_rollout.plugin.settings import RUN_VARIABLE, SETTINGS_VARIABLE, dump_settings


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Settings of one engine, in a process whose hooks have run for no other."""
    monkeypatch.setenv(SETTINGS_VARIABLE, dump_settings(reports=str(tmp_path)))
    monkeypatch.setenv(RUN_VARIABLE, "boot-1")
    monkeypatch.setattr(cache_key._Scheduler, "writes", 0)
    monkeypatch.setattr(names._State, "found", names.Found())
    process.settings.cache_clear()
    process.run.cache_clear()
    yield tmp_path / "boot-1"
    process.settings.cache_clear()
    process.run.cache_clear()


@given(st.text(max_size=20), st.text(max_size=20), st.integers(0, 9), st.integers(0, 9))
def test_keys_separate_callers_and_writes(one: str, other: str, first: int, second: int) -> None:
    key = make_key("boot-1", first, one)
    assert (key == make_key("boot-1", second, other)) == (one == other and first == second)
    assert make_key("boot-1", second, key) == make_key("boot-1", second, one), "a key is replaced, not extended"


def test_a_caller_cannot_choose_the_key_of_a_version() -> None:
    assert make_key("boot-1", 2, "boot-1:7|x") == "boot-1:2|x"


def test_requests_that_wait_get_the_key_of_new_weights(folder: Path) -> None:
    waiting, running = SimpleNamespace(extra_key="team", kv=None), SimpleNamespace(extra_key=None, kv=SimpleNamespace(holds_kv=False))
    scheduler = SimpleNamespace(waiting_queue=[waiting], server_args=None)
    for req in (waiting, running):
        key_request(scheduler, req)
    running.kv.holds_kv = True
    scheduler.waiting_queue.append(running)
    key_waiting_requests(None, scheduler, None)
    assert (waiting.extra_key, running.extra_key) == ("boot-1:1|team", "boot-1:0|")


def test_a_streaming_session_is_refused(folder: Path) -> None:
    with pytest.raises(ValueError, match=r"^not_accepted: streaming sessions"):
        refuse_streaming_session(None, SimpleNamespace(streaming=True))
    refuse_streaming_session(None, SimpleNamespace(streaming=None))


def load(rows: list[tuple[str, Any]], *, draft: bool = False, reach: bool = True, read: int | None = None) -> names.Found:
    """Load a model as SGLang does: ``ModelRunner.load_model`` calls the loader, which gives the tensors to the model."""
    runner = SimpleNamespace(
        is_draft_worker=draft, load_config=SimpleNamespace(load_format="auto"), loader=object(), model=object(),
        ps=SimpleNamespace(dp_rank=None, pp_rank=0, tp_rank=1),
        model_config=SimpleNamespace(hf_text_config=SimpleNamespace(tie_word_embeddings=True)),
    )  # fmt: skip
    taken: list[Any] = []

    def load_weights(model: Any, weights: Iterable[Any], device: str) -> None:
        iterator = iter(weights)
        taken.extend(iterator if read is None else [next(iterator) for _ in range(read)])

    def load_model(_: Any) -> None:
        if reach:
            names.watch_weights(load_weights, "model", iter(rows), "cpu")

    names.watch_load(load_model, runner)
    assert not reach or taken == rows[:read]
    return names.find_names()


def tensor(*shape: int) -> Any:
    return SimpleNamespace(shape=shape, dtype="torch.bfloat16")


def test_the_first_load_of_the_main_model_is_recorded(folder: Path) -> None:
    assert load([("draft", tensor(1))], draft=True).file == ""
    found = load([("a", tensor(2, 3)), ("b", tensor())])
    assert (found.seen, found.file, found.unchecked) == (True, "names-0-0-1.json", "")
    content = (folder / "names-0-0-1.json").read_text()
    assert '"tensors":[["a",[2,3],"bfloat16"],["b",[],"bfloat16"]]' in content
    assert '"tied":true' in content
    assert load([("later", tensor(1))]) == found
    assert (folder / "names-0-0-1.json").read_text() == content


def test_a_loader_without_the_hook_is_named(folder: Path) -> None:
    found = load([], reach=False)
    assert (found.seen, found.file) == (True, "")
    assert found.unchecked == "the load format auto reads the checkpoint with object, which does not show its tensors"


def test_a_checkpoint_that_was_not_read_to_its_end_is_no_list(folder: Path) -> None:
    assert load([("a", tensor(1)), ("b", tensor(1))], read=1).file == ""


def test_a_failed_report_does_not_fail_the_load(folder: Path) -> None:
    folder.write_text("no folder")
    found = load([("a", tensor(1))])
    assert (found.seen, found.file, found.unchecked) == (True, "", "the list of tensors could not be written")


def test_sampling_parameters_are_those_of_the_class_without_what_sglang_sets_itself() -> None:
    class SamplingParams:
        def __init__(self, *, max_new_tokens: int = 128, watermark: object = None, stop_strs: object = None) -> None: ...

    class Anything:
        def __init__(self, **fields: object) -> None: ...

    def listed(kind: object) -> tuple[str, ...]:
        return requests.list_sampling_params(SimpleNamespace(sampling_params_class=kind))

    assert listed(SamplingParams) == ("max_new_tokens", "watermark")
    assert (listed(Anything), listed(5), requests.list_sampling_params(SimpleNamespace())) == ((), (), ())


def test_a_hook_that_fails_refuses_the_request(folder: Path) -> None:
    with pytest.raises(ValueError, match=r"^unreadable_body: the check of this request failed"):
        requests.check_request(SimpleNamespace(), SimpleNamespace())
