"""Measure the latency that front, smg and gate add to a request.

    python -m bench.latency [--seconds 6]

Sends one-token requests, and streamed requests until their first event, with 1, 16 and 256 at a time, to one engine directly and
through the fleet's URL. Blocks of both ways alternate, so that the machine's load affects both. Prints p50 and p99 of both ways and their
ratios.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import time
from collections.abc import Awaitable, Callable
from typing import Any

import aiohttp
from bench.common import machine, percentile, save
from bench.fleets import local_fleet, real_engines

CONCURRENT = (1, 16, 256)
BLOCKS = 3
WARM_SECONDS = 0.5
Request = Callable[[aiohttp.ClientSession, str, int], Awaitable[float]]


def body(number: int, *, stream: bool) -> dict[str, Any]:
    """Return a request with a short prompt that differs each time, so that the prefix cache helps neither way."""
    ids = [10 + number % 1900, 11 + number // 1900 % 1900, 20, 30]
    params = {"max_new_tokens": 4 if stream else 1, "temperature": 0, "ignore_eos": True}
    return {"input_ids": ids, "sampling_params": params, "stream": stream}


async def one_token(session: aiohttp.ClientSession, url: str, number: int) -> float:
    """Return the seconds until the complete answer of a one-token request."""
    started = time.monotonic()
    async with session.post(f"{url}/generate", json=body(number, stream=False)) as reply:
        reply.raise_for_status()
        await reply.read()
    return time.monotonic() - started


async def first_event(session: aiohttp.ClientSession, url: str, number: int) -> float:
    """Return the seconds until the first token of a streamed request."""
    started = time.monotonic()
    async with session.post(f"{url}/generate", json=body(number, stream=True)) as reply:
        reply.raise_for_status()
        await reply.content.readuntil(b"\n\n")
        took = time.monotonic() - started
        await reply.read()
    return took


async def block(url: str, request: Request, concurrent: int, seconds: float) -> list[float]:
    """Send requests for ``seconds``, ``concurrent`` at a time, and return the seconds of each.

    Each block has its own connections, because the engine closes connections that idle during the other way's block. Requests that
    began while connections were opened are not counted.
    """
    warm = time.monotonic() + WARM_SECONDS
    end = warm + seconds
    numbers = iter(range(int(warm * 1000) % 1_000_000, 1 << 40))
    times: list[float] = []
    connector, timeout = aiohttp.TCPConnector(limit=0), aiohttp.ClientTimeout(total=120)
    async with aiohttp.ClientSession(timeout=timeout, connector=connector) as session:

        async def client() -> None:
            while (began := time.monotonic()) < end:
                took = await request(session, url, next(numbers))
                if began > warm:
                    times.append(took)

        await asyncio.gather(*(client() for _ in range(concurrent)))
    return times


async def compare(direct: str, fleet: str, request: Request, concurrent: int, seconds: float) -> dict[str, Any]:
    """Measure both ways in turns, and return milliseconds and ratios."""
    times: dict[str, list[float]] = {"direct": [], "fleet": []}
    for _ in range(BLOCKS):
        times["direct"] += await block(direct, request, concurrent, seconds / BLOCKS)
        times["fleet"] += await block(fleet, request, concurrent, seconds / BLOCKS)
    row: dict[str, Any] = {"what": request.__name__, "concurrent": concurrent}
    for way, values in times.items():
        row[way] = {"requests": len(values), **{f"p{p}_ms": round(percentile(values, p) * 1000, 2) for p in (50, 99)}}
    row["ratio"] = {f"p{p}": round(row["fleet"][f"p{p}_ms"] / row["direct"][f"p{p}_ms"], 3) for p in (50, 99)}
    return row


def main() -> int:
    """Measure, print a table, write the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=6.0, help="for each way, kind and concurrency")
    options = parser.parse_args()
    facts = machine()
    rows = []
    print(f"{'what':<12} {'at once':>7} {'direct p50':>11} {'p99':>8} {'fleet p50':>10} {'p99':>8} {'ratio p50':>10} {'p99':>6}   (ms)")
    with real_engines(1, args=("--max-running-requests", "256", "--max-total-tokens", "65536")) as engines, local_fleet(engines) as fleet:
        for request in (one_token, first_event):
            for concurrent in CONCURRENT:
                row = asyncio.run(compare(fleet.engines[0], fleet.url, request, concurrent, options.seconds))
                rows.append(row)
                direct, through, ratio = row["direct"], row["fleet"], row["ratio"]
                print(
                    f"{row['what']:<12} {concurrent:>7} {direct['p50_ms']:>11} {direct['p99_ms']:>8} {through['p50_ms']:>10} "
                    f"{through['p99_ms']:>8} {ratio['p50']:>10} {ratio['p99']:>6}",
                    flush=True,
                )
    save("latency", facts, {"rows": rows})
    return 0


if __name__ == "__main__":
    sys.exit(main())
