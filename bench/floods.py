"""Measure what a flood from one client costs control calls: ``python -m bench.floods [--seconds 10]``.

Two stand-in engines behind a complete ``sglang-rollout local``. One client sends a heartbeat of a trainer every 20 ms, first alone, and
then beside each flood of the fault matrix. Prints p50, p99 and the longest duration of a heartbeat. The aim is a p99 below one second.
Writes ``bench/results/floods.json``.
"""

from __future__ import annotations

import argparse
import asyncio
from typing import Any

from bench.batches import beat
from bench.common import machine, percentile, save
from bench.fleets import local_fleet, stand_ins
from e2e.chaos.floods import MALFORMED_BODIES, REFUSED_CALLS, SLOW_BODIES, Flood, FloodKind

KINDS: dict[str, FloodKind | None] = {
    "alone": None,
    "refused calls": REFUSED_CALLS,
    "slow bodies": SLOW_BODIES,
    "malformed bodies": MALFORMED_BODIES,
}


def measure(url: str, name: str, seconds: float) -> dict[str, Any]:
    """Measure heartbeats beside a flood, and return a row."""
    kind = KINDS[name]
    flood = Flood(kind, url, {}) if kind is not None else None
    if flood is not None:
        flood.start()
    times = asyncio.run(beat(url, seconds))
    if flood is not None:
        flood.stop()
    row = {"p50": percentile(times, 50), "p99": percentile(times, 99), "longest": max(times)}
    answers = dict(sorted(flood.statuses.items())) if flood is not None else {}
    return {"what": name, "heartbeats": len(times), **{key: round(value * 1000, 2) for key, value in row.items()}, "answers": answers}


def main() -> None:
    """Measure, print, and write the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=10.0, help="length of each part")
    seconds = parser.parse_args().seconds
    facts = machine()
    print(f"{'':<14} {'heartbeats':>10} {'p50':>8} {'p99':>8} {'longest':>8}   (ms)   answers to the flood")
    rows = []
    with stand_ins(2) as urls, local_fleet(urls) as fleet:
        for name in KINDS:
            row = measure(fleet.url, name, seconds)
            rows.append(row)
            print(f"{name:<14} {row['heartbeats']:>10} {row['p50']:>8} {row['p99']:>8} {row['longest']:>8}          {row['answers']}")
    save("floods", facts, {"rows": rows})


if __name__ == "__main__":
    main()
