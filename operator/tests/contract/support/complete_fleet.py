"""A complete fleet without Kubernetes over running SGLang servers: gates, agents, smg, front, coordinator and batch server, in any mode."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp

from sglang_rollout.api.intent import Intent, WantedEngine, WantedStore
from sglang_rollout.api.limits_spec import Limits
from sglang_rollout.api.weights_spec import Staging, Transport, Weights
from sglang_rollout.coordinator.main import Options, serve
from sglang_rollout.credentials import CredentialFile, Credentials
from sglang_rollout.proxy.address import Address
from sglang_rollout.wire.ports import FLEET
from sglang_rollout.wire.states import FleetMode
from tests.contract.support.agent_pod import TOKEN, Answer, Pod, Process, run_pod, until
from tests.support.ports import free_port


@dataclass
class CompleteFleet:
    """A fleet's URL, and its engines behind their gates."""

    url: str
    pods: list[Pod]
    http: aiohttp.ClientSession
    folder: Path

    async def ask(self, method: str, path: str, body: Any = None, at: str | None = None) -> Answer:
        """Send a call to the URL ``at`` of a gate or a server, by default to the fleet."""
        timeout = aiohttp.ClientTimeout(total=120)
        async with self.http.request(method, (at or self.url) + path, json=body, timeout=timeout) as reply:
            is_json = reply.content_type == "application/json"
            return Answer(reply.status, reply.reason or "", dict(reply.headers), await (reply.json() if is_json else reply.text()))

    async def document(self) -> dict[str, Any]:
        """Return ``GET /fleet``; empty while the coordinator does not answer."""
        try:
            answer = await self.ask("GET", FLEET)
        except aiohttp.ClientError:
            return {}
        return dict(answer.body) if answer.status == 200 else {}

    async def serving(self, number: int) -> None:
        async def check() -> bool:
            return (await self.document()).get("serving") == number

        await until(check, 60, f"{number} engines serve")

    async def released(self) -> list[set[str]]:
        return [set(member["released"]) for member in (await self.document()).get("members", [])]

    async def generate(self, body: dict[str, Any], at: str | None = None) -> dict[str, Any]:
        """Generate tokens. A 503 of the fleet's URL is retried, because smg learns of an open gate a moment later."""
        answers: list[Answer] = []

        async def answered() -> bool:
            answers.append(await self.ask("POST", "/generate", body, at))
            return answers[-1].status != 503 or at is not None

        await until(answered, 60, "smg knows an open gate")
        assert answers[-1].status == 200, answers[-1]
        return dict(answers[-1].body)


@asynccontextmanager
async def complete_fleet(
    folder: Path,
    servers: Sequence[str],
    mode: FleetMode | None = None,
    policy: str = "RoundRobin",
    *,
    connections: int | None = None,
    limits: Limits | None = None,
    staged: bool = False,
) -> AsyncIterator[CompleteFleet]:
    """Run all parts except the servers for the length of the block. The coordinator knows its engines when the block begins.

    Args:
        folder: Folder for logs, records and sockets.
        servers: URLs of the engines.
        mode: Mode of the fleet.
        policy: Policy of smg.
        connections: Most connections of the front.
        limits: Limits of the gates; None for the defaults.
        staged: True: transport Staged, with a weight store.
    """
    smg, metrics, listen, own, batches = (f"127.0.0.1:{free_port()}" for _ in range(5))
    url = f"http://{listen}"
    async with AsyncExitStack() as stack:
        pods = []
        for index, server in enumerate(servers):
            place = folder / f"e{index}"
            place.mkdir()
            name, credential = f"e{index}", Credentials(TOKEN).derive(f"e{index}").sent
            pod = run_pod(
                place,
                server,
                name=name,
                fleet_url=url,
                takes_tensors=mode is FleetMode.HYBRID,
                limits=limits,
                with_boot_file=True,
                start=False,
                token=credential,
                data_port=free_port() if staged else None,
            )
            one = await stack.enter_async_context(pod)
            one.boot(f"boot-{index}")
            await one.start()
            pods.append(one)
        runtime = folder / "front"
        front = ["--listen", listen, "--smg", smg, "--coordinator", own, "--batches", batches, "--runtime-dir", str(runtime)]
        front += ["--maxconn", str(connections)] if connections is not None else []
        store = await _start_store(stack, folder) if staged else None
        front += ["--store", store.data_url.removeprefix("http://")] if store is not None else []
        for name, line in {
            "smg": ["proxy", "smg", "--listen", smg, "--metrics-listen", metrics, "--policy", policy],
            "batches": ["batches", "--listen", batches, "--smg-url", f"http://{smg}", "--coordinator-url", f"http://{own}"],
            "front": ["proxy", "front", *front],
        }.items():
            process = Process(line, folder / f"{name}.log")
            await process.start()
            stack.push_async_callback(process.end)
        wanted = [
            WantedEngine(name=made.name, tensor_size=1, url=made.url, data_url=f"http://127.0.0.1:{made.data_port}" if staged else None)
            for made in pods
        ]
        weights = Weights(transport=Transport.STAGED, staging=Staging(size_limit="1Gi")) if staged else Weights(backend="gloo")
        intent = Intent(generation=1, name="demo", namespace="default", mode=mode, weights=weights, engines=wanted, store=store)
        (folder / "token").write_text(TOKEN)
        (folder / "intent.json").write_text(intent.model_dump_json())
        options = Options(
            name="demo", namespace="default", listen=Address.parse(own), smg_url=f"http://{smg}", batches_url=f"http://{batches}",
            policy=policy, token_file=folder / "token", public_url=url, kubernetes=False,
            intent_file=folder / "intent.json", record_file=folder / "record.json",
        )  # fmt: skip
        coordinator = asyncio.create_task(serve(options, CredentialFile(folder / "token")))
        stack.push_async_callback(_ended, coordinator)
        made = CompleteFleet(url, pods, pods[0].http, folder)

        async def known() -> bool:
            return len((await made.document()).get("members", [])) == len(pods)

        await until(known, 60, "the coordinator knows its engines")
        yield made


async def _start_store(stack: AsyncExitStack, folder: Path) -> WantedStore:
    """Run a weight store until the stack ends. It receives no process groups."""
    own, data, metrics = (f"127.0.0.1:{free_port()}" for _ in range(3))
    credential, state = folder / "store-token", folder / "store-state"
    credential.write_text(Credentials(TOKEN).derive("demo-store").sent)
    line = ["store", "--name", "demo-store", "--listen", own, "--data-listen", data, "--metrics-listen", metrics]
    line += ["--volume", str(folder / "store"), "--state-dir", str(state), "--token-file", str(credential)]
    process = Process(line, folder / "store.log")
    await process.start()
    stack.push_async_callback(process.end)
    return WantedStore(name="demo-store", url=f"http://{own}", data_url=f"http://{data}")


async def _ended(task: asyncio.Task[None]) -> None:
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
