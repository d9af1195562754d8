"""New credentials reach the processes at different times, while control calls run. Each engine accepts only its own."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from operator import methodcaller
from pathlib import Path

import pytest

from sglang_rollout.credentials import Credentials
from tests.contract.support.agent_pod import TOKEN, Answer
from tests.contract.support.complete_fleet import complete_fleet
from tests.contract.support.stub_engine import stub_engine

pytestmark = pytest.mark.router

STEPS = [[TOKEN, "second"], ["second", TOKEN], ["second"]]
"""Lines of the rollout's key: add the new one, send its credentials, drop the old one."""


def replace(file: Path, credentials: Credentials) -> None:
    """Replace the file at once, as the kubelet does."""
    new = file.with_suffix(".new")
    new.write_text("\n".join(credentials.lines()))
    os.replace(new, file)


@pytest.mark.parametrize("coordinator_first", [True, False])
async def test_a_rotation_fails_no_call(tmp_path: Path, coordinator_first: bool) -> None:
    async with stub_engine() as one, stub_engine() as other, complete_fleet(tmp_path, [one.url, other.url]) as fleet:
        answers: list[Answer] = []

        async def call() -> None:
            while True:
                answers.append(await fleet.ask("POST", "/flush_cache", {}))

        callers = [asyncio.create_task(call()) for _ in range(4)]
        files: list[tuple[Path, Callable[[Credentials], Credentials]]] = [(tmp_path / "token", lambda key: key)]
        files += [(pod.folder / "token", methodcaller("derive", pod.name)) for pod in fleet.pods]
        for step in STEPS:
            for file, derive in files if coordinator_first else reversed(files):
                replace(file, derive(Credentials(*step)))
                wanted = len(answers) + 8
                while len(answers) < wanted:
                    await asyncio.sleep(0.01)
        for caller in callers:
            caller.cancel()
        await asyncio.gather(*callers, return_exceptions=True)
        assert [answer for answer in answers if answer.status != 200] == []
        assert len(answers) >= 8 * len(STEPS) * len(files)
        ended = Credentials(TOKEN).derive("e0").sent
        assert (await fleet.pods[0].control("/flush_cache", {}, token=ended)).status == 403, "the old credential has ended"


async def test_an_agent_takes_only_the_credential_of_its_engine(tmp_path: Path) -> None:
    async with stub_engine() as one, stub_engine() as other, complete_fleet(tmp_path, [one.url, other.url]) as fleet:
        for pod, stranger in (fleet.pods, reversed(fleet.pods)):
            assert (await pod.control("/flush_cache", {}, term=0)).status == 409, "only the term is refused"
            assert (await pod.control("/flush_cache", {}, term=0, token=stranger.token)).status == 403
            assert (await pod.control("/flush_cache", {}, term=0, token=TOKEN)).status == 403, "the rollout's key"
