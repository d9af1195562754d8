"""Look up what :mod:`core.cluster` decides on. Only for rollouts that ask for it, and only while it matters: a fleet that runs costs
no read more than its own objects."""

from __future__ import annotations

from dataclasses import replace

from sglang_rollout.api.v1alpha1 import SGLangRollout
from sglang_rollout.controller.decide.prerequisites import (
    Cluster,
    LargestNode,
    gang_problem,
    largest_node,
    queue_problem,
    queue_stopped,
    uncreated,
)
from sglang_rollout.controller.decide.view import World
from sglang_rollout.controller.render import names
from sglang_rollout.kube.client import Kube
from sglang_rollout.kube.errors import NotFound, Refused
from sglang_rollout.kube.resources import EVENTS, NODES, POD_GROUPS, Object, Resource

KUEUE = "kueue.x-k8s.io"


async def with_cluster(kube: Kube, world: World) -> World:
    """Return ``world`` with its PodGroups and with what the cluster has for it."""
    rollout = world.rollout
    if rollout is None:
        return world
    groups, problem = await _pod_groups(kube, world, rollout)
    found = Cluster(gang_problem=problem)
    if _homeless(world, rollout):
        stopped, absent = await _queue(kube, rollout)
        largest = await _largest(kube, rollout)
        found = replace(found, queue_problem=absent, queue_stopped=stopped, largest=largest)
    if any(map(world.lacks_pods, world.engines())):
        found = replace(found, uncreated=await _uncreated(kube, world, rollout))
    children = {**world.children, **{(group["kind"], group["metadata"]["name"]): group for group in groups}}
    return replace(world, children=children, cluster=found)


def _engine_pods(world: World) -> list[Object]:
    return [
        pod for pod in world.pods.values() if (pod["metadata"].get("labels") or {}).get(names.LABEL_COMPONENT) == names.COMPONENT_ENGINE
    ]


def _homeless(world: World, rollout: SGLangRollout) -> bool:
    """Whether a wanted engine has no node yet."""
    pods = _engine_pods(world)
    return len(pods) < rollout.spec.engines or any(not (pod.get("spec") or {}).get("nodeName") for pod in pods)


async def _pod_groups(kube: Kube, world: World, rollout: SGLangRollout) -> tuple[list[Object], str]:
    """The PodGroups that there are, and why there can be none. Pods that belong to one say that they were wanted once."""
    wanted = rollout.spec.scheduling.gang is not None
    once = any(names.LABEL_POD_GROUP in (pod["metadata"].get("labels") or {}) for pod in _engine_pods(world))
    if not wanted and not once:
        return [], ""
    try:
        return (await kube.list(POD_GROUPS, rollout.namespace, labels={names.LABEL_ROLLOUT: rollout.name})).items, ""
    except NotFound:
        return [], gang_problem() if wanted else ""
    except Refused as error:
        return [], gang_problem(str(error)) if wanted else ""


async def _queue(kube: Kube, rollout: SGLangRollout) -> tuple[str, str]:
    """Why the queue admits nobody, and why it is none."""
    name = rollout.spec.scheduling.queue_name
    if name is None:
        return "", ""
    try:
        # Whatever version this Kueue prefers: what is read is the same in all of them.
        group = await kube.get_path(f"/apis/{KUEUE}")
    except NotFound:
        return "", queue_problem(name, rollout.namespace, installed=False)
    resource = Resource(KUEUE, group["preferredVersion"]["version"], "localqueues", "LocalQueue")
    try:
        return queue_stopped(await kube.get(resource, rollout.namespace, name)), ""
    except NotFound:
        return "", queue_problem(name, rollout.namespace, installed=True)
    except Refused:
        return "", ""  # not allowed to look: then Kueue itself is the only one who can say


async def _uncreated(kube: Kube, world: World, rollout: SGLangRollout) -> dict[str, str]:
    """Why pods of engines cannot be made. Only their controller can say, and it does in Events alone."""
    try:
        events = await kube.list(EVENTS, rollout.namespace, fields={"involvedObject.kind": "StatefulSet", "reason": "FailedCreate"})
    except Refused:
        return {}  # not allowed to look: a chart of an older release
    return uncreated(events.items, world.engines())


async def _largest(kube: Kube, rollout: SGLangRollout) -> LargestNode | None:
    resource = rollout.spec.engine.gpu_resource
    if not resource:
        return None
    try:
        return largest_node((await kube.list(NODES)).items, resource)
    except Refused:
        return None  # an operator for some namespaces only may not see nodes
