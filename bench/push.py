"""Compare a weight push through the fleet's URL with SGLang's own calls and with a bare broadcast of the same bytes.

    python -m bench.push [--rounds 20] [--only 2-real-197MB ...] [--paused-sleep]

A round pushes each way once, in an order that alternates, so that a busy machine slows all ways alike. Baselines: *gloo* is one broadcast
of the same bytes to the same number of ranks; *direct* is SGLang's own control API on each engine (pause, begin, buckets, end, continue)
in parallel threads. *fleet* is ``Fleet.push`` from call to return, which also compares checksums, records the version and opens the gates.

- *fleet/direct* is the ratio within a round: median and quartiles;
- *over gloo* is the time of everything but the broadcast: fleet minus gloo, in milliseconds;
- *paused* is the time from the first engine's pause to the last one's resume, by the coordinator's clock;
- *calls* compares each control call: direct; the slowest engine's answer to its agent; the coordinator's complete fan-out;
- ``--paused-sleep`` measures real engines with a patch of SGLang. Without the patch, each paused scheduler polls on a complete core, which
  slows all processes if engines, fleet and trainer share two cores;
- *cpu* is the processor time of a part's threads, *waited* the time in which they were ready to run and had no processor.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from statistics import median, quantiles
from typing import Any

from bench.common import RESULTS, machine, save
from bench.fleets import LocalFleet, bare_coordinator, engine_parts, engine_python, local_fleet, real_engines, stand_ins
from e2e.engine import environment

LARGE = ("--dtype", "bfloat16", "--hidden", "1024", "--layers", "10", "--seed", "1")
BLOCKS = 2
VERIFY_ROUNDS = 9
"""Pushes of each block that compares ``weights.verify`` Always with Off."""
ROUNDS_SECONDS = 200.0
"""Maximum seconds of a case's rounds. With the start of four engines, a case ends within six minutes."""
Rows = dict[str, list[dict[str, Any]]]


@dataclass(frozen=True)
class Case:
    """One fleet and one model."""

    name: str
    engines: int
    real: bool = True
    large: bool = False
    one_process: bool = False
    """True to run all agents in one process, without gates and front, because the machine has no room for more complete sets."""
    verified: bool = False
    """True to measure also weights.verify Always and Off, on other fleets over the same engines."""
    bucket_mib: int = 256
    """Maximum size of a bucket in MiB. The trainer fills a bucket while the previous bucket is being sent."""
    paused_sleep: bool = False
    """True to patch SGLang, so that paused schedulers sleep."""
    most_ms: float | None = None
    """Maximum of fleet minus gloo, in milliseconds."""
    most_ratio: float | None = None
    """Maximum of fleet divided by direct, as the median of the rounds' ratios."""


CASES = (
    Case("2-real-tiny", 2, verified=True, most_ms=150),
    Case("2-real-197MB", 2, large=True, verified=True, most_ratio=1.2),
    Case("2-real-197MB-in-buckets", 2, large=True, bucket_mib=32, most_ratio=1.2),
    Case("4-real-197MB", 4, large=True, most_ratio=1.2),
    Case("4-real-197MB-in-buckets", 4, large=True, bucket_mib=32, most_ratio=1.2),
    Case("8-stand-ins", 8, real=False, most_ms=300),
    Case("64-stand-ins", 64, real=False, one_process=True, most_ms=500),
)


