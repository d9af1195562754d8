"""The chart's ValidatingAdmissionPolicy, and an operator for one namespace."""

from __future__ import annotations

import copy
import json
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from e2e.cluster.controlplane import ControlPlane

from sglang_rollout.api.v1alpha1 import SGLangRollout
from sglang_rollout.controller.render import render_all
from sglang_rollout.controller.render.common import Settings
from sglang_rollout.kube.resources import SERVICEACCOUNTS, Object
from tests.integration.controller.support.chart import InstallChart, Release
from tests.integration.controller.support.operator_process import World, eventually, rollout

pytestmark = [pytest.mark.controlplane]

SETTINGS = Settings(coordinator_image="example.org/coordinator:1", router_image="example.org/router:1")
MODEL = {"path": "/models/m", "volume": {"hostPath": "/data/m"}, "download": {"command": ["fetch"]}}
Change = Callable[[Object], Any]


def pod_of(obj: Object) -> Object:
    spec: Object = obj["spec"]["template"]["spec"]
    return spec


def context_of(obj: Object) -> Object:
    context: Object = pod_of(obj)["containers"][0].setdefault("securityContext", {})
    return context


def mount(path: str) -> Change:
    return lambda obj: pod_of(obj)["volumes"].append({"name": "x", "hostPath": {"path": path}})


def more_rights(obj: Object) -> None:
    obj["rules"].append({"apiGroups": [""], "resources": ["secrets"], "verbs": ["get"]})


FOREIGN_HOST: Object = {"tcpSocket": {"host": "10.0.0.1", "port": 22}}
POD_CHANGES: list[tuple[Change, str]] = [
    (mount("/etc"), "allow.hostPaths"),
    (mount("/database"), "allow.hostPaths"),
    (lambda obj: pod_of(obj).update(hostIPC=True), "allow.hostIPC"),
    (lambda obj: pod_of(obj).update(hostNetwork=True), "allow.hostNetwork"),
    (lambda obj: pod_of(obj)["containers"][0].update(ports=[{"containerPort": 1, "hostPort": 1}]), "allow.hostNetwork"),
    (lambda obj: pod_of(obj).update(hostPID=True), "allow.privileged"),
    (lambda obj: pod_of(obj)["securityContext"].update(sysctls=[{"name": "kernel.msgmax", "value": "1"}]), "allow.privileged"),
    (lambda obj: pod_of(obj)["containers"][0].update(livenessProbe=FOREIGN_HOST), "allow.privileged"),
    (lambda obj: pod_of(obj)["containers"][0].update(lifecycle={"preStop": FOREIGN_HOST}), "allow.privileged"),
    (lambda obj: context_of(obj).update(privileged=True, allowPrivilegeEscalation=True), "allow.privileged"),
    (lambda obj: context_of(obj).update(capabilities={"add": ["SYS_ADMIN"]}), "allow.privileged"),
    (lambda obj: context_of(obj).update(seccompProfile={"type": "Unconfined"}), "allow.privileged"),
    (lambda obj: context_of(obj).update(appArmorProfile={"type": "Unconfined"}), "allow.privileged"),
    (lambda obj: context_of(obj).update(seLinuxOptions={"type": "spc_t"}), "allow.privileged"),
    (lambda obj: pod_of(obj)["initContainers"][0].update(securityContext={"capabilities": {"add": ["X"]}}), "allow.privileged"),
    (lambda obj: pod_of(obj).update(serviceAccountName="admin"), "allow.serviceAccounts"),
    (lambda obj: pod_of(obj).pop("serviceAccountName"), "allow.serviceAccounts"),
]


def select(*path: str) -> Change:
    """Return a change to the selector of all pods of the namespace."""

    def change(obj: Object) -> None:
        part = obj["spec"]
        for key in path[:-1]:
            part = part[key]
        part[path[-1]] = {"app": "theirs"}

    return change


def forget_selector(obj: Object) -> None:
    obj["spec"]["podSelector"] = {}


