"""The NetworkPolicies admit exactly the connections that docs/operations/network.md lists, for each kind of spec."""

from __future__ import annotations

import ipaddress
import itertools
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest

from sglang_rollout.api.v1alpha1 import SGLangRollout
from sglang_rollout.controller.render import names
from sglang_rollout.controller.render.network_policies import network_policies
from sglang_rollout.wire import ports
from tests.support.paths import DOCS
from tests.unit.controller.support.worlds import Object, cr

OWN, OTHER, GATEWAYS, MONITORING = "default", "other", "gateways", "monitoring"


@dataclass(frozen=True)
class Actor:
    """A source or target of connections: a pod, or a process with an address outside of the cluster's pods."""

    name: str
    namespace: str = ""
    labels: Mapping[str, str] = field(default_factory=dict, hash=False)
    address: str = "10.244.0.1"

    @property
    def is_pod(self) -> bool:
        return bool(self.namespace)


def engine_pod(rollout: str, engine: int, rank: int = 0) -> Actor:
    name = names.engine_name(rollout, engine)
    return Actor(names.engine_pod(name, rank), OWN, names.labels(rollout, names.COMPONENT_ENGINE, name))


def router_pod(rollout: str) -> Actor:
    return Actor(f"{rollout}-router", OWN, names.labels(rollout, names.COMPONENT_ROUTER))


ROUTER, ENGINE, SECOND_RANK, OTHER_ENGINE = router_pod("demo"), engine_pod("demo", 0), engine_pod("demo", 0, 1), engine_pod("demo", 1)
STORE = Actor("demo-store-0", OWN, names.labels("demo", names.COMPONENT_STORE))
FOREIGN = (router_pod("foreign"), engine_pod("foreign", 0))
TRAINER, SAMPLER = Actor("trainer", OWN, {"app": "trainer"}), Actor("sampler", OWN, {"app": "sampler"})
TRAINER_ELSEWHERE, SAMPLER_ELSEWHERE = Actor("trainer", OTHER, {"app": "trainer"}), Actor("sampler", OTHER, {"app": "sampler"})
GATEWAY, PROMETHEUS = Actor("gateway", GATEWAYS, {"app": "gateway"}), Actor("prometheus", MONITORING, {"app": "prometheus"})
NODE, OUTSIDE = Actor("process of a node", address="192.168.7.4"), Actor("process outside", address="203.0.113.9")
CALLERS = (TRAINER, SAMPLER, TRAINER_ELSEWHERE, SAMPLER_ELSEWHERE, GATEWAY, PROMETHEUS, NODE, OUTSIDE)
PODS_OF_ROLLOUTS = (ROUTER, ENGINE, SECOND_RANK, OTHER_ENGINE, STORE, *FOREIGN)
ACTORS = (*CALLERS, *PODS_OF_ROLLOUTS)
TARGETS = {"router pod": (ROUTER,), "engine pods": (ENGINE, SECOND_RANK, OTHER_ENGINE), "store pod": (STORE,)}
PORTS = (
    *(22, *sorted(value for name, value in vars(ports).items() if name.endswith("_PORT"))),
    *(29500, 30101, 32767, 32768, 40001, 65535),
)
EVERY_POD = frozenset(actor for actor in CALLERS if actor.is_pod)


# --- what the policies admit -------------------------------------------------------------------------------------------


def admits(policies: Sequence[Object], source: Actor, target: Actor, port: int) -> bool:
    """Return whether a TCP connection is admitted, as the API of NetworkPolicies defines it."""
    selecting = [policy for policy in policies if matches(policy["spec"]["podSelector"], target.labels)]
    rules = [rule for policy in selecting for rule in policy["spec"]["ingress"]]
    return not selecting or any(has_port(rule, port) and has_peer(rule, source) for rule in rules)


def has_port(rule: Object, port: int) -> bool:
    return not rule.get("ports") or any(is_port(one, port) for one in rule["ports"])


def is_port(wanted: Object, port: int) -> bool:
    first = int(wanted.get("port", port))
    return wanted["protocol"] == "TCP" and first <= port <= int(wanted.get("endPort", first))


def has_peer(rule: Object, source: Actor) -> bool:
    return not rule.get("from") or any(is_peer(peer, source) for peer in rule["from"])


