"""Measure leaks over 200 updates: memory, open files, sockets, threads and process groups of every process of a small fleet.

    python -m bench.endurance [--pushes 200]

Three stand-ins, each in its own process, run behind ``sglang-rollout local``. The trainer opens a new process group for every tenth push.
The first figures are taken after 20 pushes, when each process has allocated all that it needs once. Later growth is a leak.
"""

from __future__ import annotations

import argparse
import sys
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from bench.common import get, machine, save
from bench.fleets import LocalFleet, local_fleet, stand_ins
from bench.pusher import pusher

ENGINES, FIRST, REOPEN = 3, 20, 10
SETTLE_SECONDS = 3.0
"""Wait before figures are taken, until connections of the last push are closed."""
Figures = dict[str, dict[str, int]]


def figures(pid: int) -> dict[str, int]:
    """Return the memory, open files, sockets and threads of one process."""
    status = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines() if ":" in line)
    kinds = []
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        try:
            kinds.append(str(entry.readlink()))
        except OSError:
            continue  # closed meanwhile
    sockets = sum(kind.startswith("socket:") for kind in kinds)
    return {"rss_kib": int(status["VmRSS"].split()[0]), "fds": len(kinds), "sockets": sockets, "threads": int(status["Threads"])}


def take(fleet: LocalFleet, trainer: int, engines: list[int]) -> Figures:
    """Return the figures of all parts; for several processes of one part, the largest. ``groups``: process groups that the part knows."""
    time.sleep(SETTLE_SECONDS)
    parts = {**fleet.parts(), "engine": engines, "trainer": [trainer]}
    found = {}
    for name, pids in parts.items():
        rows = [figures(pid) for pid in pids]
        found[name] = {key: max(row[key] for row in rows) for key in rows[0]}
    found["engine"]["groups"] = max(len(get(f"{url}/stand_in/state")["groups"]) for url in fleet.engines)
    found["coordinator"]["groups"] = len(get(f"{fleet.url}/fleet")["groups"])
    return found


def main() -> int:
    """Measure, print a table, write the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pushes", type=int, default=200)
    options = parser.parse_args()
    facts = machine()
    with ExitStack() as stack:
        started = [stack.enter_context(stand_ins(1)) for _ in range(ENGINES)]
        fleet = stack.enter_context(local_fleet([url for urls in started for url in urls]))
        trainer = stack.enter_context(pusher(fleet.url, "--reopen", str(REOPEN)))
        pids = [int(get(f"{url}/stand_in/state")["pid"]) for url in fleet.engines]
        trainer.push(FIRST)
        early = take(fleet, trainer.pid, pids)
        began = time.monotonic()
        trainer.push(options.pushes - FIRST)
        seconds = time.monotonic() - began
        late = take(fleet, trainer.pid, pids)
    rows: list[dict[str, Any]] = [
        {"part": part, "figure": key, "early": value, "late": late[part][key], "grown": late[part][key] - value}
        for part, found in early.items()
        for key, value in found.items()
    ]
    print(f"{'part':<12} {'figure':<8} {f'after {FIRST}':>10} {f'after {options.pushes}':>10} {'grown':>8}")
    for row in rows:
        print(f"{row['part']:<12} {row['figure']:<8} {row['early']:>10} {row['late']:>10} {row['grown']:>8}")
    print(f"{options.pushes - FIRST} pushes took {seconds:.0f} s")
    result = {
        "pushes": options.pushes,
        "first": FIRST,
        "reopen_every": REOPEN,
        "engines": ENGINES,
        "seconds": round(seconds, 1),
        "rows": rows,
    }
    save("endurance", facts, result)
    return 0


if __name__ == "__main__":
    sys.exit(main())
