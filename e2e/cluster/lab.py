"""Start the lab cluster, remove it, and report its status."""

import fcntl
import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from e2e.cluster import apiserver, binaries, cgroups, network, nodeconf, nodes, preflight, store
from e2e.cluster.init import API_PORT
from e2e.cluster.paths import lab_root
from e2e.cluster.pki import Pki
from e2e.cluster.say import LabError, say, step, wait_until

URL = f"https://{network.API}:{API_PORT}"
_NAMES = f"DNS:kubernetes,DNS:kubernetes.default,DNS:kubernetes.default.svc,DNS:localhost,IP:127.0.0.1,IP:{network.API},IP:10.96.0.1"
_START_SECONDS = 120.0
_OWN_FOLDERS = ("/var/lib/cni", "/var/lib/kubelet")  # places to mount something on inside the nodes; empty outside


def pki() -> Pki:
    """Return the lab's certificates, which ``down`` keeps."""
    return Pki(lab_root() / "pki")


def kubeconfig() -> Path:
    """Return the path of the administrator's kubeconfig."""
    return pki().root / "admin.kubeconfig"


def _state_file() -> Path:
    return lab_root() / "state.json"


def _state() -> dict[str, Any]:
    try:
        return dict(json.loads(_state_file().read_text()))
    except (FileNotFoundError, json.JSONDecodeError):  # no lab, or one killed while it wrote this
        return {}


@contextmanager
def _alone() -> Iterator[None]:
    lab_root().mkdir(parents=True, exist_ok=True)
    with (lab_root().parent / "lab.lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise LabError("Another `up` or `down` of the lab cluster is running; wait until it ends") from error
        yield


def kubectl(*words: str) -> str:
    """Run kubectl as the administrator and return its output. Raises LabError, quoting kubectl."""
    env = os.environ | {"KUBECONFIG": str(kubeconfig()), "NO_PROXY": "*", "no_proxy": "*"}
    command = [str(binaries.find() / "kubectl"), "--request-timeout=10s", *words]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False, timeout=60)
    if done.returncode:
        raise LabError(f"kubectl {' '.join(words)} failed: {done.stderr.strip()[-1000:]}")
    return done.stdout


def _node_states() -> dict[str, bool]:
    def is_ready(node: dict[str, Any]) -> bool:
        return any(c["type"] == "Ready" and c["status"] == "True" for c in node["status"].get("conditions", []))

    return {n["metadata"]["name"]: is_ready(n) for n in json.loads(kubectl("get", "nodes", "-o", "json"))["items"]}


def leftovers() -> list[str]:
    """Return everything of a lab that exists on this machine now."""
    return nodes.leftovers() + network.leftovers() + [f"cgroup {path}" for path in cgroups.existing()]


def _already_up(count: int) -> bool:
    """Return whether this cluster runs already. Raises LabError if another cluster, or a part of one, exists."""
    found = leftovers()
    if not found:
        return False
    whole = _state().get("nodes") == count and sorted(nodes.running()) == list(range(count)) and kubeconfig().exists()
    if whole and apiserver.ready(URL, pki()):
        return True
    raise LabError(
        f"There is a lab cluster on this machine already, or a part of one ({found[0]} and {len(found) - 1} more things). "
        "Remove it with `make cluster-down` (python -m e2e.cluster down), then try again"
    )


def up(count: int, gpus: int) -> None:
    """Start the cluster, unless it runs already."""
    if not 1 <= count <= network.MAX_NODES:
        raise LabError(f"--nodes must be a number from 1 to {network.MAX_NODES}, not {count}")
    preflight.check_machine()
    with _alone():
        if _already_up(count):
            say(f"          the lab cluster runs already: {URL}, {count} node(s)")
        else:
            preflight.check()
            programs = binaries.build()
            try:
                _start(count, programs)
            except LabError as error:
                tails = "\n".join(nodes.log_tail(node) for node in range(count))
                raise LabError(f"{error}\n{tails}\nThe started processes still run; `make cluster-down` removes them") from error
        if gpus:
            with step(f"pretend {gpus} GPUs on every node"):
                _patch_gpus(count, gpus)


