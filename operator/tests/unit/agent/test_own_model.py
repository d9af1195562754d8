"""Where an agent takes the tensors of its engine's model from: the plug-in's list, or else the model's files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from sglang_rollout.agent.engine import Engine
from sglang_rollout.agent.own_model import OwnModel
from sglang_rollout.agent.plugin_reports import PluginReports
from sglang_rollout.plugin.reports import CACHE_KEY, NAMES, REQUESTS_FILE, names_file, scheduler_file, write_report
from sglang_rollout.wire.agent import CheckpointRequest

INFO = {"port": 30001, "random_seed": 7, "load_format": "auto"}
COMMON = {"release": "0.5.23", "pid": 1, "port": 30001, "seed": 7}
ROWS = [["a.weight", [4, 2], "bfloat16"], ["lm_head.weight", [4, 2], "bfloat16"], ["q.qweight", [4, 1], "int32"]]


def report(folder: Path, run: str, rows: list[list[Any]] | None, *, unchecked: str = "", tied: bool = True, tp: int = 0) -> None:
    """Write the reports of one scheduler, as the plug-in does."""
    label, runs = f"0-0-{tp}", str(folder / run)
    if rows is not None:
        write_report(runs, names_file(label), {"load_format": "auto", "model": "M", "tensors": rows, "complete": True, "tied": tied})
    place = {"rank": tp, "dp": 0, "pp": 0, "tp": tp, "hooks": [CACHE_KEY, NAMES]}
    write_report(runs, scheduler_file(label), {**COMMON, **place, "names": names_file(label) if rows else None, "unchecked": unchecked})
    write_report(runs, REQUESTS_FILE, COMMON)


async def ask(folder: Path, *, path: str | None = None, **info: Any) -> Any:
    async with Engine("http://127.0.0.1:1") as engine:
        engine.info = {**INFO, **info}
        own = OwnModel(engine, path, PluginReports(folder))
        return await own.read(CheckpointRequest(path="")), await own.read_shapes()


async def test_the_list_of_the_plug_in_is_taken_without_any_file_of_the_model(tmp_path: Path) -> None:
    report(tmp_path, "one", ROWS)
    reply, shapes = await ask(tmp_path, path="/nowhere")
    assert reply.shapes == {"a.weight": [4, 2], "lm_head.weight": [4, 2], "q.qweight": None}, "an integer may hold several weights"
    assert shapes == reply.shapes
    assert reply.names == ["a.weight", "q.qweight"], "a push need not have a tied output layer"
    assert reply.compared
    assert not reply.is_random


async def test_lists_of_several_ranks_are_united(tmp_path: Path) -> None:
    report(tmp_path, "one", ROWS[:1])
    report(tmp_path, "one", ROWS[2:], tied=False, tp=1)
    reply, _ = await ask(tmp_path)
    assert sorted(reply.shapes) == ["a.weight", "q.qweight"]


async def test_a_loader_without_the_hook_is_named(tmp_path: Path) -> None:
    report(tmp_path, "one", None, unchecked="the load format dummy reads no checkpoint")
    reply, shapes = await ask(tmp_path, path="/nowhere", load_format="dummy")
    assert reply.shapes is shapes is None
    assert "the load format dummy reads no checkpoint" in reply.why_unchecked
    assert "cannot read the engine's model /nowhere" in reply.why_unchecked, "why the files do not serve instead"
    assert reply.is_random, "an engine whose weights are random needs the whole list"


@pytest.mark.parametrize("other", [{"port": 30002}, {"seed": 8}], ids=["another engine", "an earlier start"])
async def test_the_list_of_another_engine_process_is_ignored(tmp_path: Path, other: dict[str, int]) -> None:
    report(tmp_path, "one", ROWS)
    write_report(str(tmp_path / "one"), REQUESTS_FILE, {**COMMON, **other})
    reply, _ = await ask(tmp_path, path="/nowhere")
    assert reply.shapes is None
