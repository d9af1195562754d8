"""Measure transport Staged against transport Distributed, and against what the machine can do, in pairs of the same run.

    python -m bench.staged [push-2] [push-4] [fanout] [rejoin] [memory] [tokens] [delta] [--pairs 10] [--smoke] [--paused-sleep]

push-2, push-4   Two fleets side by side, each with 2 or 4 real engines and a model of 197 MB: one Distributed, one Staged. Each round
                 pushes each way once, in an order that alternates. The baselines of a round are Distributed with the same number of
                 buckets, and one gloo broadcast of the same bytes to as many ranks. Aims, as medians of the ratios to Distributed within
                 a round: pause of an engine at most 0.3, time until the last byte is taken at most 0.5, until the commit at most 1.0.
fanout           64 pods copy 50 MB from the weight store's data port: the staging package's server and client in a few processes,
                 without the rest of an agent. The baseline is the same tree of plain sockets, which writes the same files and computes
                 no digest. The aim is a ratio of at most 1.5.
rejoin           1 or 8 stand-ins restart at the same time: seconds from an engine's first answer to its open gate, with a copy in its
                 own pod, and with a new pod that copies from another pod, from the weight store, or from a snapshot. The baseline is
                 ``/update_weights_from_disk`` on one stand-in.
memory           Resident memory of the weight store and of the agents during pushes of 197 MB to two stand-ins, without shared memory
                 (the volume's pages). The baseline is the same process before the pushes, and the agent of a Distributed fleet.
tokens           Tokens that clients receive from two real engines in a minute with one upload, against a minute without, with
                 activation AllAtOnce (aim 0.9) and Rolling (aim 0.95), and the processor time of staging.
delta            Two fleets with two stand-ins each get the same tensors of 197 MB, of which 0.1, 1 and 10 % of the elements have changed.
                 One gets complete uploads, the other one delta uploads. Bytes, times, and the ratios to the complete upload of a round.

``--smoke`` runs each row with few pairs of small models, to see that it works: its figures mean nothing, and no file is written.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench import staged_delta, staged_fanout, staged_memory, staged_rejoin, staged_tokens
from bench.common import RESULTS, machine, save
from bench.fleets import LOADER_ARGS, LocalFleet, engine_parts, engine_python, local_fleet, real_engines
from bench.push import LARGE, listed, medians, quartiles
from e2e.engine import environment

SIZE_LIMIT = "1Gi"
BUCKETS_MIB = (256, 32)
"""Maximum sizes of a bucket: one bucket, and seven."""
STAGED_WAYS = ("group", "upload", "early")
AIMS = {"paused": 0.3, "blocked": 0.5, "whole": 1.0}
"""Largest ratios to Distributed: the longest pause of an engine, until the last byte is taken, and until the commit."""
_LOAD_ENDED = re.compile(r"The load of update \w+ has ended: (.*)\.")
_STEP = re.compile(r"(\w+) (\d+) ms")
Rows = list[dict[str, Any]]


@dataclass(frozen=True)
class Settings:
    """Size of a run."""

    pairs: int
    smoke: bool = False
    paused_sleep: bool = False
    seconds: float = 400.0
    """Maximum seconds of the rounds of one row."""


# --- push ----------------------------------------------------------------------------------------------------------------


@contextmanager
def two_fleets(number: int, model: Path, *, paused_sleep: bool) -> Iterator[tuple[LocalFleet, LocalFleet]]:
    """Run real engines behind two fleets, and yield the one with transport Distributed and the one with transport Staged."""
    patches = {"SGLANG_CPU_PATCHES": "paused-sleep" if paused_sleep else ""}
    with ExitStack() as stack:
        plain = stack.enter_context(real_engines(number, model=model, env=patches))
        loading = stack.enter_context(real_engines(number, model=model, args=LOADER_ARGS, env=patches))
        first = stack.enter_context(local_fleet(plain))
        yield first, stack.enter_context(local_fleet(loading, size_limit=SIZE_LIMIT))


def measure_push(number: int, settings: Settings) -> dict[str, Any]:
    """Push each way in turns to fleets of ``number`` engines each."""
    model = environment.model() if settings.smoke else environment.model(*LARGE)
    buckets = [str(mib) for mib in ((256, 1) if settings.smoke else BUCKETS_MIB)]
    with two_fleets(number, model, paused_sleep=settings.paused_sleep) as (distributed, staged):
        load = os.getloadavg()[0]
        line = ["--distributed", distributed.url, "--staged", staged.url, "--ranks", str(number), "--model", str(model)]
        line += ["--rounds", str(settings.pairs), "--seconds", str(settings.seconds), "--bucket-mib", *buckets]
        rows = work([*line, "--parts", json.dumps(named_parts(distributed, staged))])
        loads = load_seconds(staged.state)
    return {"engines": number, "load": round(load, 2), "paused_sleep": settings.paused_sleep, "loads_ms": loads, **summarize_push(rows)}


def named_parts(distributed: LocalFleet, staged: LocalFleet) -> dict[str, list[int]]:
    """Return the process IDs of both fleets by name. Engines of both fleets share their names."""
    parts = {f"{name} (Distributed)": pids for name, pids in distributed.parts().items()}
    return parts | {f"{name} (Staged)": pids for name, pids in staged.parts().items()} | engine_parts()


def work(line: Sequence[str]) -> Rows:
    """Run the worker, which needs torch, in the engines' environment, and return its rows."""
    process = engine_python("bench.staged_worker", *line, stdout=subprocess.PIPE, text=True)
    out, _ = process.communicate(timeout=1800)
    if process.returncode:
        raise SystemExit("bench.staged_worker failed; its error is above.")
    return [json.loads(text) for text in out.splitlines()]


