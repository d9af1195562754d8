"""A real SGLang server with two tensor-parallel ranks in one pod: an update reaches both."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from agent_lab import Pod, pod, until
from e2e.engine import Engine, LabError, environment, start_engine
from ports import free_port
from test_agent_engine import push

from sglang_rollout.wire.models import Version

pytestmark = [pytest.mark.router, pytest.mark.engine, pytest.mark.timeout(420)]


@pytest.fixture
def engine() -> Iterator[Engine]:
    try:
        environment.python(make=False)
    except LabError as error:
        pytest.skip(str(error))
    with start_engine(free_port(), tensor=2) as made:
        yield made


async def checksums(lab: Pod) -> list[str]:
    answer = await lab.control("/weights_checker", {"action": "checksum"})
    assert answer.status == 200, answer.body
    return [rank["per_gpu_checksum"] for rank in answer.body["ranks"]]


async def test_an_update_reaches_both_ranks(engine: Engine, tmp_path: Path) -> None:
    async with pod(tmp_path, engine.url) as lab:
        await until(lab.engine_up, 60, "the agent sees the engine")
        await lab.open_with_base()
        base = await checksums(lab)
        assert len(base) == 2
        await push(lab, Version(run=1, n=2, label="other"), ranks=2)
        assert set(await checksums(lab)).isdisjoint(base), "each of them holds something else"
        assert (await lab.status()).tensor_size == 2
        await push(lab, Version(run=2, n=0, label="as at first"), ranks=2)
        assert await checksums(lab) == base
