"""RBAC rules that the operator needs. A test runs the operator with exactly these rules.

The chart grants them in a ClusterRole, or in a Role per namespace if the operator watches named namespaces only.
"""

from __future__ import annotations

from sglang_rollout.kube.resources import Object

# get: checks before a create whether a foreign object has the name.
_HEAL = ["get", "list", "watch", "create", "patch"]
_PRUNE = [*_HEAL, "delete"]

OPERATOR_RULES: list[Object] = [
    {"apiGroups": ["rollout.sglang.io"], "resources": ["sglangrollouts"], "verbs": ["get", "list", "watch"]},
    {"apiGroups": ["rollout.sglang.io"], "resources": ["sglangrollouts/status"], "verbs": ["patch"]},
    # Required by OwnerReferencesPermissionEnforcement (OpenShift), because owner references set blockOwnerDeletion.
    {"apiGroups": ["rollout.sglang.io"], "resources": ["sglangrollouts/finalizers"], "verbs": ["update"]},
    {"apiGroups": [""], "resources": ["serviceaccounts"], "verbs": _HEAL},
    # delete: the Service of the weight store, which a rollout with another transport no longer has.
    {"apiGroups": [""], "resources": ["services"], "verbs": _PRUNE},
    # No list, no watch: the operator reads the Secret of a rollout by its name.
    {"apiGroups": [""], "resources": ["secrets"], "verbs": ["get", "create", "patch"]},
    # update: for the coordinator's Role. RBAC forbids granting a right that the grantor lacks.
    {"apiGroups": [""], "resources": ["configmaps"], "verbs": ["update", *_HEAL]},
    # The operator's own Lease in each namespace with rollouts, and the coordinator's Role, as for ConfigMaps.
    {"apiGroups": ["coordination.k8s.io"], "resources": ["leases"], "verbs": ["create", "get", "patch", "update"]},
    {"apiGroups": ["discovery.k8s.io"], "resources": ["endpointslices"], "verbs": ["get", "list", "watch"]},
    # delete: pods of an outdated engine, in a rolling update.
    {"apiGroups": [""], "resources": ["pods"], "verbs": ["list", "watch", "delete"]},
    {"apiGroups": ["apps"], "resources": ["deployments"], "verbs": _HEAL},
    {"apiGroups": ["apps"], "resources": ["statefulsets"], "verbs": _PRUNE},
    {"apiGroups": ["rbac.authorization.k8s.io"], "resources": ["roles", "rolebindings"], "verbs": _HEAL},
    {"apiGroups": ["networking.k8s.io"], "resources": ["networkpolicies"], "verbs": _PRUNE},
    {"apiGroups": ["policy"], "resources": ["poddisruptionbudgets"], "verbs": _PRUNE},
    # list: the StatefulSet controller reports only in Events why pods cannot be created. The operator counts its own Events.
    {"apiGroups": [""], "resources": ["events"], "verbs": ["get", "list", "create", "patch"]},
    # Children of rollouts with scheduling.gang. Clusters without coscheduling do not know this kind.
    {"apiGroups": ["scheduling.x-k8s.io"], "resources": ["podgroups"], "verbs": _PRUNE},
    # Shows whether the queue of scheduling.queueName exists and is active.
    {"apiGroups": ["kueue.x-k8s.io"], "resources": ["localqueues"], "verbs": ["get"]},
]
"""``rules`` of the operator's ClusterRole, or of its Role in each namespace."""

CLUSTER_RULES: list[Object] = [
    # Shows whether any node has the GPUs that an engine pod asks for. Without this rule, only that message is missing.
    {"apiGroups": [""], "resources": ["nodes"], "verbs": ["list"]},
]
"""Rules that only a ClusterRole can grant."""
