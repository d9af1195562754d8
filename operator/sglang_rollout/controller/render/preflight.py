"""Checks in the engine's container before SGLang starts: ports, devices and memory.

A check that fails ends the container with one line, which the operator shows in the engine's row of ``status``.
SGLang would report the same problem minutes later, or less clearly.
"""

from __future__ import annotations

from collections.abc import Iterable

from sglang_rollout.api.v1alpha1 import SGLangRollout
from sglang_rollout.controller.render.common import Object, parse_quantity
from sglang_rollout.controller.render.names import OF_POD, EnginePorts

NVIDIA = "nvidia.com/gpu"
"""GPU resource whose devices have known names. Slices (MIG) and devices of other vendors are not counted."""
FAILED = 78
"""Exit code of a failed check (EX_CONFIG of sysexits.h)."""
_OPEN_FILES = 65535
"""Limit that SGLang sets at its start (``set_ulimit``)."""
_IPC_LOCK = 14
"""Number of the capability CAP_IPC_LOCK."""


def preflight(rollout: SGLangRollout, resources: Object, ports: EnginePorts = OF_POD, *, root: str = "") -> str:
    """Return the checks of ports, devices and memory, as shell.

    Args:
        rollout: The rollout.
        resources: Resources of the container.
        ports: Ports of the engine.
        root: Prefix of every path.
    """
    engine = rollout.spec.engine
    gpus = int((resources.get("limits") or {}).get(engine.gpu_resource, 0))
    checks = [
        f'fail() {{ echo "preflight failed: $1" >&2; exit {FAILED}; }}\n',
        _free(ports.of_sglang if ports.on_node or engine.pods > 1 else (ports.engine,), root, on_node=ports.on_node),
        _files(),
    ]
    if gpus and engine.gpu_resource == NVIDIA:
        checks.append(_devices(gpus, root))
    if gpus:
        checks.append(_shm(engine.shm, root))
    if engine.rdma:
        checks += [_memlock(root), _verbs(root)]
    return "".join(checks)


def _free(ports: Iterable[int], root: str, *, on_node: bool) -> str:
    """Check that no program listens (state 0A) on the ports. On a node the scheduler knows the ports of pods only."""
    of, by = (
        (" of the node", "another program: choose another engine.network.basePort") if on_node else ("", "another container of this pod")
    )
    return f"""\
for port in {" ".join(f"{port:04X}" for port in ports)}; do
  ! grep -Eqs ":$port [0-9A-F]+:0000 0A" {root}/proc/net/tcp {root}/proc/net/tcp6 ||
    fail "port $((0x$port)){of}, which the engine needs, is taken by {by}"
done
"""


def _files() -> str:
    """Warn about a low limit on open files, and raise the soft limit to it.

    An engine with few connections runs well with less. Below its own number SGLang would keep the soft limit, often 1024.
    """
    return f"""\
files=$(ulimit -Hn)
test "$files" = unlimited || test "$files" -ge {_OPEN_FILES} || {{
  ulimit -Sn "$files"
  echo "preflight: this container may open $files files, SGLang asks for {_OPEN_FILES}: raise the container runtime's nofile limit" >&2
}}
"""


def _devices(gpus: int, root: str) -> str:
    return f"""\
count() {{ test -e "$1" && echo $# || echo 0; }}
found=$(count {root}/dev/nvidia[0-9]*)
test "$found" -ge {gpus} ||
  fail "{gpus} {NVIDIA} were asked for, and $found devices /dev/nvidia[0-9]* are here: look at the node's driver and device plugin"
"""


def _shm(wanted: str, root: str) -> str:
    """Check the size of /dev/shm, which the kubelet limits to the memory that the pod may use."""
    kibibytes = int((parse_quantity(wanted) or 0) // 1024)
    return f"""\
second() {{ echo "$2"; }}
size=$(second $(df -Pk {root}/dev/shm | tail -n 1))
test "$size" -ge {kibibytes} ||
  fail "/dev/shm has $size KiB, engine.shm asks for {wanted}: the pod's memory limit or the node's memory is smaller"
"""  # noqa: S108 - the engine's own volume


def _verbs(root: str) -> str:
    """Check for RDMA devices. Without them NCCL uses TCP or fails, which only its debug log shows."""
    return f"""\
verbs() {{ test -e "$1"; }}
verbs {root}/dev/infiniband/uverbs* ||
  fail "engine.rdma is set, and no device /dev/infiniband/uverbs* is here: look at the node's RDMA device plugin"
"""


def _memlock(root: str) -> str:
    """Check that the process may pin memory, by its limit or by its capability."""
    return f"""\
caps=$(sed -n 's/^CapEff:[[:space:]]*//p' {root}/proc/self/status)
test "$(ulimit -l)" = unlimited || test "$((0x$caps >> {_IPC_LOCK} & 1))" = 1 ||
  fail "RDMA pins memory, and this user may lock $(ulimit -l) KiB only: run as root, or raise the runtime's memlock limit"
"""
