"""The rights that the operator needs, beside the code that needs them; a test runs it with exactly these.

The chart grants them in a ClusterRole, or in a Role per namespace when the operator looks after named namespaces only.
"""

from __future__ import annotations

from sglang_rollout.kube.resources import Object

# get: before something is made, whether an object of somebody else has its name.
_HEAL = ["get", "list", "watch", "create", "patch", "delete"]

OPERATOR_RULES: list[Object] = [
    {"apiGroups": ["rollout.sglang.io"], "resources": ["sglangrollouts"], "verbs": ["get", "list", "watch"]},
    {"apiGroups": ["rollout.sglang.io"], "resources": ["sglangrollouts/status"], "verbs": ["patch"]},
    # Asked for where OwnerReferencesPermissionEnforcement is on (OpenShift): we set blockOwnerDeletion.
    {"apiGroups": ["rollout.sglang.io"], "resources": ["sglangrollouts/finalizers"], "verbs": ["update"]},
    {"apiGroups": [""], "resources": ["serviceaccounts", "services", "secrets"], "verbs": _HEAL},
    # update is the coordinator's: nobody may grant in a Role what he does not have himself.
    {"apiGroups": [""], "resources": ["configmaps"], "verbs": ["update", *_HEAL]},
    {"apiGroups": ["coordination.k8s.io"], "resources": ["leases"], "verbs": ["create", "get", "patch", "update"]},
    {"apiGroups": ["discovery.k8s.io"], "resources": ["endpointslices"], "verbs": ["get", "list", "watch"]},
    # delete: an outdated engine's pod, one at a time.
    {"apiGroups": [""], "resources": ["pods"], "verbs": ["list", "watch", "delete"]},
    {"apiGroups": ["apps"], "resources": ["daemonsets", "deployments", "statefulsets"], "verbs": _HEAL},
    {"apiGroups": ["rbac.authorization.k8s.io"], "resources": ["roles", "rolebindings"], "verbs": _HEAL},
    # list: why pods of an engine cannot be made, which StatefulSets tell in Events alone.
    {"apiGroups": [""], "resources": ["events"], "verbs": ["get", "list", "create", "patch"]},
    # Children of rollouts with scheduling.gang; clusters without coscheduling have no such kind.
    {"apiGroups": ["scheduling.x-k8s.io"], "resources": ["podgroups"], "verbs": _HEAL},
    # Whether the queue of scheduling.queueName exists, and whether it admits.
    {"apiGroups": ["kueue.x-k8s.io"], "resources": ["localqueues"], "verbs": ["get"]},
]
"""``rules`` of the operator's ClusterRole, or of its Role in each namespace."""

CLUSTER_RULES: list[Object] = [
    # Whether any node has the GPUs that an engine's pod asks for. Without it the operator does all else.
    {"apiGroups": [""], "resources": ["nodes"], "verbs": ["list"]},
]
"""What only a ClusterRole can grant."""
