"""Real SGLang engines that share a machine with their trainer (``spec.mode: Hybrid``): asleep until it wakes them, each takes handles of
its tensors at its own URL, and all of them become one version.

On a CPU the handles are files in shared memory, and released memory is overwritten by a stand-in (images/engine-cpu/README.md).
"""

from __future__ import annotations

import asyncio
import json
import subprocess
from collections.abc import AsyncIterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from e2e.engine import LabError, environment, start_engine
from e2e.kube import ROOT

from sglang_rollout.wire.states import FleetMode
from tests.contract.support.agent_pod import until
from tests.contract.support.complete_fleet import CompleteFleet, complete_fleet
from tests.support.ports import free_port

pytestmark = [pytest.mark.router, pytest.mark.engine, pytest.mark.timeout(600)]

TRAINER = ROOT / "e2e/cases/hybrid_trainer.py"
PROMPT = [11, 22, 33]
GREEDY = {"input_ids": PROMPT, "sampling_params": {"temperature": 0, "max_new_tokens": 8, "ignore_eos": True}}


async def step(fleet: CompleteFleet, seed: int, version: str) -> dict[str, Any]:
    """Run one step of the trainer, and return what it saw."""
    command = [str(environment.python(make=False)), str(TRAINER), str(environment.model()), str(seed), version]
    command += [json.dumps(PROMPT), "8", fleet.url, *(made.url for made in fleet.pods)]
    done = await asyncio.to_thread(
        subprocess.run, command, check=False, capture_output=True, text=True, timeout=240, env=environment.environment_variables()
    )
    assert done.returncode == 0, f"{done.stderr[-3000:]}\n{await fleet.document()}"
    return dict(json.loads(done.stdout.splitlines()[-1]))


@pytest.fixture
async def fleet(tmp_path: Path) -> AsyncIterator[CompleteFleet]:
    try:
        environment.python(make=False)
    except LabError as error:
        pytest.skip(str(error))
    with ExitStack() as stack:
        saver = ["--enable-memory-saver"]
        logs = [tmp_path / f"engine-{i}.log" for i in range(2)]
        engines = [stack.enter_context(start_engine(free_port(), args=saver, wait=False, log=log)) for log in logs]
        for engine in engines:
            await asyncio.to_thread(engine.wait)
        async with complete_fleet(tmp_path, [engine.url for engine in engines], FleetMode.HYBRID) as made:
            yield made


async def test_the_steps_of_a_hybrid_trainer(fleet: CompleteFleet) -> None:
    async def asleep() -> bool:
        return await fleet.released() == [{"kv_cache", "weights"}] * 2

    seen = []
    for seed, version in ((1, "5"), (2, "6")):
        await until(asleep, 60, "the engines have released their memory")
        for made in fleet.pods:
            refused = await made.ask("POST", "/generate", GREEDY)
            assert refused.status == 503
        saw = await step(fleet, seed, version)
        assert list(saw["answers"].values()) == [[saw["expected"], version]] * 3, "the answers of each engine and of the fleet"
        committed = (await fleet.document())["committed"]
        assert (committed["label"], committed["step"]) == (version, int(version))
        seen.append(saw["expected"])
    assert seen[0] != seen[1], "other weights, other tokens"
