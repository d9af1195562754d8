"""Which nodes engines are kept off (``scheduling.avoidNodes``). Pure: the time is given.

A node with a bad device fails one engine after the other; a bad spec fails engines everywhere. In the order of the questions:

    an engine failed in a pod                  -> remembered in status: the kubelet tells the last two ends, while the pod is there
    enough failures on one node in the time?   -> no: nothing
    an engine of the same spec is up
    on a node without any of them?             -> no: the node is not to blame, or nobody knows a better one
    a quarter of the nodes avoided already?    -> yes: nothing; chance, or something they share, must not take the fleet's room
    otherwise                                  -> avoided until its time is over

The plan reads back what is written here (:attr:`World.avoided`), so nothing is moved for a reason that a restart would forget.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

from sglang_rollout.api.scheduling_spec import AT_ONCE_SECONDS, AvoidNodes
from sglang_rollout.api.status import MAX_AVOIDED_NODES, MAX_NODE_FAILURES, AvoidedNode, NodeFailure
from sglang_rollout.controller.decide import pods
from sglang_rollout.controller.decide.sentences import sentence
from sglang_rollout.controller.decide.view import World
from sglang_rollout.controller.render.hashing import revision, revisions

SHARE = 4
"""At most one of so many nodes is avoided; of fewer nodes, one."""
_LONGEST_REASON = 512


@dataclass(frozen=True)
class Avoidance:
    """What status says about nodes."""

    nodes: Sequence[AvoidedNode] = ()
    """Nodes that engines are kept off."""
    failures: Sequence[NodeFailure] = ()
    """Failures that count, oldest first."""


def avoidance(world: World, now: str) -> Avoidance:
    """Return which nodes are to be avoided from ``now`` (RFC 3339) on, and what is to be remembered for the next look."""
    rollout = world.rollout
    policy = rollout.spec.scheduling.avoid_nodes if rollout is not None else None
    if rollout is None or policy is None:
        return Avoidance()
    # Times are compared as text: Kubernetes and we write all of them in UTC, to the second.
    known = [AvoidedNode.model_validate(row) for row in _memory(world, "avoidedNodes")]
    kept = [row for row in known if row.until > now]
    current = {revision(rollout), *revisions(rollout).values()}
    failures = _failures(world, current, _later(now, -policy.within_seconds))
    if not _runs_elsewhere(world, current, {failure.node for failure in failures}):
        return Avoidance(kept, failures)
    return Avoidance([*kept, *_newly(world, policy, failures, kept, now)], failures)


def expires_in(status: Mapping[str, Any], now: str) -> float | None:
    """Return in how many seconds the first node of a status may be used again; None if none is avoided."""
    ends = [str(row["until"]) for row in status.get("avoidedNodes") or []]
    return (datetime.fromisoformat(min(ends)) - datetime.fromisoformat(now)).total_seconds() if ends else None


def _failures(world: World, current: Set[str], after: str) -> list[NodeFailure]:
    """What is remembered and what is seen, of pods of the current spec."""
    seen = [
        NodeFailure(node=node, engine=engine, revision=pods.revision_of(pod), time=time, reason=why[:_LONGEST_REASON])
        for engine in world.engines()
        for pod in world.pods_of(engine)
        if (node := pods.node_of(pod))
        for time, why in pods.failures(pod)
    ]
    known = [NodeFailure.model_validate(row) for row in _memory(world, "nodeFailures")]
    found = {(failure.time, failure.node, failure.engine): failure for failure in (*seen, *known)}
    counted = [failure for _, failure in sorted(found.items()) if failure.time > after and failure.revision in current]
    return counted[-MAX_NODE_FAILURES:]


def _runs_elsewhere(world: World, current: Set[str], failing: Set[str]) -> bool:
    """Whether an engine of the current spec is up and none of its nodes has failed an engine."""
    return any(
        world.whole(engine) and all(pods.revision_of(pod) in current and pods.node_of(pod) not in failing for pod in world.pods_of(engine))
        for engine in world.engines()
    )


def _newly(world: World, policy: AvoidNodes, failures: Sequence[NodeFailure], kept: Sequence[AvoidedNode], now: str) -> list[AvoidedNode]:
    avoided = {row.node for row in kept}
    by_node: dict[str, list[NodeFailure]] = defaultdict(list)
    for failure in failures:
        by_node[failure.node].append(failure)
    times = {node: _times(found) for node, found in by_node.items()}
    found = [node for node in sorted(times, key=lambda node: -times[node]) if times[node] >= policy.failures and node not in avoided]
    running = {node for engine in world.engines() for pod in world.pods_of(engine) if (node := pods.node_of(pod))}
    limit = min(max(1, len(running | avoided | times.keys()) // SHARE), MAX_AVOIDED_NODES)
    until = _later(now, policy.for_seconds)
    return [
        AvoidedNode(node=node, reason=_why(times[node], by_node[node]), since=now, until=until)
        for node in found[: max(0, limit - len(kept))]
    ]


def _times(failures: Sequence[NodeFailure]) -> int:
    count, until = 0, ""
    for failure in failures:
        if failure.time >= until:
            count, until = count + 1, _later(failure.time, AT_ONCE_SECONDS)
    return count


def _why(times: int, failures: Sequence[NodeFailure]) -> str:
    first, last = failures[0], failures[-1]
    many = "an engine failed there" if times == 1 else f"engines failed there {times} times since {first.time}"
    return sentence(f"{many}, {last.engine} at {last.time}: {last.reason}")


def _memory(world: World, key: str) -> list[dict[str, Any]]:
    return list((world.cr.get("status") or {}).get(key) or [])


def _later(now: str, seconds: int) -> str:
    return (datetime.fromisoformat(now) + timedelta(seconds=seconds)).strftime("%Y-%m-%dT%H:%M:%SZ")
