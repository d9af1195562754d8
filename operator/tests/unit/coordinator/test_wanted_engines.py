"""URLs of the engines' gates: the address of the pod, and the port of the intent."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

from sglang_rollout.api.intent import Intent, WantedEngine
from sglang_rollout.coordinator.wanted_engines import WantedEngines
from sglang_rollout.kube.client import Listing


class Intents:
    """Yields the intents that the test puts into the queue."""

    def __init__(self) -> None:
        self.queue: asyncio.Queue[Intent] = asyncio.Queue()

    async def follow(self) -> AsyncIterator[Intent]:
        while True:
            yield await self.queue.get()


class Slices:
    """An API server with one EndpointSlice that never changes."""

    def __init__(self, **addresses: str) -> None:
        endpoints = [{"hostname": name.replace("_", "-"), "addresses": [address]} for name, address in addresses.items()]
        self.slice = {"metadata": {"name": "s", "uid": "u", "resourceVersion": "1"}, "endpoints": endpoints}

    async def list(self, *_: Any, **__: Any) -> Listing:
        return Listing([self.slice], "1")

    async def watch(self, *_: Any, **__: Any) -> AsyncIterator[Any]:
        await asyncio.Event().wait()
        yield


async def urls(slices: Slices, *intents: list[WantedEngine]) -> list[dict[str, str | None]]:
    """Return the engines' URLs after each of the intents."""
    source, found = Intents(), []
    heard: asyncio.Queue[list[WantedEngine]] = asyncio.Queue()
    wanted_engines = WantedEngines(source, kube=slices, namespace="n", name="d")  # type: ignore[arg-type]
    wanted_engines.on_change = lambda intent, _: heard.put_nowait(intent.engines)
    task = asyncio.create_task(wanted_engines.run())
    try:
        async with asyncio.timeout(30):
            for engines in intents:
                await source.queue.put(Intent(generation=1, name="d", namespace="n", engines=engines))
                while await heard.get() != engines:
                    pass
                found.append({engine.name: wanted_engines.url(engine.name) for engine in engines})
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
    return found


def wanted(*ports: int | None) -> list[WantedEngine]:
    return [WantedEngine(name=f"d-engine-{index}", port=port) for index, port in enumerate(ports)]


async def test_two_engines_at_one_address_differ_by_their_ports() -> None:
    node = Slices(d_engine_0_0="10.0.0.5", d_engine_1_0="10.0.0.5")
    before, after = await urls(node, wanted(20000, 20020), wanted(20000, 24020))
    assert before == {"d-engine-0": "http://10.0.0.5:20000", "d-engine-1": "http://10.0.0.5:20020"}
    assert after == {"d-engine-0": "http://10.0.0.5:20000", "d-engine-1": "http://10.0.0.5:24020"}


async def test_an_intent_without_ports_means_the_default_port() -> None:
    (found,) = await urls(Slices(d_engine_0_0="10.0.0.5", d_engine_1_0="fd00::7"), wanted(None, None))
    assert found == {"d-engine-0": "http://10.0.0.5:30000", "d-engine-1": "http://[fd00::7]:30000"}
