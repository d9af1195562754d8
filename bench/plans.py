"""How long the operator thinks about a large fleet: run it with ``python -m bench.plans``.

Plans (which renders everything) and writes the status of 100 engines of 8 pods each, all of them serving; the baseline of the same run is
100 engines of one pod, and rendering alone. Nothing is asked of an API server. Writes ``bench/results/plans.json``.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from bench.reconcile import machine

from sglang_rollout.api.v1alpha1 import SGLangRollout
from sglang_rollout.controller.decide.drift import stamped
from sglang_rollout.controller.decide.plan import plan
from sglang_rollout.controller.decide.status import build_status
from sglang_rollout.controller.decide.view import World, observe_world
from sglang_rollout.controller.render import names, render_all
from sglang_rollout.controller.render.settings import Settings
from sglang_rollout.wire.record import EngineRow, Record
from sglang_rollout.wire.weights import BASE, EngineState

ROOT = Path(__file__).parents[1]
ENGINES = 100
REPEATS = 7
SETTINGS = Settings(coordinator_image="example.org/coordinator:1", router_image="example.org/router:1")


def custom_resource(pods: int) -> dict[str, Any]:
    """A fleet of GPU engines with 8 GPUs in each pod."""
    engine = {"image": "e:1", "parallelism": {"tensor": 8 * pods}, "gpusPerPod": 8}
    spec = {"replicas": ENGINES, "model": {"path": "/models/big"}, "engine": engine}
    metadata = {"name": "big", "namespace": "default", "uid": "u", "generation": 1}
    return {"apiVersion": "rollout.sglang.io/v1alpha1", "kind": "SGLangRollout", "metadata": metadata, "spec": spec}


def settled(pods: int) -> World:
    """The world of such a fleet when all is as it should be."""
    cr = custom_resource(pods)
    children, members = [], []
    for child in (stamped(made) for made in render_all(SGLangRollout.model_validate(cr), SETTINGS, token="t")):
        child["metadata"]["generation"] = 1
        child["status"] = {"observedGeneration": 1, "readyReplicas": 1}
        children.append(child)
        if child["kind"] == "StatefulSet":
            template = child["spec"]["template"]
            ready = {"conditions": [{"type": "Ready", "status": "True"}]}
            for index in range(child["spec"]["replicas"]):
                metadata = {"name": names.engine_pod(child["metadata"]["name"], index), "labels": template["metadata"]["labels"]}
                members.append({"metadata": metadata, "spec": template["spec"], "status": ready})
    rows = [
        EngineRow(name=names.engine_name("big", index), state=EngineState.CLEAN, version=BASE, boot_id="b", gate_open=True)
        for index in range(ENGINES)
    ]
    record = next(child for child in children if child["metadata"]["name"] == names.weights_name("big"))
    record["data"] = {names.WEIGHTS_KEY: Record(term=1, epoch=1, committed=BASE, engines=rows).model_dump_json()}
    return observe_world(cr, children, members)


def seconds(work: Callable[[], object]) -> float:
    """The median of several runs."""
    took = []
    for _ in range(REPEATS):
        began = time.perf_counter()
        work()
        took.append(time.perf_counter() - began)
    return statistics.median(took)


def measure(pods: int) -> dict[str, float]:
    """Render, plan and status of one fleet, in seconds."""
    world = settled(pods)
    rollout = world.rollout
    if rollout is None or plan(world, SETTINGS).actions:
        raise SystemExit("the fleet of this benchmark is not settled: it measures something else")
    return {
        "pods": len(world.pods),
        "render_seconds": seconds(lambda: render_all(rollout, SETTINGS, "t")),
        "plan_seconds": seconds(lambda: plan(settled_again(world), SETTINGS)),
        "status_seconds": seconds(lambda: build_status(settled_again(world), SETTINGS, "2026-01-01T00:00:00Z")),
    }


def settled_again(world: World) -> World:
    """The same without what an earlier look has computed."""
    return World(cr=world.cr, rollout=world.rollout, children=world.children, pods=world.pods, record=world.record)


def main() -> None:
    """Run everything, print and write the results."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=ROOT / "bench" / "results" / "plans.json")
    options = parser.parse_args()
    found = {"one_pod": measure(1), "eight_pods": measure(8)}
    results = {"engines": ENGINES, "repeats": REPEATS, **found}
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps({"machine": machine(), "results": results}, indent=2) + "\n")
    for row in found.values():
        times = "   ".join(f"{what} {row[f'{what}_seconds']:.3f} s" for what in ("render", "plan", "status"))
        print(f"{ENGINES} engines, {row['pods']:.0f} pods:   {times}   (median of {REPEATS})")
    print(f"written to {options.out}")


if __name__ == "__main__":
    main()
