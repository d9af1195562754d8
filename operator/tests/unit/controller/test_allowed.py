"""Rollouts may ask only for what the operator's flags allow."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import pytest
from click.testing import CliRunner

from sglang_rollout.api.status import Reason
from sglang_rollout.api.v1alpha1 import SGLangRollout
from sglang_rollout.controller import main
from sglang_rollout.controller.decide.allowed import NOTHING, Allowed, find_refusal, is_below
from sglang_rollout.controller.decide.plan import Apply, make_plan
from sglang_rollout.controller.decide.transitions import find_events
from sglang_rollout.controller.decide.view import build_fleet_view
from sglang_rollout.controller.render import render_all
from tests.unit.controller.support.worlds import NOW, SETTINGS, condition, cr, pod, record, row, status_of, world

Object = dict[str, Any]


def engine(**context: Any) -> Object:
    return {"podTemplate": {"spec": {"containers": [{"name": "engine", "securityContext": context}]}}}


def on_pod(**fields: Any) -> Object:
    return {"podTemplate": {"spec": fields}}


HOST_PATHS = {"volumes": [{"name": "data", "hostPath": {"path": "/data/models"}}]}
ENGINE_NETWORK = {"engine": {"image": "e:1", "gpuResource": "", "network": {"hostNetwork": True}}}
CASES = [
    (on_pod(**HOST_PATHS), "--allow-host-path=/data/models", "allow.hostPaths", Allowed(host_paths=("/data",))),
    ({"router": {"podTemplate": {"spec": HOST_PATHS}}}, "--allow-host-path=/data/models", "allow.hostPaths", Allowed(host_paths=("/",))),
    (
        {"engine": {"image": "e:1", "gpuResource": "", "cache": {"hostPath": "/var/cache"}}},
        "--allow-host-path=/var/cache",
        "allow.hostPaths",
        Allowed(host_paths=("/var/cache/",)),
    ),
    (
        on_pod(serviceAccountName="admin"),
        "--allow-service-account=default/admin",
        "allow.serviceAccounts",
        Allowed(service_accounts=("default/admin",)),
    ),
    (
        on_pod(serviceAccountName=None),
        "--allow-service-account=default/default",
        "allow.serviceAccounts",
        Allowed(service_accounts=("default",)),
    ),
    (
        on_pod(serviceAccountName=None, serviceAccount="admin"),
        "--allow-service-account=default/admin",
        "allow.serviceAccounts",
        Allowed(service_accounts=("admin",)),
    ),
    (
        on_pod(serviceAccountName="demo-router"),
        "--allow-service-account=default/demo-router",
        "allow.serviceAccounts",
        Allowed(service_accounts=("default/demo-router",)),
    ),
    (ENGINE_NETWORK, "--allow-host-network", "allow.hostNetwork", Allowed(host_network=True)),
    (
        {"podTemplate": {"spec": {"containers": [{"name": "engine", "ports": [{"containerPort": 1, "hostPort": 1}]}]}}},
        "--allow-host-network",
        "allow.hostNetwork",
        Allowed(host_network=True),
    ),
    (on_pod(hostIPC=True), "--allow-host-ipc", "allow.hostIPC", Allowed(host_ipc=True)),
    *(
        (spec, "--allow-privileged", "allow.privileged", Allowed(privileged=True))
        for spec in (
            on_pod(securityContext={"sysctls": [{"name": "kernel.msgmax", "value": "1"}]}),
            on_pod(containers=[{"name": "more", "livenessProbe": {"tcpSocket": {"host": "10.0.0.1", "port": 22}}}]),
            on_pod(containers=[{"name": "more", "lifecycle": {"preStop": {"httpGet": {"host": "10.0.0.1", "port": 80}}}}]),
            on_pod(hostPID=True),
            engine(privileged=True),
            engine(capabilities={"add": ["SYS_ADMIN"]}),
            engine(procMount="Unmasked"),
            engine(seccompProfile={"type": "Unconfined"}),
            engine(appArmorProfile={"type": "Unconfined"}),
            engine(windowsOptions={"hostProcess": True}),
            engine(seLinuxOptions={"type": "spc_t"}),
            engine(seLinuxOptions={"role": "system_r"}),
            on_pod(securityContext={"seccompProfile": {"type": "Unconfined"}}),
            on_pod(initContainers=[{"name": "x", "image": "x", "securityContext": {"privileged": True}}]),
            {"podTemplate": {"metadata": {"annotations": {"container.apparmor.security.beta.kubernetes.io/engine": "unconfined"}}}},
        )
    ),
]


def refusal(spec: Object, allowed: Allowed = NOTHING) -> str:
    rollout = SGLangRollout.model_validate(cr(**spec))
    return find_refusal(rollout, render_all(rollout, SETTINGS, "token"), allowed)


@pytest.mark.parametrize(("spec", "flag", "value", "allowed"), CASES)
def test_spec_needs_a_flag(spec: Object, flag: str, value: str, allowed: Allowed) -> None:
    sentence = refusal(spec)
    assert f"(flag {flag}, chart value {value})" in sentence
    assert refusal(spec, allowed) == ""


@pytest.mark.parametrize("spec", [{}, engine(capabilities={"add": ["IPC_LOCK", "CHOWN"]}), on_pod(serviceAccountName="demo-engine")])
def test_ordinary_pods_need_no_flag(spec: Object) -> None:
    assert refusal(spec) == ""


def test_refusal_names_each_need_once() -> None:
    sentence = refusal({**on_pod(hostIPC=True, **HOST_PATHS), "replicas": 3})
    assert sentence.count("--allow-host-ipc") == 1
    assert sentence.count("--allow-host-path") == 1


@pytest.mark.parametrize(
    ("path", "folders", "expected"),
    [
        ("/data/models", ["/data"], True),
        ("/data", ["/data/"], True),
        ("/data//models/.", ["/data/models"], True),
        ("/database", ["/data"], False),
        ("/", ["/data"], False),
        ("/data/../etc", ["/data"], False),
        ("/data", [], False),
    ],
)
def test_path_is_below_a_folder(path: str, folders: list[str], expected: bool) -> None:
    assert is_below(path, folders) is expected


@pytest.mark.parametrize("kind", ["StatefulSet", "Deployment"])
@pytest.mark.parametrize("account", ["demo-engine", "demo-router", "other-engine", "default", None])
def test_each_component_has_only_its_own_account(kind: str, account: str | None) -> None:
    rollout = SGLangRollout.model_validate(cr(weights={"transport": "Staged", "staging": {"sizeLimit": "20Gi"}}))
    children = [child for child in render_all(rollout, SETTINGS, "token") if child["kind"] == kind]
    assert children
    for child in children:
        own = child["spec"]["template"]["spec"]["serviceAccountName"]
        changed = copy.deepcopy(child)
        changed["spec"]["template"]["spec"]["serviceAccountName"] = account
        refused = find_refusal(rollout, [changed], NOTHING)
        assert bool(refused) == (account != own), refused


@pytest.mark.parametrize(("namespace", "refused"), [("kube-system", True), ("kube-public", True), ("kube-x", True), ("kubeflow", False)])
def test_namespaces_of_kubernetes_are_refused_whatever_is_allowed(namespace: str, refused: bool) -> None:
    document = cr()
    document["metadata"]["namespace"] = namespace
    rollout = SGLangRollout.model_validate(document)
    anything = Allowed(host_paths=("/",), host_network=True, host_ipc=True, privileged=True)
    sentence = find_refusal(rollout, render_all(rollout, SETTINGS, "token"), anything)
    assert bool(sentence) is refused
    assert not refused or "in another namespace" in sentence


def test_account_of_another_namespace_stays_refused() -> None:
    assert refusal(on_pod(serviceAccountName="admin"), Allowed(service_accounts=("other/admin",)))


def test_nothing_is_created_for_a_refused_rollout() -> None:
    fleet = build_fleet_view(cr(**on_pod(hostIPC=True)), [], [])
    plan = make_plan(fleet, SETTINGS)
    assert plan.actions == ()
    assert plan.refusal is not None
    assert plan.refusal.reason is Reason.NOT_ALLOWED
    status = status_of(fleet, plan.refusal)
    for kind in ("Ready", "Degraded", "Progressing"):
        found = condition(status, kind)
        assert (found["reason"], found["message"]) == ("NotAllowed", plan.refusal.message)
    assert [(event.type, event.reason) for event in find_events(None, status)] == [("Warning", "NotAllowed")]
    allowed = make_plan(fleet, SETTINGS, NOW, replace(NOTHING, host_ipc=True))
    assert any(isinstance(action, Apply) for action in allowed.actions)


def test_running_fleet_keeps_running() -> None:
    """The spec changes to one that is refused, and an engine is surplus by it: nothing is deleted or changed."""
    running = world([pod(0), pod(1)], written=record(row(0), row(1)))
    fleet = build_fleet_view(cr(1, **on_pod(hostIPC=True)), list(running.children.values()), [pod(0), pod(1)])
    plan = make_plan(fleet, SETTINGS)
    assert plan.actions == ()
    status = status_of(fleet, plan.refusal)
    assert condition(status, "Ready")["reason"] == "NotAllowed"
    assert condition(status, "Available")["status"] == "True"


def test_flags_reach_the_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[main.OperatorSettings] = []

    async def run(settings: main.OperatorSettings) -> None:
        seen.append(settings)

    monkeypatch.setattr(main, "run", run)
    words = ["--allow-host-path=/a", "--allow-host-path=/b", "--allow-service-account=ml/x", "--allow-host-ipc"]
    assert CliRunner().invoke(main.command, words).exit_code == 0
    assert CliRunner().invoke(main.command, []).exit_code == 0
    environment = {"SGLANG_ROLLOUT_ALLOW_HOST_PATHS": "/a /b", "SGLANG_ROLLOUT_ALLOW_PRIVILEGED": "1"}
    assert CliRunner().invoke(main.command, ["--allow-host-network"], env=environment).exit_code == 0
    assert [settings.allowed for settings in seen] == [
        Allowed(host_paths=("/a", "/b"), service_accounts=("ml/x",), host_ipc=True),
        NOTHING,
        Allowed(host_paths=("/a", "/b"), host_network=True, privileged=True),
    ]
