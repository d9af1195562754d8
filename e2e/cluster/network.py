"""The lab's network: a bridge with one network namespace per node, without a route out of the machine.

The machine gets a bridge and four kinds of routes. Its packet filter and its sysctls stay as they are.
"""

import json
import subprocess
from pathlib import Path

from e2e.cluster.apiserver import SERVICE_RANGE
from e2e.cluster.say import LabError

BRIDGE = "sgr0"
HOST = "10.88.76.1"
API = "10.88.76.2"
"""Node 0's address: the API server, the cluster's DNS, and the machine's way to Services."""
# Pods and nodes must have different ranges, because kube-proxy masquerades traffic from outside of the pods' range.
POD_RANGE = "10.88.128.0/17"
MAX_NODES = 16
_NETNS = Path("/run/netns")


def address(node: int) -> str:
    """Return the address of a node."""
    return f"10.88.76.{2 + node}"


def pods(node: int) -> str:
    """Return the address range of a node's pods."""
    return f"10.88.{128 + node}.0/24"


def namespace(node: int) -> str:
    """Return the name of a node's network namespace."""
    return f"sgrnode{node}"


def _ip(*words: str, check: bool = True) -> str:
    done = subprocess.run(["ip", *words], capture_output=True, text=True, check=False, timeout=30)
    if check and done.returncode:
        raise LabError(f"ip {' '.join(words)} failed: {done.stderr.strip()}")
    return done.stdout


def _in_namespace(node: int, *command: str) -> None:
    subprocess.run(["nsenter", f"--net={_NETNS / namespace(node)}", *command], check=True, timeout=30)


def taken() -> str:
    """Return a route of this machine that overlaps with the lab's ranges; empty if there is none."""
    for route in json.loads(_ip("-j", "route", "show", "table", "all") or "[]"):
        if route.get("dev") != BRIDGE and str(route.get("dst", "")).startswith(("10.88.", "10.96.")):
            return f"{route['dst']} dev {route.get('dev')}"
    return ""


def namespaces() -> list[str]:
    """Return the network namespaces of the lab that exist."""
    return sorted(p.name for p in _NETNS.glob("sgrnode*")) if _NETNS.is_dir() else []


def leftovers() -> list[str]:
    """Return the existing parts of the lab's network, described for a message."""
    links = sorted(p.name for p in Path("/sys/class/net").glob("sgr*"))
    return [f"link {name}" for name in links] + [f"network namespace {name}" for name in namespaces()]


def is_mount(path: Path) -> bool:
    """Return whether a file system is mounted at ``path``. os.path.ismount does not see bind mounts."""
    return any(line.split()[4] == str(path) for line in Path("/proc/self/mountinfo").read_text().splitlines())


def netns_mounted() -> bool:
    """Return whether /run/netns is a mount. ``ip netns add`` creates it, and ``down`` removes it only if ``up`` created it."""
    return is_mount(_NETNS)


def up(nodes: int) -> None:
    """Create the bridge, the namespaces and the routes."""
    _ip("link", "add", BRIDGE, "type", "bridge")
    _ip("addr", "add", f"{HOST}/24", "dev", BRIDGE)
    _ip("link", "set", BRIDGE, "up")
    _ip("route", "add", SERVICE_RANGE, "via", API, "dev", BRIDGE)
    for node in range(nodes):
        _node_up(node, nodes)


def _node_up(node: int, nodes: int) -> None:
    name, veth = namespace(node), f"sgrv{node}"
    _ip("netns", "add", name)
    _ip("link", "add", veth, "type", "veth", "peer", "name", "eth0", "netns", name)
    _ip("link", "set", veth, "master", BRIDGE, "up")
    _ip("-n", name, "addr", "add", f"{address(node)}/24", "dev", "eth0")
    _ip("-n", name, "link", "set", "eth0", "up")
    _ip("-n", name, "link", "set", "lo", "up")
    # The route that kube-proxy's OUTPUT rules need. There is no default route, so no packet leaves the machine.
    _ip("-n", name, "route", "add", SERVICE_RANGE, "via", HOST)
    for other in range(nodes):
        if other != node:
            _ip("-n", name, "route", "add", pods(other), "via", address(other))
    _ip("route", "add", pods(node), "via", address(node), "dev", BRIDGE)
    _in_namespace(node, "sh", "-c", "echo 1 > /proc/sys/net/ipv4/ip_forward")  # of this namespace, not of the machine


def down(*, unmount_netns: bool) -> None:
    """Remove the existing parts of the lab's network. The kernel removes the routes with the bridge."""
    for name in namespaces():
        _ip("netns", "del", name, check=False)
        (_NETNS / name).unlink(missing_ok=True)  # a plain file, if `ip netns add` was killed
    for link in sorted(Path("/sys/class/net").glob("sgr*")):
        _ip("link", "del", link.name, check=False)
    if unmount_netns and netns_mounted() and not any(_NETNS.iterdir()):
        subprocess.run(["umount", str(_NETNS)], check=False, timeout=30)
        _NETNS.rmdir()
