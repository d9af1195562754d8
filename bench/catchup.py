"""Measure catch-up: 1, 4 and 50 stand-ins restart at the same time and load the newest snapshot from disk.

    python -m bench.catchup [--rounds 5]

Measures the time from a restarted stand-in's first answer until the fleet reports its gate as open, with the default
``catchUp.parallel``. The baseline of the same run is ``/update_weights_from_disk`` sent directly to one stand-in.
"""

from __future__ import annotations

import argparse
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import requests
from bench.common import get, machine, percentile, save
from bench.fleets import LocalFleet, bare_coordinator, local_fleet, stand_ins, until, until_serving
from bench.pusher import pusher
from e2e.engine import environment

from sglang_rollout.api.weights_spec import CatchUp
from sglang_rollout.checkpoints.snapshots import latest_snapshot

GROUPS = ((1, 4), (50,))
"""Numbers of joiners that share a fleet: first with all processes of a fleet, then with all agents in one process."""
WATCH_EVERY = 0.02
SETTLE_SECONDS = 2.0
"""Wait before a restart, until agents have a connection to their engine. Otherwise an agent may miss a restart that takes only 50 ms."""


def bare_load(url: str, folder: str, rounds: int) -> float:
    """Return the median milliseconds of SGLang's own call on one engine."""
    times = []
    for _ in range(rounds):
        started = time.monotonic()
        body = {"model_path": folder, "flush_cache": False}
        requests.post(f"{url}/update_weights_from_disk", json=body, timeout=60).raise_for_status()
        times.append((time.monotonic() - started) * 1000)
    return median(times)


def restarted(url: str) -> float:
    """Restart a stand-in and return the time of its first answer with another boot ID."""
    before = get(f"{url}/stand_in/state")["boot_id"]
    requests.post(f"{url}/stand_in/restart", json={}, timeout=10).raise_for_status()
    times: list[float] = []

    def is_restarted() -> bool:
        times.append(time.monotonic())
        return bool(get(f"{url}/stand_in/state")["boot_id"] != before)

    until(f"{url} has restarted", is_restarted, every=WATCH_EVERY)
    return times[-1]


def restart(fleet: LocalFleet, joiners: int) -> list[float]:
    """Restart this number of engines at the same time, and return each engine's seconds from its first answer to its open gate."""
    before = {row["name"]: row["boot_id"] for row in get(f"{fleet.url}/fleet")["members"][:joiners]}
    with ThreadPoolExecutor(joiners) as pool:
        ready = [pool.submit(restarted, url) for url in fleet.engines[:joiners]]
        missed, opened = set[str](), dict[str, float]()

        def all_open() -> bool:
            document = get(f"{fleet.url}/fleet")
            for row in document["members"][:joiners]:
                if not row["gate_open"] or row["boot_id"] != before[row["name"]]:
                    missed.add(row["name"])
                if row["name"] in missed and row["gate_open"] and row["version"] == document["committed"]:
                    opened.setdefault(row["name"], time.monotonic())
            return len(opened) == joiners

        until(f"{joiners} engines have caught up", all_open, every=WATCH_EVERY)
        return [opened[name] - moment.result() for name, moment in zip(before, ready, strict=True)]


def measure(joiners: tuple[int, ...], rounds: int) -> list[dict[str, Any]]:
    """Measure all numbers of joiners on one fleet, which has one engine more than restart."""
    model = environment.model()
    whole = max(joiners) <= max(GROUPS[0])
    rows = []
    with ExitStack() as stack:
        folder = Path(stack.enter_context(TemporaryDirectory(prefix="rollout-snapshots-")))
        engines = stack.enter_context(stand_ins(max(joiners) + 2, model=model))
        alone, engines = engines[0], engines[1:]
        weights = {"catchUp": {"disk": str(folder)}}
        fleet = stack.enter_context((local_fleet if whole else bare_coordinator)(engines, weights=weights))
        trainer = stack.enter_context(pusher(fleet.url, "--model", str(model), "--snapshots", str(folder)))
        trainer.push()
        snapshot = latest_snapshot(folder)
        if snapshot is None:
            raise SystemExit(f"no snapshot in {folder}")
        for number in joiners:
            load = bare_load(alone, str(snapshot.path), rounds)
            found = []
            for _ in range(rounds if whole else 2):
                until_serving(fleet)
                time.sleep(SETTLE_SECONDS)
                found.append(restart(fleet, number))
            every = [seconds for row in found for seconds in row]
            last = median(max(row) for row in found)
            row = {"joiners": number, "bare_load_ms": round(load, 1), "median_s": round(median(every), 2), "last_s": round(last, 2)}
            rows.append({**row, "p99_s": round(percentile(every, 99), 2), "agents_in_one_process": not whole, "rounds": found})
    return rows


def main() -> int:
    """Measure, print a table, write the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    facts = machine()
    parallel = CatchUp().parallel
    rows = []
    print(f"catchUp.parallel {parallel}\n{'joiners':>7} {'bare load':>10} {'median':>8} {'last':>8}   from first answer to open gate")
    for joiners in GROUPS:
        for row in measure(joiners, options.rounds):
            rows.append(row)
            print(f"{row['joiners']:>7} {row['bare_load_ms']:>7} ms {row['median_s']:>6} s {row['last_s']:>6} s", flush=True)
    save("catchup", facts, {"parallel": parallel, "rows": rows})
    return 0


if __name__ == "__main__":
    sys.exit(main())
