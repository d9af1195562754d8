"""The table of refused paths in the documentation and the code name the same paths."""

from __future__ import annotations

import re
from pathlib import Path

from sglang_rollout.sglang.api import ControlCall
from sglang_rollout.sglang.refused_paths import REASONS, find_refusal

HTTP_API_PAGE = Path(__file__).parents[4] / "docs/reference/http-api.md"
ONE_PROCESS_CALLS = {ControlCall.UPDATE_IPC.path, ControlCall.LOAD_ADAPTER_FROM_TENSORS.path}
"""In the same table of the page; the coordinator's routes refuse these."""


def documented_paths() -> list[str]:
    """Return the entries of the table's first column. ``…`` stands for any text."""
    table = HTTP_API_PAGE.read_text().split("refuses SGLang's other paths", 1)[1].split("\n\n", 2)[1]
    return [path for row in table.splitlines()[2:] for path in re.findall(r"`([^`]+)`", row.split("|")[1])]


def matches(entry: str, path: str) -> bool:
    """Return True if an entry of the table covers the path; ``/api/…`` covers ``/api`` itself too."""
    pattern = ".*".join(re.escape(part) for part in entry.removesuffix("/…").split("…"))
    return re.fullmatch(pattern, path) is not None


def test_every_refused_path_is_documented() -> None:
    entries = documented_paths()
    assert [path for path in REASONS if not any(matches(entry, path) for entry in entries)] == []


def test_every_documented_path_is_refused() -> None:
    refused = {*REASONS, *ONE_PROCESS_CALLS}
    assert [entry for entry in documented_paths() if not any(matches(entry, path) for path in refused)] == []


def test_a_path_below_a_refused_one_is_refused_and_a_longer_name_is_not() -> None:
    assert "Set the flag in engine.args" in (find_refusal("/hicache/storage-backend") or "")
    assert find_refusal("/hicaches") is None
