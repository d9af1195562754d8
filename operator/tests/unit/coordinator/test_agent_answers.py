"""Answers of agents that accept or refuse with HTTP 200."""

from __future__ import annotations

import pytest

from sglang_rollout.coordinator.agent_replies import parse_result
from sglang_rollout.wire.agent import CheckpointReply, PreflightReply
from sglang_rollout.wire.ports import AGENT_CHECKPOINT, AGENT_PREFLIGHT
from sglang_rollout.wire.reasons import Refusal, RefusalCode


@pytest.mark.parametrize(("path", "model"), [(AGENT_CHECKPOINT, CheckpointReply), (AGENT_PREFLIGHT, PreflightReply)])
def test_a_refusal_with_status_200_is_a_failed_call(path: str, model: type[CheckpointReply] | type[PreflightReply]) -> None:
    refused = parse_result(path, 200, model(refusal=Refusal(RefusalCode.INVALID_REQUEST, "It is truncated.")).model_dump(mode="json"))
    assert (refused.ok, refused.message) == (False, "It is truncated.")
    assert not parse_result(path, 200, {"ok": True}).ok, "an answer without the field is no consent"
    assert parse_result(path, 200, model(refusal=None).model_dump()).ok
