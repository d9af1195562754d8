"""What to do next: a pure function of what was observed.

One pass applies everything that differs, deletes what is no longer wanted, and takes at most one step of a rolling
update. It keeps no memory between passes: an operator that was killed half-way goes on from what it sees.

Rolling update, in the order of the questions:

    StatefulSet not yet as wanted (or its controller lags)  -> apply; a pod deleted now would return as it was
    outdated engine that is not ready, or lacks pods        -> delete its pods: it serves nobody, so nothing is lost
    another engine does not serve (nor is it paused)        -> wait: one engine at a time; not for one beyond the base without room
    outdated engine                                         -> delete its pods; one that does not serve first
    (fleet Asleep by spec.state: nobody serves)             -> delete the pods of one that was made without what sleeping needs

An engine that does not come up on a node which is avoided is moved in the same way, beside the rolling update: its StatefulSet
gets the affinity first, then its pods are deleted. So are the pods that are left of an engine beyond the base when it was preempted in
part: its gang comes again when there is room for all.

An engine whose number of pods changes is made anew, StatefulSet and all, when its turn comes: SGLang's ranks cannot be added
to, and pods that go one by one would end the engine outside of its turn.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from sglang_rollout.controller.decide import pods
from sglang_rollout.controller.decide.drift import difference, is_applied, stamped
from sglang_rollout.controller.decide.elastic import base_members, comes_later, held_for_nothing, in_part, waits_for_room
from sglang_rollout.controller.decide.serving import cannot_sleep, kept_back, serves
from sglang_rollout.controller.decide.view import Object, World
from sglang_rollout.controller.render import names, render_all
from sglang_rollout.controller.render.hashing import revisions
from sglang_rollout.controller.render.policies import token_of
from sglang_rollout.controller.render.settings import Settings

SETTLE_SECONDS = 2.0
"""When to look again for something that changes without an event of ours: a garbage collector, a controller that
lags."""
WAIT_SECONDS = 10.0
"""When to look again at a rolling update that waits for another engine, and at a cluster that lacks something."""


@dataclass(frozen=True)
class Apply:
    """Server-side apply, with force, under our field manager."""

    object: Object
    reason: str
    """Why, for the log."""
    needs_token: bool = False
    """The object is the control Secret and holds no token yet: put a random one in first."""
    unseen: bool = False
    """No object of this name carries the rollout's label. One without it may be there: ask :func:`stranger` first."""
    version: str = ""
    """resourceVersion of the live object. If it is the same afterwards, nothing was changed."""


@dataclass(frozen=True)
class Delete:
    """Delete exactly this object."""

    api_version: str
    kind: str
    name: str
    uid: str
    """Precondition: an object of the same name that was made meanwhile is left alone."""
    reason: str
    unless_healed: str = ""
    """Name of an object that is applied in the same plan. If that changed it, this waits for the next plan."""


Action = Apply | Delete


@dataclass(frozen=True)
class Plan:
    """Actions, in this order, and when to look again even if nothing happens."""

    actions: tuple[Action, ...] = ()
    requeue_after: float | None = None


def plan(world: World, settings: Settings, now: str = "") -> Plan:
    """Return what brings ``world`` nearer to what its custom resource says. Nothing, if it is there.

    ``now`` (RFC 3339) tells which engines beyond the base have waited for room long enough to hold up nothing; without it none has.
    """
    rollout = world.rollout
    if rollout is None or world.deleting:
        return Plan()
    token = token_of(world.child("Secret", names.control_name(rollout.name)))
    found = render_all(rollout, settings, token, gates=world.gates(), avoided=world.avoided, members=base_members(world))
    wanted = [stamped(rendered) for rendered in found if _can_be_made(rendered, world)]
    applies: list[Action] = []
    changing: set[str] = set()
    healing: set[str] = set()
    blocked = False
    for rendered in wanted:
        live = world.child(rendered["kind"], rendered["metadata"]["name"])
        if live is not None and _is_leftover(live, world.uid):
            blocked = True
            continue
        if live is not None and _is_resized(rendered, live):
            continue
        reason = "does not exist" if live is None else difference(rendered, live)
        if reason:
            needs_token = rendered["kind"] == "Secret" and token is None
            version = str((live or {}).get("metadata", {}).get("resourceVersion", ""))
            applies.append(Apply(rendered, reason, needs_token=needs_token, unseen=live is None, version=version))
            (healing if live is not None and is_applied(rendered, live) else changing).add(rendered["metadata"]["name"])
    prunes = _prunes(world, wanted)
    restarts, waits = _rolling(world, changing, now)
    restarts = [_unless_healed(restart, healing) for restart in (*restarts, *_moves(world, changing, now))]
    lacking = any(in_part(world, name) or world.lacks_pods(name) for name in world.engines())
    waits = waits or lacking or bool(world.cluster.gang_problem or world.cluster.queue_problem)
    requeue = SETTLE_SECONDS if blocked else WAIT_SECONDS if waits else None
    return Plan((*applies, *prunes, *restarts), requeue)


