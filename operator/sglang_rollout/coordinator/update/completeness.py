"""Does an engine hold every tensor of the version? Pure.

Engines write the tensors that come and keep the rest, and nothing in a call says whether more belong to the version. What tells is
what trainers brought before: an engine that held the committed version may be brought some tensors, any other one needs all that were
ever brought over ``model.path``, or it would serve a mixture. Those that one update brought must be the same for all of its engines.

Handles (``spec.mode: Hybrid``) name no tensors; such updates are not looked at.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from sglang_rollout.coordinator.update.model import Fleet
from sglang_rollout.coordinator.update.progress import Update
from sglang_rollout.coordinator.update.requests import Body
from sglang_rollout.coordinator.update.steps import PATIENCE, Results, same, send
from sglang_rollout.coordinator.update.tensors import Brought, mark
from sglang_rollout.wire.agent import CheckpointRequest
from sglang_rollout.wire.ports import AGENT_CHECKPOINT
from sglang_rollout.wire.weights import BASE, Version

MARGIN = 5.0
"""Seconds that the answer of an agent may take longer than what it was asked to do."""
WAY_OUT = "push all of them in one update, or load a checkpoint with update_weights_from_disk"


def names_of(body: Body) -> frozenset[str]:
    """The tensors that an update call brings. Their names are the same whether they come one by one or as a flat bucket."""
    return frozenset(str(name) for name in body["names"])


def note_trust(fleet: Fleet, update: Update, names: Iterable[str]) -> None:
    """Before engines are told: which of them hold the committed version, and which what ``model.path`` holds."""
    for name in names:
        if fleet.committed is not None and fleet.engines[name].holds(fleet.committed):
            update.trusted.add(name)
        if fleet.engines[name].holds(BASE):
            update.from_base.add(name)
        if fleet.engines[name].blank:
            update.blank.add(name)


def note_names(fleet: Fleet, names: frozenset[str]) -> frozenset[str]:
    """Before an update call: engines may hold these even if nobody is left to hear of it. Returns those that are new."""
    new = names - fleet.weights.attempted
    fleet.weights.attempted |= new
    return new


def note_call(fleet: Fleet, update: Update, names: frozenset[str], new: frozenset[str], results: Results) -> None:
    """After an update call. What some engine may have written counts also if the update fails. Not if all refused it: a tensor that
    the model does not have must not be asked for afterwards."""
    if all(not result.ok and result.status for result in results.values()):
        fleet.weights.attempted -= new
        return
    update.tensors.setdefault(tuple(results), set()).update(names)


def incomplete(fleet: Fleet, update: Update) -> dict[str, str]:
    """Of the engines that may still commit, those that would hold a mixture, and why."""
    if update.opaque:
        return {}
    got = {name: received(update, name) for name in update.standing()}
    sent = frozenset[str]().union(*update.tensors.values())
    whole = Brought() if anew(fleet, update) else fleet.weights.tensors
    found: dict[str, str] = {}
    for name, names in got.items():
        missing = sorted(sent - names)
        if missing:
            found[name] = (
                f"lacks {len(missing)} of {len(sent)} tensors that other engines got in this update, the first is {missing[0]}: {WAY_OUT}"
            )
        elif name not in update.trusted and (why := _needed(fleet, update, whole, name).lacks(names) or _left(fleet, names)):
            found[name] = f"did not hold version {fleet.committed} before and lacks {why}: {WAY_OUT}"
    return found


async def look_up(fleet: Fleet, update: Update) -> None:
    """Ask for the tensors of the model, if engines that hold none of them may commit: what a trainer never brings they lack, too."""
    blank = sorted(update.blank & set(update.standing()))
    if blank and not update.opaque:
        limit = fleet.policy.deadlines.pause_seconds
        body = CheckpointRequest(path="", names=True, deadline=limit).model_dump(mode="json")
        results = await send(AGENT_CHECKPOINT, same(blank[:1], body), limit + MARGIN, patience=PATIENCE, idempotent=True)
        update.model = results[blank[0]].names or frozenset()


def _needed(fleet: Fleet, update: Update, whole: Brought, name: str) -> Brought:
    """An engine with the weights of its start lacks what was committed; any other may hold what failed updates left, too; and one
    whose weights are gone lacks everything."""
    if name in update.from_base:
        return whole
    lost = update.model if name in update.blank else frozenset()
    return replace(whole, names=whole.names | fleet.weights.attempted | fleet.engines[name].wrote | lost)


def _left(fleet: Fleet, got: frozenset[str]) -> str:
    """What an update brought of which a coordinator before this one left no commit, and this one has not brought, as a phrase.

    An engine may hold it; or the update was committed after all, while the store was away, and one with the weights of its start lacks it.
    """
    left = fleet.weights.attempted_before - {mark(one) for one in got}
    return f"{len(left)} tensors of an update that was open or had failed when the coordinator was restarted" if left else ""


def received(update: Update, name: str) -> frozenset[str]:
    """The tensors that this engine has taken in the update."""
    return frozenset[str]().union(*(names for engines, names in update.tensors.items() if name in engines))


def anew(fleet: Fleet, update: Update) -> bool:
    """Whether what was brought before is gone: a new run, on engines that all hold what ``model.path`` holds. While one engine
    still holds tensors of the run before, a set without them would be a mixture of both runs."""
    committed = fleet.committed
    new = committed is None or committed.is_base or fleet.target().run > committed.run
    return new and update.from_base >= set(fleet.engines)


def committed(fleet: Fleet, update: Update, version: Version) -> None:
    """Make it the committed version, and note what makes it."""
    if update.checkpoint is not None:
        fleet.weights.tensors = Brought(update.checkpoint)
    elif not update.opaque:
        before = Brought() if anew(fleet, update) else fleet.weights.tensors
        fleet.weights.tensors = before.plus(frozenset[str]().union(*update.tensors.values()))
    for name in update.standing():
        fleet.engines[name].wrote = frozenset()
    if set(update.standing()) >= set(fleet.engines):
        fleet.weights.attempted, fleet.weights.attempted_before = frozenset(), frozenset()
    fleet.commit(version)
