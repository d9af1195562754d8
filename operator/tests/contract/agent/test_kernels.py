"""Compiled kernels of an engine reach the next pod before its engine starts: a real agent, gate and weight store as processes."""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from sglang_rollout.testing import StandIn
from tests.contract.support.agent_pod import Pod, run_pod, until
from tests.contract.support.store_process import StoreProcess, store_process

pytestmark = [pytest.mark.router, pytest.mark.timeout(180)]

SECONDS = 40.0
TOKEN = "secret-of-the-kernels"
KERNEL = "triton/AB/kernel.cubin"
CODE = b"compiled" * 100_000


@pytest.fixture
def store(tmp_path: Path) -> Iterator[StoreProcess]:
    folder = tmp_path / "store"
    folder.mkdir()
    (tmp_path / "kernels-token").write_text(TOKEN)
    options = ("--kernels", str(folder / "kernels"), "--kernels-token-file", str(tmp_path / "kernels-token"))
    with store_process(folder, python=sys.executable, options=options) as made:
        yield made


@asynccontextmanager
async def new_pod(store: StoreProcess, engine: StandIn, name: str) -> AsyncIterator[Pod]:
    """Run a pod with an empty cache. The block begins when its agent answers, which is when the kubelet starts the engine."""
    folder = store.folder.parent / name
    (folder / "cache").mkdir(parents=True)
    options = (
        *("--kernels-dir", str(folder / "cache"), "--kernels-url", store.data_url, "--kernels-hash", "model-image-parallelism"),
        *("--kernels-token-file", str(store.folder.parent / "kernels-token"), "--kernels-quiet-seconds", "0.3"),
    )
    async with run_pod(folder, engine.url, name=name, options=options) as made:
        yield made


async def test_a_new_pod_has_the_kernels_of_a_running_engine_before_its_engine_starts(store: StoreProcess) -> None:
    with StandIn(weight_version="base") as engine:
        async with new_pod(store, engine, "first") as first:
            kernel = first.folder / "cache" / KERNEL
            kernel.parent.mkdir(parents=True)
            kernel.write_bytes(CODE)

            async def is_sent() -> bool:
                return any(file.suffix == ".tar" for file in (store.folder / "kernels").iterdir())

            await until(is_sent, SECONDS, "the weight store has the kernels")
        async with new_pod(store, engine, "second") as second:
            assert (second.folder / "cache" / KERNEL).read_bytes() == CODE
            await until(second.engine_up, SECONDS, "the engine serves")