def _can_be_made(rendered: Object, world: World) -> bool:
    """Whether the cluster knows the kind, and an engine's turn has come. What cannot be made is told in status, and holds up nothing
    else."""
    if rendered["kind"] == "StatefulSet":
        return not comes_later(world, rendered["metadata"]["name"])
    return rendered["kind"] != names.POD_GROUP.kind or not world.cluster.gang_problem


def stranger(live: Object, wanted: Object) -> str:
    """Return why ``live``, which has the name of ``wanted``, must be left alone, as a sentence; empty if it may be
    applied to.

    Ours is what carries our label or our owner reference: a child whose label somebody took off is healed, and one that
    lost its owner is adopted. Anything else is a user's own object that happens to have the name.
    """
    name, rollout = wanted["metadata"]["name"], wanted["metadata"]["labels"][names.LABEL_ROLLOUT]
    if (live["metadata"].get("labels") or {}).get(names.LABEL_ROLLOUT) == rollout:
        return ""
    if (_controller(live) or {}).get("uid") == (_controller(wanted) or {})["uid"]:
        return ""
    return (
        f"{wanted['kind']} {name} exists and does not belong to this rollout, so it is left alone. Delete it, give the SGLangRollout"
        f" another name, or hand the object over with the label {names.LABEL_ROLLOUT}={rollout}."
    )


def _is_leftover(live: Object, uid: str) -> bool:
    """Whether the object goes away by itself: it is being deleted, or belongs to an earlier custom resource of the same
    name.

    Applying to it would give it two controllers, which the API server refuses. Objects with our label and without a
    controller (left by ``kubectl delete --cascade=orphan``) are adopted.
    """
    if live["metadata"].get("deletionTimestamp"):
        return True
    owner = _controller(live)
    return owner is not None and owner.get("uid") != uid


def _controller(live: Object) -> Object | None:
    owners = live["metadata"].get("ownerReferences") or []
    return next((owner for owner in owners if owner.get("controller")), None)


def _prunes(world: World, wanted: list[Object]) -> list[Delete]:
    """Children of ours that are not wanted any more; of engines the highest index first."""
    keep = {(rendered["kind"], rendered["metadata"]["name"]) for rendered in wanted}
    rollout = world.cr["metadata"]["name"]
    found = [
        Delete(child["apiVersion"], kind, name, child["metadata"].get("uid", ""), "not wanted any more")
        for (kind, name), child in world.children.items()
        if (kind, name) not in keep and _is_ours(child, world.uid)
    ]
    return sorted(found, key=lambda delete: (-(names.engine_index(rollout, delete.name) or 0), delete.kind, delete.name))


def _is_ours(child: Object, uid: str) -> bool:
    owner = _controller(child)
    return owner is not None and owner.get("uid") == uid and not child["metadata"].get("deletionTimestamp")


def _rolling(world: World, changing: set[str], now: str) -> tuple[list[Delete], bool]:
    """Return the pods to delete so that their engines come back at the current revision, and whether others wait for
    their turn."""
    rollout = world.rollout
    if rollout is None:
        return [], False
    wanted = revisions(rollout)
    outdated = {engine: found for engine, current in wanted.items() if (found := _outdated(world, engine, current))}
    if not outdated:
        return [], False
    settled = {engine: found for engine, found in outdated.items() if engine not in changing and _is_observed(world, engine)}
    # Also one whose pods are not there, for example because a quota does not let them be made.
    broken = [engine for engine in settled if not world.whole(engine)]
    if broken:
        return [_restart(old, "outdated, and not ready") for engine in broken for old in settled[engine]], True
    return _next_step(world, [engine for engine in wanted if not waits_for_room(world, engine, now)], settled), True


