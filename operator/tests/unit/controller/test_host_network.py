"""Engines in the network of their node: arguments of SGLang and agents, intent and status."""

from __future__ import annotations

import json
from typing import Any

import pytest

from sglang_rollout.api.v1alpha1 import SGLangRollout
from sglang_rollout.controller.decide.plan import Apply, make_plan
from sglang_rollout.controller.decide.status import build_status
from sglang_rollout.controller.render import names
from sglang_rollout.controller.render.engines import engine_statefulsets
from sglang_rollout.controller.render.names import engine_ports
from tests.support.allowed import ANYTHING
from tests.unit.controller.support.worlds import NOW, SETTINGS, Object, cr, pod, world


def custom(network: Object | None, **engine: Any) -> Object:
    return cr(engine={"image": "example.org/engine:1", "gpuResource": "", **({"network": network} if network else {}), **engine})


def template(network: Object | None, **engine: Any) -> Object:
    """Of the second engine's pods."""
    rollout = SGLangRollout.model_validate(custom(network, **engine))
    found: Object = engine_statefulsets(rollout, SETTINGS)[1]["spec"]["template"]["spec"]
    return found


def flags(container: Object, *wanted: str) -> dict[str, str]:
    args = container["args"]
    return {flag: args[args.index(flag) + 1] for flag in wanted if flag in args}


RENDEZVOUS = ("--port", "--nccl-port", "--dist-init-addr")


@pytest.mark.parametrize(
    ("engine", "expected"),
    [
        ({}, {"--port": "20021", "--nccl-port": "20023"}),
        (
            {"parallelism": {"tensor": 2, "attentionData": 2}},
            {"--port": "20021", "--nccl-port": "20023", "--dist-init-addr": "127.0.0.1:20024"},
        ),
        (
            {"parallelism": {"tensor": 2}, "nodes": 2},
            {"--port": "20021", "--nccl-port": "20023", "--dist-init-addr": "demo-engine-1-0.demo-engines:20024"},
        ),
    ],
    ids=["one pod", "attention groups", "several pods"],
)
def test_sglang_gets_every_port_that_it_would_choose_itself(engine: Object, expected: dict[str, str]) -> None:
    assert flags(template({"hostNetwork": True}, **engine)["containers"][0], *RENDEZVOUS) == expected


def test_pods_of_an_engine_reach_each_other_on_its_ports() -> None:
    agent = template({"hostNetwork": True, "basePort": 4000}, parallelism={"tensor": 2}, nodes=2)["initContainers"][1]
    assert flags(agent, "--listen", "--engine-url", "--leader", "--advertise") == {
        "--listen": "unix@/run/rollout-gate/agent.sock",
        "--engine-url": "http://127.0.0.1:4021",
        "--leader": "demo-engine-1-0.demo-engines:4020",
        "--advertise": "[$(POD_IP)]:4020",
    }


@pytest.mark.parametrize("network", [None, {"interface": "eth0"}])
def test_engines_have_equal_ports_without_host_network(network: Object | None) -> None:
    rollout = SGLangRollout.model_validate(custom(network))
    assert engine_ports(rollout, 0) == engine_ports(rollout, 7)
    made = template(network)
    assert {"hostNetwork", "dnsPolicy"}.isdisjoint(made)
    assert "hostPort" not in json.dumps(made)
    assert flags(made["containers"][0], *RENDEZVOUS) == {"--port": "30001"}


def with_gate(made: Object, port: int) -> Object:
    """A pod as it was made when its gate was to have this port."""
    gate = {"name": "gate", "ports": [{"name": "http", "containerPort": port}]}
    return {**made, "spec": {**made["spec"], "initContainers": [gate]}}


def test_intent_has_the_ports_of_existing_gates() -> None:
    """Half-way through a rolling update from 20000 to 24000; engine 2 has no pod yet."""
    wanted = custom({"hostNetwork": True, "basePort": 24000})
    wanted["spec"]["replicas"] = 3
    seen = world([with_gate(pod(0), 20000), with_gate(pod(1), 24020)], custom=wanted)
    applied = [action.object for action in make_plan(seen, SETTINGS, allowed=ANYTHING).actions if isinstance(action, Apply)]
    intent = next(made for made in applied if made["metadata"]["name"] == names.intent_name("demo"))
    engines = json.loads(intent["data"][names.INTENT_KEY])["engines"]
    assert [engine["port"] for engine in engines] == [20000, 24020, 24040]
    rows = build_status(seen, NOW)["engines"]
    assert [row.get("port") for row in rows] == [20000, 24020, None]


def test_status_omits_the_default_port() -> None:
    rows = build_status(world([with_gate(pod(0), 30000), pod(1)]), NOW)["engines"]
    assert ["port" in row for row in rows] == [False, False]
