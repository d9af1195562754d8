"""The uploader of docs/reference/http-api.md: its reader needs nothing else to upload a version."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from e2e.engine import LabError, environment
from e2e.pages import read_blocks

from sglang_rollout.checkpoints.format import LENGTH_BYTES, header_length, parse_header
from tests.contract.support.trainer_dialects import fleet

pytestmark = [pytest.mark.engine, pytest.mark.router, pytest.mark.timeout(300)]

TEST = "test_the_uploader_of_the_page_brings_a_version_to_all_engines"
Tensors = dict[str, tuple[str, list[int], bytes]]


def read_tensors(file: Path) -> Tensors:
    """Return type, shape and bytes of each tensor of a safetensors file."""
    data = file.read_bytes()
    header = parse_header(data[LENGTH_BYTES : LENGTH_BYTES + header_length(data)])
    return {
        name: (entry.dtype, list(entry.shape), data[header.data_start + entry.start : header.data_start + entry.end])
        for name, entry in header.tensors.items()
    }


def test_the_uploader_of_the_page_brings_a_version_to_all_engines(tmp_path: Path) -> None:
    try:
        environment.python(make=False)
    except LabError as error:
        pytest.skip(str(error))
    (block,) = (block for block in read_blocks() if block.words.get("covered", "").endswith(f"::{TEST}"))
    page: dict[str, Any] = {}
    exec(compile(block.text, str(block), "exec"), page)
    with fleet("staged", tmp_path) as lab:
        scale = lab.others()[0]
        page["upload"](lab.url, read_tensors(tmp_path / str(scale) / "model.safetensors"), "7")
        lab.serving(2, 90)
        assert lab.everywhere() == [(lab.expected[scale], "7")] * 3
