"""An agent on each node of the lab cluster that enforces NetworkPolicies: kube-network-policies, as a process of this machine.

Build it with ``python -m e2e.neighbours.policy_agent`` (about four minutes on two cores, then cached).
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import yaml

from e2e.cluster import lab, network, nodes
from e2e.cluster.init import API_PORT
from e2e.cluster.say import LabError, say
from e2e.kube import Kubectl
from e2e.neighbours import modules

PROGRAM = "kube-network-policies"
MODULE = f"sigs.k8s.io/{PROGRAM}"
VERSION = "v0.8.0"
CHECKSUM = "h1:dzecRNzdmg+VmHEQWTIjxnCgf412J+8CKHqbKgCiWkk="
NAMESPACE = "kube-system"
_QUEUE = 100
# The program reads its credentials from a fixed folder below /run. A separate mount namespace provides the folder.
_START = """\
mount -t tmpfs tmpfs /run && mkdir -p /run/secrets/kubernetes.io && cp -r "$1" /run/secrets/kubernetes.io/serviceaccount || exit 1
shift; exec "$@"
"""
# Kernels without nftables' expression "queue" refuse the program's own rules. This rule gives it the same packets: the first packet of
# each connection, except for those of the node itself, which Kubernetes always admits.
_RULE = (
    *("-t", "mangle", "POSTROUTING", "-m", "conntrack", "--ctstate", "NEW", "-m", "addrtype", "!", "--src-type", "LOCAL"),
    *("-j", "NFQUEUE", "--queue-num", str(_QUEUE), "--queue-bypass"),
)


def build() -> None:
    """Build the program, unless it is built already."""
    where = modules.folder(PROGRAM, VERSION)
    if (where / PROGRAM).exists():
        return
    source = modules.download(MODULE, VERSION, where, checksum=CHECKSUM)
    shutil.copy(source / "install.yaml", where)
    # Copies of go.mod and go.sum, because the build adds lines to them, and the module cache is read-only.
    for name in ("go.mod", "go.sum"):
        (where / name).write_bytes((source / name).read_bytes())
    modules.build(source, "./cmd", where / PROGRAM, ["-mod=mod", f"-modfile={where / 'go.mod'}"])


@contextmanager
def running(where: Path) -> Iterator[None]:
    """Run one agent per node for the length of the block. Logs and credentials are in the folder ``where``.

    When the block ends, the nodes enforce nothing, as before it.
    """
    program = modules.find_program(PROGRAM, VERSION)
    account = _make_account(where)
    with contextlib.ExitStack() as stack:
        for node in sorted(nodes.running()):
            stack.enter_context(_running_on(node, program, account, where))
        yield


def _make_account(where: Path) -> Path:
    """Create the ServiceAccount with its rights, and return a folder with its credentials."""
    kubectl = Kubectl(NAMESPACE)
    documents = yaml.safe_load_all((modules.folder(PROGRAM, VERSION) / "install.yaml").read_text())
    wanted = [document for document in documents if document and document["kind"] != "DaemonSet"]
    kubectl("apply", "-f", "-", stdin=json.dumps({"apiVersion": "v1", "kind": "List", "items": wanted}))
    folder = where / "serviceaccount"
    folder.mkdir(exist_ok=True)
    (folder / "token").write_text(kubectl("create", "token", PROGRAM, "--duration=24h").strip())
    (folder / "namespace").write_text(NAMESPACE)
    shutil.copy(lab.pki().ca, folder / "ca.crt")
    return folder


@contextmanager
def _running_on(node: int, program: Path, account: Path, where: Path) -> Iterator[None]:
    enter = ["nsenter", f"--net=/run/netns/{network.namespace(node)}"]
    command = [str(program), f"--hostname-override=node{node}", "--disable-nri", f"--nfqueue-id={_QUEUE}"]
    command += ["--metrics-bind-address=127.0.0.1:9080", "--v=2"]
    environment = os.environ | {
        "KUBERNETES_SERVICE_HOST": network.API,
        "KUBERNETES_SERVICE_PORT": str(API_PORT),
        "NO_PROXY": "*",
        "no_proxy": "*",
    }
    with (where / f"{PROGRAM}-node{node}.log").open("ab") as log:
        wrapped = [*enter, "unshare", "--mount", "sh", "-c", _START, PROGRAM, str(account), *command]
        child = subprocess.Popen(wrapped, env=environment, stdout=log, stderr=log)
    try:
        _change_rule(enter, "-I")
        yield
    finally:
        _change_rule(enter, "-D")
        child.send_signal(signal.SIGINT)  # the signal at which it removes its rules
        try:
            child.wait(20)
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait(10)


def _change_rule(enter: list[str], verb: str) -> None:
    """Insert (``-I``) or delete (``-D``) the rule of a node."""
    table, chain, rest = _RULE[:2], _RULE[2], _RULE[3:]
    subprocess.run([*enter, "iptables", *table, verb, chain, *rest], check=True, timeout=30)


if __name__ == "__main__":
    try:
        build()
    except LabError as error:
        say(f"{PROGRAM}: {error}")
        sys.exit(1)
