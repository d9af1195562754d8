"""Faults of a cluster: API server, node, link. They affect only the lab's processes and network."""

from __future__ import annotations

import os
import signal
import subprocess
from contextlib import suppress
from functools import partial
from pathlib import Path

from e2e.chaos.engines import STAND_INS as ENGINES
from e2e.chaos.lab import NAME, LabStack
from e2e.chaos.matrix import PHASES, TRUTH_WITHIN, Fault, Strike, aim_signal
from e2e.cluster import binaries, network, nodes

FAR = 1
PAUSE_ENDED_WITHIN = 15.0
"""Maximum seconds until an unreachable engine ends its pause: a lease of 3 s, checked twice a second, and the calls that end it."""


def _api_server() -> int:
    """Return the process ID of the lab's API server, and of no other control plane on this machine."""
    top = nodes.running()[0]
    for entry in Path("/proc").iterdir():
        with suppress(OSError, ValueError):
            pid = int(entry.name)
            if b"kube-apiserver" in (entry / "cmdline").read_bytes().split(b"\0")[0] and _below(pid, top):
                return pid
    raise LookupError("the lab's API server does not run")


def _below(pid: int, top: int) -> bool:
    while pid > 1 and pid != top:
        pid = int(Path(f"/proc/{pid}/status").read_text().split("PPid:")[1].split()[0])
    return pid == top


def stop_api(_: LabStack) -> Strike:
    """Stop the API server. Its connections stay open without answers."""
    return aim_signal("the API server", [_api_server()], signal.SIGSTOP)


def continue_api(stack: LabStack) -> None:
    """Continue the API server and wait until the status is current."""
    os.kill(_api_server(), signal.SIGCONT)
    stack.until("the status agrees with the fleet", stack.is_status_current, TRUTH_WITHIN)


def cut_node(_: LabStack) -> Strike:
    """Cut the node's network at the lab's end of its link."""
    return partial(subprocess.run, ["ip", "link", "set", f"sgrv{FAR}", "down"], check=True, timeout=10)


def join_node(stack: LabStack) -> None:
    """Wait until unreachable engines have ended their pause, then connect the node again."""
    try:
        stack.until("unreachable engines have ended their pause", lambda: not stack.paused(), PAUSE_ENDED_WITHIN)
        stack.until("the status names the engines that serve", stack.is_status_current, TRUTH_WITHIN)
    finally:
        subprocess.run(["ip", "link", "set", f"sgrv{FAR}", "up"], check=True, timeout=10)


def lose_node(stack: LabStack) -> Strike:
    """Cut the node's network, then kill all its processes, as in a power failure."""
    cut, kill = cut_node(stack), aim_signal(f"node{FAR}", [nodes.running()[FAR]], signal.SIGKILL)

    def strike() -> None:
        cut()
        kill()

    return strike


def start_node(stack: LabStack) -> None:
    """Start the lost node again."""
    try:
        stack.until("the status names the engines that serve", stack.is_status_current, TRUTH_WITHIN)
    finally:
        stack.until("the node's processes have ended", lambda: FAR not in nodes.running(), 20)
        subprocess.run(["ip", "link", "set", f"sgrv{FAR}", "up"], check=True, timeout=10)
        nodes.start(FAR, binaries.find())


def _link(action: str, stack: LabStack) -> Strike:
    pod = stack.pod(0)
    node = int(pod["spec"]["nodeName"].removeprefix("node"))
    ends = (pod["status"]["podIP"], network.HOST)
    commands = [
        nodes.enter(node, "iptables", action, "FORWARD", "-s", source, "-d", target, "-j", "DROP") for source, target in (ends, ends[::-1])
    ]

    def strike() -> None:
        for command in commands:
            subprocess.run(command, check=True, capture_output=True, timeout=10)

    return strike


def cut_link(stack: LabStack) -> Strike:
    """Drop all traffic between engine 0 and the trainer. Both still reach all other parts."""
    return _link("-I", stack)


def mend_link(stack: LabStack) -> None:
    """Let engine 0 and the trainer reach each other again."""
    _link("-D", stack)()


def _all(_: LabStack) -> int:
    return ENGINES


def _near(stack: LabStack) -> int:
    return sum(row["name"] not in {f"{NAME}-engine-{index}" for index in stack.far()} for row in stack.document()["members"])


FAULTS = {
    fault.name: fault
    for fault in (
        Fault("API server stopped", stop_api, undo=continue_api, spares=_all),
        Fault("node cut off", cut_node, undo=join_node, spares=_near),
        Fault("node lost", lose_node, undo=start_node, spares=_near, heals_within=150.0),
        Fault("link engine-trainer cut", cut_link, undo=mend_link),
    )
}
SKIPPED = {
    ("link engine-trainer cut", "prepare"): "no process uses the link yet",
    **{
        ("node cut off", phase): "a minute each, and the engine does not answer in these phases either"
        for phase in ("prepare", "pause", "open", "resume")
    },
    **{("node lost", phase): "as with a node that is cut off" for phase in PHASES if phase not in ("idle", "transfer")},
}
"""Cells that are not run, and why."""
