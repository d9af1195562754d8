"""Measure what a large batch costs heartbeats: ``python -m bench.batches [--seconds 10]``.

Two stand-in engines behind a complete ``sglang-rollout local``. One client sends a heartbeat of a trainer every 20 ms, first while nothing
else happens, then while another client sends a batch of 200,000 prompts (32 MiB), which is cancelled at the end. Prints p50, p99 and the
longest duration of a heartbeat, and their ratios. Writes ``bench/results/batches.json``.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import time
from contextlib import suppress
from typing import Any

import aiohttp
from bench.common import machine, percentile, save
from bench.fleets import local_fleet, stand_ins

PROMPTS = 200_000
PROMPT = "x" * 160
PAUSE_SECONDS = 0.02


async def beat(url: str, seconds: float) -> list[float]:
    """Send heartbeats for ``seconds``, and return the seconds of each."""
    times = []
    end = time.monotonic() + seconds
    async with aiohttp.ClientSession() as session:
        while (began := time.monotonic()) < end:
            async with session.post(f"{url}/fleet/lease", json={"group_name": "g"}) as reply:
                reply.raise_for_status()
                await reply.read()
            times.append(time.monotonic() - began)
            await asyncio.sleep(PAUSE_SECONDS)
    return times


async def send_batch(url: str) -> None:
    """Send the batch, and drop its answer."""
    body = json.dumps({"text": [PROMPT] * PROMPTS, "sampling_params": {"max_new_tokens": 1}}).encode()
    timeout = aiohttp.ClientTimeout(total=600)
    async with aiohttp.ClientSession(timeout=timeout) as session, session.post(f"{url}/generate", data=body) as reply:
        await reply.read()


async def compare(url: str, seconds: float) -> list[dict[str, Any]]:
    """Measure heartbeats without and with a batch, and return a row for each."""
    idle = await beat(url, seconds)
    sending = asyncio.create_task(asyncio.to_thread(asyncio.run, send_for(url, seconds)))
    busy = await beat(url, seconds)
    await sending
    rows = []
    for name, times in (("idle", idle), ("batch", busy)):
        row = {"p50": percentile(times, 50), "p99": percentile(times, 99), "longest": max(times)}
        rows.append({"what": name, "heartbeats": len(times), **{key: round(value * 1000, 2) for key, value in row.items()}})
    return rows


async def send_for(url: str, seconds: float) -> None:
    """Send a batch, and cancel it after ``seconds``."""
    with suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            await send_batch(url)


def main() -> None:
    """Measure, print, and write the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=10.0, help="length of each part")
    options = parser.parse_args()
    facts = machine()
    with stand_ins(2) as urls, local_fleet(urls) as fleet:
        rows = asyncio.run(compare(fleet.url, options.seconds))
    idle, busy = rows
    ratios = {key: round(busy[key] / idle[key], 2) for key in ("p50", "p99", "longest")}
    print(f"{'':<6} {'heartbeats':>10} {'p50':>8} {'p99':>8} {'longest':>8}   (ms)")
    for row in rows:
        print(f"{row['what']:<6} {row['heartbeats']:>10} {row['p50']:>8} {row['p99']:>8} {row['longest']:>8}")
    print(f"{'ratio':<6} {'':>10} {ratios['p50']:>8} {ratios['p99']:>8} {ratios['longest']:>8}")
    save("batches", facts, {"rows": rows, "ratios": ratios})


if __name__ == "__main__":
    main()
