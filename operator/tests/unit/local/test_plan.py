"""Which processes make up a local fleet."""

from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest

from sglang_rollout.api.limits_spec import Limits
from sglang_rollout.api.weights_spec import Staging, Transport, Weights
from sglang_rollout.local.plan import Folders, Plan, count_ports, parse_engine
from sglang_rollout.proxy.address import Address

ENGINES = (parse_engine("http://127.0.0.1:1001"), parse_engine("127.0.0.1:1002,tp=2"))
PLAN = Plan(
    listen=Address("0.0.0.0", 30000),
    engines=ENGINES,
    weights=Weights(backend="gloo"),
    policy="RoundRobin",
    ports=tuple(range(24001, 24012)),
)
STAGED = replace(
    PLAN,
    engines=(ENGINES[0], parse_engine("127.0.0.1:1002,tp=2,pp=3,dp=4")),
    weights=Weights(transport=Transport.STAGED, staging=Staging(size_limit="1Gi")),
    ports=tuple(range(24001, 24017)),
    store_python="/torch/bin/python",
)
FOLDERS = Folders(state=Path("/s"), runtime=Path("/r"))


def test_each_engine_has_a_gate_and_an_agent_and_the_front_is_last() -> None:
    children = PLAN.children(FOLDERS)
    assert [child.name for child in children] == [
        *("local-engine-0-gate", "local-engine-0-agent", "local-engine-1-gate", "local-engine-1-agent"),
        *("smg", "coordinator", "batches", "front"),
    ]
    assert count_ports(2) == 11 == len(PLAN.ports)
    agent = children[3].command
    assert agent[agent.index("--tensor-size") + 1] == "2"
    assert agent[agent.index("--engine-url") + 1] == "http://127.0.0.1:1002"
    assert "--tensor-size" not in children[1].command, "the engine says its size"
    gate = children[2].command
    assert gate[gate.index("--socket") + 1] == agent[agent.index("--gate-socket") + 1]
    assert gate[gate.index("--agent") + 1] == agent[agent.index("--listen") + 1]


def test_gates_front_smg_and_batch_server_know_the_limits() -> None:
    plan = replace(PLAN, limits=Limits(samples_per_prompt=9))
    lines = {child.name: child.command for child in plan.children(FOLDERS)}
    limited = {name for name, line in lines.items() if ("--limits", '{"samplesPerPrompt":9}') in pairwise(line)}
    assert limited == {"local-engine-0-gate", "local-engine-1-gate", "batches", "front", "smg"}
    assert not any("--limits" in child.command for child in PLAN.children(FOLDERS)), "defaults need no option"


def test_the_intent_names_the_gates() -> None:
    intent = PLAN.intent()
    assert [(engine.name, engine.tensor_size, engine.url) for engine in intent.engines] == [
        ("local-engine-0", None, "http://127.0.0.1:24006"),
        ("local-engine-1", 2, "http://127.0.0.1:24009"),
    ]
    assert intent.weights.backend == "gloo"


def test_no_address_is_used_twice() -> None:
    options = ("--listen", "--metrics-listen")
    lines = [child.command for child in PLAN.children(FOLDERS)]
    listens = [value for line in lines for option, value in pairwise(line) if option in options]
    assert len(set(listens)) == len(listens) == count_ports(2) + 1


def test_transport_staged_adds_a_weight_store_and_data_ports() -> None:
    lines = {child.name: child.command for child in STAGED.children(FOLDERS)}
    assert set(lines) - {child.name for child in PLAN.children(FOLDERS)} == {"local-store"}
    assert count_ports(2, staged=True) == 16 == len(STAGED.ports)
    store, agent, front = lines["local-store"], lines["local-engine-1-agent"], lines["front"]
    assert store[:4] == ("/torch/bin/python", "-m", "sglang_rollout.cli", "store")
    assert (agent[agent.index("--pipeline-size") + 1], agent[agent.index("--data-size") + 1]) == ("3", "4")
    folders = {line[line.index(option) + 1] for line, option in ((store, "--volume"), (agent, "--staging-volume"))}
    assert folders == {"/s/staged/local-store", "/s/staged/local-engine-1"}
    assert front[front.index("--store") + 1] == store[store.index("--data-listen") + 1], "pieces of uploads go straight to the store"
    intent = STAGED.intent()
    assert intent.store is not None
    assert intent.store.url == f"http://{store[store.index('--listen') + 1]}"
    assert intent.store.data_url == f"http://{store[store.index('--data-listen') + 1]}"
    assert intent.engines[1].data_url == f"http://{agent[agent.index('--data-listen') + 1]}"
    options = ("--listen", "--metrics-listen", "--data-listen")
    listens = [value for line in lines.values() for option, value in pairwise(line) if option in options]
    assert len(set(listens)) == len(listens) == count_ports(2, staged=True) + 1
    stores = [target for target in STAGED.scrape_targets() if target["labels"]["container"] == "store"]  # type: ignore[index]
    assert [target["targets"] for target in stores] == [[store[store.index("--metrics-listen") + 1]]]
    assert PLAN.intent().store is None


def test_every_process_is_a_target_of_prometheus_where_its_pod_serves_metrics() -> None:
    targets = {(str(target["labels"]["pod"]), str(target["labels"]["container"])): target for target in PLAN.scrape_targets()}  # type: ignore[index]
    assert len(targets) == len(PLAN.children(FOLDERS)) + len(ENGINES), "and the engines themselves"
    lines = {child.name: child.command for child in PLAN.children(FOLDERS)}
    gate, front = lines["local-engine-1-gate"], lines["front"]
    engine, smg = targets["local-engine-1", "engine"], targets["local-router", "smg"]
    assert engine["targets"] == [gate[gate.index("--metrics-listen") + 1]]
    assert smg["targets"] == [front[front.index("--metrics-listen") + 1]]
    assert smg["labels"]["__metrics_path__"] == "/metrics/smg"  # type: ignore[index]


@pytest.mark.parametrize(
    "text", ["https://x:1", "http://x", "http://x:1/path", "http://x:1,tp=0", "http://x:1,pp=0", "http://x:1,dp=0", "http://u@x:1", ""]
)
def test_a_malformed_engine_option_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"is not valid|is not the URL"):
        parse_engine(text)
