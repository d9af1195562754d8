"""A weight push through the fleet's URL against the bare broadcast of the same bytes, in the same run and in turns.

    python -m bench.push [--rounds 7] [--only 2-real-197MB ...]

Baselines: *gloo* is one broadcast of the same bytes to as many ranks that do nothing else; *direct* is SGLang's own control API on each
engine (pause, begin, buckets, end, continue) in parallel threads. *fleet* is ``Fleet.push`` from call to return, which also proves what
every engine holds, records the version and opens the gates.

- *over gloo* is what everything but the broadcast costs: fleet minus gloo, in milliseconds;
- *paused* is the time from the first engine's pause to the last one's resume, by the coordinator's clock.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

from bench.common import RESULTS, machine, save
from bench.fleets import LocalFleet, bare_coordinator, engine_python, local_fleet, real_engines, stand_ins
from e2e.engine import environment

LARGE = ("--dtype", "bfloat16", "--hidden", "1024", "--layers", "10", "--seed", "1")
BLOCKS = 2
Rows = dict[str, list[dict[str, Any]]]


@dataclass(frozen=True)
class Case:
    """One fleet and one model."""

    name: str
    engines: int
    real: bool = True
    large: bool = False
    one_process: bool = False
    """Agents in one process and neither gates nor front: more whole sets than this do not fit."""
    verified: bool = False
    """Also measured with weights.verify Always and Off, on fleets of their own over the same engines."""
    bucket_mib: int = 256
    """Most bytes of a bucket, so how many buckets a push has: the trainer fills one while the one before is on its way."""
    most_ms: float | None = None
    """Aim for fleet minus gloo."""
    most_ratio: float | None = None
    """Aim for fleet over gloo."""


CASES = (
    Case("2-real-tiny", 2, verified=True, most_ms=150),
    Case("2-real-197MB", 2, large=True, verified=True, most_ratio=1.1),
    Case("2-real-197MB-in-buckets", 2, large=True, bucket_mib=32, most_ratio=1.1),
    Case("4-real-197MB", 4, large=True, most_ratio=1.1),
    Case("8-stand-ins", 8, real=False, most_ms=300),
    Case("64-stand-ins", 64, real=False, one_process=True, most_ms=500),
)


def work(fleet: LocalFleet, options: Sequence[str]) -> Rows:
    """Run the worker, which needs torch, in the engines' environment."""
    line = ["--url", fleet.url, "--engines", *fleet.engines, "--parts", json.dumps(fleet.parts()), *options]
    process = engine_python("bench.push_worker", *line, stdout=subprocess.PIPE, text=True)
    out, _ = process.communicate(timeout=1200)
    if process.returncode:
        raise SystemExit("bench.push_worker failed; its error is above.")
    rows: Rows = {}
    for text in out.splitlines():
        row = json.loads(text)
        rows.setdefault(row.pop("way"), []).append(row)
    return rows


def measure(case: Case, rounds: int) -> dict[str, Any]:
    """Put a case's fleet up and push to it each way in turns."""
    model = environment.model(*LARGE) if case.large else environment.model() if case.real else None
    options = ["--rounds", str(rounds), "--bucket-mib", str(case.bucket_mib), *(["--model", str(model)] if model else [])]
    with ExitStack() as stack:
        engines = stack.enter_context(real_engines(case.engines, model=model) if case.real else stand_ins(case.engines))
        load = os.getloadavg()[0]
        with bare_coordinator(engines) if case.one_process else local_fleet(engines) as fleet:
            rows = work(fleet, options)
        verified = {"verify": verification(engines, options)} if case.verified else {}
    return {**asdict(case), "load": round(load, 2), **summary(case, rows), **verified, "rounds": rows}


def verification(engines: list[str], options: Sequence[str]) -> dict[str, Any]:
    """What comparing checksums costs: pushes with ``weights.verify`` off and always, in blocks that take turns."""
    times: dict[str, list[float]] = {"off": [], "always": []}
    for verify in ("off", "always") * BLOCKS:
        with local_fleet(engines, weights={"verify": verify}, fresh=False) as fleet:
            times[verify] += [row["whole"] for row in work(fleet, [*options, "--ways", "fleet"])["fleet"]]
    middle = {f"{verify}_ms": round(median(values), 1) for verify, values in times.items()}
    return {**middle, "ratio": round(middle["always_ms"] / middle["off_ms"], 2), "pushes": len(times["off"])}


def summary(case: Case, rows: Rows) -> dict[str, Any]:
    """Medians, and how far they are from the aims."""
    middle = {way: median(row["whole"] for row in found) for way, found in rows.items()}
    fleet = rows["fleet"]
    over = middle["fleet"] - middle["gloo"]
    ratios = {way: round(middle["fleet"] / middle[way], 2) for way in ("gloo", "direct")}
    missed = (case.most_ms is not None and over > case.most_ms) or (case.most_ratio is not None and ratios["gloo"] > case.most_ratio)
    parts = {kind: {key: round(median(row[kind].get(key, 0) for row in fleet), 1) for key in fleet[0][kind]} for kind in KINDS}
    whole = {f"{way}_ms": round(value, 1) for way, value in middle.items()}
    paused = round(median(row["paused"] for row in fleet), 1)
    return {**whole, "over_gloo_ms": round(over, 1), "ratio": ratios, "paused_ms": paused, "missed": missed, **parts}


KINDS = ("client", "coordinator", "cpu")


def show(row: dict[str, Any]) -> None:
    """One case, for people."""
    size = row["rounds"]["fleet"][0]["bytes"] / 1e6
    aim = f"{row['most_ms']:.0f} ms over gloo" if row["most_ms"] else f"{row['most_ratio']} x gloo"
    buckets = row["rounds"]["fleet"][0]["buckets"]
    what = f"{size:.2g} MB in {buckets} bucket{'s' if buckets > 1 else ''}, load {row['load']}"
    print(f"{row['name']}: {what}; aim: at most {aim}: {'MISSED' if row['missed'] else 'met'}")
    times = ", ".join(f"{way} {row[f'{way}_ms']:.0f} ms" for way in ("gloo", "direct", "fleet"))
    print(f"  {times}: {row['over_gloo_ms']:.0f} ms over gloo, {row['ratio']['gloo']} x gloo, {row['ratio']['direct']} x direct")
    print(f"  paused {row['paused_ms']:.0f} ms")
    if "verify" in row:
        found = row["verify"]
        print(f"  weights.verify Always {found['always_ms']:.0f} ms, Off {found['off_ms']:.0f} ms: {found['ratio']} x")
    for kind in KINDS:
        print(f"  {kind:<12} " + ", ".join(f"{key} {value:.0f}" for key, value in row[kind].items()) + " ms", flush=True)


def main() -> int:
    """Measure, print, write the result. Exit code 0 also above an aim: a benchmark measures, it does not judge."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--only", nargs="+", choices=[case.name for case in CASES], help="only these; the file keeps the others")
    options = parser.parse_args()
    facts = machine()
    for case in CASES:
        if options.only is None or case.name in options.only:
            row = measure(case, options.rounds)
            show(row)
            others = [other for other in saved() if other["name"] != case.name]
            save("push", facts, {"cases": [*others, row]})
    return 0


def saved() -> list[dict[str, Any]]:
    """The cases that were measured before."""
    path = RESULTS / "push.json"
    return list(json.loads(path.read_text()).get("cases", [])) if path.exists() else []


if __name__ == "__main__":
    sys.exit(main())
