"""What the benchmarks share: machine facts, results, statistics, and a fleet of real engines on this machine."""

from __future__ import annotations

import json
import os
import platform
import random
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from e2e.engine import Engine, start_engine

RESULTS = Path(__file__).parent / "results"
_START_SECONDS = 120.0
_OPENER = urllib.request.build_opener(urllib.request.ProxyHandler({}))


def machine() -> dict[str, Any]:
    """Facts of this machine without which a number says nothing."""
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
    """Write a result beside the facts of the machine that it was measured on."""
    RESULTS.mkdir(parents=True, exist_ok=True)
    path = RESULTS / f"{name}.json"
    finished = datetime.now(UTC).isoformat(timespec="seconds")
    path.write_text(json.dumps({"bench": name, "finished": finished, "machine": facts, **result}, indent=1) + "\n")
    print(f"written: {path}")
    return path


def percentile(values: Sequence[float], percent: float) -> float:
    """Nearest-rank percentile."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, max(0, round(percent / 100 * len(ordered) + 0.5) - 1))]


def free_port() -> int:
    """A loopback port below the ephemeral range."""
    while True:
        port = random.randrange(26200, 26900)
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port


def get(url: str, seconds: float = 5.0) -> dict[str, Any]:
    """GET a JSON object."""
    with _OPENER.open(url, timeout=seconds) as reply:
        value: dict[str, Any] = json.load(reply)
        return value


@dataclass(frozen=True)
class LocalFleet:
    """Engines, and the fleet's URL in front of them."""

    url: str
    engines: list[Engine]


@contextmanager
def local_fleet(number: int, *, model: Path | None = None, args: Sequence[str] = ()) -> Iterator[LocalFleet]:
    """Real engines behind ``sglang-rollout local``, serving when the block begins."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(TemporaryDirectory(prefix="rollout-bench-")))
        engines = [stack.enter_context(start_engine(free_port(), model=model, args=args, wait=False)) for _ in range(number)]
        for engine in engines:
            engine.wait()
        address = f"127.0.0.1:{free_port()}"  # only now: engines take ports too while they start
        wanted = [part for engine in engines for part in ("--engine", engine.url)]
        command = [sys.executable, "-m", "sglang_rollout.cli", "local", *wanted, "--listen", address, "--backend", "gloo"]
        with (folder / "local.log").open("wb") as log:
            process = subprocess.Popen([*command, "--state-dir", str(folder / "state")], stdout=log, stderr=log)
        try:
            _wait_serving(f"http://{address}", number, process, folder / "local.log")
            yield LocalFleet(f"http://{address}", engines)
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait(30)


def _wait_serving(url: str, number: int, process: subprocess.Popen[bytes], log: Path) -> None:
    end = time.monotonic() + _START_SECONDS
    while process.poll() is None and time.monotonic() < end:
        try:
            if get(f"{url}/fleet")["serving"] == number:
                return
        except OSError:
            pass  # the front is not up yet, or answers for a coordinator that is not
        time.sleep(0.5)
    raise SystemExit(f"{url}: {number} engines did not serve within {_START_SECONDS:.0f} s. The end of the log:\n{log.read_text()[-2000:]}")
