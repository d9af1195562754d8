"""Real SGLang engines that share a machine with their trainer: it pushes handles of memory to each engine's own URL, and the fleet
commits once. On a CPU the handles are files in shared memory; nothing is released, because a CPU has no memory saver."""

from __future__ import annotations

import asyncio
import json
import subprocess
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path

import aiohttp
import pytest
from agent_lab import TOKEN, Pod, pod, until
from e2e.engine import LabError, environment, start_engine
from fleet_lab import FakeSmg
from ports import free_port

from sglang_rollout.fleet.cli import Options, serve
from sglang_rollout.wire.models import Intent, WantedEngine, WeightsPolicy
from sglang_rollout.wire.ports import FLEET, VERSION_HEADER
from sglang_rollout.wire.states import FleetMode

pytestmark = [pytest.mark.router, pytest.mark.engine, pytest.mark.timeout(600)]

TRAINER = Path(__file__).with_name("tensors_trainer.py")
PROMPT = [11, 22, 33]
TOKENS = 8
GREEDY = {"input_ids": PROMPT, "sampling_params": {"temperature": 0, "max_new_tokens": TOKENS, "ignore_eos": True}}


@dataclass
class Lab:
    """A coordinator over real engines, each behind its gate and agent."""

    url: str
    pods: list[Pod]

    async def push(self, seed: int, version: str) -> list[int]:
        """What the trainer's own model generates with what it pushed."""
        command = [str(environment.python(make=False)), str(TRAINER), str(environment.model()), str(seed), version]
        command += [json.dumps(PROMPT), str(TOKENS), *(made.url for made in self.pods)]
        done = await asyncio.to_thread(
            subprocess.run, command, check=False, capture_output=True, text=True, timeout=240, env=environment.environment_variables()
        )
        assert done.returncode == 0, f"{done.stderr[-3000:]}\n{await self.document()}"
        return list(json.loads(done.stdout.splitlines()[-1]))

    async def document(self) -> dict[str, object]:
        async with self.pods[0].http.get(self.url + FLEET) as reply:
            return dict(await reply.json()) if reply.status == 200 else {}

    async def generated(self) -> list[tuple[list[int], str | None]]:
        """Tokens and version header of each engine, when its gate is open."""
        for made in self.pods:
            await until(made.is_open, 60, f"{made.name} serves", every=0.2)
        answers = [await made.ask("POST", "/generate", GREEDY) for made in self.pods]
        return [(answer.body["output_ids"], answer.headers.get(VERSION_HEADER)) for answer in answers]


@pytest.fixture
async def lab(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Lab]:
    try:
        environment.python(make=False)
    except LabError as error:
        pytest.skip(str(error))
    folder = tmp_path_factory.mktemp("hybrid")
    async with AsyncExitStack() as stack:
        engines = [stack.enter_context(start_engine(free_port(), wait=False, log=folder / f"engine-{i}.log")) for i in range(2)]
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
        found = Lab(url, pods)
        await until(lambda: _all_up(found), 60, "the coordinator sees both engines")
        yield found


async def _all_up(lab: Lab) -> bool:
    try:
        members = (await lab.document()).get("members")
    except aiohttp.ClientError:
        return False
    return isinstance(members, list) and len(members) == 2 and all(member["boot_id"] for member in members)


async def _ended(task: asyncio.Task[None]) -> None:
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def test_tensors_for_each_engine_become_one_version_of_the_fleet(lab: Lab) -> None:
    seen = []
    for seed, version in ((1, "5"), (2, "6")):
        expected = await lab.push(seed, version)
        assert await lab.generated() == [(expected, version)] * 2
        committed = (await lab.document())["committed"]
        assert isinstance(committed, dict)
        assert (committed["label"], committed["n"]) == (version, int(version))
        seen.append(expected)
    assert seen[0] != seen[1], "other weights, other tokens"
