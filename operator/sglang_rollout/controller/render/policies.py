"""The objects through which operator and coordinator speak, and the Secret that engines know the coordinator by."""

from __future__ import annotations

import base64
from collections.abc import Mapping

from sglang_rollout.api.intent import Intent, WantedEngine
from sglang_rollout.api.sharing_spec import Mode
from sglang_rollout.api.spec import State
from sglang_rollout.api.v1alpha1 import SGLangRollout
from sglang_rollout.controller.render import names
from sglang_rollout.controller.render.common import Object, child
from sglang_rollout.controller.render.ports import engine_ports
from sglang_rollout.wire.ports import GATE_PORT
from sglang_rollout.wire.record import Adapter
from sglang_rollout.wire.states import FleetMode, FleetState

_STATES = {
    State.ACTIVE: FleetState.ACTIVE,
    State.PAUSED: FleetState.PAUSED,
    State.ASLEEP: FleetState.ASLEEP,
    State.SUSPENDED: FleetState.ACTIVE,
}
"""A suspended fleet has no engines that could be held."""
_MODES = {Mode.STANDALONE: None, Mode.HYBRID: FleetMode.HYBRID, Mode.COLOCATED: FleetMode.COLOCATED}


def intent(rollout: SGLangRollout, gates: Mapping[str, int]) -> Object:
    """Return the ConfigMap that tells the coordinator what is wanted. One writer: the operator.

    ``gates``: ports of the gates that are there, by engine.
    """
    wanted = Intent(
        generation=rollout.metadata.generation,
        name=rollout.name,
        namespace=rollout.namespace,
        engines=[
            WantedEngine(
                name=(name := names.engine_name(rollout.name, index)),
                tensor_size=rollout.spec.engine.parallelism.tensor,
                port=_other_port(gates.get(name, engine_ports(rollout, index).gate)),
            )
            for index in range(rollout.spec.engines)
        ],
        base=rollout.spec.base if rollout.spec.elastic else None,
        weights=rollout.spec.weights,
        state=_STATES[rollout.spec.state],
        drain=rollout.spec.sleep.drain_seconds,
        adapters=_adapters(rollout),
        mode=_MODES[rollout.spec.mode],
    )
    made = _config_map(rollout, names.intent_name(rollout.name))
    made["data"] = {names.INTENT_KEY: wanted.model_dump_json(by_alias=True, exclude_none=True)}
    return made


def _other_port(port: int) -> int | None:
    """What everybody knows is left out, so that a coordinator of an earlier release reads the same intent as before."""
    return None if port == GATE_PORT else port


def _adapters(rollout: SGLangRollout) -> list[Adapter] | None:
    lora = rollout.spec.engine.lora
    return None if lora is None or not lora.enabled else [Adapter(name=adapter.name, path=adapter.path) for adapter in lora.adapters]


def weights(rollout: SGLangRollout) -> Object:
    """Return the ConfigMap for the coordinator's record, without data: the coordinator is its only writer."""
    return _config_map(rollout, names.weights_name(rollout.name))


def control_secret(rollout: SGLangRollout, token: str | None) -> Object:
    """Return the Secret with the token of control calls; empty if there is no token yet."""
    secret = child(
        rollout,
        api_version="v1",
        kind="Secret",
        name=names.control_name(rollout.name),
        component=names.COMPONENT_ROUTER,
    )
    secret["type"] = "Opaque"
    return with_token(secret, token) if token else secret


def with_token(secret: Object, token: str) -> Object:
    """Return ``secret`` holding ``token``."""
    return {**secret, "data": {names.TOKEN_KEY: base64.b64encode(token.encode()).decode()}}


def token_of(secret: Object | None) -> str | None:
    """Return the token that a live Secret holds; None if it holds none."""
    encoded = ((secret or {}).get("data") or {}).get(names.TOKEN_KEY)
    if not encoded:
        return None
    try:
        return base64.b64decode(encoded, validate=True).decode() or None
    except ValueError:  # somebody wrote something else into it: a new token heals that
        return None


def _config_map(rollout: SGLangRollout, name: str) -> Object:
    return child(rollout, api_version="v1", kind="ConfigMap", name=name, component=names.COMPONENT_ROUTER)
