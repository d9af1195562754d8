"""Which nodes engines must not use (``scheduling.avoidNodes``). Pure.

A node with a bad device fails one engine after the other; a bad spec fails engines on every node. In the order of the questions:

    an engine failed in a pod                   -> remember it in the status: the kubelet reports the last two ends of a live pod
    enough failures on one node in the window?  -> no: nothing
    an engine of the same spec is up
    on a node without such a failure?           -> no: the node is not to blame, or no better node is known
    a quarter of the nodes avoided already?     -> yes: nothing; chance or a shared cause must not take the fleet's room
    otherwise                                   -> avoid the node until its time is over

The plan reads the result back from the status (:attr:`FleetView.avoided_nodes`), so the result survives a restart of the operator.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

from sglang_rollout.api.scheduling_spec import AT_ONCE_SECONDS, AvoidNodes
from sglang_rollout.api.status import MAX_AVOIDED_NODES, MAX_NODE_FAILURES, AvoidedNode, NodeFailure, Reason
from sglang_rollout.controller.decide.view import EngineView, FleetView
from sglang_rollout.controller.render.hashing import revision
from sglang_rollout.wire.reasons import end_sentence

MIN_NODES_PER_AVOIDED = 4
"""At most one of this many nodes is avoided; if there are fewer nodes, one."""
_MAX_MESSAGE_CHARACTERS = 512


@dataclass(frozen=True)
class Avoidance:
    """What the status says about nodes."""

    nodes: Sequence[AvoidedNode] = ()
    """Nodes that engines must not use."""
    failures: Sequence[NodeFailure] = ()
    """Failures in the window, oldest first."""


def decide_avoidance(fleet: FleetView, now: str) -> Avoidance:
    """Return the nodes to avoid from ``now`` (RFC 3339) on, and the failures to remember for the next pass."""
    rollout = fleet.rollout
    policy = rollout.spec.scheduling.avoid_nodes if rollout is not None else None
    if rollout is None or policy is None:
        return Avoidance()
    # Times compare as text, because Kubernetes and the operator write all times in UTC, to the second.
    avoided = [AvoidedNode.model_validate(row) for row in fleet.previous.get("avoidedNodes") or []]
    remaining = [row for row in avoided if row.until > now]
    current = {revision(rollout), *(engine.revision for engine in fleet.wanted)}
    failures = _collect_failures(fleet, current, _add_seconds(now, -policy.within_seconds))
    if not _runs_elsewhere(fleet, current, {failure.node for failure in failures}):
        return Avoidance(remaining, failures)
    return Avoidance([*remaining, *_find_new_nodes(fleet, policy, failures, remaining, now)], failures)


def seconds_until_expiry(status: Mapping[str, Any], now: str) -> float | None:
    """Return the seconds until the first avoided node of a status may be used again; None if no node is avoided."""
    ends = [str(row["until"]) for row in status.get("avoidedNodes") or []]
    return (datetime.fromisoformat(min(ends)) - datetime.fromisoformat(now)).total_seconds() if ends else None


def _collect_failures(fleet: FleetView, current: Set[str], after: str) -> list[NodeFailure]:
    """Return remembered and new failures of pods of the current spec."""
    seen = [
        NodeFailure(
            node=pod.node,
            engine=engine.name,
            revision=pod.revision,
            time=end.time,
            reason=end.reason,
            message=end.message[:_MAX_MESSAGE_CHARACTERS],
        )
        for engine in fleet.existing
        for pod in engine.pods
        if pod.node
        for end in pod.engine_failures()
    ]
    known = [NodeFailure.model_validate(row) for row in fleet.previous.get("nodeFailures") or []]
    found = {(failure.time, failure.node, failure.engine): failure for failure in (*seen, *known)}
    counted = [failure for _, failure in sorted(found.items()) if failure.time > after and failure.revision in current]
    return counted[-MAX_NODE_FAILURES:]


def _runs_elsewhere(fleet: FleetView, current: Set[str], failing: Set[str]) -> bool:
    """Return True if an engine of the current spec is up, and none of its nodes has failed an engine."""

    def is_proof(engine: EngineView) -> bool:
        return engine.is_ready and all(pod.revision in current and pod.node not in failing for pod in engine.pods)

    return any(is_proof(engine) for engine in fleet.existing)


def _find_new_nodes(
    fleet: FleetView, policy: AvoidNodes, failures: Sequence[NodeFailure], remaining: Sequence[AvoidedNode], now: str
) -> list[AvoidedNode]:
    """Return nodes to avoid in addition to ``remaining``, within the limit; most failures first."""
    avoided = {row.node for row in remaining}
    by_node: dict[str, list[NodeFailure]] = defaultdict(list)
    for failure in failures:
        by_node[failure.node].append(failure)
    counts = {node: _count_incidents(found) for node, found in by_node.items()}
    found = [node for node in sorted(counts, key=lambda node: -counts[node]) if counts[node] >= policy.failures and node not in avoided]
    running = {pod.node for engine in fleet.existing for pod in engine.pods if pod.node}
    limit = min(max(1, len(running | avoided | counts.keys()) // MIN_NODES_PER_AVOIDED), MAX_AVOIDED_NODES)
    until = _add_seconds(now, policy.for_seconds)
    return [
        AvoidedNode(node=node, reason=Reason.ENGINES_FAILED.value, message=_describe(counts[node], by_node[node]), since=now, until=until)
        for node in found[: max(0, limit - len(remaining))]
    ]


def _count_incidents(failures: Sequence[NodeFailure]) -> int:
    """Return the number of incidents. Failures within ``AT_ONCE_SECONDS`` of the first of them count as one incident."""
    count, until = 0, ""
    for failure in failures:
        if failure.time >= until:
            count, until = count + 1, _add_seconds(failure.time, AT_ONCE_SECONDS)
    return count


def _describe(count: int, failures: Sequence[NodeFailure]) -> str:
    first, last = failures[0], failures[-1]
    many = "an engine failed there" if count == 1 else f"engines failed there {count} times since {first.time}"
    return end_sentence(f"{many}, {last.engine} at {last.time}: {last.message}")


def _add_seconds(time: str, seconds: int) -> str:
    return (datetime.fromisoformat(time) + timedelta(seconds=seconds)).strftime("%Y-%m-%dT%H:%M:%SZ")
