"""``make demo``: create a fleet on a cluster and update its weights from a trainer.

Every step prints what it does and how long it took. The fleet keeps running afterwards.
"""

from __future__ import annotations

import json
import os
import pathlib
import subprocess
import sys
import time
from collections.abc import Mapping
from typing import Any

import yaml

from e2e.cluster.say import LabError, say, step
from e2e.images.catalog import LOCAL, Place
from e2e.images.push import helm_command, publish, use_images
from e2e.kube import ROOT, Kubectl, Refused, condition, eventually, install_operator, run_helm

OUT = ROOT / "out"
DEMO = Kubectl("default")


def ready() -> bool:
    """Return whether the demo's rollout is Ready."""
    return condition(DEMO.get("sglr", "demo"), "Ready")["status"] == "True"


def job(name: str, *arguments: str, images: Place = LOCAL) -> dict[str, Any]:
    """Return the example trainer's Job with another name and more arguments."""
    document: dict[str, Any] = yaml.safe_load(use_images((ROOT / "examples/trainer/job.yaml").read_text(), images))
    document["metadata"]["name"] = name
    container = document["spec"]["template"]["spec"]["containers"][0]
    container["args"] = [*container.get("args", []), *arguments]
    return document


def train(name: str, *arguments: str, seconds: float = 300, images: Place = LOCAL) -> dict[str, Any]:
    """Run a trainer Job to its end, show its output, and return its reward curve."""
    DEMO("delete", "job", name, "--ignore-not-found", "--wait=true", timeout=90)
    DEMO.apply(job(name, *arguments, images=images))
    eventually("the trainer's pod starts", lambda: DEMO.list("pods", f"job-name={name}")[0]["status"]["phase"] != "Pending", within=90)
    follow = subprocess.Popen(
        ["kubectl", "-n", DEMO.namespace, "logs", "-f", "-c", "trainer", f"job/{name}", "--pod-running-timeout=60s"],
        stdout=subprocess.PIPE,
        text=True,
    )
    assert follow.stdout is not None
    curve: dict[str, Any] = {}
    deadline = time.monotonic() + seconds
    for line in follow.stdout:
        if line.startswith("CURVE "):
            curve = json.loads(line.removeprefix("CURVE "))
        else:
            say("          | " + line.rstrip())
        if time.monotonic() > deadline:
            follow.kill()
            raise LabError(f"the trainer Job {name} did not end within {seconds:.0f} s: kubectl logs job/{name}")
    follow.wait(10)
    eventually("the Job is complete", lambda: DEMO.get("job", name)["status"].get("succeeded"), within=30)
    return curve


def draw(out: pathlib.Path, *curves: dict[str, Any]) -> None:
    """Draw both reward curves into ``reward.png``."""
    files = []
    for curve in curves:
        files.append(out / f"curve-{'pushing' if curve['push'] else 'not-pushing'}.json")
        files[-1].write_text(json.dumps(curve))
    command = [sys.executable, str(ROOT / "examples/trainer/plot.py"), *map(str, files), "--out", str(out / "reward.png")]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, timeout=120)


def install() -> Place:
    """Install the operator, and return where its images are: loaded into the cluster, or pushed to the registry REGISTRY."""
    is_own = os.environ.get("CLUSTER") == "current"
    if is_own and (registry := os.environ.get("REGISTRY", "")):
        images = publish(registry)
        with step("install the operator from the registry: helm upgrade --install"):
            run_helm(helm_command(images))
        return images
    if is_own:
        say(f"          The nodes need the images {LOCAL.reference('…')} (make kind-load). REGISTRY=… pushes them to a registry instead.")
    with step("install the operator: helm install charts/sglang-rollout-operator"):
        install_operator()
    return LOCAL


def main() -> None:
    """Run the demo on the cluster of the current environment."""
    began = time.monotonic()
    OUT.mkdir(exist_ok=True)
    images = install()
    trainer = DEMO("create", "configmap", "demo-trainer", f"--from-file={ROOT / 'examples/trainer'}", "--dry-run=client", "-o", "yaml")
    DEMO("apply", "-f", "-", stdin=trainer)
    with step("apply the fleet: kubectl apply -f examples/rollout-cpu.yaml"):
        DEMO("apply", "-f", "-", stdin=use_images((ROOT / "examples/rollout-cpu.yaml").read_text(), images))
    with step("two real SGLang engines load their model and become Ready"):
        eventually("the rollout is Ready", ready, within=600, every=1)
    before = DEMO("get", "sglr", "demo")
    say("          | " + before.replace("\n", "\n          | ").rstrip(" |"))
    with step("trainer that pushes no weights: its reward does not rise"):
        flat = train("trainer-no-push", "--no-push", images=images)
    with step("trainer that pushes its weights through the URL after every step"):
        pushed = train("trainer", images=images)
    with step("draw both curves"):
        draw(OUT, pushed, flat)
    eventually("status names the last version", lambda: str(pushed["rows"][-1]["step"]) in DEMO("get", "sglr", "demo"), within=15)
    say("\nkubectl get sglr, before and after:")
    say(before + DEMO("get", "sglr", "demo").splitlines()[-1])
    say(f"\nDone in {time.monotonic() - began:.0f} s. The fleet keeps running. Reward curves: {OUT / 'reward.png'}")
    say(describe_next_steps(os.environ))


def describe_next_steps(environment: Mapping[str, str]) -> str:
    """Return commands for the running fleet. Those below a heading can be pasted together."""
    kubeconfig, programs = environment.get("KUBECONFIG", ""), environment.get("PATH", "").split(":")[0]
    exported = [f"export KUBECONFIG={kubeconfig} PATH={programs}:$PATH"] if kubeconfig else []
    commands = (
        *exported,
        ".venv/bin/sglang-rollout status demo",
        "kubectl get pods,svc",
        "kubectl port-forward svc/demo-router 30000 > /dev/null &",
        "curl -s --retry 10 --retry-connrefused localhost:30000/get_weight_version",
    )
    return "Inspect it:\n" + "".join(f"  {command}\n" for command in commands) + "Remove it:\n  make clean"


if __name__ == "__main__":
    try:
        main()
    except (LabError, Refused, AssertionError, subprocess.SubprocessError) as error:
        say(f"demo: {error}")
        sys.exit(1)