def load_seconds(state: Path) -> dict[str, float]:
    """Return the median milliseconds of each step of a load, from the agents' logs. The first load of each engine is left out."""
    found: Rows = []
    for log in (state / "logs").glob("*-agent.log"):
        steps = [{name: float(ms) for name, ms in _STEP.findall(text)} for text in _LOAD_ENDED.findall(log.read_text(errors="replace"))]
        found += steps[1:]
    return medians(found) if found else {}


def summarize_push(rows: Rows) -> dict[str, Any]:
    """Return the medians and quartiles of each way, and the ratios to Distributed and to gloo within a round."""
    ways: dict[str, dict[int, dict[str, Any]]] = {}
    for row in rows:
        ways.setdefault(f"{row['way']} {row['mib']}", {})[row["round"]] = row
    found: dict[str, Any] = {
        "bytes": max(row.get("bytes", 0) for row in rows),
        "ways": {name: describe_way(by_round) for name, by_round in ways.items()},
    }
    found["ratios"] = [
        compare_ways(ways, way, base)
        for base in [name for name in ways if name.startswith("distributed")]
        for way in ways
        if way.split()[0] in STAGED_WAYS and (not way.startswith("group") or way.split()[1] == base.split()[1])
    ]
    return found


def describe_way(by_round: dict[int, dict[str, Any]]) -> dict[str, Any]:
    """Return quartiles of the times of one way, and medians of its steps, phases and processor times."""
    rows = list(by_round.values())
    times: dict[str, Any] = {
        name: quartiles([row[name] for row in rows], 0) for name in ("whole", "blocked", "paused", "paused_mean") if name in rows[0]
    }
    tables: dict[str, Any] = {name: medians([row[name] for row in rows]) for name in ("steps", "coordinator", "cpu") if name in rows[0]}
    return {"pushes": len(rows), "buckets": rows[0].get("buckets", 1), **times, **tables}


def compare_ways(ways: dict[str, dict[int, dict[str, Any]]], way: str, base: str) -> dict[str, Any]:
    """Return the quartiles of the ratios within a round: of ``way`` to ``base``, and of its time until the commit to a gloo broadcast."""
    rounds = [number for number in ways[way] if number in ways[base]]

    def ratios(name: str, other: str, name_of_other: str) -> list[float]:
        found = [ways[way][n][name] / ways[other][n][name_of_other] for n in rounds if n in ways[other] and ways[other][n][name_of_other]]
        return quartiles(found, 2) if found else []

    names = ["paused", "paused_mean", "blocked", *([] if way.startswith("early") else ["whole"])]
    found = {name: ratios(name, base, name) for name in names}
    missed = [name for name, aim in AIMS.items() if found.get(name) and found[name][1] > aim]
    gloo = ratios("whole", "gloo 0", "whole") if "gloo 0" in ways else []
    return {"way": way, "base": base, "pairs": len(rounds), **found, "over_gloo": gloo, "missed": missed}