def _start(count: int, programs: Path) -> None:
    with step("certificates"):
        apiserver.certificates(pki(), _NAMES, URL)
        for node in range(count):
            pki().certificate(f"node{node}", f"/O=system:nodes/CN=system:node:node{node}", f"DNS:node{node},IP:{network.address(node)}")
            pki().kubeconfig(f"node{node}", URL)
    with step(f"network {network.BRIDGE} with {count} node(s)"):
        old = _state()  # of an `up` that was killed before it had anything else to remove
        made = sorted({folder for folder in _OWN_FOLDERS if not Path(folder).exists()} | set(old.get("made", [])))
        state = {"nodes": count, "made": made, "unmount_netns": bool(old.get("unmount_netns")) or not network.netns_mounted()}
        _state_file().write_text(json.dumps(state))
        for folder in made:
            Path(folder).mkdir(parents=True, exist_ok=True)
        network.up(count)
    with step("containerd and the pause image"):
        for node in range(count):
            nodes.start(node, programs)
        for node in range(count):
            store.wait_for_runtime(node)
        store.load_pause(programs)
    with step(f"kube-apiserver answers at {URL}"):
        wait_until(lambda: apiserver.ready(URL, pki()), seconds=_START_SECONDS, what=f"{URL} did not become ready")
    with step(f"{count} node(s) Ready"):
        wait_until(lambda: _usable(count), seconds=_START_SECONDS, every=0.3, what="the nodes did not become Ready")


def _usable(count: int) -> bool:
    if len(nodes.running()) < count:
        raise LabError("a node ended while it started")
    states = _node_states()
    if len(states) < count or not all(states.values()):
        return False
    found = kubectl("get", "serviceaccount", "default", "--ignore-not-found", "-o", "name")  # pods are refused before
    return bool(found.strip())


def _patch_gpus(count: int, gpus: int) -> None:
    amount = {"nvidia.com/gpu": str(gpus)}
    patch = json.dumps({"status": {"capacity": amount, "allocatable": amount}})
    for node in range(count):
        kubectl("patch", "node", f"node{node}", "--subresource=status", "--type=merge", "-p", patch)


def down(*, data: bool) -> None:
    """Remove the lab from the machine. With ``data``, remove also images, certificates and logs from the cache."""
    if os.geteuid() != 0:
        raise LabError("Removing the lab cluster needs root")
    with _alone():
        found = leftovers()
        with step("remove the lab cluster" if found else "no lab cluster runs here"):
            _remove(data=data)


def _remove(*, data: bool) -> None:
    state = _state()
    nodes.stop_all()
    network.down(unmount_netns=bool(state.get("unmount_netns")))
    cgroups.remove()
    left = leftovers()
    if left:
        raise LabError(f"These parts of the lab cluster could not be removed: {', '.join(left)}")
    for folder in map(Path, state.get("made", [])):
        if folder.is_dir() and not any(folder.iterdir()):
            folder.rmdir()
    for node in lab_root().glob("node*"):
        shutil.rmtree(node / "running", ignore_errors=True)
    if data:
        shutil.rmtree(lab_root())
    else:
        _state_file().unlink(missing_ok=True)


def status() -> bool:
    """Print what runs, and return whether the cluster is complete."""
    live = nodes.running()
    if not live:
        left = leftovers()
        print(f"The lab cluster is down.{' Left over: ' + ', '.join(left) + '; run: make cluster-down' if left else ''}")
        return False
    answers = kubeconfig().exists() and apiserver.ready(URL, pki())
    print(f"API server {URL}: {'answers' if answers else 'DOES NOT ANSWER'}")
    states = _node_states() if answers else {}
    for node in sorted(live):
        images = ", ".join(store.loaded(node)) or "none"
        condition = "Ready" if states.get(f"node{node}") else "NOT READY"
        print(f"node{node}: {condition}; logs in {nodeconf.node_folder(node)}/logs; images: {images}")
    return answers and bool(states) and all(states.values())
