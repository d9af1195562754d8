"""An SGLang that will refuse every update of the weights reports it at its start, with SGLang's own reason."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from e2e.engine import environment

from tests.contract.support.plugin_engines import plugin_environment, start_plugin_engine

pytestmark = [pytest.mark.engine, pytest.mark.timeout(300)]

WHY = "Online weight updates are not supported while kernels hold copies of the weights. Restart with COPIES=0."
CODE = f"""\
from sglang.srt.plugins.hook_registry import HookRegistry, HookType


def declare(result, runner, *args, **kwargs):
    runner.model._derived_weight_cache_error = {WHY!r}  # as SGLang's own layers declare it


def register():
    HookRegistry.register("sglang.srt.model_executor.model_runner.ModelRunner.load_model", declare, HookType.AFTER)
"""


def install_declaration(folder: Path) -> Path:
    """Write another plug-in, whose models declare that they keep data derived from their weights, as models on GPUs do."""
    (folder / "declares_copies-1.dist-info").mkdir(parents=True)
    (folder / "declares_copies.py").write_text(CODE)
    (folder / "declares_copies-1.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: declares_copies\nVersion: 1\n")
    (folder / "declares_copies-1.dist-info" / "entry_points.txt").write_text(
        "[sglang.srt.plugins]\ndeclares_copies = declares_copies:register\n"
    )
    return folder


def test_updates_that_sglang_will_refuse_are_reported_at_the_start(engine_environment: None, tmp_path: Path) -> None:
    path = [str(install_declaration(tmp_path / "other")), plugin_environment(tmp_path)["PYTHONPATH"]]
    with start_plugin_engine(tmp_path, env={"PYTHONPATH": os.pathsep.join(path)}) as engine:
        assert engine.wait_for_proof(1).updates_refused == WHY
        status, answer = engine.post("/update_weights_from_disk", {"model_path": str(environment.model())})
        assert (status, answer["message"]) == (400, WHY), "what it reports is what SGLang then answers"


@pytest.mark.parametrize("old", [False, True])
def test_an_engine_that_takes_updates_reports_nothing(engine_environment: None, tmp_path: Path, old: bool) -> None:
    with start_plugin_engine(tmp_path, old=old) as engine:
        assert engine.wait_for_proof(1).updates_refused == ""
        status, answer = engine.post("/update_weights_from_disk", {"model_path": str(environment.model())})
        assert (status, answer["success"]) == (200, True)