def work(fleet: LocalFleet, options: Sequence[str]) -> Rows:
    """Run the worker, which needs torch, in the engines' environment."""
    line = ["--url", fleet.url, "--engines", *fleet.engines, "--parts", json.dumps(fleet.parts() | engine_parts()), *options]
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
    """Start a case's fleet and push each way in turns."""
    model = environment.model(*LARGE) if case.large else environment.model() if case.real else None
    options = ["--bucket-mib", str(case.bucket_mib), *(["--model", str(model)] if model else [])]
    with ExitStack() as stack:
        env = {"SGLANG_CPU_PATCHES": "paused-sleep" if case.paused_sleep else ""}
        engines = stack.enter_context(real_engines(case.engines, model=model, env=env) if case.real else stand_ins(case.engines))
        load = os.getloadavg()[0]
        with bare_coordinator(engines) if case.one_process else local_fleet(engines) as fleet:
            rows = work(fleet, [*options, "--rounds", str(rounds), "--seconds", str(ROUNDS_SECONDS)])
        verified = {"verify": verification(engines, options)} if case.verified else {}
    return {**asdict(case), "load": round(load, 2), **summary(case, rows), **verified, "rounds": rows}


def verification(engines: list[str], options: Sequence[str]) -> dict[str, Any]:
    """Measure pushes with ``weights.verify`` Off and Always, in alternating blocks."""
    times: dict[str, list[float]] = {"Off": [], "Always": []}
    for verify in ("Off", "Always") * BLOCKS:
        with local_fleet(engines, weights={"verify": verify}, fresh=False) as fleet:
            times[verify] += [row["whole"] for row in work(fleet, [*options, "--rounds", str(VERIFY_ROUNDS), "--ways", "fleet"])["fleet"]]
    middle = {f"{verify.lower()}_ms": round(median(values), 1) for verify, values in times.items()}
    return {**middle, "ratio": round(middle["always_ms"] / middle["off_ms"], 2), "pushes": len(times["Off"])}


def summary(case: Case, rows: Rows) -> dict[str, Any]:
    """Return medians, quartiles, and whether a maximum is exceeded."""
    whole = {way: {row["round"]: row["whole"] for row in found} for way, found in rows.items()}
    middle = {way: median(times.values()) for way, times in whole.items()}
    ratios = [time / whole["direct"][number] for number, time in whole["fleet"].items() if number in whole["direct"]]
    over = middle["fleet"] - middle["gloo"]
    pairs = quartiles(ratios, 3)
    missed = (case.most_ms is not None and over > case.most_ms) or (case.most_ratio is not None and pairs[1] > case.most_ratio)
    ratio = {way: round(middle["fleet"] / middle[way], 2) for way in ("gloo", "direct")}
    times = {f"{way}_ms": round(value, 1) for way, value in middle.items()}
    spread = {way: quartiles(list(values.values()), 0) for way, values in whole.items()}
    paused = round(median(row["paused"] for row in rows["fleet"]), 1)
    found = {"pairs": len(ratios), "pair_ratio": pairs, "quartiles_ms": spread, "ratio": ratio, "over_gloo_ms": round(over, 1)}
    stolen = {way: round(sum(row["stolen"] for row in found_rows)) for way, found_rows in rows.items()}
    return {**times, **found, "paused_ms": paused, "missed": missed, "stolen_ms": stolen, **time_by_part(rows)}


def time_by_part(rows: Rows) -> dict[str, Any]:
    """Return the medians of the times of steps, phases and calls, and of each part's processor time and waiting."""
    fleet, direct = rows["fleet"], rows["direct"]
    calls = {
        "direct": medians([row["calls"] for row in direct]),
        "engine": medians([row["calls"]["engine"] for row in fleet]),
        "fan_out": medians([row["calls"]["fan_out"] for row in fleet]),
    }
    names = {name: None for table in (calls["fan_out"], calls["direct"]) for name in table}
    return {
        "steps": {"direct": medians([row["steps"] for row in direct]), "fleet": medians([row["steps"] for row in fleet])},
        "coordinator": medians([row["coordinator"] for row in fleet]),
        "calls": {name: {who: table[name] for who, table in calls.items() if name in table} for name in names},
        **{kind: {way: medians([row[kind] for row in rows[way]]) for way in ("direct", "fleet")} for kind in ("cpu", "waited")},
    }


