"""The processes of nodes on this machine: start them in their own namespaces, find them by command line, enter them, end them."""

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

from e2e.cluster import network, nodeconf
from e2e.cluster.paths import REPOSITORY, cache_root, lab_root

_MODULE = "e2e.cluster.init"
_PROXIES = ("http_proxy", "https_proxy", "all_proxy", "no_proxy")


def start(node: int, binaries: Path) -> None:
    """Start a node. The node outlives this process; ``stop_all`` ends it."""
    folder = nodeconf.node_folder(node)
    shutil.rmtree(nodeconf.runtime_folder(node), ignore_errors=True)
    for old in (folder / "logs").glob("*.log"):
        old.unlink()
    nodeconf.write(node)
    environment = {k: v for k, v in os.environ.items() if k.lower() not in _PROXIES}
    environment |= {
        "PYTHONPATH": str(REPOSITORY),
        "SGLANG_ROLLOUT_CACHE": str(cache_root()),
        "PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
    }
    command = [
        "nsenter",
        f"--net=/run/netns/{network.namespace(node)}",
        "unshare",
        "--mount",
        "--propagation",
        "private",
        "--pid",
        "--fork",
        "--kill-child=TERM",
        "--mount-proc",
        "--uts",
        "--ipc",
        "tini",
        "-s",
        "-g",
        "--",
        sys.executable,
        "-u",
        "-m",
        _MODULE,
        str(node),
        str(binaries),
        str(lab_root()),
    ]
    with (folder / "logs" / "init.log").open("wb") as log:
        subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT, cwd="/", env=environment, start_new_session=True
        )


def _processes() -> list[tuple[int, str, int]]:
    """Return (pid, program, node) of every process of ``start``. They are found by command line, because a PID file can get lost."""
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            words = (entry / "cmdline").read_bytes().decode(errors="replace").split("\0")
        except OSError:  # it ended meanwhile
            continue
        if _MODULE in words[:-2] and words[words.index(_MODULE) + 1].isdigit():
            found.append((int(entry.name), Path(words[0]).name, int(words[words.index(_MODULE) + 1])))
    return sorted(found)


def running() -> dict[int, int]:
    """Return the running nodes, each with the PID of its first process."""
    return {node: pid for pid, program, node in _processes() if program == "tini"}


def _signal(pid: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


def stop_all(patience: float = 5.0) -> None:
    """End every node with all its pods: SIGTERM to their first processes, SIGKILL after ``patience`` seconds."""
    for pid in running().values():
        _signal(pid, signal.SIGTERM)
    began = time.monotonic()
    while (left := _processes()) and time.monotonic() < began + patience + 10:
        if time.monotonic() > began + patience or not any(program == "tini" for _, program, _ in left):
            for pid, _, _ in left:  # killing a node's first process ends all others in its namespace
                _signal(pid, signal.SIGKILL)
        time.sleep(0.05)


def leftovers() -> list[str]:
    """Return the lab's processes, described for a message."""
    return [f"process {pid} ({program} of node{node})" for pid, program, node in _processes()]


def enter(node: int, *command: str) -> list[str]:
    """Return the command line that runs ``command`` inside a node."""
    return ["nsenter", "-t", str(running()[node]), "--mount", "--net", "--pid", "--uts", "--ipc", "--wd=/", *command]


def processes(pod: str) -> list[int]:
    """Return the process IDs of a pod's containers on this machine, oldest first.

    Raises:
        LookupError: No process of the pod runs.
    """
    found, wanted = [], f"HOSTNAME={pod}".encode()
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError):  # it has ended
            if entry.name.isdigit() and wanted in (entry / "environ").read_bytes().split(b"\0"):
                found.append(int(entry.name))
    if not found:
        raise LookupError(f"no process of pod {pod} runs on this machine")
    return sorted(found)


def log_tail(node: int, lines: int = 5) -> str:
    """Return the last lines of each log of a node, for an error message."""
    parts = []
    for log in sorted((nodeconf.node_folder(node) / "logs").glob("*.log")):
        tail = log.read_text(errors="replace").strip().splitlines()[-lines:]
        parts += [f"--- {log}", *tail]
    return "\n".join(parts)
