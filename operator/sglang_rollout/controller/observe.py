"""Read everything that a decision about one rollout needs, live from the API server, and join it into a view.

Children and pods are found by label. Facts about the cluster are read only for rollouts that ask for them, and only while they
matter. So a running fleet costs no reads beyond its own objects.
"""

from __future__ import annotations

import asyncio
from dataclasses import replace

from sglang_rollout.api.v1alpha1 import SGLangRollout
from sglang_rollout.controller.certificate import describe_defect, describe_missing_secret
from sglang_rollout.controller.decide.pods import Pod
from sglang_rollout.controller.decide.prerequisites import (
    Cluster,
    LargestNode,
    describe_gang_problem,
    describe_missing_queue,
    find_creation_errors,
    find_largest_node,
    find_queue_stop,
)
from sglang_rollout.controller.decide.view import FleetView, build_fleet_view
from sglang_rollout.controller.render import names
from sglang_rollout.kube.client import Kube
from sglang_rollout.kube.errors import NotFound, Refused
from sglang_rollout.kube.resources import EVENTS, NODES, POD_GROUPS, PODS, ROLLOUTS, SECRETS, Object, Resource

KUEUE = "kueue.x-k8s.io"


async def observe(kube: Kube, namespace: str, name: str) -> FleetView | None:
    """Return the view of one rollout; None if the rollout does not exist."""
    labels: dict[str, str | None] = {names.LABEL_ROLLOUT: name}
    try:
        rollout = await kube.get(ROLLOUTS, namespace, name)
    except NotFound:
        return None
    # The rollout is read first. Children newer than the rollout do no harm, but a rollout newer than its children would be
    # planned with objects that have already been replaced.
    *listings, pods = await asyncio.gather(*(kube.list(resource, namespace, labels=labels) for resource in (*names.LISTED_KINDS, PODS)))
    children: list[Object] = [item for listing in listings for item in listing.items]
    secrets = (names.control_name(name), names.credentials_name(name))
    found = await asyncio.gather(*(_get_secret(kube, namespace, name, secret) for secret in secrets))
    children += [secret for secret in found if secret is not None]
    return await _add_cluster(kube, build_fleet_view(rollout, children, pods.items))


async def _get_secret(kube: Kube, namespace: str, rollout: str, name: str) -> Object | None:
    """Return a Secret if it has the rollout's label, as a list by label would."""
    try:
        secret = await kube.get(SECRETS, namespace, name)
    except NotFound:
        return None
    is_ours = (secret["metadata"].get("labels") or {}).get(names.LABEL_ROLLOUT) == rollout
    return secret if is_ours else None


async def _add_cluster(kube: Kube, fleet: FleetView) -> FleetView:
    """Return ``fleet`` with its PodGroups and facts about the cluster."""
    rollout = fleet.rollout
    if rollout is None:
        return fleet
    groups, problem = await _list_pod_groups(kube, fleet, rollout)
    cluster = Cluster(gang_problem=problem, tls_problem=await _check_certificate(kube, rollout))
    if _lacks_nodes(fleet, rollout):
        stopped, absent = await _check_queue(kube, rollout)
        largest = await _find_largest_node(kube, rollout)
        cluster = replace(cluster, queue_problem=absent, queue_stopped=stopped, largest=largest)
    if any(engine.lacks_pods for engine in fleet.existing) or (fleet.store is not None and fleet.store_pod is None):
        cluster = replace(cluster, creation_errors=await _find_creation_errors(kube, fleet, rollout))
    children = {**fleet.children, **{(group["kind"], group["metadata"]["name"]): group for group in groups}}
    return replace(fleet, children=children, cluster=cluster)


async def _check_certificate(kube: Kube, rollout: SGLangRollout) -> str:
    """Return why the Secret of ``security.tls`` cannot be used; empty if it can, or if there is none."""
    tls = rollout.spec.security.tls
    if tls is None:
        return ""
    try:
        return describe_defect(await kube.get(SECRETS, rollout.namespace, tls.secret_name))
    except NotFound:
        return describe_missing_secret(tls.secret_name, rollout.namespace)


def _engine_pods(fleet: FleetView) -> list[Pod]:
    return [pod for pod in fleet.pods.values() if pod.component == names.COMPONENT_ENGINE]


def _lacks_nodes(fleet: FleetView, rollout: SGLangRollout) -> bool:
    """Return True if a wanted engine has no node yet."""
    pods = _engine_pods(fleet)
    return len(pods) < rollout.spec.engines or any(not pod.node for pod in pods)


async def _list_pod_groups(kube: Kube, fleet: FleetView, rollout: SGLangRollout) -> tuple[list[Object], str]:
    """Return the PodGroups, and why none can be created.

    PodGroups are listed if the spec asks for them, or if a pod belongs to a PodGroup that an earlier spec asked for.
    """
    wanted = rollout.spec.scheduling.gang is not None
    if not wanted and not any(pod.pod_group for pod in _engine_pods(fleet)):
        return [], ""
    try:
        return (await kube.list(POD_GROUPS, rollout.namespace, labels={names.LABEL_ROLLOUT: rollout.name})).items, ""
    except NotFound:
        return [], describe_gang_problem() if wanted else ""
    except Refused as error:
        return [], describe_gang_problem(str(error)) if wanted else ""


async def _check_queue(kube: Kube, rollout: SGLangRollout) -> tuple[str, str]:
    """Return why the LocalQueue is stopped and why it is missing; empty strings if neither applies."""
    name = rollout.spec.scheduling.queue_name
    if name is None:
        return "", ""
    try:
        # Any version of Kueue's API suffices, because the fields that are read are the same in all versions.
        group = await kube.get_path(f"/apis/{KUEUE}")
    except NotFound:
        return "", describe_missing_queue(name, rollout.namespace, installed=False)
    resource = Resource(group["preferredVersion"]["groupVersion"], "localqueues", "LocalQueue")
    try:
        return find_queue_stop(await kube.get(resource, rollout.namespace, name)), ""
    except NotFound:
        return "", describe_missing_queue(name, rollout.namespace, installed=True)
    except Refused:
        return "", ""  # the operator may not read queues, so the state of the queue is unknown


async def _find_creation_errors(kube: Kube, fleet: FleetView, rollout: SGLangRollout) -> dict[str, str]:
    """Return why pods of engines or of the weight store cannot be created. The StatefulSet controller reports the reason only in Events."""
    try:
        events = await kube.list(EVENTS, rollout.namespace, fields={"involvedObject.kind": "StatefulSet", "reason": "FailedCreate"})
    except Refused:
        return {}  # the RBAC rules are those of an older chart
    statefulsets = [*(engine.statefulset for engine in fleet.existing), fleet.store]
    return find_creation_errors(events.items, [statefulset for statefulset in statefulsets if statefulset])


async def _find_largest_node(kube: Kube, rollout: SGLangRollout) -> LargestNode | None:
    resource = rollout.spec.engine.gpu_resource
    if not resource:
        return None
    try:
        return find_largest_node((await kube.list(NODES)).items, resource)
    except Refused:
        return None  # an operator for some namespaces only may not list nodes
