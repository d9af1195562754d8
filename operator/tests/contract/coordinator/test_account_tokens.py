"""Tokens of ServiceAccounts at the coordinator's port, with keys of a simulated API server."""

from __future__ import annotations

import json
import logging
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from sglang_rollout.coordinator import main
from sglang_rollout.coordinator.callers.check import CallerCheck
from sglang_rollout.wire.access import CALLER_HEADER
from tests.contract.support.coordinator_process import Lab, fleet_lab
from tests.support.account_tokens import ApiServer, make_claims, make_key, sign
from tests.support.pods import fill, make_pod

KEY = make_key("ec")
THROUGH_FORWARD = "127.0.0.1"


@pytest.fixture
async def lab(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Lab]:
    """Run a coordinator that sees one trainer's pod, as in a cluster."""
    checks: list[CallerCheck] = []

    def make_check(**given: Any) -> CallerCheck:
        checks.append(CallerCheck(**given))
        return checks[-1]

    monkeypatch.setattr(main, "CallerCheck", make_check)
    async with fleet_lab(tmp_path) as lab:
        (check,) = checks
        check.in_cluster, check.keys = True, ApiServer([KEY]).signing_keys()
        fill(check.pods, [make_pod(namespace="default")])
        yield lab


async def pause(lab: Lab, token: str | None) -> tuple[int, str]:
    headers = {CALLER_HEADER: THROUGH_FORWARD} | ({"Authorization": f"Bearer {token}"} if token else {})
    async with lab.session.post(f"{lab.url}/pause_generation", json={}, headers=headers) as reply:
        return reply.status, (await reply.json())["message"]


def make_token(**claims: Any) -> str:
    given: dict[str, Any] = {"pod": "default-train-0", "account": "default:trainer", "audience": "rollout.sglang.io/default/demo"} | claims
    return sign(KEY, make_claims(**given))


async def test_a_token_names_the_trainer_in_the_audit_line(lab: Lab, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "sglang_rollout.audit")
    assert (await pause(lab, make_token()))[0] == 200
    (line,) = (json.loads(each.getMessage()) for each in caplog.records if each.name == "sglang_rollout.audit")
    assert (line["caller"], line["serviceAccount"]) == ("default/Job/train", "trainer")
    assert make_token() not in caplog.text


@pytest.mark.parametrize(
    ("token", "words"),
    [
        (None, "The call comes from the router's own pod"),
        (make_token(audience="rollout.sglang.io/default/other"), "its audience is not rollout.sglang.io/default/demo"),
        (make_token(exp=1), "it has expired"),
        (make_token(pod="gone"), "its pod is not known or has ended"),
        (make_token(pod="default-train-0", account="default:admin"), "its pod is not known or has ended"),
        ("a.b.c", "it is no JSON Web Token"),
    ],
    ids=["none", "audience", "expired", "unknown-pod", "other-account", "no-token"],
)
async def test_other_tokens_are_refused_with_the_reason(lab: Lab, token: str | None, words: str) -> None:
    status, message = await pause(lab, token)
    assert status == 401
    assert words in message
    assert "Allowed: callers with a token" in message
    assert not any(agent.bodies_of("/pause_generation") for agent in lab.agents)