def is_peer(peer: Object, source: Actor) -> bool:
    if "ipBlock" in peer:
        return ipaddress.ip_address(source.address) in ipaddress.ip_network(peer["ipBlock"]["cidr"])
    if "namespaceSelector" in peer:
        in_namespace = matches(peer["namespaceSelector"], {"kubernetes.io/metadata.name": source.namespace})
    else:
        in_namespace = source.namespace == OWN
    return source.is_pod and in_namespace and matches(peer.get("podSelector", {}), source.labels)


def matches(selector: Object, labels: Mapping[str, str]) -> bool:
    tests: dict[str, Callable[[str, list[str]], bool]] = {
        "In": lambda key, values: labels.get(key) in values,
        "NotIn": lambda key, values: labels.get(key) not in values,
        "Exists": lambda key, _: key in labels,
        "DoesNotExist": lambda key, _: key not in labels,
    }
    equal = all(labels.get(key) == value for key, value in selector.get("matchLabels", {}).items())
    return equal and all(tests[one["operator"]](one["key"], one.get("values", [])) for one in selector.get("matchExpressions", []))


# --- what the page lists -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Spec:
    """A spec with the callers that belong to each group of the page."""

    name: str
    spec: Object = field(default_factory=dict)
    trainers: frozenset[Actor] = frozenset({TRAINER, SAMPLER})
    clients: frozenset[Actor] = frozenset({TRAINER, SAMPLER})
    proxies: frozenset[Actor] = frozenset()
    scrapers: frozenset[Actor] = EVERY_POD

    @property
    def rollout(self) -> SGLangRollout:
        return SGLangRollout.model_validate(cr(**self.spec))

    def is_shared(self) -> bool:
        return "mode" in self.spec

    def is_staged(self) -> bool:
        return self.rollout.spec.weights.is_staged

    def is_on_node(self) -> bool:
        return "network" in self.spec.get("engine", {})


def security(**fields: Any) -> Object:
    return {"security": fields}


def pods(app: str) -> Object:
    return {"podSelector": {"matchLabels": {"app": app}}}


def namespace(name: str) -> Object:
    return {"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": name}}}


ENGINE_FIELDS: Object = {"image": "example.org/engine:1", "gpuResource": "", "memorySaver": True}
SHARED: Object = {"mode": "Hybrid", "sharing": {"trainerLabels": {"app": "trainer"}}, "engine": ENGINE_FIELDS}
ON_NODE: Object = {"engine": {**ENGINE_FIELDS, "network": {"hostNetwork": True}}}
STAGED: Object = {"weights": {"transport": "Staged", "staging": {"sizeLimit": "1Gi"}}}
SEVERAL_PODS: Object = {"engine": {**ENGINE_FIELDS, "nodes": 2, "parallelism": {"tensor": 2}}}
ANYBODY = frozenset(ACTORS)
SPECS = (
    Spec("default"),
    Spec("one trainer", security(trainers=pods("trainer")), trainers=frozenset({TRAINER})),
    Spec(
        "trainers by expression",
        security(trainers={"podSelector": {"matchExpressions": [{"key": "app", "operator": "NotIn", "values": ["sampler"]}]}}),
        trainers=frozenset({TRAINER}),
    ),
    Spec("trainers elsewhere", security(trainers=pods("trainer") | namespace(OTHER)), trainers=frozenset({TRAINER_ELSEWHERE})),
    Spec(
        "trainers everywhere",
        security(trainers=pods("trainer") | {"namespaceSelector": {}}),
        trainers=frozenset({TRAINER, TRAINER_ELSEWHERE}),
    ),
    Spec("trainers by address", security(trainers={"cidrs": ["192.168.7.0/24"]}), trainers=frozenset({NODE})),
    Spec(
        "trainers by label and address",
        security(trainers=pods("trainer") | {"cidrs": ["192.168.7.4/32"]}),
        trainers=frozenset({TRAINER, NODE}),
    ),
    Spec("no trainer", security(trainers={"cidrs": []}), trainers=frozenset()),
    Spec(
        "no caller",
        security(trainers={"cidrs": []}, generate="Clients", clients={"serviceAccounts": [], "cidrs": []}),
        trainers=frozenset(),
        clients=frozenset(),
    ),
    Spec("trainers by account", security(trainers={"serviceAccounts": ["train"]})),
    Spec(
        "trainers by account elsewhere",
        security(trainers={"serviceAccounts": ["other/train"]} | pods("trainer")),
        trainers=frozenset({TRAINER_ELSEWHERE}),
    ),
    Spec(
        "trainers by accounts of two namespaces",
        security(trainers={"serviceAccounts": ["train", "other/train", "other/test"]}),
        trainers=frozenset({TRAINER, SAMPLER, TRAINER_ELSEWHERE, SAMPLER_ELSEWHERE}),
    ),
    Spec("tokens", security(control="Token", generate="Token")),
    Spec("open control", security(control="Open"), trainers=ANYBODY),
    Spec("clients", security(generate="Clients", clients=pods("sampler") | namespace(OTHER)), clients=frozenset({SAMPLER_ELSEWHERE})),
    Spec(
        "clients beside open control",
        security(control="Open", generate="Clients", clients=pods("sampler")),
        trainers=ANYBODY,
        clients=frozenset({SAMPLER}),
    ),
    Spec("clients beside tokens", security(control="Token", generate="Clients", clients=pods("sampler")), clients=frozenset({SAMPLER})),
    Spec("clients by default", security(generate="Clients", trainers=pods("trainer")), trainers=frozenset({TRAINER})),
    Spec("proxies", security(generate="Token", proxies=namespace(GATEWAYS)), proxies=frozenset({GATEWAY})),
    Spec("scrapers", security(scrapers=pods("prometheus") | namespace(MONITORING)), scrapers=frozenset({PROMETHEUS})),
    Spec("scrapers here", security(scrapers=pods("sampler")), scrapers=frozenset({SAMPLER})),
    Spec("disk", {"weights": {"transport": "Disk"}}),
    Spec("staged", STAGED),
    Spec("staged by one trainer", STAGED | security(trainers=pods("trainer")), trainers=frozenset({TRAINER})),
    Spec("staged by anybody", STAGED | security(control="Open"), trainers=ANYBODY),
    Spec("several pods", SEVERAL_PODS),
    Spec("staged in several pods", STAGED | SEVERAL_PODS),
    Spec("shared", SHARED),
    Spec("colocated", {**SHARED, "mode": "Colocated"} | security(trainers=pods("trainer")), trainers=frozenset({TRAINER})),
    Spec("network of the node", ON_NODE),
)

