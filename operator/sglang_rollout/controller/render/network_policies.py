"""NetworkPolicies: who may connect to the pods of a rollout. Pure.

docs/operations/network.md lists the same connections, and a test compares both. The policies restrict incoming connections only.
Kubernetes always admits the node of a pod, so probes and ``kubectl port-forward`` need no rule. Policies cannot select pods in the
network of a node.
"""

from __future__ import annotations

from collections.abc import Sequence

from sglang_rollout.api.security_spec import Callers, ControlAccess, GenerateAccess, LabelSelector, NetworkAccess, PodPeers
from sglang_rollout.api.sharing_spec import Mode
from sglang_rollout.api.v1alpha1 import SGLangRollout
from sglang_rollout.api.weights_spec import Transport
from sglang_rollout.controller.render import names
from sglang_rollout.controller.render.common import Object, child
from sglang_rollout.controller.render.names import OF_POD
from sglang_rollout.wire.ports import FRONT_PORT, GENERATE_PORT, METRICS_PORT, STAGING_PORT, STORE_PORT

Peers = Sequence[Object] | None
"""Sources of connections; None: every source."""

_OF_NO_ROLLOUT: Object = {"key": names.LABEL_ROLLOUT, "operator": "DoesNotExist"}
"""Pods of rollouts run model code, so they are never callers."""
_PROCESS_GROUP_PORTS: Object = {"protocol": "TCP", "port": 32768, "endPort": 65535}
"""Ports on which the ranks of a process group listen: gloo and NCCL take them from the kernel.

All fixed ports lie below, among them those at which SGLang unpickles what it receives (``wire.ports.RENDEZVOUS_PORT`` and above).
"""
_NAMESPACE_NAME = "kubernetes.io/metadata.name"
"""Label of every namespace with its name, set by the API server."""


def is_isolated(rollout: SGLangRollout) -> bool:
    """Return True if the rollout has NetworkPolicies."""
    return rollout.spec.security.network is NetworkAccess.ISOLATED


def selects_engines(rollout: SGLangRollout) -> bool:
    """Return True if NetworkPolicies select the engine pods."""
    return is_isolated(rollout) and not _is_on_node(rollout)


def has_process_groups(rollout: SGLangRollout) -> bool:
    """Return True if trainers open process groups with the engines, so that all ranks must reach each other."""
    return rollout.spec.mode is Mode.STANDALONE and rollout.spec.weights.transport is Transport.DISTRIBUTED


def network_policies(rollout: SGLangRollout) -> list[Object]:
    """Return the NetworkPolicies of router, weight store and engines; none if the network is open."""
    if not is_isolated(rollout):
        return []
    router = _policy(rollout, names.router_name(rollout.name), names.COMPONENT_ROUTER, _router_rules(rollout))
    if not selects_engines(rollout):
        return [router]
    engines = _policy(rollout, names.engines_service(rollout.name), names.COMPONENT_ENGINE, _engine_rules(rollout))
    store = (
        [_policy(rollout, names.store_name(rollout.name), names.COMPONENT_STORE, _store_rules(rollout))]
        if rollout.spec.weights.is_staged
        else []
    )
    return [router, *store, engines, *_policies_of_multi_pod_engines(rollout)]


def _router_rules(rollout: SGLangRollout) -> list[Object]:
    security, own = rollout.spec.security, _pods_of(rollout, names.COMPONENT_ENGINE)
    proxies = [] if security.proxies is None else [_pods(security.proxies)]
    trainers = _trainers(rollout)
    rules = [
        _rule(_join(trainers, proxies), FRONT_PORT),
        _rule(_join(_generating(rollout), proxies), GENERATE_PORT),
        _rule(_scrapers(rollout), METRICS_PORT),
    ]
    if rollout.spec.mode is not Mode.STANDALONE:
        # Agents pass trainers' calls at engines to the coordinator.
        rules.append(_rule(own, FRONT_PORT))
    return rules


def _engine_rules(rollout: SGLangRollout) -> list[Object]:
    rules = [
        _rule(_pods_of(rollout, names.COMPONENT_ROUTER), OF_POD.gate),
        _rule(_trainers(rollout), OF_POD.gate),
        _rule(_scrapers(rollout), OF_POD.metrics),
    ]
    if has_process_groups(rollout):
        ranks = _join(_trainers(rollout), _pods_of(rollout, names.COMPONENT_ENGINE))
        rules.append(_rule(ranks, _PROCESS_GROUP_PORTS))
    if rollout.spec.weights.is_staged:
        # Pods copy versions from each other, and a new pod of the store takes the committed version from them.
        pods = _join(_pods_of(rollout, names.COMPONENT_ENGINE), _pods_of(rollout, names.COMPONENT_STORE))
        rules.append(_rule(pods, STAGING_PORT))
    return rules


