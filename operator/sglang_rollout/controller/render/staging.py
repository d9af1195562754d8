"""What transport Staged adds to an engine pod: the volumes of staged versions and verdicts, arguments, and the agent's memory. Pure."""

from __future__ import annotations

import math

from sglang_rollout.api.pod_template import STAGED_VOLUME, VERDICTS_VOLUME
from sglang_rollout.api.v1alpha1 import SGLangRollout
from sglang_rollout.api.weights_spec import Medium, Staging
from sglang_rollout.controller.render import names
from sglang_rollout.controller.render.common import Object, container_ports, memory_volume, parse_quantity
from sglang_rollout.plugin.install import LOADER
from sglang_rollout.sglang.sizes import loads_folders
from sglang_rollout.wire.ports import STAGING_PORT

_EXTRA_BYTES = 64 * 2**20
"""Room for headers, indexes and the loader beside the tensors of the versions."""
_DISK_SHARE = 0.9
"""Share of a volume on disk that versions may fill, because the kubelet evicts a pod whose volume exceeds its limit."""


def staging_of(rollout: SGLangRollout) -> Staging | None:
    """Return the settings of staged versions; None with another transport."""
    weights = rollout.spec.weights
    return weights.staging if weights.is_staged else None


def staged_volume(staging: Staging) -> Object:
    """Return the volume of staged versions, for an engine pod or the weight store."""
    medium = {"medium": "Memory"} if staging.medium is Medium.MEMORY else {}
    return {"name": STAGED_VOLUME, "emptyDir": {**medium, "sizeLimit": _mebibytes(_volume_bytes(staging))}}


def add_staged_bytes(resources: Object, staging: Staging | None) -> Object:
    """Return the resources of the container that writes staged versions, with the room for them.

    A volume in memory is charged to the container that writes it. A volume on disk needs a node with room for it.
    """
    if staging is None:
        return resources
    size = _volume_bytes(staging)
    requests, limits = resources["requests"], resources["limits"]
    if staging.medium is Medium.DISK:
        return {"requests": {"ephemeral-storage": _mebibytes(size), **requests}, "limits": limits}
    return {part: {**values, "memory": _mebibytes(_bytes(values["memory"]) + size)} for part, values in resources.items()}


def pod_volumes(rollout: SGLangRollout) -> list[Object]:
    """Return the volumes that an engine pod has in addition."""
    staging = staging_of(rollout)
    return [] if staging is None else [staged_volume(staging), memory_volume(VERDICTS_VOLUME)]


def agent_mounts(rollout: SGLangRollout) -> list[Object]:
    """Return the mounts that the agent has in addition."""
    return _mounts(rollout, {})


def engine_mounts(rollout: SGLangRollout) -> list[Object]:
    """Return the mounts that the engine has in addition. It only reads staged versions."""
    return _mounts(rollout, {"readOnly": True})


def agent_arguments(rollout: SGLangRollout) -> list[str]:
    """Return the arguments that the agent has in addition."""
    sizes, staging = rollout.spec.engine.parallelism, staging_of(rollout)
    if staging is None:
        return []
    return [
        *("--staging-volume", names.STAGED_DIR),
        *("--verdicts-dir", names.VERDICTS_DIR),
        *("--data-listen", f"[::]:{STAGING_PORT}"),
        *("--pipeline-size", str(sizes.pipeline)),
        *(("--data-size", str(sizes.data)) if sizes.data > 1 else ()),
    ]


def agent_ports(rollout: SGLangRollout) -> Object:
    """Return the field of the agent's container with the port at which it serves copies; empty with another transport."""
    return {} if staging_of(rollout) is None else {"ports": container_ports(data=STAGING_PORT)}


def engine_arguments(rollout: SGLangRollout) -> list[str]:
    """Return the arguments that SGLang has in addition."""
    return ["--custom-weight-loader", LOADER] if _has_loader(rollout) else []


def pod_revision(rollout: SGLangRollout) -> Object:
    """Return the settings that change an engine pod; empty with another transport."""
    staging, fields = staging_of(rollout), {"copies", "size_limit", "medium"}
    return {} if staging is None else staging.model_dump(mode="json", by_alias=True, include=fields)


def _has_loader(rollout: SGLangRollout) -> bool:
    return staging_of(rollout) is not None and not loads_folders(rollout.spec.engine.parallelism.data)


def _mounts(rollout: SGLangRollout, access: Object) -> list[Object]:
    if staging_of(rollout) is None:
        return []
    return [
        {"name": STAGED_VOLUME, "mountPath": names.STAGED_DIR, **access},
        {"name": VERDICTS_VOLUME, "mountPath": names.VERDICTS_DIR},
    ]


def _volume_bytes(staging: Staging) -> int:
    size = staging.copies * _bytes(staging.size_limit) + _EXTRA_BYTES
    return size if staging.medium is Medium.MEMORY else math.ceil(size / _DISK_SHARE)


def _bytes(quantity: str) -> int:
    return math.ceil(parse_quantity(quantity) or 0)


def _mebibytes(size: int) -> str:
    return f"{math.ceil(size / 2**20)}Mi"
