"""Decide what to do next, from what was observed. Pure.

One pass applies every child that differs, deletes children that are no longer wanted, and takes at most one step of a rolling
update (:mod:`rollout`). Nothing is remembered between passes: a restarted operator continues from what it sees.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from sglang_rollout.api.status import Reason
from sglang_rollout.controller.decide.allowed import NOTHING, Allowed, find_refusal
from sglang_rollout.controller.decide.contest import Rival, find_rival, seconds_until_restore
from sglang_rollout.controller.decide.drift import find_difference, stamp
from sglang_rollout.controller.decide.elastic import count_base_group_members, is_held_for_base, is_partly_placed
from sglang_rollout.controller.decide.names_taken import describe_taken_names, find_controller, is_foreign, is_leftover
from sglang_rollout.controller.decide.pods import count_designed_pods
from sglang_rollout.controller.decide.rollout import Restart, plan_restarts
from sglang_rollout.controller.decide.store import find_outdated_store, is_store_protected, is_update_young
from sglang_rollout.controller.decide.view import FleetView
from sglang_rollout.controller.render import names, render_all
from sglang_rollout.controller.render.common import Settings
from sglang_rollout.controller.render.fleet_objects import token_of
from sglang_rollout.controller.render.hashing import digest
from sglang_rollout.controller.render.network_policies import selects_engines
from sglang_rollout.kube.resources import DEPLOYMENTS, NETWORK_POLICIES, POD_GROUPS, STATEFULSETS, Object

WORKLOADS = frozenset({STATEFULSETS.kind, DEPLOYMENTS.kind})
"""Kinds that create pods. Their pods use other children by name."""
SETTLE_SECONDS = 2.0
"""Delay before the next pass while garbage collection or a controller lags, because that causes no event."""
WAIT_SECONDS = 10.0
"""Delay before the next pass of a rolling update that waits for another engine, and of a cluster that lacks something."""


@dataclass(frozen=True)
class Apply:
    """Server-side apply with force, under the operator's field manager."""

    object: Object
    reason: str
    """Why, for the log."""
    is_new_key: bool = False
    """True for the Secret of the rollout's key if its key is new, so that it must not replace another key."""
    unseen: bool = False
    """True if no object of this name carries the rollout's label.

    An object without the label may exist: call :func:`names_taken.is_foreign` first.
    """
    rival: Rival | None = None
    """The client that changed the live object; None if it is not known."""


@dataclass(frozen=True)
class Delete:
    """Delete exactly this object."""

    api_version: str
    kind: str
    name: str
    uid: str
    """Precondition: a newer object of the same name is left alone."""
    reason: str


Action = Apply | Delete


@dataclass(frozen=True)
class Failure:
    """Why an action of a plan could not be carried out."""

    reason: Reason
    message: str


@dataclass(frozen=True)
class Plan:
    """Actions in order, and when to look again even if no event arrives."""

    actions: tuple[Action, ...] = ()
    requeue_after: float | None = None
    """Seconds; None: wait for an event."""
    refusal: Failure | None = None
    """Why there are no actions although something differs; None if the plan is complete."""


def make_plan(fleet: FleetView, settings: Settings, now: str = "", allowed: Allowed = NOTHING, *, new_key: str | None = None) -> Plan:
    """Return the actions that bring the rollout nearer to its spec; none if nothing differs.

    Args:
        fleet: The view of the rollout.
        settings: Images and other settings of the operator.
        now: Time (RFC 3339). Without it, no surplus engine counts as waiting for room.
        allowed: What the rollout may ask for beyond ordinary pods. A rollout that asks for more keeps the children that it has.
        new_key: Key of a rollout that has none yet.
    """
    rollout = fleet.rollout
    if rollout is None or fleet.is_being_deleted:
        return Plan()
    wanted = [stamp(rendered) for rendered in _render_creatable(fleet, settings, now, new_key)]
    if refusal := find_refusal(rollout, wanted, allowed):
        return Plan(refusal=Failure(Reason.NOT_ALLOWED, refusal))
    if fleet.cluster.tls_problem and not fleet.serves_wanted_certificate:
        return Plan(requeue_after=WAIT_SECONDS, refusal=Failure(Reason.INVALID_CERTIFICATE, fleet.cluster.tls_problem))
    if taken := _find_taken_names(fleet, wanted):
        return Plan(refusal=Failure(Reason.NAME_TAKEN, describe_taken_names(taken)))
    applies, blocked, held = _plan_applies(fleet, wanted, now)
    unapplied = {apply.object["metadata"]["name"] for apply in applies} | held.keys()
    restarts, waits = plan_restarts(fleet, unapplied, now)
    store = find_outdated_store(fleet, unapplied)
    replaced = [Delete("v1", "Pod", store.name, store.uid, "outdated, and not in use")] if store else []
    lacks_something = any(is_partly_placed(fleet, engine) or engine.lacks_pods for engine in fleet.existing)
    waits = waits or lacks_something or bool(fleet.cluster.gang_problem or fleet.cluster.queue_problem or fleet.cluster.tls_problem)
    waits = waits or is_update_young(fleet, now)
    requeue = min([*([SETTLE_SECONDS] if blocked else []), *([WAIT_SECONDS] if waits else []), *held.values()], default=None)
    return Plan((*applies, *_plan_prunes(fleet, wanted), *replaced, *(_delete(restart) for restart in restarts)), requeue)