def _store_rules(rollout: SGLangRollout) -> list[Object]:
    router, engines = _pods_of(rollout, names.COMPONENT_ROUTER), _pods_of(rollout, names.COMPONENT_ENGINE)
    return [
        _rule(router, STORE_PORT),
        _rule(_join(router, engines), STAGING_PORT),
        _rule(_scrapers(rollout), OF_POD.metrics),
        _rule(_trainers(rollout), _PROCESS_GROUP_PORTS),
    ]


def _policies_of_multi_pod_engines(rollout: SGLangRollout) -> list[Object]:
    """Return a policy for each engine of several pods, whose ranks use ports of SGLang, torch, gloo and NCCL."""
    if rollout.spec.engine.pods == 1:
        return []
    engines = [names.engine_name(rollout.name, index) for index in range(rollout.spec.engines)]
    return [
        _policy(rollout, name, names.COMPONENT_ENGINE, [{"from": _pods_of(rollout, names.COMPONENT_ENGINE, name)}], engine=name)
        for name in engines
    ]


def _policy(rollout: SGLangRollout, name: str, component: str, rules: Sequence[Object], *, engine: str | None = None) -> Object:
    policy = child(rollout, "networking.k8s.io/v1", "NetworkPolicy", name, component, engine=engine)
    policy["spec"] = {
        "podSelector": {"matchLabels": names.selector(rollout.name, component, engine)},
        "policyTypes": ["Ingress"],
        # An empty list of sources would admit every source.
        "ingress": [rule for rule in rules if rule.get("from") != []],
    }
    return policy


def _rule(peers: Peers, port: int | Object) -> Object:
    """Return a rule that admits ``peers`` to a TCP port, or to a range of ports."""
    ports: Object = {"protocol": "TCP", "port": port} if isinstance(port, int) else port
    return {"ports": [ports]} if peers is None else {"from": list(peers), "ports": [ports]}


def _join(*groups: Peers) -> Peers:
    """Return all peers, each once; None if a group admits every source."""
    found: list[Object] = []
    for group in groups:
        if group is None:
            return None
        found += [peer for peer in group if peer not in found]
    return found


def _trainers(rollout: SGLangRollout) -> Peers:
    security = rollout.spec.security
    return None if security.control is ControlAccess.OPEN else _callers(security.trainers)


def _generating(rollout: SGLangRollout) -> Peers:
    """Return the callers of data paths."""
    security = rollout.spec.security
    if security.generate is GenerateAccess.OPEN:
        return None
    trainers = _callers(security.trainers) if security.trainers_may_generate else []
    return _join(trainers, _callers(security.clients))


def _scrapers(rollout: SGLangRollout) -> Peers:
    scrapers = rollout.spec.security.scrapers
    return [_pods(PodPeers(namespace_selector=LabelSelector()) if scrapers is None else scrapers)]


def _callers(callers: Callers | None) -> list[Object]:
    """Return the peers of ``callers``. A policy cannot select ServiceAccounts, which the coordinator checks."""
    if callers is None:
        return [_pods(PodPeers())]
    blocks: list[Object] = [{"ipBlock": {"cidr": cidr}} for cidr in callers.cidrs]
    if callers.namespace_selector is not None or not callers.service_accounts:
        has_pods = callers.pod_selector is not None or callers.namespace_selector is not None
        return [_pods(callers), *blocks] if has_pods else blocks
    namespaces = {account.partition("/")[0] if "/" in account else "" for account in callers.service_accounts}
    return [*(_pods(_in_namespace(callers, namespace)) for namespace in sorted(namespaces)), *blocks]


def _in_namespace(callers: Callers, namespace: str) -> PodPeers:
    """Return the pods of ``callers`` in a namespace; empty: in that of the rollout."""
    selector = LabelSelector(match_labels={_NAMESPACE_NAME: namespace}) if namespace else None
    return PodPeers(pod_selector=callers.pod_selector, namespace_selector=selector)


def _pods(peers: PodPeers) -> Object:
    """Return a peer: the selected pods that belong to no rollout."""
    selector = _dump(peers.pod_selector or LabelSelector())
    peer: Object = {"podSelector": {**selector, "matchExpressions": [*selector.get("matchExpressions", ()), _OF_NO_ROLLOUT]}}
    return peer if peers.namespace_selector is None else {**peer, "namespaceSelector": _dump(peers.namespace_selector)}


def _dump(selector: LabelSelector) -> Object:
    return selector.model_dump(mode="json", by_alias=True, exclude_defaults=True)


def _pods_of(rollout: SGLangRollout, component: str, engine: str | None = None) -> list[Object]:
    return [{"podSelector": {"matchLabels": names.selector(rollout.name, component, engine)}}]


def _is_on_node(rollout: SGLangRollout) -> bool:
    network = rollout.spec.engine.network
    return network is not None and network.host_network
