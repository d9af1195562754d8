"""A fleet with a base and engines beyond it (``spec.elastic``). Pure."""

from __future__ import annotations

from datetime import datetime

from sglang_rollout.controller.decide import pods
from sglang_rollout.controller.decide.view import World
from sglang_rollout.controller.render import names

PATIENCE_SECONDS = 60
"""A pod without a node for so long waits for room. A scheduler or a queue needs less to look at a pod that has just been made, also
with several tries."""


def base_members(world: World) -> int | None:
    """Return how many pods the group of the base has; None if it has all that it is to have.

    A scheduler starts no pod of a group that has fewer pods than its ``minMember``, and more than one by one if it has more.
    Which group a pod belongs to is decided when it is made. So while a rolling update takes engines into the base, or out of it, or
    gives them another number of pods, the group is as large as those that are in it, and those that will come back into it.
    """
    rollout = world.rollout
    if rollout is None or rollout.spec.elastic is None or not world.pods:
        return None
    base, size = names.base_group(rollout.name), rollout.spec.engine.pods
    wanted = {names.engine_name(rollout.name, index) for index in range(rollout.spec.base)}
    count = 0
    for engine in wanted | world.engines().keys():
        there = [pod for pod in world.pods_of(engine) if not pods.is_terminating(pod)]
        if any(pods.group_of(pod) == base for pod in there) if there else engine in wanted:
            count += world.size_of(engine) if world.child("StatefulSet", engine) else size
    # Never none: the group of an engine that is the first to come into the base must be whole as well.
    return max(count, size)


def comes_later(world: World, engine: str) -> bool:
    """Whether an engine beyond the base is not made yet, because an engine of the base has no node: it must not take its room."""
    if not is_beyond(world, engine) or world.child("StatefulSet", engine) or world.rollout is None:
        return False
    base = [names.engine_name(world.rollout.name, index) for index in range(world.rollout.spec.base)]
    return not all(len(found := world.pods_of(first)) == world.size_of(first) and all(map(pods.node_of, found)) for first in base)


def waits_for_room(world: World, engine: str, now: str) -> bool:
    """Whether an engine beyond the base has been without a node for a while. Nobody waits for it."""
    there = world.pods_of(engine) if now and is_beyond(world, engine) else []
    return any(pods.node_of(pod) is None and _age(pod, now) >= PATIENCE_SECONDS for pod in there)


def in_part(world: World, engine: str) -> bool:
    """Whether only some pods of an engine beyond the base have nodes, and a scheduler would take all of them or none."""
    nodes = [pods.node_of(pod) for pod in world.pods_of(engine)]
    gang = world.rollout is not None and world.rollout.spec.scheduling.gang is not None
    return gang and is_beyond(world, engine) and any(nodes) and not all(nodes)


def held_for_nothing(world: World, engine: str, now: str) -> list[pods.Object]:
    """Return the pods that keep room which their engine cannot use, because others of its pods were preempted a while ago.

    Not while the engine starts: its pods get their nodes one by one then, however long they have waited.
    """
    there = world.pods_of(engine)
    if not now or not in_part(world, engine) or any(map(pods.is_terminating, there)):
        return []
    placed = [pod for pod in there if pods.node_of(pod)]
    since = [_seconds((pod.get("status") or {}).get("startTime"), now) if pods.node_of(pod) else _age(pod, now) for pod in there]
    return placed if min(since) >= PATIENCE_SECONDS else []


def is_beyond(world: World, engine: str) -> bool:
    """Whether an engine is wanted beyond the base."""
    rollout, index = world.rollout, names.engine_index(world.cr["metadata"]["name"], engine)
    return rollout is not None and index is not None and rollout.spec.base <= index < rollout.spec.engines


def _age(pod: pods.Object, now: str) -> float:
    return _seconds(pod["metadata"].get("creationTimestamp"), now)


def _seconds(since: str | None, now: str) -> float:
    return (datetime.fromisoformat(now) - datetime.fromisoformat(since or now)).total_seconds()
