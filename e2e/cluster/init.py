"""Inside a node: ``python -m e2e.cluster.init NODE BINARIES LAB`` sets up the namespaces and keeps the node's programs running.

Runs as the child of tini, which is process 1 of the node: when it ends, the kernel ends everything in the node.
"""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType

from e2e.cluster import apiserver, cgroups, network, nodeconf
from e2e.cluster.paths import lab_root
from e2e.cluster.pki import Pki
from e2e.cluster.say import say, wait_until

API_PORT = 6443
_START_SECONDS = 120.0
_RESTART_SECONDS = 1.0
# The kubelet requires these machine-wide values. It reads them from files that hide the machine's values, which stay as they are.
_SHOWN_SYSCTLS = {
    "vm/overcommit_memory": "1",
    "vm/panic_on_oom": "0",
    "kernel/panic": "10",
    "kernel/panic_on_oops": "1",
    "kernel/keys/root_maxkeys": "1000000",
    "kernel/keys/root_maxbytes": "25000000",
}
_HIDDEN = ("/var/lib/cni", "/var/lib/kubelet", "/var/log")  # fixed paths of programs, which must not be written on the machine's disk


def _mount(*words: str) -> None:
    subprocess.run(["mount", *words], check=True, timeout=30)


def _prepare_mounts(node: int) -> None:
    _mount("--make-rshared", "/")
    _mount("-t", "tmpfs", "-o", "mode=755,size=256m", "tmpfs", "/run")
    for folder in (nodeconf.RUN, Path("/run/netns")):
        folder.mkdir()
    for hidden in _HIDDEN:
        _mount("-t", "tmpfs", "tmpfs", hidden)
    for folder in (Path("/var/log/pods"), Path("/var/log/containers")):
        folder.mkdir()
    resolv, mine = Path("/etc/resolv.conf").resolve(), nodeconf.node_folder(node) / "resolv.conf"
    if resolv.exists():
        _mount("--bind", str(mine), str(resolv))
    else:  # a link into /run, which is the node's own and empty now
        resolv.parent.mkdir(parents=True, exist_ok=True)
        resolv.write_bytes(mine.read_bytes())
    for name, value in _SHOWN_SYSCTLS.items():
        shown = nodeconf.RUN / "sysctl" / name
        shown.parent.mkdir(parents=True, exist_ok=True)
        shown.write_text(value + "\n")
        if Path("/proc/sys", name).exists():
            _mount("--bind", str(shown), f"/proc/sys/{name}")


@dataclass
class Programs:
    """The node's programs, each with its log file. A program that ends is restarted after a second."""

    logs: Path
    commands: dict[str, list[str]] = field(default_factory=dict)
    running: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)

    def start(self, name: str, command: list[str]) -> None:
        """Start a program and keep it running."""
        self.commands[name] = command
        with (self.logs / f"{name}.log").open("ab") as log:
            self.running[name] = subprocess.Popen(
                command, stdout=log, stderr=subprocess.STDOUT, cwd="/", stdin=subprocess.DEVNULL, start_new_session=True
            )
        say(f"{time.strftime('%H:%M:%S')} {name} started as {self.running[name].pid}")

    def watch(self) -> None:
        """Restart programs that end. Never returns."""
        while True:
            time.sleep(_RESTART_SECONDS)
            for name, process in list(self.running.items()):
                if process.poll() is not None:
                    say(f"{time.strftime('%H:%M:%S')} {name} ended with code {process.returncode}; its log: {self.logs}/{name}.log")
                    self.start(name, self.commands[name])

    def stop(self) -> None:
        """End all programs. Only containerd gets time, to close the image store, which outlives the node."""
        for name, process in self.running.items():
            if process.poll() is None:
                process.send_signal(signal.SIGTERM if name == "containerd" else signal.SIGKILL)
        if "containerd" in self.running:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.running["containerd"].wait(3)


def _control_plane(programs: Programs, binaries: Path, pki: Pki) -> None:
    programs.start("etcd", apiserver.etcd(binaries, nodeconf.runtime_folder(0) / "etcd", 2379, 2380))
    programs.start("kube-apiserver", apiserver.api_server(binaries, pki, network.API, API_PORT, 2379))


def _controllers(programs: Programs, binaries: Path, pki: Pki) -> None:
    programs.start("kube-controller-manager", apiserver.controller_manager(binaries, pki, 10257))
    config = pki.root / "sched.kubeconfig"
    programs.start(
        "kube-scheduler",
        [
            str(binaries / "kube-scheduler"),
            f"--kubeconfig={config}",
            f"--authentication-kubeconfig={config}",
            f"--authorization-kubeconfig={config}",
            "--leader-elect=false",
            "--bind-address=127.0.0.1",
        ],
    )
    programs.start("coredns", [str(binaries / "coredns"), "-conf", str(nodeconf.node_folder(0) / "Corefile")])


def _node(programs: Programs, node: int, binaries: Path, pki: Pki) -> None:
    folder = nodeconf.node_folder(node)
    programs.start(
        "kubelet",
        [
            str(binaries / "kubelet"),
            f"--config={folder}/kubelet.yaml",
            f"--kubeconfig={pki.root}/node{node}.kubeconfig",
            f"--root-dir={nodeconf.runtime_folder(node)}/kubelet",
            f"--hostname-override=node{node}",
            f"--node-ip={network.address(node)}",
        ],
    )
    programs.start("kube-proxy", [str(binaries / "kube-proxy"), f"--config={folder}/proxy.yaml"])


def main() -> None:
    """Run the node until SIGTERM."""
    node, binaries = int(sys.argv[1]), Path(sys.argv[2])
    pki = Pki(lab_root() / "pki")
    programs = Programs(nodeconf.node_folder(node) / "logs")

    def end(_signal: int, _frame: FrameType | None) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        programs.stop()
        os._exit(0)

    signal.signal(signal.SIGTERM, end)
    socket.sethostname(f"node{node}")
    _prepare_mounts(node)
    cgroups.enter(nodeconf.cgroup(node))
    programs.start("containerd", ["containerd", "-c", str(nodeconf.node_folder(node) / "containerd.toml")])
    if node == 0:
        _control_plane(programs, binaries, pki)
    url = f"https://{network.API}:{API_PORT}"
    # The other programs exit or back off for long if the API server is not ready.
    wait_until(lambda: apiserver.ready(url, pki), seconds=_START_SECONDS, what=f"{url} did not become ready")
    if node == 0:
        _controllers(programs, binaries, pki)
    _node(programs, node, binaries, pki)
    programs.watch()


if __name__ == "__main__":
    main()
