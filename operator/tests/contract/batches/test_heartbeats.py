"""A large batch never delays the heartbeats that keep a trainer's lease: the batch server parses it, and not the coordinator."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
import pytest
from aiohttp import web

from sglang_rollout.api.weights_spec import OnLoss, TrainerLease
from sglang_rollout.wire.ports import AGENT_PREFLIGHT, FLEET_LEASE
from tests.contract.coordinator.test_trainer_lease import push
from tests.contract.support.agent_pod import Process
from tests.contract.support.coordinator_process import Lab, fleet_lab
from tests.support.ports import free_port

pytestmark = pytest.mark.router

BATCH = json.dumps({"text": ["x" * 160] * 200_000}).encode()
"""32 MiB."""
LIMITS = ["--limits", json.dumps({"promptsPerRequest": 200_000, "samplesPerRequest": 200_000})]
LEASE = TrainerLease(ttl_seconds=3, on_loss=OnLoss.PAUSE)


@asynccontextmanager
async def fleet_url(lab: Lab) -> AsyncIterator[str]:
    """Run coordinator, batch server and front as processes, and yield the fleet's URL."""
    await lab.kill()
    folder, listen, batches = lab.folder, f"127.0.0.1:{free_port()}", f"127.0.0.1:{free_port()}"
    smg, coordinator = f"127.0.0.1:{lab.smg.port}", f"127.0.0.1:{lab.port}"
    files = ["--token-file", str(folder / "token"), "--intent-file", str(folder / "intent.json"), "--record-file", str(lab.record)]
    urls = ["--smg-url", f"http://{smg}"]
    front = ["--smg", smg, "--coordinator", coordinator, "--batches", batches, "--runtime-dir", str(folder / "front")]
    lines = {
        "coordinator": ["coordinator", "--name", "demo", "--listen", coordinator, *urls, *files, "--public-url", f"http://{listen}"],
        "batches": ["batches", "--listen", batches, *urls, "--coordinator-url", f"http://{coordinator}", *LIMITS],
        "front": ["proxy", "front", "--listen", listen, *front],
    }
    processes = [Process(line, folder / f"{name}.log") for name, line in lines.items()]
    try:
        for process in processes:
            await process.start()
        yield f"http://{listen}"
    finally:
        for process in processes:
            await process.end()


async def test_heartbeats_keep_the_lease_during_a_large_batch(tmp_path: Path) -> None:
    """If the lease ended, the fleet would pause, because no process listens at the store of the trainer's process group."""
    reached_smg = asyncio.Event()

    async def never_answer(request: web.Request) -> web.StreamResponse:
        reached_smg.set()
        await asyncio.sleep(3600)
        return web.Response()

    async with fleet_lab(tmp_path, trainer_lease=LEASE) as lab, fleet_url(lab) as url:
        lab.smg.answer_tokens = never_answer
        await lab.serving(2, within=60)

        async def is_front_up() -> bool:
            async with lab.session.get(f"{url}/fleet") as reply:
                return reply.status == 200

        await lab.until("the front answers", is_front_up, 60)
        await push(lab, "g", 1)
        for agent in lab.agents:
            agent.broken[AGENT_PREFLIGHT] = "connection refused."
        statuses: list[int] = []

        async def beat() -> None:
            async with aiohttp.ClientSession() as session:
                while True:
                    async with session.post(url + FLEET_LEASE, json={"group_name": "g"}) as reply:
                        statuses.append(reply.status)
                    await asyncio.sleep(0.1)

        async def are_paused() -> bool:
            return all(agent.agent.paused for agent in lab.agents)

        beating = asyncio.create_task(beat())
        asking = asyncio.create_task(lab.session.post(f"{url}/generate", data=BATCH, timeout=aiohttp.ClientTimeout(total=300)))
        async with asyncio.timeout(60):
            await reached_smg.wait()
        await asyncio.sleep(2 * LEASE.ttl_seconds)
        assert set(statuses) == {200}
        assert not any(agent.agent.paused for agent in lab.agents)
        asking.cancel()
        beating.cancel()
        await asyncio.gather(asking, beating, return_exceptions=True)
        await lab.until("without heartbeats the fleet pauses", are_paused, 60)
