"""The client of one SGLang server: success of replies, and secrets in ``/server_info``."""

from __future__ import annotations

import pytest

from sglang_rollout.sglang.api import PAUSE_MODES
from sglang_rollout.sglang.client import Reply, redact_secrets


@pytest.mark.parametrize(
    ("reply", "ok"),
    [
        (Reply.json(200, {"success": True}), True),
        (Reply.json(200, {"success": False, "message": "no"}), False),
        (Reply.json(200, None), True),
        (Reply(200, b"Cache flushed.", "text/plain"), True),
        (Reply.json(400, {"success": True}), False),
    ],
)
def test_a_reply_is_ok_by_status_and_by_its_success_field(reply: Reply, ok: bool) -> None:
    assert reply.ok is ok


def test_keys_are_hidden_wherever_they_occur() -> None:
    info = {"api_key": "key-1", "launch_command": "sglang --api-key key-1 --admin-api-key=key-2", "args": ["key-2", {"note": "key-1"}]}
    shown = str(redact_secrets({**info, "admin_api_key": None}))
    assert "key-" not in shown.replace("api-key", "")
    assert "sglang --api-key (hidden)" in shown


def test_pause_modes_are_spelled_as_sglang_spells_them() -> None:
    assert PAUSE_MODES == ("retract", "abort", "in_place")
