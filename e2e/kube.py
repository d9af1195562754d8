"""Access to the cluster with ``kubectl``, for the end-to-end cases and the demo."""

from __future__ import annotations

import contextlib
import json
import pathlib
import re
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

import yaml

ROOT = pathlib.Path(__file__).resolve().parents[1]
SYSTEM = "rollout-system"
"""Namespace of the operator."""


class Refused(Exception):
    """kubectl ended with an error; the message is its output."""


@dataclass(frozen=True)
class Kubectl:
    """``kubectl`` bound to one namespace."""

    namespace: str

    def __call__(self, *args: str, stdin: str | None = None, timeout: float = 60) -> str:
        """Run kubectl and return its output. Raises Refused with its error."""
        command = ["kubectl", "-n", self.namespace, *args]
        try:
            done = subprocess.run(command, input=stdin, capture_output=True, text=True, timeout=timeout, check=False)
        except subprocess.TimeoutExpired as error:
            raise Refused(f"{' '.join(command)}: no answer within {timeout:.0f} s") from error
        if done.returncode:
            raise Refused(f"{' '.join(command)}: {done.stderr.strip() or done.stdout.strip()}")
        return done.stdout

    def apply(self, document: dict[str, Any]) -> str:
        """Apply one object."""
        return self("apply", "-f", "-", stdin=yaml.safe_dump(document))

    def get(self, kind: str, name: str) -> dict[str, Any]:
        """Return one object. Raises Refused if it is absent."""
        return dict(json.loads(self("get", kind, name, "-o", "json")))

    def list(self, kind: str, selector: str = "") -> list[dict[str, Any]]:
        """Return the objects of one kind, optionally by label selector."""
        extra = ["-l", selector] if selector else []
        return list(json.loads(self("get", kind, *extra, "-o", "json"))["items"])

    def exec(self, pod: str, *command: str, container: str = "", stdin: str | None = None, timeout: float = 120) -> str:
        """Run a command in a pod's container and return its output."""
        where = ["-c", container] if container else []
        flags = ["-i"] if stdin is not None else []
        return self("exec", *flags, pod, *where, "--", *command, stdin=stdin, timeout=timeout)

    @contextlib.contextmanager
    def forward(self, target: str, port: int) -> Iterator[str]:
        """Forward a port of ``target`` (``svc/x``, ``pod/x``) and yield its URL on this machine."""
        command = ["kubectl", "-n", self.namespace, "port-forward", target, f":{port}"]
        child = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        try:
            assert child.stdout is not None
            line = child.stdout.readline()
            found = re.search(r"127\.0\.0\.1:(\d+)", line)
            if not found:
                raise Refused(f"{' '.join(command)}: {line.strip() or 'ended without output'}")
            yield f"http://127.0.0.1:{found.group(1)}"
        finally:
            child.terminate()
            child.wait(10)


def describe_pods(kubectl: Kubectl) -> str:
    """Return one line per pod: phase, deletion, and the state of each container."""
    lines = []
    for pod in kubectl.list("pods"):
        status, ending = pod["status"], pod["metadata"].get("deletionTimestamp")
        rows = status.get("initContainerStatuses", []) + status.get("containerStatuses", [])
        doing = ", ".join(f"{row['name']} {_doing(row['state'])}" for row in rows)
        lines.append(f"{pod['metadata']['name']}: {status.get('phase')}{f', to end by {ending}' if ending else ''}: {doing}")
    return "\n".join(lines) or "none"


def _doing(state: dict[str, Any]) -> str:
    return " ".join([*state, *(str(row[key]) for row in state.values() for key in ("reason", "exitCode") if key in row)])


T = TypeVar("T")


def eventually(what: str, probe: Callable[[], T], *, within: float = 180, every: float = 0.5) -> T:
    """Return the first true value of ``probe``. Raises AssertionError with the last value after ``within`` seconds."""
    deadline = time.monotonic() + within
    last: object = None
    while True:
        try:
            if value := probe():
                return value
            last = value
        except (Refused, KeyError, IndexError, OSError) as error:
            last = error
        if time.monotonic() > deadline:
            raise AssertionError(f"not within {within:.0f} s: {what} (last seen: {str(last)[:500]!r})")
        time.sleep(every)


CASES_VALUES = ROOT / "e2e/cases/values.yaml"
"""Chart values that allow what the fleets of the cases ask for."""


def install_operator(*values: pathlib.Path) -> None:
    """Install or upgrade the operator from the chart with local images, and wait for its CRD.

    Args:
        *values: Files of chart values, beside those that name the local images.

    Raises:
        Refused: helm failed; the message quotes it.
    """
    command = ["helm", "upgrade", "--install", "sglang-rollout-operator", str(ROOT / "charts/sglang-rollout-operator"), "-n", SYSTEM]
    run_helm([*command, "--create-namespace", *(f"--values={file}" for file in (ROOT / "e2e/values.yaml", *values)), "--wait"])


def run_helm(command: list[str]) -> None:
    """Run a command that installs the operator, and wait for its CRD.

    Raises:
        Refused: helm failed; the message quotes it.
    """
    command = [*command, "--timeout", "3m"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    if done.returncode:
        raise Refused(f"helm could not install the operator: {done.stderr.strip()}")
    wait_for_crd(Kubectl(SYSTEM), "sglangrollouts.rollout.sglang.io")


def wait_for_crd(kubectl: Kubectl, name: str) -> None:
    """Wait until a CustomResourceDefinition is established. ``kubectl wait`` fails while the definition has no conditions."""
    eventually(f"{name} is established", lambda: condition(kubectl.get("crd", name), "Established")["status"] == "True", within=30)


def condition(document: dict[str, Any], kind: str) -> dict[str, str]:
    """Return one condition of an object's status; an empty condition while it is absent."""
    for found in document.get("status", {}).get("conditions") or []:
        if found["type"] == kind:
            return dict(found)
    return {"type": kind, "status": "", "reason": "", "message": ""}
