"""What each path of the fleet's URL can do, and so who may call it. The front and the coordinator share this table."""

from __future__ import annotations

from enum import StrEnum

from sglang_rollout.sglang.api import DATA_PATHS, LOADS, MODEL_INFO, MODELS, SERVER_INFO
from sglang_rollout.wire.ports import FLEET_CALLER, FLEET_HEALTH, FLEET_HELD, FLEET_METRICS, FLEET_SERVING

CALLER_HEADER = "X-Rollout-Caller"
"""Request header: address of the caller. The front sets it, and replaces what the caller sent."""
RELAYED_CALLER_HEADER = "X-Rollout-Relayed-Caller"
"""Request header: address of the caller for which another process asks.

An agent names the trainer whose call it relays: this counts only with the credential of its engine. The batch server names the caller
of a data request.
"""

RELAYED_AUTHORIZATION_HEADER = "X-Rollout-Relayed-Authorization"
"""Request header: the ``Authorization`` of the trainer whose call an agent relays. It counts where the relayed address does."""


class PathKind(StrEnum):
    """Kinds of paths, by what a call can do."""

    HEALTH = "health"
    """Says only whether the fleet works."""
    DATA = "data"
    """Uses the model: generation, embeddings, scores and tokens."""
    READ = "read"
    """Describes the model and the fleet's load. Callers of data paths and of control paths need it."""
    CONTROL = "control"
    """Changes what the fleet serves, or shows weights, engines and addresses."""


_HEALTH = frozenset({"/health", "/health_generate", "/ping", "/ready", FLEET_HEALTH})
_READ = frozenset(
    {
        *(SERVER_INFO, "/get_server_info", MODEL_INFO, "/get_model_info", MODELS, LOADS, "/get_load"),
        *("/get_weight_version", "/get_world_size", FLEET_HELD, FLEET_METRICS),
    }
)

POD_PATHS = frozenset({FLEET_CALLER, FLEET_HEALTH, FLEET_HELD, FLEET_METRICS, FLEET_SERVING})
"""Paths that haproxy and the batch server themselves request from the coordinator, without a caller: checks, the kubelet's probes, metrics,
and what the batch server needs to know."""


def kind_of_path(path: str) -> PathKind:
    """Return the kind of a path, with any method. A path that is not listed is a control path."""
    if path in _HEALTH:
        return PathKind.HEALTH
    if path in DATA_PATHS:
        return PathKind.DATA
    if path in _READ or path.startswith(f"{MODELS}/"):
        return PathKind.READ
    return PathKind.CONTROL
