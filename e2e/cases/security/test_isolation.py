"""Who reaches a fleet's pods: with an agent that enforces NetworkPolicies, and on a cluster without one."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import requests

from e2e import machine_token, stand_in
from e2e.cases.conftest import ready, remove
from e2e.cases.security.callers import ELSEWHERE, SILENT, change_security, reach
from e2e.cases.stand_in_rollout import StandInRollout
from e2e.kube import eventually
from e2e.neighbours import policy_agent
from sglang_rollout.wire.ports import AGENT_HEALTH, FRONT_PORT, GATE_PORT, GENERATE_PORT, METRICS_GATE, METRICS_PORT, PROBES_PORT


def control(name: str) -> str:
    """Return a control path at the URL."""
    return f"http://{name}-router.e2e:{FRONT_PORT}/fleet"


def generate(name: str, path: str = "/generate") -> str:
    """Return a path at the port for data paths."""
    return f"http://{name}-generate.e2e:{GENERATE_PORT}{path}"


def at_engine(stand: StandInRollout, index: int, port: int = GATE_PORT, path: str = "/generate") -> str:
    """Return a URL at the address of an engine's pod."""
    address = stand.kubectl.get("pod", f"{stand.engine(index)}-0")["status"]["podIP"]
    return f"http://{address}:{port}{path}"


@pytest.fixture
def enforced(stand: StandInRollout, tmp_path: Path) -> Iterator[StandInRollout]:
    """Enforce NetworkPolicies on all nodes."""
    with policy_agent.running(tmp_path):
        eventually("the condition is Enforced", lambda: stand.condition("NetworkIsolated")["reason"] == "Enforced", within=120, every=2)
        yield stand


@pytest.fixture
def spec_is_restored(stand: StandInRollout) -> Iterator[None]:
    """Restore ``spec.security`` after the case."""
    yield
    change_security(stand.kubectl, stand.name)


def test_status_reports_whether_the_cluster_enforces_policies(stand: StandInRollout) -> None:
    """The lab cluster does not; your own cluster may."""
    wanted = {"NotEnforced"} if os.environ.get("CLUSTER", "lab") == "lab" else {"Enforced", "NotEnforced"}
    eventually(f"the condition is {wanted}", lambda: stand.condition("NetworkIsolated")["reason"] in wanted, within=60, every=1)
    if stand.condition("NetworkIsolated")["reason"] == "NotEnforced":
        assert "does not enforce NetworkPolicies" in stand.condition("NetworkIsolated")["message"]
        assert any(event.startswith("NotEnforced ") for event in stand.events())
    eventually("the rollout is Ready", lambda: stand.condition("Ready")["status"] == "True", within=60, every=1)


def test_without_a_token_a_trainer_in_a_pod_pushes_and_this_machine_has_no_rights(stand: StandInRollout, tmp_path: Path) -> None:
    document = stand_in.rollout("default", replicas=1)
    del document["spec"]["security"]
    stand.kubectl.apply(document)
    try:
        eventually("the rollout is Ready", lambda: ready(stand.kubectl, "default"), within=180, every=1)
        with stand.kubectl.forward("svc/default-router", 30000) as url:
            for headers in ({}, machine_token.HEADERS):
                assert requests.get(f"{url}/fleet", headers=headers, timeout=10).status_code == 401
            fleet = StandInRollout(stand.kubectl, "default", url, 1, tmp_path)
            trainer = fleet.trainer()
            trainer.begin("7")
            assert trainer.outcome(60)["ok"]
            trainer.end()
        eventually("status names the version", lambda: fleet.status()["weights"]["committedVersion"] == "7")
    finally:
        remove(stand.kubectl, "default")


