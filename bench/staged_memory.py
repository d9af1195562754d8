"""The row *memory* of bench.staged: resident memory of the weight store and of the agents during pushes."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

from bench.fleets import LOADER_ARGS, LocalFleet, local_fleet, stand_ins

ENGINES, PUSHES = 2, 3
WATCHED = ("agent", "store", "receiver of the store", "coordinator", "front")
SAMPLE_SECONDS = 0.01
IDLE_SECONDS = 1.0
WAYS = ("distributed", "group", "upload")
Work = Callable[[Sequence[str]], list[dict[str, Any]]]


def private_kib(pid: int) -> int:
    """Return the resident memory of a process without shared memory, so without the pages of a volume in memory that it maps."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return 0  # the process has ended
    return sum(int(line.split()[1]) for line in lines if line.startswith(("RssAnon:", "RssFile:")))


class Sampler:
    """The largest memory of any process of each part, sampled in a thread."""

    def __init__(self, fleet: LocalFleet) -> None:
        self._fleet = fleet
        self.peaks: dict[str, int] = {}

    @contextmanager
    def running(self) -> Iterator[None]:
        """Sample for the length of the block."""
        stop = threading.Event()
        thread = threading.Thread(target=self._sample, args=(stop,))
        thread.start()
        try:
            yield
        finally:
            stop.set()
            thread.join()

    def _sample(self, stop: threading.Event) -> None:
        parts, read_at = self._fleet.parts(), time.monotonic()
        while not stop.wait(SAMPLE_SECONDS):
            if time.monotonic() - read_at > 1.0:  # a process group starts another receiver
                parts, read_at = self._fleet.parts(), time.monotonic()
            for name in WATCHED:
                found = max(map(private_kib, parts.get(name, ())), default=0)
                self.peaks[name] = max(found, self.peaks.get(name, 0))


def measure(*, model: Path, size_limit: str, pairs: int, work: Work) -> dict[str, Any]:
    """Push each way in turns, and return the memory before and the peak during the pushes, in MiB."""
    load = os.getloadavg()[0]
    found: dict[str, list[dict[str, Any]]] = {way: [] for way in WAYS}
    with ExitStack() as stack:
        plain = stack.enter_context(stand_ins(ENGINES, model=model))
        loading = stack.enter_context(stand_ins(ENGINES, model=model, args=LOADER_ARGS))
        distributed = stack.enter_context(local_fleet(plain))
        staged = stack.enter_context(local_fleet(loading, size_limit=size_limit))
        line = ["--distributed", distributed.url, "--staged", staged.url, "--ranks", str(ENGINES), "--model", str(model)]
        for turn in range(pairs):
            for way in WAYS if turn % 2 else reversed(WAYS):
                fleet = distributed if way == "distributed" else staged
                options = [*line, "--ways", way, "--bucket-mib", "256", "--rounds", str(PUSHES)]
                found[way].append(sample(fleet, partial(work, options)))
    size = (model / "model.safetensors").stat().st_size
    return {"load": round(load, 2), "bytes": size, "ways": {way: summarize(rows) for way, rows in found.items()}}


def sample(fleet: LocalFleet, pushes: Callable[[], object]) -> dict[str, Any]:
    """Return the memory before the pushes, and the peak during them, in KiB."""
    before, during = Sampler(fleet), Sampler(fleet)
    with before.running():
        time.sleep(IDLE_SECONDS)
    with during.running():
        pushes()
    return {name: (before.peaks.get(name, 0), during.peaks[name]) for name in WATCHED if during.peaks.get(name)}


def summarize(rows: Sequence[Mapping[str, tuple[int, int]]]) -> dict[str, Any]:
    """Return the medians of the memory before and of the peak, and the largest peak, in MiB."""
    names = {name: None for row in rows for name in row}
    found = {}
    for name in names:
        pairs = [row[name] for row in rows if name in row]
        before, peak = (round(median(pair[index] for pair in pairs) / 1024, 1) for index in range(2))
        found[name] = {"before_mib": before, "peak_mib": peak, "largest_mib": round(max(pair[1] for pair in pairs) / 1024, 1)}
    return found


def show(row: dict[str, Any]) -> None:
    """Print the row for people."""
    print(f"memory without shared pages, pushes of {row['bytes'] / 1e6:.3g} MB, load {row['load']}: MiB before, peak, largest peak")
    for way, parts in row["ways"].items():
        for name, found in parts.items():
            print(f"  {way:<12} {name:<24} {found['before_mib']:>7} {found['peak_mib']:>7} {found['largest_mib']:>7}", flush=True)
