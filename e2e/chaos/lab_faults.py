"""What only a cluster can lose: its API server, a node, a link. All of it is done to the lab's own processes and network alone."""

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
LET_GO_WITHIN = 15.0
"""An engine that nobody reaches ends its pause: the lease of 3 s, looked at twice a second, and the calls that end it."""


def _api_server() -> int:
    """The lab's own: other control planes of this machine are somebody else's."""
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
    """Its connections stay open and nothing answers: worse than a refusal."""
    return aim_signal("the API server", [_api_server()], signal.SIGSTOP)


def go_on_api(stack: LabStack) -> None:
    """It answers again, and the status must catch up."""
    os.kill(_api_server(), signal.SIGCONT)
    stack.until("the status says what the fleet says", stack.is_told, TRUTH_WITHIN)


def cut_node(_: LabStack) -> Strike:
    """Unplug the node's cable: the lab's end of it."""
    return partial(subprocess.run, ["ip", "link", "set", f"sgrv{FAR}", "down"], check=True, timeout=10)


def join_node(stack: LabStack) -> None:
    """What was out of reach must have let go by itself; then plug it in again."""
    try:
        stack.until("engines out of reach have let go", lambda: not stack.paused(), LET_GO_WITHIN)
        stack.until("the status says which engines serve", stack.is_told, TRUTH_WITHIN)
    finally:
        subprocess.run(["ip", "link", "set", f"sgrv{FAR}", "up"], check=True, timeout=10)


def lose_node(stack: LabStack) -> Strike:
    """Power off: nobody hears of it, then all that runs there is gone."""
    cut, kill = cut_node(stack), aim_signal(f"node{FAR}", [nodes.running()[FAR]], signal.SIGKILL)

    def strike() -> None:
        cut()
        kill()

    return strike


def start_node(stack: LabStack) -> None:
    """Power on."""
    try:
        stack.until("the status says which engines serve", stack.is_told, TRUTH_WITHIN)
    finally:
        stack.until("the node's programs have ended", lambda: FAR not in nodes.running(), 20)
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
    """Engine 0 and the trainer do not hear of each other any more; everybody else hears both."""
    return _link("-I", stack)


def mend_link(stack: LabStack) -> None:
    """They do again."""
    _link("-D", stack)()


def _all(_: LabStack) -> int:
    return ENGINES


def _near(stack: LabStack) -> int:
    return sum(row["name"] not in {f"{NAME}-engine-{index}" for index in stack.far()} for row in stack.document()["members"])


FAULTS = {
    fault.name: fault
    for fault in (
        Fault("API server stopped", stop_api, undo=go_on_api, spares=_all),
        Fault("node cut off", cut_node, undo=join_node, spares=_near),
        Fault("node lost", lose_node, undo=start_node, spares=_near, heals_within=150.0),
        Fault("link engine-trainer cut", cut_link, undo=mend_link),
    )
}
SKIPPED = {
    ("link engine-trainer cut", "prepare"): "nobody speaks over it yet",
    **{
        ("node cut off", phase): "a minute each, and a call to its engine is not answered then either"
        for phase in ("prepare", "pause", "open", "resume")
    },
    **{("node lost", phase): "as with a node that is cut off" for phase in PHASES if phase not in ("idle", "transfer")},
}
"""Cells that are not run, and why."""
