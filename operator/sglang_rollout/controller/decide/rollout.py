"""The rolling update: which pods to delete now, so that engines come back at the current revision. Pure.

At most one engine is taken out of service per pass, in the order of these questions:

    StatefulSet not applied yet, or its controller lags     -> wait; a pod deleted now would return unchanged
    outdated engine that is not ready, or lacks pods        -> delete its pods: it serves no request
    another engine does not serve (and is not paused)       -> wait; surplus engines without room are ignored,
                                                               and engines that cannot take staged versions
    outdated engine                                         -> delete its pods; an engine that does not serve comes first
    fleet Asleep by spec.state, so that no engine serves    -> delete the pods of one engine that was made without memorySaver

Three restarts happen beside this order:

- An engine on an avoided node that does not come up is moved. Its StatefulSet gets the affinity first, then its pods are deleted.
- Pods of an earlier release are recreated if their engine got a pod of this release, which has another credential.
- The remaining pods of a partly preempted surplus engine are deleted. Its pod group returns when there is room for all pods.

If the number of pods per engine changes, the engine is recreated with its StatefulSet when its turn comes. SGLang cannot add
ranks, and pods that are removed one by one would stop the engine before its turn.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from operator import attrgetter

from sglang_rollout.api.engine_flags import FLAGS
from sglang_rollout.api.pod_template import STAGED_VOLUME
from sglang_rollout.controller.decide.elastic import find_stranded_pods, waits_for_room
from sglang_rollout.controller.decide.pods import Pod
from sglang_rollout.controller.decide.view import EngineView, FleetView
from sglang_rollout.wire.states import FleetState


@dataclass(frozen=True)
class Restart:
    """A pod to delete, or the StatefulSet of an engine that changes its number of pods."""

    engine: EngineView
    pod: Pod | None
    """The pod to delete; None to delete the StatefulSet."""
    reason: str


Outdated = Mapping[int, Sequence[Pod | None]]
"""Result of :func:`_find_outdated` for each outdated engine, by its index."""


def plan_restarts(fleet: FleetView, unapplied: Set[str], now: str) -> tuple[list[Restart], bool]:
    """Return what to delete now, and whether other restarts wait.

    Args:
        fleet: The view of the rollout.
        unapplied: Names of children that this pass applies. A pod deleted now could return from the old template.
        now: Time (RFC 3339) for surplus engines that wait for room; empty if unknown.
    """
    outdated = {engine.index: found for engine in fleet.wanted if (found := _find_outdated(fleet, engine))}
    candidates = list(_plan_moves(fleet, outdated.keys(), now))
    moves = [move for move in candidates if _is_settled(move.engine, unapplied)]
    if not outdated:
        return moves, len(moves) < len(candidates)
    settled = [fleet.wanted[index] for index in outdated if _is_settled(fleet.wanted[index], unapplied)]
    # Includes engines without pods, for example because a quota rejects them.
    broken = [engine for engine in settled if not engine.is_ready]
    if broken:
        return [*_restart_all(broken, outdated, "outdated, and not ready"), *moves], True
    considered = [engine for engine in fleet.wanted if not waits_for_room(engine, now)]
    return [*_plan_next_engine(fleet, considered, settled, outdated), *moves], True


def _plan_next_engine(
    fleet: FleetView, considered: Sequence[EngineView], settled: Sequence[EngineView], outdated: Outdated
) -> list[Restart]:
    """Return the restarts of the next engine of the rolling update; none if the update must wait."""
    away = {engine.index for engine in considered if not (engine.is_serving or engine.is_paused_by_spec)}
    stale = {engine.index for engine in settled if _cannot_be_updated(fleet, engine)}
    # An outdated engine that does not serve comes first; then the highest index, as everywhere in Kubernetes.
    for engine in sorted(settled, key=lambda candidate: (candidate.index not in away, -candidate.index)):
        if away - stale <= {engine.index}:
            return _restart_all([engine], outdated, "outdated, and all other engines serve")
    # No engine of a sleeping fleet serves, so an engine that cannot sleep has to be recreated anyway, one at a time.
    awake = [engine for engine in settled if _cannot_sleep(fleet, engine)]
    if awake and all(engine.is_ready for engine in considered):
        return _restart_all([max(awake, key=attrgetter("index"))], outdated, "outdated, and cannot sleep")
    return []


def _restart_all(engines: Sequence[EngineView], outdated: Outdated, reason: str) -> list[Restart]:
    return [Restart(engine, pod, reason) for engine in engines for pod in outdated[engine.index]]


def _find_outdated(fleet: FleetView, engine: EngineView) -> list[Pod | None]:
    """Return the outdated pods of an engine. ``[None]`` stands for its StatefulSet, if the number of pods changes."""
    if fleet.rollout is not None and engine.statefulset is not None and engine.size != fleet.rollout.spec.engine.pods:
        return [] if engine.statefulset["metadata"].get("deletionTimestamp") else [None]
    return [pod for pod in engine.pods if engine.is_outdated(pod) and not pod.is_terminating]


def _plan_moves(fleet: FleetView, outdated: Set[int], now: str) -> Iterator[Restart]:
    """Yield pods to move off avoided nodes, pods that cannot talk to the other pods of their engine, and pods that hold room in vain.

    All pods of a moved engine are restarted, as in every restart. Engines that run on an avoided node stay there.
    """
    for engine in fleet.wanted:
        if engine.index in outdated:
            continue
        remaining = [pod for pod in engine.pods if not pod.is_terminating]
        failing = next((pod.node for pod in remaining if pod.node in fleet.avoided_nodes and not pod.has_started), None)
        if failing:
            yield from (Restart(engine, pod, f"node {failing} is avoided") for pod in remaining)
            continue
        earlier = [pod for pod in remaining if pod.mounts_key]
        if len(earlier) < len(remaining):
            yield from (Restart(engine, pod, "its credential differs from that of the engine's other pods") for pod in earlier)
        for pod in find_stranded_pods(fleet, engine, now):
            yield Restart(engine, pod, "other pods of its engine were preempted")


def _is_settled(engine: EngineView, unapplied: Set[str]) -> bool:
    """Return True if a deleted pod would come back from the wanted template."""
    return engine.name not in unapplied and engine.is_observed


def _cannot_be_updated(fleet: FleetView, engine: EngineView) -> bool:
    """Return True if an engine lacks the committed version, and cannot take any, because its pods were made without staged versions.

    Such engines serve again only after their restart. Several of them must not wait for one another.
    """
    if fleet.rollout is None or not fleet.rollout.spec.weights.is_staged or fleet.record is None:
        return False
    is_idle = fleet.record.under_way is None and not engine.holds_committed
    return is_idle and not any(pod.has_volume(STAGED_VOLUME) for pod in engine.pods)


def _cannot_sleep(fleet: FleetView, engine: EngineView) -> bool:
    """Return True if the fleet sleeps by ``spec.state`` but this engine was created without ``memorySaver``.

    Such an engine keeps its memory and serves no request until it is recreated.
    """
    is_asleep, row = fleet.record is not None and fleet.record.state is FleetState.ASLEEP, engine.row
    if not is_asleep or row is None or row.gate_open or row.released:
        return False
    return not any(pod.has_engine_flag(FLAGS["memory_saver"]) for pod in engine.pods)
