"""Measure the operator's speed and its load on the API server: ``python -m bench.reconcile``.

Starts its own control plane (etcd, kube-apiserver, kube-controller-manager; no nodes), then measures

* the time from ``apply`` of an SGLangRollout until all of its child objects exist (p50, p99),
* the writes that reach the API server in 60 s while 20 rollouts do not change, counted by the server,
* the time until a deleted child is recreated, and the time of a burst of 20 rollouts.

Prints a table and writes ``bench/results/reconcile.json`` with the facts about the machine.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import re
import subprocess
import sys
import tempfile
import time
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from e2e.cluster.controlplane import ControlPlane, control_plane

from sglang_rollout.controller.render import names
from sglang_rollout.controller.render.names import CHILD_KINDS
from sglang_rollout.kube.client import Kube
from sglang_rollout.kube.errors import NotFound
from sglang_rollout.kube.resources import PODS, ROLLOUTS, SERVICES, STATEFULSETS, Object

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).parents[1]
NAMESPACE = "bench"
ENGINES = 2
# The kinds that the operator may write. Kubernetes' own controllers write other kinds (leases, endpoints).
OURS = {kind.plural for kind in CHILD_KINDS} | {"pods", "sglangrollouts", "events"}
WRITES = {"POST", "PUT", "PATCH", "APPLY", "DELETE", "DELETECOLLECTION"}
DEADLINE = 60.0
# Children besides the engines: two accounts, Role and binding, Secret, two ConfigMaps, two Services, the router.
SHARED = 10
# Seconds between two rollouts, so that the pods of a rollout exist before the next rollout is measured.
PAUSE = 1.5


def rollout(name: str) -> Object:
    """Return a small rollout of two engines."""
    spec = {"replicas": ENGINES, "model": {"path": "tiny"}, "engine": {"image": "none:1", "gpuResource": ""}}
    metadata = {"name": name, "namespace": NAMESPACE}
    return {"apiVersion": ROLLOUTS.api_version, "kind": ROLLOUTS.kind, "metadata": metadata, "spec": spec}


@contextmanager
def operator(plane: ControlPlane, log: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Run the operator as a process that watches all namespaces."""
    command = [sys.executable, "-m", "sglang_rollout.cli", "operator", "--metrics-port=0", "--health-port=0"]
    with log.open("wb") as out:
        process = subprocess.Popen(command, env=plane.environment, stdout=out, stderr=out)
    try:
        yield process
    finally:
        process.terminate()
        process.wait(20)


def write_counts(plane: ControlPlane) -> dict[str, int]:
    """Return the write requests that the API server has served so far, by resource."""
    counts: dict[str, int] = {}
    for line in plane.kubectl("get", "--raw", "/metrics").stdout.splitlines():
        if line.startswith("apiserver_request_total{"):
            labels = dict(re.findall(r'(\w+)="([^"]*)"', line))
            if labels["verb"] in WRITES:
                counts[labels["resource"]] = counts.get(labels["resource"], 0) + int(float(line.rsplit(" ", 1)[1]))
    return counts


async def created_seconds(kube: Kube, name: str) -> float:
    """Create one rollout, and return the seconds until all its children exist."""
    labels: dict[str, str | None] = {names.LABEL_ROLLOUT: name}
    began = time.monotonic()
    await kube.create(rollout(name))
    while time.monotonic() - began < DEADLINE:
        # StatefulSets are created last. Listing only them disturbs the measurement least.
        if len((await kube.list(STATEFULSETS, NAMESPACE, labels=labels)).items) == ENGINES:
            took = time.monotonic() - began
            listings = [await kube.list(kind, NAMESPACE, labels=labels) for kind in CHILD_KINDS]
            if sum(len(listing.items) for listing in listings) == SHARED + ENGINES:
                return took
        await asyncio.sleep(0.02)
    raise SystemExit(f"{name}: not all children after {DEADLINE} s")


async def burst_seconds(kube: Kube, count: int) -> float:
    """Create many rollouts at the same time, and return the seconds until the last one has all its children."""
    began = time.monotonic()
    await asyncio.gather(*(kube.create(rollout(f"burst-{index}")) for index in range(count)))
    while time.monotonic() - began < DEADLINE:
        sets = (await kube.list(STATEFULSETS, NAMESPACE, labels={names.LABEL_ROLLOUT: None})).items
        mine = [item for item in sets if item["metadata"]["labels"][names.LABEL_ROLLOUT].startswith("burst-")]
        if len(mine) == count * ENGINES:
            return time.monotonic() - began
        await asyncio.sleep(0.1)
    raise SystemExit(f"not all of {count} rollouts have their children after {DEADLINE} s")


