"""The processes below this one: engines, gates, front, smg, coordinator and batch server. A request may end none and busy none for long."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

PROXY_CPU_SECONDS = 0.25
"""Processor time of a proxy for one request. Its one thread has all streams of an engine, and haproxy aborts after 2 s in one step.
64 MiB through haproxy take 0.1 s."""
PYTHON_CPU_SECONDS = 2.0
"""Processor time of another process for one request: a gate closes after 2 s without an answer of its agent. Parsing a body of 10 MB
takes 0.2 s."""
_TICKS = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True)
class Process:
    """One process at one time."""

    pid: int
    started: int
    """Start time in ticks since the start of the system: it tells a process from a later one with the same ID."""
    parent: int
    name: str
    """What the process is, for people."""
    cpu: float
    """Seconds of processor time so far."""

    @property
    def is_proxy(self) -> bool:
        """True for haproxy: gates and front."""
        return self.name.startswith("haproxy")

    @property
    def is_ours(self) -> bool:
        """True for the parts of the fleet besides the engines, whose computation takes as long as the request says."""
        return self.is_proxy or "sglang_rollout" in self.name or "smg" in self.name


def running(root: int | None = None) -> dict[tuple[int, int], Process]:
    """Return all descendants of a process, by default of this one, by ID and start time."""
    everyone = [found for entry in Path("/proc").iterdir() if entry.name.isdigit() and (found := _read(entry)) is not None]
    below = {root or os.getpid()}
    descendants: dict[tuple[int, int], Process] = {}
    for process in sorted(everyone, key=lambda each: each.started):
        if process.parent in below:
            below.add(process.pid)
            descendants[process.pid, process.started] = process
    return descendants


def find_problem(before: Mapping[tuple[int, int], Process], after: Mapping[tuple[int, int], Process], requests: int) -> str:
    """Return which process has ended, or has used more processor time than these requests may cost; empty if there is none."""
    if gone := [process.name for key, process in before.items() if key not in after]:
        return f"ended: {', '.join(gone)}"
    for key, process in after.items():
        used = process.cpu - before[key].cpu if key in before else process.cpu
        limit = requests * (PROXY_CPU_SECONDS if process.is_proxy else PYTHON_CPU_SECONDS)
        if process.is_ours and used > limit:
            return f"{used:.1f} s of processor time for {requests} requests, above {limit:.1f} s: {process.name}"
    return ""


def _read(entry: Path) -> Process | None:
    """Return a process; None if it ends meanwhile, or has ended and its parent has not noticed."""
    try:
        fields = (entry / "stat").read_text().rpartition(")")[2].split()
        words = (entry / "cmdline").read_bytes().decode(errors="replace").split("\0")
    except OSError:
        return None
    if fields[0] in "ZX":
        return None
    name = " ".join([Path(words[0]).name, *words[1:]]).strip()[:160]
    return Process(int(entry.name), int(fields[19]), int(fields[1]), name, (int(fields[11]) + int(fields[12])) / _TICKS)
