"""A Kubernetes control plane without nodes: etcd, kube-apiserver and kube-controller-manager as ordinary processes.

It needs neither root nor containers, listens on free ports of 127.0.0.1, and starts in about five seconds. Objects behave as in any
cluster (schemas, CEL rules, server-side apply, RBAC, garbage collection, StatefulSets create Pods), but no Pod ever runs.

    with control_plane(tmp_path) as cluster:
        cluster.kubectl("apply", "-f", "crds/")

For pytest there is a session fixture in ``e2e.cluster.fixtures``.
"""

import json
import os
import signal
import socket
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

from e2e.cluster import apiserver, binaries
from e2e.cluster.pki import Pki
from e2e.cluster.say import LabError, wait_until

_START_SECONDS = 180.0
"""Longest start of the API server. It takes a few seconds on an idle machine."""
_NAMES = "DNS:kubernetes,DNS:kubernetes.default,DNS:kubernetes.default.svc,DNS:localhost,IP:127.0.0.1,IP:10.96.0.1"


@dataclass(frozen=True)
class ControlPlane:
    """A running control plane."""

    url: str
    kubeconfig: Path
    binaries: Path
    logs: Path
    environment: dict[str, str]
    """Environment variables of programs that use the control plane: KUBECONFIG, and no proxy."""

    def kubectl(self, *words: str, stdin: str | None = None, check: bool = True) -> subprocess.CompletedProcess[str]:
        """Run kubectl. With ``check``, a failure raises LabError, quoting kubectl."""
        done = subprocess.run(
            [str(self.binaries / "kubectl"), *words],
            input=stdin,
            env=self.environment,
            capture_output=True,
            text=True,
            check=False,
            timeout=120,
        )
        if check and done.returncode:
            raise LabError(f"kubectl {' '.join(words)} failed: {done.stderr.strip()[-1500:]}")
        return done

    def get(self, *words: str) -> Any:
        """Return the parsed output of ``kubectl get … -o json``."""
        return json.loads(self.kubectl("get", *words, "-o", "json").stdout)

    def wait_for_crd(self, name: str) -> None:
        """Wait until a CustomResourceDefinition is established. ``kubectl wait`` fails while the definition has no conditions."""

        def is_established() -> bool:
            conditions = self.get("crd", name).get("status", {}).get("conditions") or []
            return any(one["type"] == "Established" and one["status"] == "True" for one in conditions)

        wait_until(is_established, seconds=20, what=f"the definition {name} is not established")


def free_ports(count: int) -> list[int]:
    """Return different free ports of 127.0.0.1."""
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in sockets]


@contextmanager
def child(name: str, command: Sequence[str], logs: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Run a program in its own process group for the length of the block, with its output in ``logs``. Ends with SIGTERM, then SIGKILL."""
    with (logs / f"{name}.log").open("wb") as log:
        process = subprocess.Popen(
            command, stdout=log, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, start_new_session=True, cwd=logs
        )
    try:
        yield process
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGTERM)
            try:
                process.wait(5)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait(5)


def _ready(url: str, pki: Pki, processes: Sequence[tuple[str, subprocess.Popen[bytes]]], logs: Path) -> bool:
    for name, process in processes:
        if process.poll() is not None:
            tail = (logs / f"{name}.log").read_text(errors="replace").strip().splitlines()[-3:]
            raise LabError(f"{name} ended with code {process.returncode} while the control plane started: {' | '.join(tail)}")
    return apiserver.ready(url, pki)


@contextmanager
def control_plane(folder: Path, *, controllers: bool = True) -> Iterator[ControlPlane]:
    """Run a control plane for the length of the block, with its data, certificates and logs below ``folder``."""
    programs = binaries.find()
    logs = folder / "logs"
    logs.mkdir(parents=True, exist_ok=True)
    etcd_port, peer_port, api_port, kcm_port = free_ports(4)
    url = f"https://127.0.0.1:{api_port}"
    pki = Pki(folder / "pki")
    apiserver.certificates(pki, _NAMES, url)
    kubeconfig = pki.root / "admin.kubeconfig"
    environment = {k: v for k, v in os.environ.items() if k.lower() not in ("http_proxy", "https_proxy", "all_proxy")}
    environment |= {"KUBECONFIG": str(kubeconfig), "NO_PROXY": "*", "no_proxy": "*"}
    with ExitStack() as stack:
        etcd = stack.enter_context(child("etcd", apiserver.etcd(programs, folder / "etcd", etcd_port, peer_port), logs))
        command = apiserver.api_server(programs, pki, "127.0.0.1", api_port, etcd_port)
        api = stack.enter_context(child("kube-apiserver", command, logs))
        processes = [("etcd", etcd), ("kube-apiserver", api)]
        what = f"kube-apiserver on {url} did not become ready; see {logs}"
        wait_until(lambda: _ready(url, pki, processes, logs), seconds=_START_SECONDS, what=what)
        if controllers:  # only now, because it exits if the API server is not ready
            command = apiserver.controller_manager(programs, pki, kcm_port)
            stack.enter_context(child("kube-controller-manager", command, logs))
        plane = ControlPlane(url, kubeconfig, programs, logs, environment)
        if controllers:
            what = f"kube-controller-manager created no default service account; see {logs}"
            wait_until(lambda: _has_account(plane), seconds=_START_SECONDS, what=what, every=0.2)
        yield plane


def _has_account(plane: ControlPlane) -> bool:
    return plane.kubectl("get", "serviceaccount", "default", check=False).returncode == 0


def _end(number: int, frame: FrameType | None) -> None:
    raise SystemExit(0)  # unwinds the context managers


def main() -> None:
    """Run a control plane until Ctrl-C, and print the shell line for kubectl."""
    signal.signal(signal.SIGTERM, _end)
    signal.signal(signal.SIGINT, _end)
    with tempfile.TemporaryDirectory(prefix="sgr-controlplane-") as folder, control_plane(Path(folder)) as plane:
        print(f"export KUBECONFIG={plane.kubeconfig} NO_PROXY='*'  # kubectl: {plane.binaries}/kubectl", flush=True)
        signal.pause()


if __name__ == "__main__":
    main()
