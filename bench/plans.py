"""Measure the operator's CPU time per reconcile: ``python -m bench.plans``.

Renders, plans and reports fleets of 10, 100 and 1,000 engines of one pod, and of 100 engines of 8 pods, in which every engine serves.
Then fleets of 10, 100 and 1,000 engines without nodes, of which half are surplus engines (``spec.elastic``).
Calls no API server. Prints each time, and the ratio to the fleet of a tenth of the size; about 10 is linear.
Writes ``bench/results/plans.json``.
"""

from __future__ import annotations

import argparse
import gc
import json
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from bench.reconcile import machine

from sglang_rollout.api.v1alpha1 import SGLangRollout
from sglang_rollout.controller.decide.drift import stamp
from sglang_rollout.controller.decide.plan import make_plan
from sglang_rollout.controller.decide.pods import Pod
from sglang_rollout.controller.decide.status import build_status
from sglang_rollout.controller.decide.view import FleetView, build_fleet_view
from sglang_rollout.controller.render import names, render_all
from sglang_rollout.controller.render.common import Settings
from sglang_rollout.wire.record import EngineRow, Record
from sglang_rollout.wire.states import BASE, EngineState

ROOT = Path(__file__).parents[1]
FLEETS = ((10, 1, True), (100, 1, True), (1000, 1, True), (100, 8, True), (10, 1, False), (100, 1, False), (1000, 1, False))
"""Engines, pods of each engine, and whether they serve or wait for a node."""
REPEATS = 7
SETTINGS = Settings(coordinator_image="example.org/coordinator:1", router_image="example.org/router:1")
STEPS = ("render", "plan", "status")


def custom_resource(engines: int, pods: int, base: int) -> dict[str, Any]:
    """Return a fleet of GPU engines with 8 GPUs in each pod."""
    engine = {"image": "e:1", "parallelism": {"tensor": 8 * pods}, "gpusPerPod": 8}
    spec = {"replicas": engines, "model": {"path": "/models/big"}, "engine": engine, "elastic": {"base": base}}
    metadata = {"name": "big", "namespace": "default", "uid": "u", "generation": 1}
    return {"apiVersion": "rollout.sglang.io/v1alpha1", "kind": "SGLangRollout", "metadata": metadata, "spec": spec}


def observe_fleet(engines: int, pods: int, *, serving: bool) -> FleetView:
    """Return the view of such a fleet in which every engine serves, or every engine of the base waits for a node."""
    base = engines if serving else engines // 2
    cr = custom_resource(engines, pods, base)
    children, members = [], []
    for child in (stamp(made) for made in render_all(SGLangRollout.model_validate(cr), SETTINGS, token="t")):
        if not serving and (names.engine_index("big", child["metadata"]["name"]) or 0) >= base:
            continue
        child["metadata"]["generation"] = 1
        child["status"] = {"observedGeneration": 1, "readyReplicas": 1}
        children.append(child)
        if child["kind"] == "StatefulSet":
            template = child["spec"]["template"]
            ready = {"conditions": [{"type": "Ready", "status": str(serving)}]}
            for index in range(child["spec"]["replicas"]):
                metadata = {"name": names.engine_pod(child["metadata"]["name"], index), "labels": template["metadata"]["labels"]}
                members.append({"metadata": metadata, "spec": template["spec"], "status": ready})
    rows = [
        EngineRow(name=names.engine_name("big", index), state=EngineState.CLEAN, version=BASE, boot_id="b", gate_open=serving)
        for index in range(base)
    ]
    record = next(child for child in children if child["metadata"]["name"] == names.weights_name("big"))
    record["data"] = {names.WEIGHTS_KEY: Record(term=1, epoch=1, committed=BASE, engines=rows).model_dump_json()}
    return build_fleet_view(cr, children, members)


def cpu_seconds(work: Callable[[], object]) -> float:
    """Return the smallest CPU time of several runs without garbage collection, so that other processes and old objects do not count."""
    durations = []
    for _ in range(REPEATS):
        gc.collect()
        gc.disable()
        began = time.process_time()
        work()
        durations.append(time.process_time() - began)
        gc.enable()
    return min(durations)


def measure(engines: int, pods: int, *, serving: bool) -> dict[str, float]:
    """Return the seconds that one fleet takes to render, plan and report."""
    fleet = observe_fleet(engines, pods, serving=serving)
    rollout = fleet.rollout
    if rollout is None or make_plan(fleet, SETTINGS).actions:
        raise SystemExit("the plan of this benchmark's fleet is not empty, so the benchmark would measure something else")
    return {
        "engines": engines,
        "serving": engines if serving else 0,
        "pods": len(fleet.pods),
        "render_seconds": cpu_seconds(lambda: render_all(rollout, SETTINGS, "t")),
        "plan_seconds": cpu_seconds(lambda: make_plan(forget(fleet), SETTINGS)),
        "status_seconds": cpu_seconds(lambda: build_status(forget(fleet), "2026-01-01T00:00:00Z")),
    }


def forget(fleet: FleetView) -> FleetView:
    """Return the same view without the values that an earlier step has cached."""
    return replace(fleet, pods={name: Pod(pod.raw) for name, pod in fleet.pods.items()})


def main() -> None:
    """Measure every fleet, print and write the results."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=ROOT / "bench" / "results" / "plans.json")
    options = parser.parse_args()
    found: dict[tuple[int, int, bool], dict[str, float]] = {}
    print(f"CPU time, smallest of {REPEATS}; in brackets: ratio to the fleet of a tenth of the size")
    for engines, pods, serving in FLEETS:
        row = found[engines, pods, serving] = measure(engines, pods, serving=serving)
        smaller = found.get((engines // 10, pods, serving))
        if smaller:
            row |= {f"{step}_ratio": row[f"{step}_seconds"] / smaller[f"{step}_seconds"] for step in STEPS}
        cells = (f"{step} {row[f'{step}_seconds']:.4f} s" + (f" ({row[f'{step}_ratio']:.1f}×)" if smaller else "") for step in STEPS)
        print(f"{engines} engines, {'serving' if serving else 'waiting'}, {row['pods']:.0f} pods:   {'   '.join(cells)}", flush=True)
    results = {"repeats": REPEATS, "fleets": list(found.values())}
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps({"machine": machine(), "results": results}, indent=2) + "\n")
    print(f"written to {options.out}")


if __name__ == "__main__":
    main()