async def healed_seconds(kube: Kube, name: str) -> float:
    """Delete one Service, and return the seconds until it is recreated."""
    service = names.router_name(name)
    began = time.monotonic()
    await kube.delete(SERVICES, NAMESPACE, service)
    while time.monotonic() - began < DEADLINE:
        try:
            await kube.get(SERVICES, NAMESPACE, service)
        except NotFound:
            await asyncio.sleep(0.01)
        else:
            return time.monotonic() - began
    raise SystemExit(f"{service}: not recreated after {DEADLINE} s")


def percentile(values: list[float], part: float) -> float:
    """Return the smallest value that ``part`` of all values do not exceed."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(part * len(ordered)))]


def machine() -> dict[str, Any]:
    """Return the facts about this machine that the results depend on."""
    cpu = re.search(r"model name\s*: (.*)", Path("/proc/cpuinfo").read_text())
    memory = re.search(r"MemTotal:\s*(\d+)", Path("/proc/meminfo").read_text())
    return {
        "cpu": cpu.group(1) if cpu else platform.machine(),
        "cores": os.cpu_count(),
        "memory_gib": round(int(memory.group(1)) / 2**20) if memory else None,
        "kernel": platform.release(),
        "python": platform.python_version(),
        "load_1m_at_start": round(os.getloadavg()[0], 2),
    }


async def quiet(plane: ControlPlane, seconds: float = 5.0) -> None:
    """Wait until no object of our kinds has been written for ``seconds``."""
    end = time.monotonic() + 120
    last = ours(write_counts(plane))
    while time.monotonic() < end:
        await asyncio.sleep(seconds)
        now = ours(write_counts(plane))
        if now == last:
            return
        last = now
    raise SystemExit(f"the operator still writes: {last}")


def ours(counts: dict[str, int]) -> dict[str, int]:
    """Return the counts of the kinds that the operator may write."""
    return {resource: count for resource, count in counts.items() if resource in OURS}


async def measure(plane: ControlPlane, count: int, steady: float) -> dict[str, Any]:
    """Take all measurements on one control plane with one operator."""
    async with await Kube.connect(field_manager="bench", kubeconfig=str(plane.kubeconfig)) as kube:
        await created_seconds(kube, "warm-up")
        created = []
        for index in range(count):
            await asyncio.sleep(PAUSE)
            created.append(await created_seconds(kube, f"one-{index}"))
        healed = [await healed_seconds(kube, f"one-{index}") for index in range(count)]
        await quiet(plane)
        for index in range(count):
            await kube.delete(ROLLOUTS, NAMESPACE, f"one-{index}")
        burst = await burst_seconds(kube, count)
        await quiet(plane)
        pods = len((await kube.list(PODS, NAMESPACE)).items)
        before = write_counts(plane)
        await asyncio.sleep(steady)
        after = write_counts(plane)
    grown = {key: value - before.get(key, 0) for key, value in after.items() if value != before.get(key, 0)}
    return {
        "rollouts": count + 1,
        "pods": pods,
        "created_seconds": {"p50": percentile(created, 0.5), "p99": percentile(created, 0.99), "n": len(created)},
        "healed_seconds": {"p50": percentile(healed, 0.5), "p99": percentile(healed, 0.99), "n": len(healed)},
        "burst_seconds": burst,
        "steady_seconds": steady,
        "steady_writes": sum(ours(grown).values()),
        "steady_writes_of_others": {key: value for key, value in grown.items() if key not in OURS},
    }


def main() -> None:
    """Measure, print and write the results."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rollouts", type=int, default=20)
    parser.add_argument("--steady", type=float, default=60.0, help="seconds to count writes for")
    parser.add_argument("--out", type=Path, default=ROOT / "bench" / "results" / "reconcile.json")
    options = parser.parse_args()
    facts = machine()
    with tempfile.TemporaryDirectory(prefix="sgr-bench-") as folder, control_plane(Path(folder)) as plane:
        plane.kubectl("apply", "--server-side", "-f", str(ROOT / "crds"))
        plane.wait_for_crd("sglangrollouts.rollout.sglang.io")
        plane.kubectl("create", "namespace", NAMESPACE)
        with operator(plane, Path(folder) / "operator.log"):
            results = asyncio.run(measure(plane, options.rollouts, options.steady))
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps({"machine": facts, "results": results}, indent=2) + "\n")
    for what in ("created", "healed"):
        values = results[f"{what}_seconds"]
        print(f"{what:8} p50 {values['p50']:.3f} s   p99 {values['p99']:.3f} s   (n={values['n']})")
    print(f"burst    {results['burst_seconds']:.1f} s until {options.rollouts} rollouts applied at once have all children")
    print(f"steady   {results['steady_writes']} writes in {options.steady:.0f} s with {results['rollouts']} rollouts")
    print(f"written to {options.out}")


if __name__ == "__main__":
    main()
