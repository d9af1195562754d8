"""The row *rejoin* of bench.staged: engines restart and load the committed version from a copy.

With the source *own*, only the engines restart. With the others, their agents restart with them and have no copies, as new pods: they
copy the version from the pod of another engine, from the weight store, or from a weight store that has itself restarted with a snapshot.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

from bench.catchup import SETTLE_SECONDS, bare_load, restart
from bench.common import get
from bench.fleets import LOADER_ARGS, LocalFleet, below, engine_python, local_fleet, stand_ins, until, until_serving
from bench.push import quartiles

from sglang_rollout.local.plan import STORE

MODEL = ("--dtype", "bfloat16", "--hidden", "512", "--layers", "10", "--seed", "1")
"""Options of a model of 51 MB."""
SIZE_LIMIT = "256Mi"
SOURCES = ("own", "peer", "store", "snapshot")
_AGENT, _STORE = "sglang_rollout.cli agent --name ", "sglang_rollout.cli store "


def measure(*, joiners: Sequence[int], model: Path, rounds: int) -> dict[str, Any]:
    """Measure each number of joiners with each source. Every fleet has one engine more than restart."""
    load = os.getloadavg()[0]
    rows = [row for number in joiners for row in measure_number(number, model, rounds)]
    return {"load": round(load, 2), "model_bytes": (model / "model.safetensors").stat().st_size, "rows": rows}


def measure_number(number: int, model: Path, rounds: int) -> list[dict[str, Any]]:
    """Return one row for each source."""
    with ExitStack() as stack:
        engines = stack.enter_context(stand_ins(number + 2, model=model, args=LOADER_ARGS))
        alone, engines = engines[0], engines[1:]
        snapshots = Path(stack.enter_context(TemporaryDirectory(prefix="rollout-snapshots-", dir="/var/tmp")))
        fleet = stack.enter_context(local_fleet(engines, size_limit=SIZE_LIMIT, snapshots=snapshots))
        push_once(fleet, number + 1, model)
        until("the snapshot is written", lambda: any(snapshots.rglob("*.safetensors")), every=0.5)
        found: dict[str, list[list[float]]] = {source: [] for source in SOURCES}
        bare: list[float] = []
        for turn in range(rounds):
            for source in SOURCES if turn % 2 else reversed(SOURCES):
                bare.append(bare_load(alone, str(model), 1) / 1000)
                found[source].append(rejoin(fleet, number, source))
    return [summarize(number, source, each, bare) for source, each in found.items()]


def push_once(fleet: LocalFleet, engines: int, model: Path) -> None:
    """Upload the version that the fleet then serves."""
    line = ["--distributed", fleet.url, "--staged", fleet.url, "--ranks", str(engines), "--model", str(model)]
    process = engine_python("bench.staged_worker", *line, "--rounds", "1", "--ways", "upload", stdout=subprocess.DEVNULL)
    if process.wait(300):
        raise SystemExit("bench.staged_worker failed; its error is above.")


def rejoin(fleet: LocalFleet, number: int, source: str) -> list[float]:
    """Restart the first engines at the same time, and return each one's seconds from its first answer to its open gate."""
    until_serving(fleet)
    time.sleep(SETTLE_SECONDS)
    names = [row["name"] for row in get(f"{fleet.url}/fleet")["members"]]
    lose_copies(fleet, {"own": [], "peer": names[:number]}.get(source, names), store=source == "snapshot")
    return restart(fleet, number)


def lose_copies(fleet: LocalFleet, names: Sequence[str], *, store: bool) -> None:
    """End these agents, and with ``store`` the weight store, and delete their copies. The fleet starts the processes again."""
    ends = [f"{_AGENT}{name} " for name in names] + ([_STORE] if store else [])
    for pid, words in below(fleet.roots).items():
        if any(end in words for end in ends):
            os.kill(pid, signal.SIGKILL)
    for name in [*names, *([STORE] if store else [])]:
        for folder in (fleet.state / "staged" / name).iterdir():
            if folder.name != "loader":
                shutil.rmtree(folder)


def summarize(joiners: int, source: str, found: list[list[float]], bare: list[float]) -> dict[str, Any]:
    """Return the seconds of all engines, of the last engine of a round, and the ratio to a bare load."""
    every = [seconds for row in found for seconds in row]
    middle = median(bare)
    return {
        "joiners": joiners,
        "source": source,
        "rounds": len(found),
        "bare_load_s": round(middle, 3),
        "seconds": quartiles(every, 2),
        "last_s": quartiles([max(row) for row in found], 2),
        "over_bare_load": round(median(every) / middle, 1),
    }


def show(row: dict[str, Any]) -> None:
    """Print the row for people."""
    print(f"rejoin with {row['model_bytes'] / 1e6:.3g} MB, load {row['load']}: seconds from first answer to open gate, median (quartiles)")
    for found in row["rows"]:
        low, middle, high = found["seconds"]
        last = found["last_s"]
        print(
            f"  {found['joiners']} from {found['source']:<8} {middle:.2f} ({low:.2f} to {high:.2f}), the last {last[1]:.2f}"
            f" ({last[0]:.2f} to {last[2]:.2f}), bare load {found['bare_load_s']} s, ratio {found['over_bare_load']}",
            flush=True,
        )
