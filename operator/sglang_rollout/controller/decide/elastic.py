"""Fleets with a base and surplus engines (``spec.elastic``): which engines wait for room, and which give room back. Pure."""

from __future__ import annotations

from sglang_rollout.controller.decide.pods import Pod
from sglang_rollout.controller.decide.times import seconds_since
from sglang_rollout.controller.decide.view import EngineView, FleetView
from sglang_rollout.controller.render import names

WAITING_FOR_ROOM_SECONDS = 60
"""Age after which a pod without a node counts as waiting for room. Schedulers and queues need less time for a new pod, even with
several attempts."""


def count_base_group_members(fleet: FleetView) -> int | None:
    """Return the current number of pods in the base's PodGroup; None if the group has its final size.

    A scheduler starts no pod of a group with fewer pods than ``minMember``. If the group has more pods, the scheduler starts pods
    one by one. A pod gets its group when the pod is created. A rolling update may move engines into the base or out of it, or change
    their number of pods. Meanwhile, the group counts its present pods and the pods that will rejoin it.
    """
    rollout = fleet.rollout
    if rollout is None or rollout.spec.elastic is None or not fleet.pods:
        return None
    group, size = names.base_group(rollout.name), rollout.spec.engine.pods
    count = 0
    for engine in fleet.engines:
        remaining = [pod for pod in engine.pods if not pod.is_terminating]
        belongs = any(pod.pod_group == group for pod in remaining) if remaining else engine.is_wanted and not engine.is_surplus
        if belongs:
            count += engine.size if engine.statefulset else size
    # At least one engine: the group of the first engine that enters the base must be complete as well.
    return max(count, size)


def is_held_for_base(fleet: FleetView, engine: EngineView) -> bool:
    """Return True if a surplus engine must not be created yet, because an engine of the base has no node and may need the room."""
    return engine.is_surplus and engine.statefulset is None and not fleet.base_has_nodes


def waits_for_room(engine: EngineView, now: str) -> bool:
    """Return True if a surplus engine has been without a node for a while. No other engine waits for such an engine."""
    if not now or not engine.is_surplus:
        return False
    return any(pod.node is None and _age_seconds(pod, now) >= WAITING_FOR_ROOM_SECONDS for pod in engine.pods)


def is_partly_placed(fleet: FleetView, engine: EngineView) -> bool:
    """Return True if only some pods of a surplus engine have nodes although its scheduler places all of them or none."""
    if fleet.rollout is None or fleet.rollout.spec.scheduling.gang is None or not engine.is_surplus:
        return False
    return any(pod.node for pod in engine.pods) and not all(pod.node for pod in engine.pods)


def find_stranded_pods(fleet: FleetView, engine: EngineView, now: str) -> list[Pod]:
    """Return pods that hold room which their engine cannot use, because its other pods were preempted a while ago.

    Returns none while the engine starts, because its pods then get their nodes one by one.
    """
    if not now or not is_partly_placed(fleet, engine) or any(pod.is_terminating for pod in engine.pods):
        return []
    since = [seconds_since(pod.status.get("startTime"), now) if pod.node else _age_seconds(pod, now) for pod in engine.pods]
    return [pod for pod in engine.pods if pod.node] if min(since) >= WAITING_FOR_ROOM_SECONDS else []


def _age_seconds(pod: Pod, now: str) -> float:
    return seconds_since(pod.created, now)