def test_the_port_for_data_paths_refuses_control_calls(stand: StandInRollout) -> None:
    kubectl, name = stand.kubectl, stand.name
    assert reach(kubectl, "trainer", generate(name), method="POST") == [200]
    paths = ("/fleet", "/get_weights_by_name", "/server_info", "/workers")
    assert reach(kubectl, "trainer", *(generate(name, path) for path in paths)) == [403] * len(paths)
    calls = ("/pause_generation", "/update_weights_from_distributed", "/fleet/run", "/fleet/lease")
    assert reach(kubectl, "trainer", *(generate(name, path) for path in calls), method="POST") == [403] * len(calls)
    assert reach(kubectl, "trainer", *(generate(name, path) for path in ("/v1/models", "/health", "/ready"))) == [200] * 3
    assert stand.status()["endpoints"]["generate"] == f"http://{name}-generate.e2e.svc:{GENERATE_PORT}"


@pytest.mark.neighbours
def test_a_pod_of_another_namespace_may_only_generate(enforced: StandInRollout, outsider: str) -> None:
    name = enforced.name
    engine = [at_engine(enforced, 0), at_engine(enforced, 0, PROBES_PORT, AGENT_HEALTH)]
    assert reach(ELSEWHERE, outsider, control(name), *engine) == [SILENT] * 3
    assert reach(ELSEWHERE, outsider, generate(name, "/fleet"), at_engine(enforced, 0, METRICS_PORT, METRICS_GATE)) == [403, 200]
    assert reach(ELSEWHERE, outsider, generate(name), method="POST") == [200]


@pytest.mark.neighbours
def test_an_engine_container_reaches_neither_the_url_nor_another_engine(enforced: StandInRollout) -> None:
    kubectl, pod = enforced.kubectl, f"{enforced.engine(0)}-0"
    forbidden = (control(enforced.name), at_engine(enforced, 1), at_engine(enforced, 1, PROBES_PORT, AGENT_HEALTH))
    assert reach(kubectl, pod, *forbidden, container="engine") == [SILENT] * 3


@pytest.mark.neighbours
def test_the_trainer_pushes_and_samples_while_policies_are_enforced(enforced: StandInRollout) -> None:
    trainer = enforced.trainer()
    label = enforced.push(trainer)
    trainer.end()
    enforced.serve()
    assert enforced.status()["weights"]["committedVersion"] == label
    assert reach(enforced.kubectl, "trainer", at_engine(enforced, 0), method="POST") == [200]


@pytest.mark.neighbours
@pytest.mark.usefixtures("spec_is_restored")
def test_only_the_named_trainer_reaches_the_url(enforced: StandInRollout, sampler: str) -> None:
    kubectl, name = enforced.kubectl, enforced.name
    assert reach(kubectl, sampler, control(name)) == [200]
    kubectl("label", "pod", "trainer", "app=trainer", "--overwrite")
    change_security(enforced.kubectl, enforced.name, trainers={"podSelector": {"matchLabels": {"app": "trainer"}}})
    eventually("the sampler is refused", lambda: reach(kubectl, sampler, control(name)) == [SILENT], within=60, every=1)
    assert reach(kubectl, sampler, at_engine(enforced, 0), method="POST") == [SILENT]
    assert reach(kubectl, sampler, generate(name), method="POST") == [200]
    trainer = enforced.trainer()
    enforced.push(trainer)
    trainer.end()


@pytest.mark.neighbours
@pytest.mark.usefixtures("spec_is_restored")
def test_an_open_network_has_no_policies(enforced: StandInRollout, outsider: str) -> None:
    change_security(enforced.kubectl, enforced.name, network="Open")
    selector = f"rollout.sglang.io/rollout={enforced.name}"
    eventually("the policies are gone", lambda: not enforced.kubectl.list("networkpolicies", selector), within=30)
    eventually("the URL is reached", lambda: SILENT not in reach(ELSEWHERE, outsider, control(enforced.name)), within=60, every=1)
    eventually("the condition is NetworkOpen", lambda: enforced.condition("NetworkIsolated")["reason"] == "NetworkOpen", within=30)