OTHER_CHANGES: list[tuple[str, Change, str]] = [
    ("StatefulSet", lambda obj: obj["metadata"].pop("ownerReferences"), "only children whose controller is an SGLangRollout"),
    ("ConfigMap", lambda obj: obj["metadata"]["ownerReferences"][0].update(kind="Other"), "only children whose controller"),
    ("Secret", lambda obj: obj.update(type="example.org/token"), "only Secrets of the type Opaque"),
    ("Service", lambda obj: obj["spec"].update(externalIPs=["192.0.2.1"]), "only Services inside the cluster"),
    ("Role", more_rights, "only the rights of a coordinator"),
    ("RoleBinding", lambda obj: obj["subjects"][0].update(name="other"), "only the Role of a router"),
    ("StatefulSet", lambda obj: pod_of(obj).update(serviceAccountName="demo-router"), "router pods only the router's"),
    ("Deployment", lambda obj: pod_of(obj).update(serviceAccountName="demo-engine"), "router pods only the router's"),
    ("Service", select("selector"), "only pods of the rollout"),
    ("Service", lambda obj: obj["spec"].pop("selector"), "only pods of the rollout"),
    ("NetworkPolicy", select("podSelector", "matchLabels"), "only pods of the rollout"),
    ("NetworkPolicy", forget_selector, "only pods of the rollout"),
    ("ConfigMap", lambda obj: obj["metadata"].update(namespace="kube-public"), "in namespaces of Kubernetes itself"),
]


class Intruder:
    """Has the operator's credentials. It asks the API server to admit objects, and stores none."""

    def __init__(self, api: ControlPlane, release: Release, live: Object) -> None:
        self._api, self._release = api, release
        self._children = render_all(SGLangRollout.model_validate(live), SETTINGS, "token")

    def child(self, kind: str) -> Object:
        """Return what the operator would create."""
        return copy.deepcopy(next(child for child in self._children if child["kind"] == kind))

    def kubectl(self, *words: str, stdin: str | None = None) -> str:
        """Return why the call is refused; empty if it is not."""
        done = self._api.kubectl(*words, "--dry-run=server", f"--kubeconfig={self._release.kubeconfig}", stdin=stdin, check=False)
        return done.stderr if done.returncode else ""

    def create(self, obj: Object) -> str:
        return self.kubectl("apply", "--server-side", "--force-conflicts", "-f", "-", stdin=json.dumps(obj))

    def create_changed(self, kind: str, change: Change) -> str:
        obj = self.child(kind)
        change(obj)
        return self.create(obj)


Invade = Callable[..., Awaitable[Intruder]]


@pytest.fixture
def invade(api: ControlPlane, world: World, install_chart: InstallChart) -> Invade:
    """Return a function that installs the chart with values and takes the operator's credentials."""

    async def invade(*values: str) -> Intruder:
        live = await world.kube.create(rollout("demo", world.namespace, model=MODEL))
        intruder = Intruder(api, install_chart(*values), live)
        # RBAC reads the Role before it admits a RoleBinding.
        api.kubectl("apply", "-f", "-", stdin=json.dumps(intruder.child("Role")))

        async def is_enforced() -> bool:
            return "ValidatingAdmissionPolicy" in intruder.create_changed("ConfigMap", lambda obj: obj["metadata"].pop("ownerReferences"))

        await eventually("the policy is enforced", is_enforced)
        return intruder

    return invade


MODELS = 'allow.hostPaths=["/data/m"]'


async def test_policy_bounds_what_the_operator_may_create(invade: Invade) -> None:
    intruder = await invade(MODELS)
    for kind in ("ServiceAccount", "Role", "RoleBinding", "Secret", "ConfigMap", "Service", "NetworkPolicy", "Deployment", "StatefulSet"):
        assert intruder.create(intruder.child(kind)) == "", kind
    for change, message in POD_CHANGES:
        assert message in intruder.create_changed("StatefulSet", change)
    for kind, change, message in OTHER_CHANGES:
        assert message in intruder.create_changed(kind, change), kind
    daemon_set = intruder.child("Deployment") | {"kind": "DaemonSet"}
    assert 'cannot patch resource "daemonsets"' in intruder.create(daemon_set)


