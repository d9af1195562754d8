"""Shared by the benchmarks: facts about the machine, results, statistics."""

from __future__ import annotations

import json
import os
import platform
import random
import socket
import urllib.request
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"
_OPENER = urllib.request.build_opener(urllib.request.ProxyHandler({}))


def machine() -> dict[str, Any]:
    """Return the facts about this machine that a result depends on."""
    cpu = next(
        (line.partition(":")[2].strip() for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")), ""
    )
    memory = next(line for line in Path("/proc/meminfo").read_text().splitlines() if line.startswith("MemTotal"))
    return {
        "cpu": cpu,
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(int(memory.split()[1]) / 2**20, 1),
        "load_before": os.getloadavg()[0],
        "kernel": platform.release(),
        "python": platform.python_version(),
    }


def save(name: str, facts: dict[str, Any], result: dict[str, Any]) -> Path:
    """Write a result with the facts about the machine, and return its path."""
    RESULTS.mkdir(parents=True, exist_ok=True)
    path = RESULTS / f"{name}.json"
    finished = datetime.now(UTC).isoformat(timespec="seconds")
    path.write_text(json.dumps({"bench": name, "finished": finished, "machine": facts, **result}, indent=1) + "\n")
    print(f"written: {path}")
    return path


def percentile(values: Sequence[float], percent: float) -> float:
    """Return the nearest-rank percentile."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, max(0, round(percent / 100 * len(ordered) + 0.5) - 1))]


def free_port(*, first: int = 26200, row: int = 1) -> int:
    """Return the first of ``row`` consecutive free loopback ports, below the ephemeral range."""
    while True:
        port = random.randrange(first, first + 700)
        try:
            for number in range(row):
                with socket.socket() as probe:
                    probe.bind(("127.0.0.1", port + number))
        except OSError:
            continue
        return port


def get(url: str, seconds: float = 5.0) -> dict[str, Any]:
    """Send a GET request and return the JSON object of the answer."""
    with _OPENER.open(url, timeout=seconds) as reply:
        value: dict[str, Any] = json.load(reply)
        return value


def cpu_seconds(pids: Sequence[int]) -> float:
    """Return the processor time that these processes have used so far."""
    ticks = 0
    for pid in pids:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        ticks += int(fields[11]) + int(fields[12])
    return ticks / os.sysconf("SC_CLK_TCK")
