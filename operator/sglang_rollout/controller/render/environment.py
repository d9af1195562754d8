"""What typed fields add to the engine container: environment variables and capabilities."""

from __future__ import annotations

from enum import StrEnum

from sglang_rollout.api.network_spec import CACHE_VARIABLES, MEMORY_CHECK, NETWORK_VARIABLES, OFFLINE_VARIABLES
from sglang_rollout.api.v1alpha1 import SGLangRollout
from sglang_rollout.controller.render.common import Object
from sglang_rollout.controller.render.storage import CACHE_DIR


def variables(rollout: SGLangRollout) -> list[Object]:
    """Return those of the fields that are set; the API server has refused the same names in ``engine.env``."""
    engine = rollout.spec.engine
    made: dict[str, str] = {}
    for field, names in NETWORK_VARIABLES.items():
        value = getattr(engine.network, field) if engine.network else None
        if value is not None:
            made |= dict.fromkeys(names, _text(value))
    if not engine.check_memory_balance:
        made[MEMORY_CHECK] = "false"
    if engine.cache:
        made |= {name: CACHE_DIR + below for name, below in CACHE_VARIABLES.items()}
    if rollout.spec.model.offline:
        made |= dict.fromkeys(OFFLINE_VARIABLES, "1")
    return [{"name": name, "value": value} for name, value in made.items()]


def capabilities(rollout: SGLangRollout) -> Object:
    """Return what the container may do beyond others: RDMA pins memory, more than an unprivileged process may."""
    return {"capabilities": {"add": ["IPC_LOCK"]}} if rollout.spec.engine.rdma else {}


def _text(value: str | int | StrEnum) -> str:
    """NCCL's switches are 0 and 1, its levels of logging are in capitals."""
    if isinstance(value, bool):
        return str(int(value))
    return value.upper() if isinstance(value, StrEnum) else str(value)