def show_push(row: dict[str, Any]) -> None:
    """Print one row of pushes for people."""
    print(f"{row['engines']} + {row['engines']} real engines, {row['bytes'] / 1e6:.3g} MB, load {row['load']}; median (quartiles), ms")
    for name, found in row["ways"].items():
        times = ", ".join(
            f"{what} {found[what][1]:.0f} ({found[what][0]:.0f} to {found[what][2]:.0f})"
            for what in ("whole", "blocked", "paused", "paused_mean")
            if what in found
        )
        print(f"  {name:<16} {found['buckets']} buckets: {times}")
        for table in ("steps", "coordinator", "cpu"):
            if table in found:
                print(f"    {table:<12} {listed({key: value for key, value in found[table].items() if value})}")
    print(f"  steps of a load: {listed(row['loads_ms'])}")
    for found in row["ratios"]:
        shown = ", ".join(
            f"{name} {found[name][1]:.2f} ({found[name][0]:.2f} to {found[name][2]:.2f})"
            for name in ("paused", "paused_mean", "blocked", "whole", "over_gloo")
            if found.get(name)
        )
        print(f"  {found['way']} / {found['base']}: {shown}; {'MISSED: ' + ', '.join(found['missed']) if found['missed'] else 'met'}")
    sys.stdout.flush()


# -------------------------------------------------------------------------------------------------------------------------


def measure_fanout(settings: Settings) -> dict[str, Any]:
    """Measure copies to many pods."""
    pods, size, fanouts = (16, 2_000_000, (1, 4, 16)) if settings.smoke else (64, 50_000_000, (1, 4, 64))
    return staged_fanout.measure(pods=pods, size=size, fanouts=fanouts, pairs=settings.pairs)


def measure_rejoin(settings: Settings) -> dict[str, Any]:
    """Measure engines that come back."""
    model = environment.model() if settings.smoke else environment.model(*staged_rejoin.MODEL)
    return staged_rejoin.measure(joiners=(1, 2) if settings.smoke else (1, 8), model=model, rounds=settings.pairs)


def measure_memory(settings: Settings) -> dict[str, Any]:
    """Measure resident memory."""
    model = environment.model() if settings.smoke else environment.model(*LARGE)
    return staged_memory.measure(model=model, size_limit=SIZE_LIMIT, pairs=settings.pairs, work=work)


def measure_tokens(settings: Settings) -> dict[str, Any]:
    """Measure tokens that are generated during a push."""
    model = environment.model() if settings.smoke else environment.model(*LARGE)
    return staged_tokens.measure(model=model, size_limit=SIZE_LIMIT, pairs=settings.pairs, seconds=15.0 if settings.smoke else 60.0)


def measure_delta(settings: Settings) -> dict[str, Any]:
    """Measure delta uploads."""
    model = environment.model() if settings.smoke else environment.model(*LARGE)
    return staged_delta.measure(model=model, size_limit=SIZE_LIMIT, pairs=settings.pairs)


ROWS: dict[str, tuple[Callable[[Settings], dict[str, Any]], Callable[[dict[str, Any]], None]]] = {
    "push-2": (lambda settings: measure_push(2, settings), show_push),
    "push-4": (lambda settings: measure_push(4, settings), show_push),
    "fanout": (measure_fanout, staged_fanout.show),
    "rejoin": (measure_rejoin, staged_rejoin.show),
    "memory": (measure_memory, staged_memory.show),
    "tokens": (measure_tokens, staged_tokens.show),
    "delta": (measure_delta, staged_delta.show),
}
DEFAULT_PAIRS = {"push-2": 20, "push-4": 12, "fanout": 5, "rejoin": 5, "memory": 3, "tokens": 3, "delta": 5}


def main() -> int:
    """Measure, print and write the result. Returns 0 also if an aim is missed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rows", nargs="*", help=f"any of {', '.join(ROWS)}; all if none is given. The file keeps the others")
    parser.add_argument("--pairs", type=int, help="pairs of each comparison; fewer if they take too long")
    parser.add_argument("--smoke", action="store_true", help="small models and few pairs; writes no file")
    parser.add_argument("--paused-sleep", action="store_true", help="patch real engines so that paused schedulers sleep")
    options = parser.parse_args()
    unknown = set(options.rows) - ROWS.keys()
    if unknown:
        parser.error(f"unknown rows {', '.join(sorted(unknown))}: use any of {', '.join(ROWS)}")
    facts = machine()
    for name in options.rows or ROWS:
        measure, show = ROWS[name]
        pairs = options.pairs or (2 if options.smoke else DEFAULT_PAIRS[name])
        row = measure(Settings(pairs, smoke=options.smoke, paused_sleep=options.paused_sleep))
        show(row)
        if not options.smoke:
            label = f"{name}-paused-sleep" if options.paused_sleep and name.startswith("push") else name
            save("staged", facts, {"rows": saved() | {label: row}})
    return 0


def saved() -> dict[str, Any]:
    """Return the rows of the result file."""
    path = RESULTS / "staged.json"
    return dict(json.loads(path.read_text()).get("rows", {})) if path.exists() else {}


if __name__ == "__main__":
    sys.exit(main())
