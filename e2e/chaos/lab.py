"""The fleet under fault on the lab cluster: stand-in engines in pods on two nodes, and the trainer on the machine that holds the lab.

The calls of this module bypass the API server, because the API server is one of the parts that fail. They reach the fleet's URL at the
address of its Service, and engines in their network namespaces.
"""

from __future__ import annotations

import json
import subprocess
import sys
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import Any

from e2e import machine_token, stand_in
from e2e.chaos.engines import STAND_INS as ENGINES
from e2e.chaos.stack import PHASE_LINE, WEIGHTS, FleetUnderFault
from e2e.chaos.trainer_process import Trainer, local_trainer
from e2e.cluster import network, nodes
from e2e.kube import CASES_VALUES, SYSTEM, Kubectl, Refused, eventually, install_operator

NAMESPACE = NAME = "chaos"
_CALL = (
    "import sys, urllib.request as u\n"
    "r = u.Request('http://127.0.0.1:30001' + sys.argv[2], method=sys.argv[1], data=sys.argv[3].encode() or None)\n"
    "print(u.build_opener(u.ProxyHandler({})).open(r, timeout=5).read().decode())\n"
)
_FAR = 1
"""The node that is lost. The other node runs the control plane, the router and the operator."""


class LabStack(FleetUnderFault):
    """Use as a context manager. The cluster must be up, with two nodes."""

    number = ENGINES
    trainer_host = network.HOST
    start_seconds = 0.0
    headers = machine_token.HEADERS

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.kubectl = Kubectl(NAMESPACE)

    def __enter__(self) -> LabStack:
        if len(nodes.running()) != 2:
            raise SystemExit("The matrix needs a lab of two nodes: python -m e2e.cluster down; python -m e2e.cluster up --nodes 2")
        install_operator(CASES_VALUES)
        with suppress(Refused):  # the namespace exists already
            self.kubectl("create", "namespace", NAMESPACE)
        self._remove()
        self._ends.callback(self._remove)
        self.kubectl.apply(machine_token.secret())
        self.kubectl.apply(stand_in.code())
        self.kubectl.apply(self._rollout())
        eventually("the router runs", lambda: self._pods("router")[0]["status"]["podIP"], within=60)
        self._keep_near(self.kubectl, f"rollout.sglang.io/rollout={NAME},app.kubernetes.io/component=router")
        self._keep_near(Kubectl(SYSTEM), "")
        self.url = f"http://{self.kubectl.get('svc', f'{NAME}-router')['spec']['clusterIP']}:30000"
        self.until("all engines serve", lambda: self.document().get("serving") == ENGINES, 180)
        return self

    def new_trainer(self) -> Trainer:
        """End the current trainer and start another."""
        if self.trainer is not None:
            self.trainer.end()
        self.trainer = local_trainer(self.url, self.folder / "trainer.log", token=machine_token.TOKEN)
        return self.trainer

    def phases(self) -> list[tuple[float, str]]:
        """Return the phases that the coordinator's log names, oldest first, each with the Unix time at which it began."""
        pod = self._pods("router")[0]["metadata"]["name"]
        found = []
        for line in self.kubectl("logs", pod, "-c", "coordinator", "--timestamps").splitlines():
            stamp, _, text = line.partition(" ")
            phase = text.partition(PHASE_LINE)[2]
            if phase:
                found.append((datetime.fromisoformat(stamp[:26].rstrip("Z") + "+00:00").timestamp(), phase))
        return found

    def slow(self, phase: str, seconds: float, engines: list[int]) -> None:
        """Slow down one call of a phase on some engines."""
        for index in engines:
            self.ask(index, "POST", "/stand_in/faults", {"kind": "slow", "phase": phase, "times": 1, "seconds": seconds})

    def calm(self) -> None:
        """Disarm the faults that did not hit."""
        for index in range(ENGINES):
            with suppress(LookupError):
                self.ask(index, "DELETE", "/stand_in/faults")

    def paused(self) -> list[int]:
        """Return the engines that report a pause or an open session, also on a node that is cut off."""
        found = []
        for index in range(ENGINES):
            with suppress(LookupError):
                state = self.ask(index, "GET", "/stand_in/state")
                if state["paused"] or state["session"]:
                    found.append(index)
        return found

    def ask(self, index: int, method: str, path: str, body: dict[str, Any] | None = None) -> Any:
        """Call a stand-in from its pod's network. Raises LookupError if the stand-in does not run."""
        data = json.dumps(body) if body else ""
        command = ["nsenter", "-t", str(self.engine_pid(index)), "--net", sys.executable, "-c", _CALL, method, path, data]
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
        if done.returncode:
            raise LookupError(f"engine {index} does not answer {path}: {done.stderr.strip().splitlines()[-1:]}")
        return json.loads(done.stdout)

    def engine_pid(self, index: int) -> int:
        """Return the process ID of a stand-in on this machine. Raises LookupError."""
        for pid in nodes.processes(f"{NAME}-engine-{index}-0"):
            with suppress(OSError):
                if Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")[1:3] == [b"-m", b"sglang.launch_server"]:
                    return pid
        raise LookupError(f"no process of engine {index} runs")

    def pod(self, index: int) -> dict[str, Any]:
        """Return an engine's pod."""
        return self.kubectl.get("pod", f"{NAME}-engine-{index}-0")

    def far(self) -> list[int]:
        """Return the engines on the node that can be lost."""
        return [index for index in range(ENGINES) if self.pod(index)["spec"]["nodeName"] == f"node{_FAR}"]

    def rest(self) -> None:
        """Wait until Kubernetes has replaced the pods of a node that was lost. It replaces also pods that serve again."""
        self.until("every pod is ready and none is deleted", lambda: all(_is_ready(pod) for pod in self._pods("engine")), 180)

    def is_status_current(self) -> bool:
        """Return whether the CR status agrees with the fleet about the engines whose pods are ready."""
        status, seen = self.kubectl.get("sglr", NAME)["status"], self.document()
        ready = {pod["metadata"]["name"] for pod in self._pods("engine") if _is_ready(pod)}
        serving = sum(row["gate_open"] and f"{row['name']}-0" in ready for row in seen["members"])
        published = (status["ready"], status["weights"]["committedVersion"])
        return bool(published == (f"{serving}/{ENGINES}", seen["committed"]["label"]))

    def _remove(self) -> None:
        self.kubectl("delete", "sglr", NAME, "--ignore-not-found", "--wait=false")
        mine = f"rollout.sglang.io/rollout={NAME}"
        eventually("the pods of an earlier run are gone", lambda: not self.kubectl.list("pods", mine), within=240)

    def _rollout(self) -> dict[str, Any]:
        made = stand_in.rollout(NAME, replicas=ENGINES, weights=WEIGHTS)
        spread = {"rollout.sglang.io/rollout": NAME, "app.kubernetes.io/component": "engine"}
        made["spec"]["podTemplate"]["spec"]["topologySpreadConstraints"] = [
            {
                "maxSkew": 1,
                "topologyKey": "kubernetes.io/hostname",
                "whenUnsatisfiable": "DoNotSchedule",
                "labelSelector": {"matchLabels": spread},
            }
        ]
        # The trainer runs on this machine, whose address belongs to no pod.
        made["spec"]["security"] = machine_token.security(trainerAddresses=[network.HOST])
        return made

    def _pods(self, component: str) -> list[dict[str, Any]]:
        return self.kubectl.list("pods", f"rollout.sglang.io/rollout={NAME},app.kubernetes.io/component={component}")

    def _keep_near(self, kubectl: Kubectl, selector: str) -> None:
        """Move other pods off the node that will be lost, so that only engines fail with it."""
        kubectl("cordon", f"node{_FAR}")
        try:
            for pod in kubectl.list("pods", selector):
                if pod["spec"].get("nodeName") == f"node{_FAR}":
                    kubectl("delete", "pod", pod["metadata"]["name"], "--wait=true", timeout=240)
            eventually("the pods run on the other node", lambda: all(_near(pod) for pod in kubectl.list("pods", selector)), within=90)
        finally:
            kubectl("uncordon", f"node{_FAR}")


def _is_ready(pod: dict[str, Any]) -> bool:
    ready = next((one["status"] for one in pod["status"].get("conditions", []) if one["type"] == "Ready"), "")
    return ready == "True" and not pod["metadata"].get("deletionTimestamp")


def _near(pod: dict[str, Any]) -> bool:
    return bool(pod["spec"].get("nodeName") == "node0" and pod["status"]["phase"] == "Running")