WHEN: dict[str, Callable[[Spec], bool]] = {
    "always": lambda _: True,
    "`mode` is not `Standalone`": Spec.is_shared,
    "`security.trainers` is set, or `security.control` is `Trainers`": lambda case: case.rollout.spec.security.trainers_may_generate,
    "`security.generate` is `Open`": lambda case: case.spec.get("security", {}).get("generate", "Open") == "Open",
    "`mode` is `Standalone`, and `weights.transport` is `Distributed`": lambda case: not case.is_shared() and "weights" not in case.spec,
    "`weights.transport` is `Staged`": Spec.is_staged,
    "engines of several pods": lambda case: "nodes" in case.spec.get("engine", {}),
}
"""By text of the column *when*."""


@dataclass(frozen=True)
class Row:
    """A row of the page."""

    sources: list[str]
    targets: list[str]
    ports: list[range]
    when: str

    def admits(self, case: Spec, source: Actor, target: Actor, port: int) -> bool:
        is_target = any(target in TARGETS[name] for name in self.targets if name in TARGETS)
        is_meant = WHEN[self.when](case) and any(port in ports for ports in self.ports)
        return (
            is_meant
            and (is_target or "pods of the same engine" in self.targets)
            and any(self._is_source(name, case, source, target) for name in self.sources)
        )

    def _is_source(self, name: str, case: Spec, source: Actor, target: Actor) -> bool:
        engines = TARGETS["engine pods"]
        match name:
            case "trainers" | "clients" | "proxies" | "scrapers":
                return source in getattr(case, name)
            case "engine pods":
                return source in engines and not case.is_on_node()
            case "router pod":
                return source == ROUTER
            case "store pod":
                return source == STORE
            case "pods of one engine":
                return source in engines and target in engines and source.labels[names.LABEL_ENGINE] == target.labels[names.LABEL_ENGINE]
            case "every source":
                return True
        raise ValueError(f"the page names {name!r}, which this test does not know")


def read_rows() -> Iterator[Row]:
    """Yield the rows of the page. Kubernetes admits the pod's own node, so no policy does."""
    text = (DOCS / "operations/network.md").read_text().partition("## Connections to the fleet's pods")[2].partition("\n## ")[0]
    lines = [[cell.strip() for cell in line.split("|")[1:-1]] for line in text.splitlines() if line.startswith("|")]
    for sources, targets, port, when, _ in (line for line in lines if len(line) == 5 and line[0] not in ("from", "---")):
        if sources != "the pod's own node":
            yield Row(sources.split(", "), targets.split(", "), [read_ports(part) for part in port.split(", ")], when)


