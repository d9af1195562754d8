"""CPU and memory of the operator's own containers.

No container has a CPU limit, because throttling would delay answers, heartbeats and health checks. Every container has a memory limit,
because a container without one can take the memory of the engines on its node.
"""

from __future__ import annotations

from typing import NamedTuple

from sglang_rollout.api.engine_spec import Resources
from sglang_rollout.controller.render.common import Object, container_resources, parse_quantity


class _Defaults(NamedTuple):
    """Requests of CPU and memory, and the memory limit."""

    cpu: str
    memory: str
    limit: str


_DEFAULTS = {
    "gate": _Defaults("50m", "64Mi", "512Mi"),
    "agent": _Defaults("100m", "128Mi", "1Gi"),
    "front": _Defaults("100m", "128Mi", "2Gi"),
    "smg": _Defaults("250m", "256Mi", "8Gi"),
    "coordinator": _Defaults("100m", "128Mi", "1Gi"),
    "batches": _Defaults("50m", "128Mi", "6Gi"),
    "download": _Defaults("100m", "256Mi", "8Gi"),
    "package": _Defaults("50m", "64Mi", "256Mi"),
    "store": _Defaults("500m", "1Gi", "4Gi"),
}
"""Values of each container.

The memory limits are at least twice the resident memory that ``python -m bench.memory`` measures at the largest permitted load, because the
buffers of sockets count, too; docs/develop/benchmarks.md has the figures. The limit of smg is twice the memory for 1,024 requests of 1 MiB
at a time. The memory of a download depends on its command. The limit of the store is an estimate: it is for torch in one process for
each process group, and comes on top of the memory of versions.
"""


def own_resources(container: str, own: Resources | None = None) -> Object:
    """Return the resources of one of the operator's containers: the defaults, and the user's values over them.

    Kubernetes refuses a request above its limit, so a value of the user moves the default of the other one.
    """
    default, given = _DEFAULTS[container], container_resources(own or Resources())
    own_requests, own_limits = given.get("requests", {}), given.get("limits", {})
    requests = {"cpu": default.cpu, "memory": default.memory} | own_requests
    limits = {"memory": default.limit} | own_limits
    for name in requests.keys() & limits.keys():
        if (parse_quantity(requests[name]) or 0) <= (parse_quantity(limits[name]) or 0):
            continue
        if name not in own_limits:
            limits[name] = requests[name]
        elif name not in own_requests:
            requests[name] = limits[name]
    return {"requests": requests, "limits": limits}
