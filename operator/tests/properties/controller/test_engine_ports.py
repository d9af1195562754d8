"""Engines on the network of one node share no port, and the intent has the port of each gate, also while ports change."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_rollout.api.network_spec import BLOCK, NODE_PORTS, UNPRIVILEGED
from sglang_rollout.api.v1alpha1 import SGLangRollout
from sglang_rollout.controller.decide.pods import Pod
from sglang_rollout.controller.render import names
from sglang_rollout.controller.render.engines import engine_statefulsets
from sglang_rollout.controller.render.names import engine_ports
from tests.properties.support.simulated_cluster import SETTINGS, Cluster, Object, rollout

bases = st.integers(UNPRIVILEGED // BLOCK + 1, NODE_PORTS // BLOCK - 1).map(lambda number: number * BLOCK)


def engine(network: Object | None, **more: Any) -> Object:
    return {"image": "example.org/engine:1", "gpuResource": "", **({"network": network} if network else {}), **more}


def on_nodes(base: int, replicas: int, **more: Any) -> SGLangRollout:
    network = {"hostNetwork": True, "basePort": base}
    return SGLangRollout.model_validate(rollout(replicas=replicas, engine=engine(network, **more)))


@st.composite
def fleets(draw: st.DrawFn, most: int) -> SGLangRollout:
    """Any that the API server accepts, of 1 to ``most`` engines."""
    base = draw(bases)
    replicas = draw(st.integers(1, min(most, (NODE_PORTS - base) // BLOCK)))
    nodes, attention = draw(st.sampled_from([1, 2, 4])), draw(st.sampled_from([1, 2, 4]))
    return on_nodes(base, replicas, nodes=nodes, parallelism={"tensor": 4, "attentionData": attention})


def named(statefulset: Object) -> Iterator[int]:
    """Return every port in the pods of an engine."""
    pod = statefulset["spec"]["template"]["spec"]
    assert pod["hostNetwork"] is True
    for container in (*pod["initContainers"], *pod["containers"]):
        for port in container.get("ports", []):
            assert port["hostPort"] == port["containerPort"], "the scheduler looks at hostPort"
            yield port["hostPort"]
        for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
            asked = container.get(probe, {})
            if "exec" not in asked and asked:
                yield (asked.get("httpGet") or asked["tcpSocket"])["port"]
        yield from map(int, re.findall(r"(?<!--start-seconds\n)(?:^|:)(\d{4,5})$", "\n".join(container["args"]), re.MULTILINE))


@given(fleets(6))
@settings(deadline=None, max_examples=40)
def test_no_two_engines_of_a_fleet_share_a_port(fleet: SGLangRollout) -> None:
    seen: set[int] = set()
    for index, statefulset in enumerate(engine_statefulsets(fleet, SETTINGS)):
        ports = engine_ports(fleet, index)
        own = {*named(statefulset), *ports.of_sglang}
        assert {ports.gate, ports.engine, ports.nccl} <= own
        assert len({ports.gate, *ports.of_sglang}) == len(ports.of_sglang) + 1
        assert max(own) - min(own) < BLOCK
        assert max(own) < NODE_PORTS
        assert seen.isdisjoint(own)
        seen |= own


@given(fleets(500), fleets(500))
@settings(deadline=None, max_examples=200)
def test_port_conflicts_of_two_fleets_are_visible_to_the_scheduler(one: SGLangRollout, other: SGLangRollout) -> None:
    def blocks(fleet: SGLangRollout) -> dict[int, tuple[int | None, ...]]:
        """By the port that the engine's own container names."""
        return {(ports := engine_ports(fleet, index)).engine: (*ports, *ports.of_sglang) for index in range(fleet.spec.engines)}

    ours, theirs = blocks(one), blocks(other)
    assert len(ours) == one.spec.engines
    apart = {port for key, ports in ours.items() if key not in theirs for port in ports}
    assert apart.isdisjoint(port for ports in theirs.values() for port in ports)


NETWORKS = [None, {"hostNetwork": True}, {"hostNetwork": True, "basePort": 22000}]


@given(st.lists(st.sampled_from(NETWORKS), min_size=2, max_size=4), st.integers(1, 4))
@settings(deadline=None, max_examples=20)
def test_intent_has_the_present_gate_ports_during_a_change(steps: list[Object | None], replicas: int) -> None:
    cluster = Cluster(rollout(replicas=replicas, engine=engine(steps[0])))
    cluster.converge()
    for network in steps[1:]:
        cluster.edit_spec(rollout(replicas=replicas, engine=engine(network))["spec"])
        for _ in range(3 * replicas + 3):
            cluster.execute(cluster.plan().actions)
            assert intended(cluster) == there(cluster) | {
                name: port for name, port in intended(cluster).items() if name not in there(cluster)
            }
            cluster.settle()
        cluster.converge()
        wanted = SGLangRollout.model_validate(cluster.cr)
        assert intended(cluster) == {f"demo-engine-{index}": engine_ports(wanted, index).gate for index in range(replicas)}
        assert there(cluster) == intended(cluster)


def intended(cluster: Cluster) -> dict[str, int]:
    """Return the ports of gates in the intent."""
    intent = json.loads(cluster.objects["ConfigMap", names.intent_name("demo")]["data"][names.INTENT_KEY])
    return {wanted["name"]: wanted.get("port", 30000) for wanted in intent["engines"]}


def there(cluster: Cluster) -> dict[str, int]:
    """Return the ports of the gates of running pods."""
    return {name.removesuffix("-0"): Pod(pod).gate_port or 0 for name, pod in cluster.pods.items()}
