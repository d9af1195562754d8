"""A batch server that checks callers, with the coordinator that decides about them.

Without Kubernetes, programs of this machine need no token, and others do.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from sglang_rollout.api.security_spec import Security
from sglang_rollout.sglang.api import DATA_PATHS
from sglang_rollout.wire.access import CALLER_HEADER
from tests.contract.batches.test_batches import Script
from tests.contract.support.coordinator_process import Lab, fleet_lab

HERE, ELSEWHERE = {CALLER_HEADER: "127.0.0.1"}, {CALLER_HEADER: "192.0.2.7"}


@pytest.fixture
async def lab(tmp_path: Path) -> AsyncIterator[Lab]:
    async with fleet_lab(tmp_path) as made:
        made.smg.answer_tokens = Script()
        await made.end_batches()
        await made.start_batches(check_data_callers=True)
        made.security = Security.model_validate({"generate": "Token"})
        made.write_intent()

        async def is_restricted() -> bool:
            return (await ask(made, "/generate", ELSEWHERE))[0] == 401

        await made.until("the coordinator has read the spec", is_restricted)
        made.smg.answer_tokens.seen.clear()
        yield made


async def ask(lab: Lab, path: str, headers: dict[str, str]) -> tuple[int, dict[str, object], str]:
    async with lab.session.post(lab.url_of(path), json={"text": ["a", "b"]}, headers=headers) as reply:
        return reply.status, await reply.json(), reply.headers.get("Retry-After", "")


async def test_a_caller_that_is_not_allowed_reaches_no_data_path(lab: Lab) -> None:
    for path in DATA_PATHS:
        for headers in (ELSEWHERE, {}):
            status, body, _ = await ask(lab, path, headers)
            assert status in (401, 403), path
            assert path in str(body["error"])
    assert isinstance(lab.smg.answer_tokens, Script)
    assert lab.smg.answer_tokens.seen == []


async def test_an_allowed_caller_generates(lab: Lab) -> None:
    status, answers, _ = await ask(lab, "/generate", HERE)
    assert (status, len(answers)) == (200, 2)


async def test_without_a_coordinator_no_caller_is_allowed(lab: Lab) -> None:
    await lab.kill()
    status, _, retry = await ask(lab, "/generate", HERE)
    assert (status, retry) == (503, "1")
