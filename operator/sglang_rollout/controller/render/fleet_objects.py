"""Objects of the whole fleet: ServiceAccounts, the router's Role, Services, ConfigMaps, and Secrets."""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from typing import Any

from sglang_rollout.api.intent import Intent, WantedEngine, WantedStore
from sglang_rollout.api.sharing_spec import Mode
from sglang_rollout.api.v1alpha1 import SGLangRollout, State
from sglang_rollout.controller.render import names, tls
from sglang_rollout.controller.render.common import Object, child
from sglang_rollout.controller.render.names import engine_ports
from sglang_rollout.controller.render.network_policies import selects_engines
from sglang_rollout.credentials import Credentials
from sglang_rollout.wire.ports import FRONT_PORT, GATE_PORT, GENERATE_PORT, STAGING_PORT, STORE_PORT
from sglang_rollout.wire.record import Adapter
from sglang_rollout.wire.states import FleetMode, FleetState

_RBAC = "rbac.authorization.k8s.io"
_READ = ("get", "list", "watch")

_STATES = {
    State.ACTIVE: FleetState.ACTIVE,
    State.PAUSED: FleetState.PAUSED,
    State.ASLEEP: FleetState.ASLEEP,
    State.SUSPENDED: FleetState.ACTIVE,  # a suspended fleet has no engines to pause
}
_MODES = {Mode.STANDALONE: None, Mode.HYBRID: FleetMode.HYBRID, Mode.COLOCATED: FleetMode.COLOCATED}


def rbac(rollout: SGLangRollout) -> list[Object]:
    """Return the ServiceAccounts, the router's Role and its binding.

    The account of the engines has no rights, because model code runs there. No account mounts its token by default.
    """
    return [
        _account(rollout, names.engine_account(rollout.name), names.COMPONENT_ENGINE, rollout.spec.engine.service_account_annotations),
        _account(rollout, names.router_name(rollout.name), names.COMPONENT_ROUTER, rollout.spec.router.service_account_annotations),
        _router_role(rollout),
        _router_binding(rollout),
    ]


def _account(rollout: SGLangRollout, name: str, component: str, annotations: dict[str, str] | None) -> Object:
    account = child(rollout, "v1", "ServiceAccount", name, component)
    if annotations:
        account["metadata"]["annotations"] = annotations
    return {**account, "automountServiceAccountToken": False}


def _router_role(rollout: SGLangRollout) -> Object:
    """Return the rights of the coordinator: its intent, its record, its Lease, the addresses of engine pods, and the pods that call."""
    name = names.router_name(rollout.name)
    role = child(rollout, f"{_RBAC}/v1", "Role", name, names.COMPONENT_ROUTER)
    role["rules"] = [
        _rule("", "configmaps", _READ, names.intent_name(rollout.name)),
        _rule("", "configmaps", (*_READ, "patch", "update"), names.weights_name(rollout.name)),
        # RBAC cannot restrict creation to a name.
        _rule("coordination.k8s.io", "leases", ("create",)),
        _rule("coordination.k8s.io", "leases", ("get", "patch", "update"), name),
        _rule("discovery.k8s.io", "endpointslices", _READ),
        # Callers are identified by their pods.
        _rule("", "pods", ("list", "watch")),
    ]
    return role


def _rule(group: str, resource: str, verbs: Sequence[str], name: str | None = None) -> Object:
    named = {} if name is None else {"resourceNames": [name]}
    return {"apiGroups": [group], "resources": [resource], **named, "verbs": list(verbs)}


def _router_binding(rollout: SGLangRollout) -> Object:
    name = names.router_name(rollout.name)
    binding = child(rollout, f"{_RBAC}/v1", "RoleBinding", name, names.COMPONENT_ROUTER)
    binding["roleRef"] = {"apiGroup": _RBAC, "kind": "Role", "name": name}
    binding["subjects"] = [{"kind": "ServiceAccount", "name": name, "namespace": rollout.namespace}]
    return binding


def services(rollout: SGLangRollout) -> list[Object]:
    """Return the headless Service of all engines, the Service of the fleet's URL, and the Service of data paths.

    All Services publish addresses of pods that are not ready. The coordinator must reach engines that load or are closed, and the front
    serves generation while its coordinator restarts.
    """
    return [
        _service(rollout, names.engines_service(rollout.name), names.COMPONENT_ENGINE, GATE_PORT, clusterIP="None"),
        _service(rollout, names.router_name(rollout.name), names.COMPONENT_ROUTER, FRONT_PORT, type="ClusterIP"),
        _service(rollout, names.generate_service(rollout.name), names.COMPONENT_ROUTER, GENERATE_PORT, type="ClusterIP"),
    ]