def _next_step(world: World, engines: list[str], settled: Mapping[str, list[Object]]) -> list[Delete]:
    away = [engine for engine in engines if not (serves(world, engine) or kept_back(world, engine))]
    # An outdated engine that does not serve anyway goes first; then any, the highest index first, as everywhere in
    # Kubernetes.
    for engine in sorted(settled, key=lambda name: (name not in away, -engines.index(name))):
        if all(other == engine for other in away):
            return [_restart(old, "outdated, and all other engines serve") for old in settled[engine]]
    # Where all sleep nobody serves, so that one which cannot has to be made anew all the same: one at a time, too.
    awake = [engine for engine in sorted(settled, key=engines.index, reverse=True) if cannot_sleep(world, engine)]
    if awake and all(map(world.whole, engines)):
        return [_restart(old, "outdated, and cannot sleep") for old in settled[awake[0]]]
    return []


def _outdated(world: World, engine: str, wanted: str) -> list[Object]:
    """What to delete of an engine so that it comes back as it is wanted now: nothing, pods, or all of it."""
    rollout, live = world.rollout, world.child("StatefulSet", engine)
    if rollout is not None and live is not None and pods.made_for(live) != rollout.spec.engine.pods:
        return [] if live["metadata"].get("deletionTimestamp") else [live]
    return [pod for pod in world.pods_of(engine) if pods.revision_of(pod) != wanted and not pods.is_terminating(pod)]


def _moves(world: World, changing: set[str], now: str) -> Iterator[Delete]:
    """Pods of engines that do not come up on a node which is avoided: made anew, they go elsewhere. All pods of the engine, as in
    every restart. Engines that run there stay, and outdated ones are restarted anyway. And pods that hold room for nothing."""
    rollout = world.rollout
    if rollout is None:
        return
    for engine, current in revisions(rollout).items():
        found = [pod for pod in world.pods_of(engine) if not pods.is_terminating(pod)]
        failing = next((node for pod in found if (node := pods.node_of(pod)) in world.avoided and not pods.started(pod)), None)
        given_back = held_for_nothing(world, engine, now)
        if not (failing or given_back) or engine in changing or not _is_observed(world, engine) or _outdated(world, engine, current):
            continue
        if failing:
            yield from (_restart(pod, f"node {failing} is avoided") for pod in found)
        else:
            yield from (_restart(pod, "other pods of its engine were preempted") for pod in given_back)


def _is_resized(rendered: Object, live: Object) -> bool:
    """Whether an engine is to have another number of pods."""
    return rendered["kind"] == "StatefulSet" and pods.made_for(rendered) != pods.made_for(live)


def _is_observed(world: World, engine: str) -> bool:
    """Whether the StatefulSet controller has seen the newest template: else it would make the pod anew as it was."""
    statefulset: Mapping[str, Any] = world.child("StatefulSet", engine) or {}
    generation = (statefulset.get("metadata") or {}).get("generation")
    return (statefulset.get("status") or {}).get("observedGeneration") == generation


def _unless_healed(restart: Delete, healing: set[str]) -> Delete:
    """Hold back the restart of an engine whose template somebody has changed: the controller could make the pod anew from that. If
    applying changes nothing, the template is what the API server makes of ours, and is waited for no longer."""
    engine = restart.name if restart.kind == "StatefulSet" else restart.name.rpartition("-")[0]
    return replace(restart, unless_healed=engine) if engine in healing else restart


def _restart(old: Object, reason: str) -> Delete:
    """Delete a pod, or the StatefulSet of an engine with another number of them."""
    kind = old.get("kind", "Pod")
    return Delete("apps/v1" if kind == "StatefulSet" else "v1", kind, old["metadata"]["name"], old["metadata"].get("uid", ""), reason)
