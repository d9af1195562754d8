"""Measure the processor time of a request in gate, front, smg and batch server: ``python -m bench.router_cpu [--requests 200]``.

One stand-in engine behind the fleet's URL; prompts of 100, 10,000 and 128,000 token ids, one request at a time. Requests through the URL
and to the engine alone alternate, so that the machine's load affects both. Writes ``bench/results/router_cpu.json``.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
import time
from typing import Any

import aiohttp
from bench.common import cpu_seconds, machine, percentile, save
from bench.fleets import LocalFleet, local_fleet

from sglang_rollout.plugin.install import reports_folder
from sglang_rollout.plugin.settings import SETTINGS_VARIABLE, dump_settings
from sglang_rollout.testing import StandInFleet

SIZES = (100, 10_000, 128_000)
PARTS = ("gate", "front", "smg", "batches")
CONTEXT = 262_144
"""Tokens of the stand-in's context."""
BLOCK = 20
"""Requests before the other way has its turn."""


def body(size: int, number: int) -> bytes:
    """Return a request for one token after ``size`` token ids."""
    ids = [10 + (number * 7 + place) % 1900 for place in range(size)]
    return json.dumps({"input_ids": ids, "sampling_params": {"max_new_tokens": 1}}).encode()


async def send(session: aiohttp.ClientSession, url: str, size: int, first: int, count: int) -> list[float]:
    """Send requests one after the other, and return the seconds of each."""
    times = []
    for number in range(first, first + count):
        data, began = body(size, number), time.monotonic()
        async with session.post(f"{url}/generate", data=data, headers={"Content-Type": "application/json"}) as reply:
            await reply.read()
            reply.raise_for_status()
        times.append(time.monotonic() - began)
    return times


async def warm_up(session: aiohttp.ClientSession, url: str, size: int) -> None:
    """Send requests until one is answered: smg routes a moment after the fleet serves."""
    end = time.monotonic() + 30
    while True:
        try:
            await send(session, url, size, 0, BLOCK)
        except aiohttp.ClientResponseError as error:
            if error.status != 503 or time.monotonic() > end:
                raise
            await asyncio.sleep(0.5)
        else:
            return


async def measure(fleet: LocalFleet, size: int, requests: int) -> dict[str, Any]:
    """Return milliseconds of processor time by part, and p50 of both ways."""
    times: dict[str, list[float]] = {"direct": [], "fleet": []}
    parts = {name: pids for name, pids in fleet.parts().items() if name in PARTS}
    async with aiohttp.ClientSession() as session:
        await warm_up(session, fleet.url, size)
        used = dict.fromkeys(parts, 0.0)
        for first in range(0, requests, BLOCK):
            times["direct"] += await send(session, fleet.engines[0], size, first, BLOCK)
            before = {name: cpu_seconds(pids) for name, pids in parts.items()}
            times["fleet"] += await send(session, fleet.url, size, first, BLOCK)
            for name, pids in parts.items():
                used[name] += cpu_seconds(pids) - before[name]
    p50 = {way: round(percentile(values, 50) * 1000, 2) for way, values in times.items()}
    cpu = {name: round(seconds * 1000 / len(times["fleet"]), 2) for name, seconds in used.items()}
    return {"token_ids": size, "cpu_ms": cpu, "p50_ms": p50, "ratio": round(p50["fleet"] / p50["direct"], 2)}


def main() -> int:
    """Measure, print a table, write the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=200, help="for each size and way")
    options = parser.parse_args()
    os.environ.setdefault(SETTINGS_VARIABLE, dump_settings(reports=str(reports_folder(os.environ))))
    facts, rows = machine(), []
    with StandInFleet(engines=1, context_length=CONTEXT) as engines, local_fleet(engines.urls) as fleet:
        for size in SIZES:
            row = asyncio.run(measure(fleet, size, options.requests))
            rows.append(row)
            print(json.dumps(row), flush=True)
    save("router_cpu", facts, {"rows": rows})
    return 0


if __name__ == "__main__":
    sys.exit(main())
