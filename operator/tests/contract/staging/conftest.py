"""Fixtures of tests with Mooncake."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from sglang_rollout.staging.mooncake import MooncakeProcess
from tests.contract.support.staging_pods import SHARDS, Pod, has_mooncake, run_pod, use_stand_in_mooncake
from tests.support.staged import random_version, use_small_pieces


@pytest.fixture(autouse=True)
async def ended_processes(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[None]:
    """Wait until the processes of Mooncake have ended. A reader that is closed does not, and its event loop may end before they do."""
    start, started, loop = MooncakeProcess.start, list[MooncakeProcess](), asyncio.get_running_loop()

    async def note_start(host: str) -> MooncakeProcess:
        process = await start(host)
        started.extend([process] if asyncio.get_running_loop() is loop else [])
        return process

    monkeypatch.setattr(MooncakeProcess, "start", note_start)
    yield
    for process in started:
        await process.kill()


@pytest.fixture
def over_tcp(monkeypatch: pytest.MonkeyPatch) -> None:
    """Use small pieces, and TCP also on a machine with a device for RDMA."""
    use_small_pieces(monkeypatch)
    monkeypatch.setenv("MC_FORCE_TCP", "1")


@pytest.fixture
async def pods(tmp_path: Path) -> AsyncIterator[list[Pod]]:
    """A peer, and the store. Both share their memory."""
    async with AsyncExitStack() as stack:
        yield [await stack.enter_async_context(run_pod(tmp_path / name, mooncake=True)) for name in ("peer", "store")]


@pytest.fixture
def data() -> list[bytes]:
    """The bytes of a version."""
    return random_version(SHARDS)


@pytest.fixture
def faults(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Use the stand-in for the library. A file in the returned folder makes it fail."""
    folder = tmp_path / "faults"
    folder.mkdir()
    monkeypatch.setenv("MOONCAKE_FAULTS", str(folder))
    use_stand_in_mooncake(monkeypatch, tmp_path)
    return folder


@pytest.fixture(params=["stand-in", "library"])
def library(request: pytest.FixtureRequest) -> None:
    """Run the test with the stand-in, and with the library if it is installed."""
    if request.param == "stand-in":
        request.getfixturevalue("faults")
    elif not has_mooncake():
        pytest.skip("Mooncake Transfer Engine is not installed")
