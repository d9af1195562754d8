"""ServiceAccounts and the router's Role: each as small as the work allows."""

from __future__ import annotations

from sglang_rollout.api.v1alpha1 import SGLangRollout
from sglang_rollout.controller.render import names
from sglang_rollout.controller.render.common import Object, child

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
