"""Real SGLang engines that share a machine with their trainer (``spec.mode: Hybrid``): asleep until it wakes them, each takes handles of
its tensors at its own URL, and all of them become one version.

On a CPU the handles are files in shared memory, and released memory is overwritten by a stand-in (images/engine-cpu/README.md).
"""

from __future__ import annotations

import asyncio
import json
import subprocess
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import Any

import aiohttp
import pytest
from agent_lab import TOKEN, Pod, pod, until
from e2e.engine import LabError, environment, start_engine
from e2e.kube import ROOT
from fleet_lab import FakeSmg
from ports import free_port

from sglang_rollout.fleet.cli import Options, serve
from sglang_rollout.wire.intent import Intent, WantedEngine
from sglang_rollout.wire.policy import WeightsPolicy
from sglang_rollout.wire.ports import FLEET
from sglang_rollout.wire.states import FleetMode

pytestmark = [pytest.mark.router, pytest.mark.engine, pytest.mark.timeout(600)]

TRAINER = ROOT / "e2e/cases/hybrid_trainer.py"
PROMPT = [11, 22, 33]
GREEDY = {"input_ids": PROMPT, "sampling_params": {"temperature": 0, "max_new_tokens": 8, "ignore_eos": True}}


@dataclass
class Lab:
    """A coordinator over real engines, each behind its gate and agent."""

    url: str
    pods: list[Pod]

    async def step(self, seed: int, version: str) -> dict[str, Any]:
        """One step of the trainer; what it saw."""
        command = [str(environment.python(make=False)), str(TRAINER), str(environment.model()), str(seed), version]
        # smg is played here and passes nothing on, so an engine answers in the fleet's place.
        command += [json.dumps(PROMPT), "8", self.pods[0].url, *(made.url for made in self.pods)]
        done = await asyncio.to_thread(
            subprocess.run, command, check=False, capture_output=True, text=True, timeout=240, env=environment.environment_variables()
        )
        assert done.returncode == 0, f"{done.stderr[-3000:]}\n{await self.document()}"
        return dict(json.loads(done.stdout.splitlines()[-1]))

    async def document(self) -> dict[str, Any]:
        async with self.pods[0].http.get(self.url + FLEET) as reply:
            return dict(await reply.json()) if reply.status == 200 else {}

    async def members(self) -> list[dict[str, Any]]:
        try:
            return list((await self.document()).get("members", []))
        except aiohttp.ClientError:
            return []

    async def asleep(self) -> bool:
        members = await self.members()
        return len(members) == len(self.pods) and all(set(member["released"]) == {"kv_cache", "weights"} for member in members)


@pytest.fixture
async def lab(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Lab]:
    try:
        environment.python(make=False)
    except LabError as error:
        pytest.skip(str(error))
    folder = tmp_path_factory.mktemp("hybrid")
    async with AsyncExitStack() as stack:
        saver = ["--enable-memory-saver"]
        logs = [folder / f"engine-{i}.log" for i in range(2)]
        engines = [stack.enter_context(start_engine(free_port(), args=saver, wait=False, log=log)) for log in logs]
        for engine in engines:
            await asyncio.to_thread(engine.wait)
        smg = FakeSmg()
        await smg.start()
        stack.push_async_callback(smg.stop)
        port = free_port()
        url = f"http://127.0.0.1:{port}"
        pods = []
        for index, engine in enumerate(engines):
            place = folder / f"e{index}"
            place.mkdir()
            pods.append(await stack.enter_async_context(pod(place, engine.url, name=f"e{index}", fleet_url=url)))
        intent = Intent(
            generation=1, name="demo", namespace="default", mode=FleetMode.HYBRID, weights=WeightsPolicy(backend="gloo"),
            engines=[WantedEngine(name=made.name, tensor_size=1, url=made.url) for made in pods],
        )  # fmt: skip
        (folder / "intent.json").write_text(intent.model_dump_json())
        options = Options(
            name="demo", namespace="default", host="127.0.0.1", port=port, smg_url=f"http://127.0.0.1:{smg.port}",
            token_file=folder / "token", public_url=url, kubernetes=False,
            intent_file=folder / "intent.json", record_file=folder / "record.json",
        )  # fmt: skip
        coordinator = asyncio.create_task(serve(options, TOKEN))
        stack.push_async_callback(_ended, coordinator)
        yield Lab(url, pods)


async def _ended(task: asyncio.Task[None]) -> None:
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def test_step_after_step_of_a_trainer_on_the_engines_machine(lab: Lab) -> None:
    seen = []
    for seed, version in ((1, "5"), (2, "6")):
        await until(lab.asleep, 60, "the engines have given back what the trainer has")
        for made in lab.pods:
            refused = await made.ask("POST", "/generate", GREEDY)
            assert refused.status == 503
        saw = await lab.step(seed, version)
        assert list(saw["answers"].values()) == [[saw["expected"], version]] * len(lab.pods)
        committed = (await lab.document())["committed"]
        assert (committed["label"], committed["n"]) == (version, int(version))
        seen.append(saw["expected"])
    assert seen[0] != seen[1], "other weights, other tokens"
