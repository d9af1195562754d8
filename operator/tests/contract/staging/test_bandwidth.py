"""Limits of what a pod sends and receives, with copies over HTTP."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from sglang_rollout.staging.bandwidth import Bandwidth
from sglang_rollout.staging.index import StagedError, StagedFault
from tests.contract.support.staging_pods import pull_into, run_pod, stage_request, until
from tests.support.staged import open_copy, random_version, read_data, shard

SIZE = 3_000_000
SHARDS = [shard(SIZE)]
HOUR = 3600.0


class Allowance(Bandwidth):
    """Lets so many bytes move at once, and all others in an hour."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.left = count
        self.transfers = 0

    @contextmanager
    def transfer(self) -> Iterator[None]:
        self.transfers += 1
        try:
            yield
        finally:
            self.transfers -= 1

    def take_part(self, most: int) -> tuple[int, float]:
        part = min(most, 100_000, self.left) or most
        wait = 0.0 if self.left else HOUR
        self.left -= min(part, self.left)
        return part, wait


async def test_a_pod_receives_what_its_limit_allows_and_a_cancelled_copy_ends_at_once(tmp_path: Path) -> None:
    receiving, copy = Allowance(1_000_000), open_copy(tmp_path)
    async with run_pod(tmp_path / "store") as store:
        store.hold(SHARDS, random_version(SHARDS))
        task = asyncio.create_task(pull_into(copy, stage_request([store]), receiving=receiving))
        await until(lambda: copy.bytes_received == 1_000_000)
        assert not task.done()
        task.cancel()
        done, _ = await asyncio.wait({task}, timeout=10)
        assert done, "the copy waits for its limit although it was cancelled"
    assert (copy.bytes_received, receiving.transfers) == (1_000_000, 0)


async def test_a_pod_sends_what_its_limit_allows(tmp_path: Path) -> None:
    sending, copy = Allowance(1_000_000), open_copy(tmp_path)
    async with run_pod(tmp_path / "store", sending=sending) as store:
        store.hold(SHARDS, random_version(SHARDS))
        task = asyncio.create_task(pull_into(copy, stage_request([store]), receiving=Allowance(2**40)))
        await until(lambda: copy.bytes_received == 1_000_000)
        assert (task.done(), sending.transfers) == (False, 1)
        task.cancel()
        await asyncio.wait({task})
    assert copy.bytes_received == 1_000_000


async def test_a_version_arrives_whole_within_both_limits(tmp_path: Path) -> None:
    limit, data, copy = 10 * SIZE, random_version(SHARDS), open_copy(tmp_path)
    async with run_pod(tmp_path / "store", sending=Bandwidth(limit)) as store:
        end = store.hold(SHARDS, data)
        assert await pull_into(copy, stage_request([store]), receiving=Bandwidth(limit)) == end
    assert read_data(copy) == data


async def test_a_copy_that_is_late_names_the_limit(tmp_path: Path) -> None:
    async with run_pod(tmp_path / "store") as store:
        store.hold(SHARDS, random_version(SHARDS))
        with pytest.raises(StagedError, match="A pod receives at most 5000 bytes per second") as caught:
            await pull_into(open_copy(tmp_path), stage_request([store], deadline=0.3), receiving=Bandwidth(5000))
    assert caught.value.fault is StagedFault.LATE