async def test_an_account_that_only_has_the_name_is_out_of_reach(invade: Invade, world: World, api: ControlPlane) -> None:
    """An operator that is taken over must not run pods with an administrator's account, whatever the account's name."""
    intruder = await invade(MODELS)
    foreign = "only ServiceAccounts that belong to their rollout"
    other = await world.kube.create(rollout("other", world.namespace, model=MODEL))
    for kind, name in (("StatefulSet", "demo-engine"), ("Deployment", "demo-router")):
        metadata = {"name": name, "namespace": world.namespace}
        await world.kube.create({"apiVersion": "v1", "kind": "ServiceAccount", "metadata": metadata})

        async def is_refused(kind: str = kind) -> bool:
            return foreign in intruder.create(intruder.child(kind))

        await eventually(f"{kind} is refused", is_refused)
        # A label is not enough, and another rollout's account is as foreign.
        labelled = {"labels": {"rollout.sglang.io/rollout": "demo"}}
        await world.kube.merge_patch(SERVICEACCOUNTS, world.namespace, name, {"metadata": labelled})
        assert foreign in intruder.create(intruder.child(kind))
        owner = intruder.child(kind)["metadata"]["ownerReferences"][0]
        # A real object, because the garbage collector deletes what an absent object owns.
        theirs = owner | {"name": "other", "uid": other["metadata"]["uid"]}
        await world.kube.merge_patch(SERVICEACCOUNTS, world.namespace, name, {"metadata": {"ownerReferences": [theirs]}})
        assert foreign in intruder.create(intruder.child(kind))
        await world.kube.merge_patch(SERVICEACCOUNTS, world.namespace, name, {"metadata": {"ownerReferences": [owner]}})

        async def is_admitted(kind: str = kind) -> bool:
            return intruder.create(intruder.child(kind)) == ""

        await eventually(f"{kind} with its rollout's own account", is_admitted)


async def test_values_widen_the_policy(invade: Invade) -> None:
    flags = [f"allow.{name}=true" for name in ("hostNetwork", "hostIPC", "privileged")]
    intruder = await invade('allow.hostPaths=["/"]', 'allow.serviceAccounts=["admin", "default"]', *flags)
    for change, message in POD_CHANGES:
        assert message not in intruder.create_changed("StatefulSet", change)


async def test_policy_protects_objects_of_others(invade: Invade, world: World, api: ControlPlane) -> None:
    intruder = await invade(MODELS, f"watchNamespaces={json.dumps([world.namespace])}")
    elsewhere = intruder.child("ConfigMap")
    elsewhere["metadata"]["namespace"] = "default"
    assert "only in the namespaces that it watches" in intruder.create(elsewhere)
    for obj in (
        {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": "theirs"}, "stringData": {"password": "x"}},
        {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "theirs"}, "spec": {"containers": [{"name": "c", "image": "i"}]}},
    ):
        api.kubectl("create", "-n", world.namespace, "-f", "-", stdin=json.dumps(obj))
    owned = intruder.child("Secret")
    owned["metadata"]["name"] = "theirs"
    assert "belongs to an SGLangRollout already" in intruder.kubectl(
        "apply", "--server-side", "--force-conflicts", "-f", "-", stdin=json.dumps(owned)
    )
    assert "only children, Events" in intruder.kubectl("delete", "pod", "theirs", "-n", world.namespace)
    lease = {"apiVersion": "coordination.k8s.io/v1", "kind": "Lease", "metadata": {"name": "x", "namespace": world.namespace}, "spec": {}}
    assert "only children, Events" in intruder.create(lease)


async def test_operator_for_one_namespace_has_no_rights_elsewhere(install_chart: InstallChart, world: World, api: ControlPlane) -> None:
    release = install_chart('rbac.scope="Namespace"')
    assert not [obj for obj in release.objects if obj["kind"].startswith("ClusterRole")]
    release.operator.start()
    await world.kube.create(rollout("demo", world.namespace))
    await world.serve("demo", 2)
    release.operator.stop()
    said = release.operator.said()
    assert "orbidden" not in said, said
    assert "ERROR" not in said, said
    for verb, kind, namespace in (
        ("list", "secrets", world.namespace),
        ("watch", "secrets", world.namespace),
        ("get", "secrets", "default"),
        ("create", "statefulsets.apps", "default"),
        ("list", "nodes", "default"),
        ("list", "sglangrollouts.rollout.sglang.io", "default"),
    ):
        account = f"--as=system:serviceaccount:{world.namespace}:{world.namespace}"
        assert api.kubectl("auth", "can-i", verb, kind, "-n", namespace, account, check=False).stdout.strip() == "no", (verb, kind)


async def test_refused_rollout_gets_no_children(install_chart: InstallChart, world: World) -> None:
    release = install_chart()
    release.operator.start()
    await world.kube.create(rollout("demo", world.namespace, podTemplate={"spec": {"hostIPC": True}}))

    async def message() -> str:
        ready = await world.condition("demo")
        assert ready.get("reason") == "NotAllowed", ready
        return str(ready["message"])

    assert "flag --allow-host-ipc, chart value allow.hostIPC" in await eventually("NotAllowed", message)
    assert not await world.children("demo")