def _service(rollout: SGLangRollout, name: str, component: str, port: int, **fields: Any) -> Object:
    service = child(rollout, "v1", "Service", name, component)
    service["spec"] = {
        **fields,
        "publishNotReadyAddresses": True,
        "selector": names.selector(rollout.name, component),
        "ports": [{"name": "http", "port": port, "targetPort": port, "protocol": "TCP"}],
    }
    if component == names.COMPONENT_ROUTER and tls.is_encrypted(rollout):
        # Meshes would read the name as plain HTTP.
        service["spec"]["ports"][0]["appProtocol"] = "https"
    return service


def intent(rollout: SGLangRollout, gates: Mapping[str, int]) -> Object:
    """Return the ConfigMap with the coordinator's intent, which only the operator writes.

    Args:
        rollout: The rollout.
        gates: Ports of existing gates, by engine. Other gates are where the spec puts them.
    """
    spec = rollout.spec
    content = Intent(
        generation=rollout.metadata.generation,
        name=rollout.name,
        namespace=rollout.namespace,
        engines=[_wanted_engine(rollout, index, gates) for index in range(spec.engines)],
        store=_wanted_store(rollout),
        base=spec.base if spec.elastic else None,
        weights=spec.weights,
        security=spec.security,
        state=_STATES[spec.state],
        drain=spec.sleep.drain_seconds,
        adapters=_adapters(rollout),
        mode=_MODES[spec.mode],
        isolated=selects_engines(rollout) or None,
    )
    config_map = child(rollout, "v1", "ConfigMap", names.intent_name(rollout.name), names.COMPONENT_ROUTER)
    config_map["data"] = {names.INTENT_KEY: content.model_dump_json(by_alias=True, exclude_none=True)}
    return config_map


def _wanted_engine(rollout: SGLangRollout, index: int, gates: Mapping[str, int]) -> WantedEngine:
    """Return an engine of the intent. The default port is left out, so that coordinators of earlier releases read the same intent."""
    name = names.engine_name(rollout.name, index)
    port = gates.get(name, engine_ports(rollout, index).gate)
    return WantedEngine(name=name, tensor_size=rollout.spec.engine.parallelism.tensor, port=None if port == GATE_PORT else port)


def _wanted_store(rollout: SGLangRollout) -> WantedStore | None:
    if not rollout.spec.weights.is_staged:
        return None
    host = names.store_host(rollout.name, rollout.namespace)
    return WantedStore(name=names.store_name(rollout.name), url=f"http://{host}:{STORE_PORT}", data_url=f"http://{host}:{STAGING_PORT}")


def _adapters(rollout: SGLangRollout) -> list[Adapter] | None:
    lora = rollout.spec.engine.lora
    return None if lora is None or not lora.enabled else [Adapter(name=adapter.name, path=adapter.path) for adapter in lora.adapters]


def weights(rollout: SGLangRollout) -> Object:
    """Return the ConfigMap for the coordinator's record, without data: the coordinator is its only writer."""
    return child(rollout, "v1", "ConfigMap", names.weights_name(rollout.name), names.COMPONENT_ROUTER)


def control_secret(rollout: SGLangRollout, token: str | None) -> Object:
    """Return the Secret with the rollout's key; empty if there is no key yet."""
    secret = child(rollout, "v1", "Secret", names.control_name(rollout.name), names.COMPONENT_ROUTER)
    secret["type"] = "Opaque"
    return with_token(secret, token) if token else secret


def credentials_secret(rollout: SGLangRollout, token: str | None) -> list[Object]:
    """Return the Secret with a credential for each engine and the weight store, one for each line of the key.

    There is none if there is no key yet.
    """
    key = Credentials(*(token or "").split())
    if not key.lines():
        return []
    holders = [names.engine_name(rollout.name, index) for index in range(rollout.spec.engines)]
    if rollout.spec.weights.is_staged:
        holders.append(names.store_name(rollout.name))
    secret = child(rollout, "v1", "Secret", names.credentials_name(rollout.name), names.COMPONENT_ENGINE)
    return [{**secret, "type": "Opaque", "data": {holder: _encode("\n".join(key.derive(holder).lines())) for holder in holders}}]


def with_token(secret: Object, token: str) -> Object:
    """Return ``secret`` with ``token`` in it."""
    return {**secret, "data": {names.TOKEN_KEY: _encode(token)}}


def _encode(text: str) -> str:
    return base64.b64encode(text.encode()).decode()


def token_of(secret: Object | None) -> str | None:
    """Return the token of a live Secret; None if the Secret holds no token, or a value that is not base64."""
    encoded = ((secret or {}).get("data") or {}).get(names.TOKEN_KEY)
    if not encoded:
        return None
    try:
        return base64.b64decode(encoded, validate=True).decode() or None
    except ValueError:
        return None
