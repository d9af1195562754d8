"""What ``engine.cache.shared`` adds to engine pods and to the weight store: volumes, arguments, and a credential of its own. Pure."""

from __future__ import annotations

from sglang_rollout.api.pod_template import CACHE_VOLUME
from sglang_rollout.api.v1alpha1 import SGLangRollout
from sglang_rollout.controller.render import names
from sglang_rollout.controller.render.common import Object
from sglang_rollout.controller.render.hashing import digest
from sglang_rollout.controller.render.storage import CACHE_DIR
from sglang_rollout.wire.kernels import MAX_ARCHIVE_BYTES
from sglang_rollout.wire.ports import STAGING_PORT

_STORE_VOLUME = "rollout-kernels"
_STORE_GIBIBYTES = 3 * MAX_ARCHIVE_BYTES // 2**30 + 1
"""Room for the archives that the store keeps, for one that arrives, and for folders."""


def shares_kernels(rollout: SGLangRollout) -> bool:
    """Return True if new pods get the compiled kernels of running engines."""
    cache = rollout.spec.engine.cache
    return cache is not None and cache.shared


def credential_items(rollout: SGLangRollout) -> list[Object]:
    """Return the items of the Secret with credentials that agents and the weight store mount in addition."""
    return [{"key": names.kernels_name(rollout.name), "path": names.KERNELS_TOKEN_KEY}] if shares_kernels(rollout) else []


def agent_mounts(rollout: SGLangRollout) -> list[Object]:
    """Return the mounts that the agent has in addition."""
    return [{"name": CACHE_VOLUME, "mountPath": CACHE_DIR}] if shares_kernels(rollout) else []


def agent_arguments(rollout: SGLangRollout) -> list[str]:
    """Return the arguments that the agent has in addition."""
    if not shares_kernels(rollout):
        return []
    model, engine = rollout.spec.model, rollout.spec.engine
    sizes = engine.parallelism.model_dump(mode="json", by_alias=True)
    return [
        *("--kernels-dir", CACHE_DIR),
        *("--kernels-url", f"http://{names.store_host(rollout.name, rollout.namespace)}:{STAGING_PORT}"),
        *("--kernels-hash", digest([model.path, engine.image, engine.pods, sizes])),
        *("--kernels-token-file", names.KERNELS_TOKEN_FILE),
    ]


def store_volumes(rollout: SGLangRollout) -> list[Object]:
    """Return the volumes that the weight store's pod has in addition."""
    return [{"name": _STORE_VOLUME, "emptyDir": {"sizeLimit": f"{_STORE_GIBIBYTES}Gi"}}] if shares_kernels(rollout) else []


def store_mounts(rollout: SGLangRollout) -> list[Object]:
    """Return the mounts that the weight store has in addition."""
    return [{"name": _STORE_VOLUME, "mountPath": names.KERNELS_DIR}] if shares_kernels(rollout) else []


def store_arguments(rollout: SGLangRollout) -> list[str]:
    """Return the arguments that the weight store has in addition. It creates the folder, which only its user can read."""
    if not shares_kernels(rollout):
        return []
    return ["--kernels", f"{names.KERNELS_DIR}/archives", "--kernels-token-file", names.KERNELS_TOKEN_FILE]