def medians(tables: Sequence[dict[str, float]]) -> dict[str, float]:
    """Return the median of each name's values. A missing name counts as 0."""
    names = {name: None for table in tables for name in table}
    return {name: round(median(table.get(name, 0.0) for table in tables), 1) for name in names}


def quartiles(values: Sequence[float], digits: int) -> list[float]:
    """Return first quartile, median and third quartile."""
    found = quantiles(values, n=4, method="inclusive") if len(values) > 1 else [*values] * 3
    return [round(value, digits) for value in found]


def show(row: dict[str, Any]) -> None:
    """Print one case for people."""
    first = row["rounds"]["fleet"][0]
    aim = f"{row['most_ms']:.0f} ms over gloo" if row["most_ms"] else f"{row['most_ratio']} x direct"
    what = f"{first['bytes'] / 1e6:.2g} MB in {first['buckets']} bucket{'s' if first['buckets'] > 1 else ''}, load {row['load']}"
    print(f"{row['name']}: {what}; aim: at most {aim}: {'MISSED' if row['missed'] else 'met'}")
    low, middle, high = row["pair_ratio"]
    print(f"  fleet/direct {middle:.2f} ({low:.2f} to {high:.2f}) in {row['pairs']} pairs; medians {row['ratio']['direct']:.2f}")
    times = ", ".join(f"{way} {median_:.0f} ({q1:.0f} to {q3:.0f})" for way, (q1, median_, q3) in row["quartiles_ms"].items())
    print(f"  ms: {times}; {row['over_gloo_ms']:.0f} over gloo; paused {row['paused_ms']:.0f}")
    print(f"  stolen by the hypervisor in all pushes: {row['stolen_ms']} ms")
    if "verify" in row:
        found = row["verify"]
        print(f"  weights.verify Always {found['always_ms']:.0f} ms, Off {found['off_ms']:.0f} ms: {found['ratio']} x")
    print("  steps        " + "; ".join(f"{way}: {listed(steps)}" for way, steps in row["steps"].items()))
    print("  coordinator  " + listed(row["coordinator"]))
    for call, found in row["calls"].items():
        print(f"  {call:<32}" + ", ".join(f"{who} {value:.0f}" for who, value in found.items()))
    for kind in ("cpu", "waited"):
        for way, found in row[kind].items():
            print(f"  {kind:<7}{way:<7}" + listed(found), flush=True)


def listed(table: dict[str, float]) -> str:
    """Return names and milliseconds on one line."""
    return ", ".join(f"{name} {value:.0f}" for name, value in table.items())


def main() -> int:
    """Measure, print and write the result. Returns 0 also if a maximum is exceeded."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=20, help="pushes each way; fewer if they take too long")
    parser.add_argument("--only", nargs="+", choices=[case.name for case in CASES], help="measure only these; the file keeps the others")
    parser.add_argument("--paused-sleep", action="store_true", help="patch real engines so that paused schedulers sleep")
    options = parser.parse_args()
    facts = machine()
    for case in choose_cases(options.only, paused_sleep=options.paused_sleep):
        row = measure(case, options.rounds)
        show(row)
        row["rounds"] = {way: [round(found["whole"], 1) for found in rows] for way, rows in row["rounds"].items()}
        others = [other for other in saved() if other["name"] != case.name]
        save("push", facts, {"cases": [*others, row]})
    return 0


def choose_cases(only: Sequence[str] | None, *, paused_sleep: bool) -> list[Case]:
    """Return the cases of these names, or all. With ``paused_sleep``, return those of real engines with other names."""
    cases = [case for case in CASES if only is None or case.name in only]
    if not paused_sleep:
        return cases
    return [replace(case, name=f"{case.name}-paused-sleep", paused_sleep=True, verified=False) for case in cases if case.real]


def saved() -> list[dict[str, Any]]:
    """Return the cases of the result file."""
    path = RESULTS / "push.json"
    return list(json.loads(path.read_text()).get("cases", [])) if path.exists() else []


if __name__ == "__main__":
    sys.exit(main())
