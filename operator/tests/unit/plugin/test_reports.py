"""Reports of the plug-in: what agents conclude from them, and what they do not believe."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_rollout.plugin.reports import (
    CACHE_KEY,
    NAMES,
    REQUESTS_FILE,
    NamesReport,
    Reports,
    RequestsReport,
    Tensor,
    names_file,
    process_label,
    read_reports,
    scheduler_file,
    write_report,
)

RUN = "run-1"
REQUESTS = {"release": "0.5.23", "pid": 12, "port": 30001, "seed": 123}
TENSORS = [["model.a", [2, 3], "bfloat16"], ["model.b", [], "float32"]]


def scheduler(tp: int = 0, *, dp: int = 0, pp: int = 0, **fields: Any) -> dict[str, Any]:
    label = process_label(dp, pp, tp)
    return {
        **REQUESTS, "rank": tp, "dp": dp, "pp": pp, "tp": tp, "hooks": [CACHE_KEY, NAMES], "names": names_file(label), "unchecked": ""
    } | fields  # fmt: skip


def names(tensors: Any = TENSORS, **fields: Any) -> dict[str, Any]:
    return {"load_format": "auto", "model": "LlamaForCausalLM", "tensors": tensors, "complete": True} | fields


def write(folder: Path, **reports: Any) -> Reports:
    """Write reports as the plug-in does, and read them as an agent does. Keys: ``requests``, ``s_<dp>_<pp>_<tp>``, ``n_<dp>_<pp>_<tp>``."""
    for key, content in reports.items():
        kind, _, label = key.partition("_")
        files = {"requests": REQUESTS_FILE, "s": scheduler_file(label.replace("_", "-")), "n": names_file(label.replace("_", "-"))}
        write_report(str(folder / RUN), files[kind], content)
    return read_reports(folder, RUN)


def test_a_complete_proof(tmp_path: Path) -> None:
    found = write(tmp_path, requests=REQUESTS, s_0_0_0=scheduler(), s_0_0_1=scheduler(1), n_0_0_0=names(), n_0_0_1=names())
    assert found.missing(2) is None
    assert found.requests == RequestsReport("0.5.23", 12, 30001, 123)
    assert [one.tp for one in found.schedulers] == [0, 1]
    assert found.names() == NamesReport((Tensor("model.a", (2, 3), "bfloat16"), Tensor("model.b", (), "float32")))


def test_parts_that_are_missing_are_named(tmp_path: Path) -> None:
    assert str(read_reports(tmp_path, RUN).missing(1)).startswith("The plug-in has not seen a request in the process that answers")
    found = write(tmp_path, s_0_0_0=scheduler())
    assert found.missing(1, requests=False) is None
    assert str(found.missing(1)).startswith("The plug-in has not seen")
    assert found.missing(4, requests=False) == "The plug-in has seen a request in 1 of 4 schedulers."
    found = write(tmp_path, requests=REQUESTS, s_0_0_0=scheduler(hooks=[NAMES]))
    missing = "The scheduler 0-0-0 of SGLang 0.5.23 sets no cache key of the version, which engine.prefixCache: PerVersion needs."
    assert found.missing(1) == missing
    assert found.missing(1, cache_key=False) is None


def test_the_reason_of_any_scheduler_says_that_updates_are_refused(tmp_path: Path) -> None:
    assert write(tmp_path, s_0_0_0=scheduler()).updates_refused == ""
    assert write(tmp_path, s_0_0_1=scheduler(1, updates_refused="splits are active.")).updates_refused == "splits are active."
    assert write(tmp_path, s_0_0_1=scheduler(1, updates_refused="a\nb")).problems != ()


def test_sampling_parameters_are_those_that_the_process_of_requests_lists(tmp_path: Path) -> None:
    assert write(tmp_path, s_0_0_0=scheduler()).sampling_params == ()
    assert write(tmp_path, requests=REQUESTS).sampling_params == (), "a plug-in of an earlier release lists none"
    assert write(tmp_path, requests={**REQUESTS, "sampling_params": ["n", "top_k"]}).sampling_params == ("n", "top_k")
    for wrong in ("n", [5], ["a\nb"], ["x" * 2000], ["n"] * 2000):
        assert write(tmp_path, requests={**REQUESTS, "sampling_params": wrong}).problems != ()


def test_reports_of_another_run_prove_nothing(tmp_path: Path) -> None:
    assert write(tmp_path, requests=REQUESTS, s_0_0_0=scheduler()).missing(1) is None
    assert read_reports(tmp_path, "run-2").missing(1) is not None


def test_tensors_of_all_ranks_are_united(tmp_path: Path) -> None:
    stages = [scheduler(pp=stage) for stage in range(2)]
    found = write(tmp_path, s_0_0_0=stages[0], s_0_1_0=stages[1], n_0_0_0=names(TENSORS[:1]), n_0_1_0=names(TENSORS[1:]))
    assert [tensor.name for tensor in found.names().tensors] == ["model.a", "model.b"]


@pytest.mark.parametrize(
    ("rows", "reason"),
    [
        (scheduler(names=None, unchecked="the load format dummy reads no checkpoint"), "the load format dummy reads no checkpoint"),
        (scheduler(names=None), "the plug-in did not see the load of the model"),
        (scheduler(names="names-9-9-9.json"), "names-9-9-9.json cannot be read (FileNotFoundError)"),
    ],
)
def test_names_that_are_unknown_have_a_reason(tmp_path: Path, rows: dict[str, Any], reason: str) -> None:
    assert write(tmp_path, s_0_0_0=rows, s_0_0_1=scheduler(1), n_0_0_1=names()).names() == NamesReport(unchecked=reason)


@pytest.mark.parametrize(
    "content",
    [
        names(complete=False),
        names([["a", [1]]]),
        names([["a", [-1], "float32"]]),
        names([["a", [True], "float32"]]),
        names([["a", "1", "float32"]]),
        names([[5, [1], "float32"]]),
        names([["a" * 2000, [1], "float32"]]),
        names({"a": 1}),
    ],
)
def test_a_wrong_list_of_tensors_is_no_list(tmp_path: Path, content: dict[str, Any]) -> None:
    found = write(tmp_path, s_0_0_0=scheduler(), n_0_0_0=content).names()
    assert not found.tensors
    assert found.unchecked


def test_no_schedulers_mean_no_names(tmp_path: Path) -> None:
    assert read_reports(tmp_path, RUN).names().unchecked == "no scheduler reported its tensors"


@pytest.mark.parametrize(
    "text", ["", "{", "[]", "5", "[" * 100_000, '{"release": 5}', json.dumps(REQUESTS | {"pid": 1e9}), " " * 100_000, "\x00", "{}"]
)
def test_a_wrong_report_is_a_problem_and_no_proof(tmp_path: Path, text: str) -> None:
    write(tmp_path, requests=REQUESTS, s_0_0_0=scheduler())
    (tmp_path / RUN / REQUESTS_FILE).write_text(text)
    found = read_reports(tmp_path, RUN)
    assert found.requests is None
    assert str(found.missing(1)).startswith("A report of the plug-in cannot be used: ")


@pytest.mark.parametrize("names_of", ["../secret.json", "names-/../../secret", "/etc/passwd", "requests.json", "x" * 5000])
def test_a_report_names_only_files_of_its_folder(tmp_path: Path, names_of: str) -> None:
    (tmp_path / "secret.json").write_text(json.dumps(names()))
    found = write(tmp_path, requests=REQUESTS, s_0_0_0=scheduler(names=names_of))
    assert found.schedulers == ()
    assert found.missing(1) is not None


def test_links_and_pipes_are_not_read(tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere.json"
    elsewhere.write_text(json.dumps(REQUESTS))
    folder = tmp_path / RUN
    folder.mkdir()
    (folder / REQUESTS_FILE).symlink_to(elsewhere)
    assert read_reports(tmp_path, RUN).requests is None
    (folder / REQUESTS_FILE).unlink()
    os.mkfifo(folder / REQUESTS_FILE)
    assert read_reports(tmp_path, RUN).requests is None
    folder.rename(tmp_path / "other")
    folder.symlink_to(tmp_path / "other")
    assert read_reports(tmp_path, RUN) == Reports(folder=folder)


def test_a_file_that_grows_without_end_is_read_to_a_limit(tmp_path: Path) -> None:
    write(tmp_path, requests=REQUESTS)
    with (tmp_path / RUN / REQUESTS_FILE).open("r+b") as file:
        file.truncate(2**40)  # sparse
    assert str(read_reports(tmp_path, RUN).missing(1)) == "A report of the plug-in cannot be used: requests.json has more than 65536 bytes."


KEYS = st.sampled_from(sorted(scheduler())) | st.text(max_size=5)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=10),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(KEYS, inner, max_size=4),
    max_leaves=20,
)


@given(st.dictionaries(st.sampled_from(sorted(scheduler())), JSON), st.dictionaries(st.sampled_from(sorted(names())), JSON))
def test_no_report_makes_an_agent_fail(tmp_path_factory: pytest.TempPathFactory, report: dict[str, Any], listed: dict[str, Any]) -> None:
    found = write(tmp_path_factory.mktemp("any"), requests=report, s_0_0_0=scheduler() | report, n_0_0_0=names() | listed)
    assert found.missing(1) is None or isinstance(found.missing(1), str)
    assert isinstance(found.names(), NamesReport)