def _render_creatable(fleet: FleetView, settings: Settings, now: str, new_key: str | None) -> list[Object]:
    """Return the children that can be created now: the cluster knows their kind, and the engine's turn has come.

    The status reports children that cannot be created. They do not block the other children.
    """
    rollout = fleet.rollout
    if rollout is None:
        return []
    token = token_of(fleet.child("Secret", names.control_name(rollout.name))) or new_key
    members = count_base_group_members(fleet)
    rendered = render_all(
        rollout,
        settings,
        token,
        gates=fleet.gate_ports,
        avoided=fleet.avoided_nodes,
        members=members,
        is_store_protected=is_store_protected(fleet, now),
    )
    held = {engine.name for engine in fleet.wanted if is_held_for_base(fleet, engine)}
    refused = {POD_GROUPS.kind} if fleet.cluster.gang_problem else set()
    if fleet.cluster.tls_problem:
        refused.add(DEPLOYMENTS.kind)  # a new router pod would wait for the Secret, and the running one would end
    return [
        child
        for child in rendered
        if child["kind"] not in refused and not (child["kind"] == "StatefulSet" and child["metadata"]["name"] in held)
    ]


def _plan_applies(fleet: FleetView, wanted: Sequence[Object], now: str) -> tuple[list[Apply], bool, dict[str, float]]:
    """Return the applies, whether a leftover object blocks one of the names, and the seconds until contested children are applied.

    Workloads wait until no leftover has the name of an object that they use.
    """
    applies: list[Apply] = []
    held: dict[str, float] = {}
    leftovers: set[str] = set()
    for child in wanted:
        kind = child["kind"]
        live = fleet.child(kind, child["metadata"]["name"])
        if live is not None and is_leftover(live, fleet.uid):
            leftovers.add(kind)
            continue
        if kind in WORKLOADS and not leftovers <= WORKLOADS:
            continue
        if live is not None and kind == "StatefulSet" and count_designed_pods(child) != count_designed_pods(live):
            continue  # recreated by the rolling update
        is_new_key = child["metadata"]["name"] == names.control_name(fleet.name) and token_of(live) is None
        if reason := "does not exist" if live is None else find_difference(child, live, fleet.ownership):
            name = child["metadata"]["name"]
            if (delay := seconds_until_restore(fleet.restores.get((kind, name)), digest(child), now)) > 0:
                held[name] = min(delay, held.get(name, delay))
                continue
            rival = find_rival(child, live) if live else None
            applies.append(Apply(child, reason, is_new_key=is_new_key, unseen=live is None, rival=rival))
    return applies, bool(leftovers), held


def _find_taken_names(fleet: FleetView, wanted: Sequence[Object]) -> list[Object]:
    """Return the children whose names objects with the rollout's label have, although another controller manages these objects."""
    return [child for child in wanted if (live := fleet.child(child["kind"], child["metadata"]["name"])) and is_foreign(live, child)]


def _plan_prunes(fleet: FleetView, wanted: Sequence[Object]) -> list[Delete]:
    """Return deletes of our children that are no longer wanted; engines with the highest index come first."""
    keep = {(child["kind"], child["metadata"]["name"]) for child in wanted}
    found = [
        Delete(child["apiVersion"], kind, name, child["metadata"].get("uid", ""), "not wanted any more")
        for (kind, name), child in fleet.children.items()
        if kind in names.PRUNED_KINDS
        and (kind, name) not in keep
        and _is_prunable(child, fleet.uid)
        and not _connects_pods(fleet, kind, name)
    ]
    return sorted(found, key=lambda delete: (-(names.engine_index(fleet.name, delete.name) or 0), delete.kind, delete.name))


def _connects_pods(fleet: FleetView, kind: str, name: str) -> bool:
    """Return True for the NetworkPolicy of an engine with several pods that still run, for example while the engine drains.

    Other policies isolate these pods. Without this one, they could not connect to each other.
    """
    if kind != NETWORK_POLICIES.kind or fleet.rollout is None or not selects_engines(fleet.rollout):
        return False
    return sum(pod.name.rpartition("-")[0] == name for pod in fleet.pods.values()) > 1


def _is_prunable(child: Object, uid: str) -> bool:
    owner = find_controller(child)
    return owner is not None and owner.get("uid") == uid and not child["metadata"].get("deletionTimestamp")


def _delete(restart: Restart) -> Delete:
    """Return the delete of a pod, or of the StatefulSet of an engine whose number of pods changes."""
    engine, pod = restart.engine, restart.pod
    if pod is not None:
        return Delete("v1", "Pod", pod.name, pod.uid, restart.reason)
    uid = (engine.statefulset or {}).get("metadata", {}).get("uid", "")
    return Delete("apps/v1", "StatefulSet", engine.name, uid, restart.reason)
