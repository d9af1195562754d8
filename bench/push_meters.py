"""Meters of bench.push: processor time and waiting of processes, and the times of control calls.

bench.push_worker reads them before and after a push, never during it.
"""

from __future__ import annotations

import os
import urllib.request
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bench.common import get
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

from sglang_rollout.wire.ports import AGENT_ACK, AGENT_METRICS, AGENT_RUN, AGENT_SYNC, FLEET_METRICS

Milliseconds = dict[str, float]
NAMES = {AGENT_ACK: "acknowledge", AGENT_RUN: "run", AGENT_SYNC: "sync"}
"""Names of the agents' own calls, by path."""
COORDINATOR = "sglang_rollout_coordinator_fan_out_seconds_sum"
AGENT = "sglang_rollout_agent_control_seconds_sum"
PAUSES = "sglang_rollout_agent_pause_seconds_sum"


class Processes:
    """Processes by part of the fleet, engine or trainer."""

    def __init__(self, parts: Mapping[str, Sequence[int]]) -> None:
        self._parts = parts

    def read(self) -> dict[str, tuple[float, float]]:
        """Return the milliseconds on a processor and of waiting for one, by part, since the processes started."""
        return {name: _sum([_schedstat(pid) for pid in pids]) for name, pids in self._parts.items()}


class Calls:
    """The fleet's histograms of its control calls."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._agents = [member["url"] for member in get(f"{url}/fleet")["members"]]

    def read(self) -> dict[str, Milliseconds]:
        """Return the milliseconds by call since the fleet started: of the coordinator's fan-outs, and of each engine's answers."""
        found = {"fan_out": _seconds(self._url + FLEET_METRICS, COORDINATOR)}
        return found | {url: _seconds(url + AGENT_METRICS, AGENT) for url in self._agents}


def processor_use(before: Mapping[str, tuple[float, float]], after: Mapping[str, tuple[float, float]]) -> dict[str, Milliseconds]:
    """Return the processor time (``cpu``) and the waiting (``waited``) between two readings of Processes, by part."""
    return {
        kind: {name: round(after[name][index] - before[name][index], 1) for name in after} for index, kind in enumerate(("cpu", "waited"))
    }


def call_times(before: Mapping[str, Milliseconds], after: Mapping[str, Milliseconds]) -> dict[str, Milliseconds]:
    """Return the milliseconds between two readings of Calls: ``fan_out`` by call, and ``engine``, the slowest engine's, by call."""
    spent = {
        who: {call: total - before[who].get(call, 0.0) for call, total in totals.items() if total > before[who].get(call, 0.0)}
        for who, totals in after.items()
    }
    fan_out = {call: round(value, 1) for call, value in spent.pop("fan_out").items()}
    names = {call for row in spent.values() for call in row}
    return {"fan_out": fan_out, "engine": {call: round(max(row.get(call, 0.0) for row in spent.values()), 1) for call in names}}


def paused(url: str) -> dict[str, float]:
    """Return the milliseconds that each engine of a fleet was paused since its agent started, by the agent's URL."""
    agents = [member["url"] for member in get(f"{url}/fleet")["members"]]
    return {agent: sum(sample.value for sample in _samples(agent + AGENT_METRICS, PAUSES)) * 1000 for agent in agents}


def stolen() -> float:
    """Return the milliseconds for which the hypervisor has kept processors from this machine since its start."""
    ticks = int(Path("/proc/stat").read_text().split("\n", 1)[0].split()[8])
    return ticks * 1000 / os.sysconf("SC_CLK_TCK")


def _samples(url: str, metric: str) -> list[Sample]:
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with opener.open(url, timeout=5) as reply:
        families = text_string_to_metric_families(reply.read().decode())
    return [sample for family in families for sample in family.samples if sample.name == metric]


def _seconds(url: str, metric: str) -> Milliseconds:
    calls = [(sample.labels.get("path") or sample.labels["call"], sample.value) for sample in _samples(url, metric)]
    return {NAMES.get(call, call.removeprefix("/")): seconds * 1000 for call, seconds in calls}


def _schedstat(pid: int) -> tuple[float, float]:
    """Return the run time and the waiting of all current threads of a process. Ended threads do not count."""
    rows: list[tuple[float, float]] = []
    for task in Path(f"/proc/{pid}/task").glob("*/schedstat"):
        try:
            ran, waited, _ = task.read_text().split()
        except OSError:
            continue  # the thread has just ended
        rows.append((int(ran) / 1e6, int(waited) / 1e6))
    return _sum(rows)


def _sum(rows: Sequence[tuple[float, float]]) -> tuple[float, float]:
    return sum(row[0] for row in rows), sum(row[1] for row in rows)


class Meters:
    """All meters of one push. Calls are read first and last, because reading them uses the fleet's processor time."""

    def __init__(self, processes: Processes, calls: Calls | None) -> None:
        self._processes, self._calls = processes, calls
        self._before: tuple[dict[str, Milliseconds], float, dict[str, tuple[float, float]]] = ({}, 0.0, {})

    def start(self) -> None:
        """Read all meters before a push."""
        self._before = (self._calls.read() if self._calls is not None else {}, stolen(), self._processes.read())

    def stop(self) -> dict[str, Any]:
        """Return the differences since ``start``."""
        calls, taken, processes = self._before
        found: dict[str, Any] = {**processor_use(processes, self._processes.read()), "stolen": round(stolen() - taken, 1)}
        return found if self._calls is None else {**found, "calls": call_times(calls, self._calls.read())}
