"""The row *delta* of bench.staged: delta uploads against complete uploads of the same tensors."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from bench.fleets import LOADER_ARGS, LocalFleet, engine_parts, engine_python, local_fleet, stand_ins
from bench.push import listed, medians, quartiles

ENGINES = 2
SHARES = (0.001, 0.01, 0.1)
"""Shares of the elements that change between two pushes."""
WAYS = ("complete", "delta")
TIMES = ("whole", "transfer", "stage")


def measure(*, model: Path, size_limit: str, pairs: int) -> dict[str, Any]:
    """Push the same tensors to two fleets, in turns: one gets complete uploads, the other one delta uploads."""
    load = os.getloadavg()[0]
    with ExitStack() as stack:
        fleets = {}
        for way in WAYS:
            engines = stack.enter_context(stand_ins(ENGINES, model=model, args=LOADER_ARGS))
            fleets[way] = stack.enter_context(local_fleet(engines, size_limit=size_limit))
        line = [part for way in WAYS for part in (f"--{way}", fleets[way].url)]
        line += ["--model", str(model), "--rounds", str(pairs), "--shares", *map(str, SHARES), "--parts", json.dumps(named_parts(fleets))]
        rows = _work(line)
    return {"load": round(load, 2), "bytes": rows[0]["bytes"], "engines": ENGINES, "shares": summarize(rows)}


def named_parts(fleets: dict[str, LocalFleet]) -> dict[str, list[int]]:
    """Return the process IDs of both fleets by name."""
    return {f"{name} ({way})": pids for way, fleet in fleets.items() for name, pids in fleet.parts().items()} | engine_parts()


def _work(line: Sequence[str]) -> list[dict[str, Any]]:
    """Run the worker, which needs torch, in the engines' environment, and return its rows."""
    process = engine_python("bench.staged_delta_worker", *line, stdout=subprocess.PIPE, text=True)
    out, _ = process.communicate(timeout=1800)
    if process.returncode:
        raise SystemExit("bench.staged_delta_worker failed; its error is above.")
    return [json.loads(text) for text in out.splitlines()]


def summarize(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return bytes and quartiles of times of both ways for each share, and the ratios of delta to complete within a round."""
    found: dict[str, Any] = {}
    for share in dict.fromkeys(row["share"] for row in rows):
        ways = {way: {row["round"]: row for row in rows if (row["share"], row["way"]) == (share, way)} for way in WAYS}
        complete, delta = ways["complete"], ways["delta"]
        found[f"{share:g}"] = {
            **{way: _describe(way, list(by_round.values())) for way, by_round in ways.items()},
            "ratios": {
                name: quartiles([delta[n][name] / complete[n][name] for n in delta if complete[n][name]], 2 if name in TIMES else 4)
                for name in ("sent", "pods", *TIMES)
            },
        }
    return found


def _describe(way: str, rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    numbers = {name: quartiles([row[name] for row in rows], 0) for name in ("sent", "pods", *TIMES)}
    others = tuple(f"({other})" for other in WAYS if other != way)
    cpu = medians([{name: value for name, value in row["cpu"].items() if not name.endswith(others)} for row in rows])
    return {"pushes": len(rows), **numbers, "cpu": cpu}


def show(row: dict[str, Any]) -> None:
    """Print the row for people."""
    print(
        f"uploads of {row['bytes'] / 1e6:.3g} MB to {row['engines']} + {row['engines']} stand-ins, load {row['load']}; medians (quartiles)"
    )
    for share, found in row["shares"].items():
        print(f"  {float(share):.1%} of the elements changed")
        for way in WAYS:
            numbers = found[way]
            times = ", ".join(f"{name} {numbers[name][1]:.0f} ({numbers[name][0]:.0f} to {numbers[name][2]:.0f}) ms" for name in TIMES)
            print(f"    {way:<8} {numbers['sent'][1] / 1e6:.3g} MB sent, {numbers['pods'][1] / 1e6:.3g} MB to the pods; {times}")
            print(f"      cpu {listed({name: value for name, value in numbers['cpu'].items() if value})}")
        ratios = ", ".join(f"{name} {each[1]:g} ({each[0]:g} to {each[2]:g})" for name, each in found["ratios"].items())
        print(f"    delta / complete: {ratios}", flush=True)