def read_ports(text: str) -> range:
    first, _, last = "1 to 65535".partition(" to ") if text == "any" else text.partition(" to ")
    return range(int(first), int(last or first) + 1)


ROWS = list(read_rows())


# --- tests -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", SPECS, ids=lambda case: case.name)
def test_the_policies_admit_what_the_page_lists_and_nothing_else(case: Spec) -> None:
    policies = network_policies(case.rollout)
    targets = (ROUTER,) if case.is_on_node() else (ROUTER, *TARGETS["engine pods"], *((STORE,) if case.is_staged() else ()))
    differences = [
        f"{source.name} of {source.namespace or 'no namespace'} → {target.name}:{port} is {'admitted' if admitted else 'refused'}"
        for source, target, port in itertools.product(ACTORS, targets, PORTS)
        if source != target
        and (admitted := admits(policies, source, target, port)) != any(row.admits(case, source, target, port) for row in ROWS)
    ]
    assert differences == []


def test_each_row_of_the_page_has_an_effect() -> None:
    idle = [
        row
        for row in ROWS
        if not any(
            row.admits(case, source, target, port)
            for case in SPECS
            for source, target, port in itertools.product(ACTORS, (ROUTER, ENGINE, SECOND_RANK, STORE), PORTS)
        )
    ]
    assert idle == []
    assert {row.when for row in ROWS} == set(WHEN)


@pytest.mark.parametrize("case", SPECS, ids=lambda case: case.name)
def test_no_pod_of_another_rollout_reaches_control_paths_weights_or_probes(case: Spec) -> None:
    if case.rollout.spec.security.control == "Open":
        return
    policies = network_policies(case.rollout)
    reached = {
        port
        for source, target, port in itertools.product(FOREIGN, (ROUTER, ENGINE, *((STORE,) if case.is_staged() else ())), PORTS)
        if admits(policies, source, target, port) and not (case.is_on_node() and target is ENGINE)
    }
    assert reached <= {ports.GENERATE_PORT}


@pytest.mark.parametrize("source", [TRAINER, OTHER_ENGINE, ROUTER], ids=lambda actor: actor.name)
def test_only_pods_of_the_same_engine_reach_the_sockets_of_sglang(source: Actor) -> None:
    rollout = SGLangRollout.model_validate(
        cr(engine={**ENGINE_FIELDS, "nodes": 2, "parallelism": {"tensor": 2, "attentionData": 2}}),
    )
    policies = network_policies(rollout)
    # SGLang unpickles what it receives 1 to 13 ports above that of the rendezvous. Its store of all ranks has a port from 22000 on.
    sockets = (22000, 29999, *range(ports.RENDEZVOUS_PORT, ports.RENDEZVOUS_PORT + 100))
    assert [port for port in sockets if admits(policies, source, ENGINE, port)] == []
    assert all(admits(policies, SECOND_RANK, ENGINE, port) for port in sockets)
    assert admits(policies, source, ENGINE, 40001) == (source is not ROUTER)


def test_an_open_network_has_no_policies() -> None:
    assert network_policies(SGLangRollout.model_validate(cr(**security(network="Open")))) == []


def test_pods_of_an_engine_are_selected_by_a_policy_of_their_own_only_if_there_are_several() -> None:
    made = {case.name: [policy["metadata"]["name"] for policy in network_policies(case.rollout)] for case in SPECS}
    assert made["default"] == ["demo-router", "demo-engines"]
    assert made["several pods"] == ["demo-router", "demo-engines", "demo-engine-0", "demo-engine-1"]
    assert made["staged"] == ["demo-router", "demo-store", "demo-engines"]
    assert made["staged in several pods"] == ["demo-router", "demo-store", "demo-engines", "demo-engine-0", "demo-engine-1"]
    assert made["network of the node"] == ["demo-router"]


def test_policies_restrict_incoming_connections_only() -> None:
    policies = [policy for case in SPECS for policy in network_policies(case.rollout)]
    assert {tuple(policy["spec"]["policyTypes"]) for policy in policies} == {("Ingress",)}
    assert not any(re.search("egress", str(policy), re.IGNORECASE) for policy in policies)
