"""The NCCL that an engine's container reports."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from sglang_rollout.agent.engine import read_nccl


@pytest.mark.parametrize(
    ("text", "info", "version", "cumem"),
    [
        ("version=2.28.3\n", {"nnodes": 1}, "2.28.3", "0"),
        ("version=2.28.3\nNCCL_CUMEM_ENABLE=1\n", {"nnodes": 1}, "2.28.3", "1"),
        ("version=2.28.3\nNCCL_CUMEM_ENABLE=0\n", {"enable_symm_mem": True}, "2.28.3", "1"),
        ("version=2.28.3\n", {"nnodes": 2}, "2.28.3", None),  # SGLang asks the hardware
        ("version=\n", {}, None, "0"),
        ("Traceback (most recent call last)\n", {}, None, "0"),
    ],
)
def test_the_variable_that_sglang_adds_is_included(
    tmp_path: Path, text: str, info: dict[str, Any], version: str | None, cumem: str | None
) -> None:
    file = tmp_path / "nccl"
    file.write_text(text)
    found = read_nccl(file, info)
    assert found is not None
    assert (found.version, found.settings.get("NCCL_CUMEM_ENABLE")) == (version, cumem)


def test_settings_keep_their_complete_values(tmp_path: Path) -> None:
    file = tmp_path / "nccl"
    file.write_text("version=2.28.3\nNCCL_IB_HCA=mlx5_0=1\nPATH=/bin\n")
    found = read_nccl(file, {})
    assert found is not None
    assert found.settings == {"NCCL_IB_HCA": "mlx5_0=1", "NCCL_CUMEM_ENABLE": "0"}


def test_without_a_file_nccl_is_not_known(tmp_path: Path) -> None:
    assert read_nccl(tmp_path / "nccl", {}) is None
