"""The row *tokens* of bench.staged: tokens that clients receive in a minute with one push, against a minute without.

The engines are real, and the push is an upload. Windows with and without a push alternate in one run of the same fleet.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import aiohttp
from bench.common import cpu_seconds
from bench.fleets import LOADER_ARGS, LocalFleet, local_fleet, real_engines
from bench.push import medians, quartiles
from bench.pusher import Pusher, pusher

ENGINES, CLIENTS, TOKENS = 2, 8, 200
LEAD_SECONDS = 5.0
"""How long the clients run before the first window, and how late in its window a push begins."""
ROLLING = {"versionPolicy": "MaxStaleness", "maxStaleness": 1, "activation": {"strategy": "Rolling", "maxUnavailable": 1}}
STRATEGIES: dict[str, tuple[dict[str, Any], float]] = {"AllAtOnce": ({}, 0.9), "Rolling": (ROLLING, 0.95)}
"""``spec.weights`` of each strategy, and the smallest ratio that is the aim."""
STAGING = ("store", "agent", "coordinator", "front")


class Clients:
    """Clients that stream answers one after the other, and count the tokens as they arrive."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._numbers = itertools.count()
        self.tokens = 0
        self.failed = 0

    async def run(self) -> None:
        """Generate until the task is cancelled."""
        connector, timeout = aiohttp.TCPConnector(limit=0), aiohttp.ClientTimeout(total=300)
        async with aiohttp.ClientSession(connector=connector, timeout=timeout) as session, asyncio.TaskGroup() as group:
            for _ in range(CLIENTS):
                group.create_task(self._client(session))

    async def _client(self, session: aiohttp.ClientSession) -> None:
        params = {"max_new_tokens": TOKENS, "temperature": 0, "ignore_eos": True}
        while True:
            body = {"input_ids": [10 + next(self._numbers) % 1900, 20, 30], "sampling_params": params, "stream": True}
            seen = 0
            async with session.post(f"{self._url}/generate", json=body) as reply:
                async for line in reply.content:
                    if line.startswith(b"data: {"):
                        found = json.loads(line[6:])["meta_info"]["completion_tokens"]
                        self.tokens, seen = self.tokens + found - seen, found
            self.failed += seen != TOKENS


def measure(*, model: Path, size_limit: str, pairs: int, seconds: float) -> dict[str, Any]:
    """Measure each strategy with a fleet of its own."""
    load, rows = os.getloadavg()[0], {}
    for name, (weights, aim) in STRATEGIES.items():
        with staged_fleet(model, size_limit, weights) as fleet, pusher(fleet.url, "--model", str(model), "--upload") as trainer:
            trainer.push()
            rows[name] = {"aim": aim, **asyncio.run(alternate(fleet, trainer, pairs, seconds))}
    return {"load": round(load, 2), "bytes": (model / "model.safetensors").stat().st_size, "seconds": seconds, "strategies": rows}


@contextmanager
def staged_fleet(model: Path, size_limit: str, weights: dict[str, Any]) -> Iterator[LocalFleet]:
    """Run real engines behind a fleet with transport Staged."""
    with ExitStack() as stack:
        engines = stack.enter_context(real_engines(ENGINES, model=model, args=LOADER_ARGS))
        yield stack.enter_context(local_fleet(engines, weights=weights, size_limit=size_limit))


async def alternate(fleet: LocalFleet, trainer: Pusher, pairs: int, seconds: float) -> dict[str, Any]:
    """Return the ratios of tokens with a push to tokens without, and the processor time of one push by part."""
    clients = Clients(fleet.url)
    running = asyncio.create_task(clients.run())
    await asyncio.sleep(LEAD_SECONDS)
    rows: list[dict[str, Any]] = []
    for turn in range(pairs):
        found: dict[str, dict[str, Any]] = {}
        for pushes in (False, True) if turn % 2 else (True, False):
            found["with" if pushes else "without"] = await window(fleet, clients, trainer if pushes else None, seconds)
        spent = {part: max(0.0, round(found["with"]["cpu"][part] - found["without"]["cpu"][part], 2)) for part in STAGING}
        tokens = {name: row["tokens"] for name, row in found.items()}
        rows.append({"tokens": tokens, "ratio": tokens["with"] / tokens["without"], "push_s": found["with"]["push_s"], "cpu_s": spent})
    running.cancel()
    await asyncio.wait({running})
    return {
        "pairs": len(rows),
        "failed": clients.failed,
        "ratio": quartiles([row["ratio"] for row in rows], 3),
        "push_s": quartiles([row["push_s"] for row in rows], 2),
        "tokens": medians([row["tokens"] for row in rows]),
        "cpu_s": medians([row["cpu_s"] for row in rows]),
    }


async def window(fleet: LocalFleet, clients: Clients, trainer: Pusher | None, seconds: float) -> dict[str, Any]:
    """Count tokens and processor time for some seconds, in which a trainer may push once."""
    parts, end = fleet.parts(), time.monotonic() + seconds
    before, used, took = clients.tokens, {part: cpu_seconds(parts.get(part, [])) for part in STAGING}, 0.0
    if trainer is not None:
        await asyncio.sleep(LEAD_SECONDS)
        ((began, ended),) = await asyncio.to_thread(trainer.push)
        took = ended - began
    await asyncio.sleep(max(0.0, end - time.monotonic()))
    cpu = {part: cpu_seconds(parts.get(part, [])) - used[part] for part in STAGING}
    return {"tokens": clients.tokens - before, "cpu": cpu, "push_s": took}


def show(row: dict[str, Any]) -> None:
    """Print the row for people."""
    print(f"{ENGINES} real engines, {CLIENTS} clients, {row['bytes'] / 1e6:.3g} MB, windows of {row['seconds']:g} s, load {row['load']}")
    for name, found in row["strategies"].items():
        low, middle, high = found["ratio"]
        verdict = "met" if middle >= found["aim"] else "MISSED"
        print(f"  {name:<10} tokens with a push / without {middle:.3f} ({low:.3f} to {high:.3f}), aim {found['aim']}: {verdict}")
        print(
            f"    tokens {found['tokens']}, push {found['push_s'][1]:.2f} s, failed {found['failed']}, processor seconds {found['cpu_s']}"
        )
