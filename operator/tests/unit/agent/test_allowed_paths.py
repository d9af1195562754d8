"""``security.paths`` in an engine's pod: symbolic links, absent folders, and adapters."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from sglang_rollout.agent.checkpoint import CheckpointCheck
from sglang_rollout.agent.engine_model import EngineModel
from sglang_rollout.checkpoints.allowed import is_allowed, is_below
from sglang_rollout.checkpoints.format import build_header
from sglang_rollout.wire.agent import CheckpointReply, CheckpointRequest
from sglang_rollout.wire.reasons import RefusalCode


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """The only allowed folder, beside a secret one."""
    (tmp_path / "secret").mkdir()
    (tmp_path / "secret" / "adapter_config.json").write_text("{}")
    (tmp_path / "root").mkdir()
    return tmp_path / "root"


def write_adapter(folder: Path) -> Path:
    folder.mkdir()
    (folder / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA"}))
    (folder / "adapter_model.safetensors").write_bytes(build_header([("a.lora_A.weight", "F32", (1,))]) + bytes(4))
    return folder


async def check(path: Path | str, root: Path) -> CheckpointReply:
    return await CheckpointCheck().run(CheckpointRequest(path=str(path), adapter=True, allowed=[str(root)]), EngineModel())


@pytest.mark.parametrize(
    ("path", "below"),
    [("/a/b", True), ("/a", True), ("/a/b/../c", True), ("/ab", False), ("/a/../b", False), ("a/b", False), ("", False), ("/", False)],
)
def test_paths_are_compared_by_their_elements(path: str, below: bool) -> None:
    assert is_below(path, ["/a"]) is below


def test_links_inside_are_followed_and_links_that_leave_are_refused(root: Path) -> None:
    folder = write_adapter(root / "step-1")
    (root / "latest").symlink_to("step-1")
    assert is_allowed(str(root / "latest"), [str(root)])
    (root / "out").symlink_to("../secret")
    (root / "loop").symlink_to("loop")
    assert not any(is_allowed(str(root / name), [str(root)]) for name in ("out", "loop", "absent", "out/../step-1/../../secret"))
    (folder / "more.safetensors").symlink_to("../../secret/adapter_config.json")
    assert not is_allowed(str(folder), [str(root)])


def test_a_folder_that_is_itself_a_link_is_a_root(root: Path) -> None:
    write_adapter(root / "step-1")
    alias = root.parent / "alias"
    alias.symlink_to(root)
    assert is_allowed(str(alias / "step-1"), [str(alias)])


async def test_an_adapter_is_checked_like_a_checkpoint(root: Path) -> None:
    folder = write_adapter(root / "step-1")
    reply = await check(folder, root)
    assert reply.refusal is None
    assert reply.digest is not None
    weights = folder / "adapter_model.safetensors"
    os.truncate(weights, weights.stat().st_size - 1)
    truncated = (await check(folder, root)).refusal
    assert truncated is not None
    assert "it is truncated" in truncated.message
    weights.unlink()
    without = (await check(folder, root)).refusal
    assert without is not None
    assert "Save the adapter as safetensors" in without.message


async def test_absent_and_forbidden_folders_get_the_same_refusal(root: Path) -> None:
    (root / "out").symlink_to("../secret")
    texts = set()
    for path in (root / "absent", root / "out", root.parent / "secret", root.parent / "nothing"):
        refusal = (await check(path, root)).refusal
        assert refusal is not None
        assert refusal.code is RefusalCode.FORBIDDEN
        texts.add(refusal.message.replace(str(path), "PATH"))
    assert len(texts) == 1
