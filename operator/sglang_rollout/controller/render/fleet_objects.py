"""Objects of the whole fleet: accounts, the router's Role, Services, ConfigMaps, and the Secret."""

from __future__ import annotations

import base64
from collections.abc import Mapping

from sglang_rollout.api.intent import Intent, WantedEngine
from sglang_rollout.api.sharing_spec import Mode
from sglang_rollout.api.v1alpha1 import SGLangRollout, State
from sglang_rollout.controller.render import names
from sglang_rollout.controller.render.common import Object, child
from sglang_rollout.controller.render.names import engine_ports
from sglang_rollout.wire.ports import FRONT_PORT, GATE_PORT
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


_RBAC = "rbac.authorization.k8s.io"


def rbac(rollout: SGLangRollout) -> list[Object]:
    """Return the accounts, the Role and its binding."""
    return [*_accounts(rollout), _router_role(rollout), _router_binding(rollout)]


def _accounts(rollout: SGLangRollout) -> list[Object]:
    """An account without rights for engines (model code runs there), one for the router. No token is mounted by default
    in either."""
    made, spec = [], rollout.spec
    for name, component, annotated in (
        (names.engine_account(rollout.name), names.COMPONENT_ENGINE, spec.engine.service_account_annotations),
        (names.router_name(rollout.name), names.COMPONENT_ROUTER, spec.router.service_account_annotations),
    ):
        account = child(rollout, api_version="v1", kind="ServiceAccount", name=name, component=component)
        if annotated:
            account["metadata"]["annotations"] = annotated
        made.append({**account, "automountServiceAccountToken": False})
    return made


def _router_role(rollout: SGLangRollout) -> Object:
    """The coordinator reads its intent, keeps its record and its Lease, and watches which engine pods there are."""
    role = child(
        rollout,
        api_version=f"{_RBAC}/v1",
        kind="Role",
        name=names.router_name(rollout.name),
        component=names.COMPONENT_ROUTER,
    )
    role["rules"] = [
        {
            "apiGroups": [""],
            "resources": ["configmaps"],
            "resourceNames": [names.intent_name(rollout.name)],
            "verbs": ["get", "list", "watch"],
        },
        {
            "apiGroups": [""],
            "resources": ["configmaps"],
            "resourceNames": [names.weights_name(rollout.name)],
            "verbs": ["get", "list", "watch", "patch", "update"],
        },
        # A name cannot be demanded of what is created.
        {"apiGroups": ["coordination.k8s.io"], "resources": ["leases"], "verbs": ["create"]},
        {
            "apiGroups": ["coordination.k8s.io"],
            "resources": ["leases"],
            "resourceNames": [names.router_name(rollout.name)],
            "verbs": ["get", "patch", "update"],
        },
        {"apiGroups": ["discovery.k8s.io"], "resources": ["endpointslices"], "verbs": ["get", "list", "watch"]},
    ]
    return role


def _router_binding(rollout: SGLangRollout) -> Object:
    name = names.router_name(rollout.name)
    binding = child(rollout, api_version=f"{_RBAC}/v1", kind="RoleBinding", name=name, component=names.COMPONENT_ROUTER)
    binding["roleRef"] = {"apiGroup": _RBAC, "kind": "Role", "name": name}
    binding["subjects"] = [{"kind": "ServiceAccount", "name": name, "namespace": rollout.namespace}]
    return binding


def services(rollout: SGLangRollout) -> list[Object]:
    """Return both Services."""
    return [_engines(rollout), _router(rollout)]


def _engines(rollout: SGLangRollout) -> Object:
    """Headless, and with addresses of pods that are not ready: the coordinator must reach an engine that is loading or
    closed."""
    service = child(
        rollout,
        api_version="v1",
        kind="Service",
        name=names.engines_service(rollout.name),
        component=names.COMPONENT_ENGINE,
    )
    service["spec"] = {
        "clusterIP": "None",
        "publishNotReadyAddresses": True,
        "selector": names.selector(rollout.name, names.COMPONENT_ENGINE),
        "ports": [{"name": "http", "port": GATE_PORT, "targetPort": GATE_PORT, "protocol": "TCP"}],
    }
    return service


def _router(rollout: SGLangRollout) -> Object:
    """The fleet's one URL.

    With addresses of a pod that is not ready: there is only one, and while its coordinator restarts the front still
    serves generation. A Service without addresses would refuse what the front could have answered or explained.
    """
    service = child(
        rollout,
        api_version="v1",
        kind="Service",
        name=names.router_name(rollout.name),
        component=names.COMPONENT_ROUTER,
    )
    service["spec"] = {
        "type": "ClusterIP",
        "publishNotReadyAddresses": True,
        "selector": names.selector(rollout.name, names.COMPONENT_ROUTER),
        "ports": [{"name": "http", "port": FRONT_PORT, "targetPort": FRONT_PORT, "protocol": "TCP"}],
    }
    return service
