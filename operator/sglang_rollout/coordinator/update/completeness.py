"""Does an engine hold every tensor of the version? Pure.

Engines write the tensors that come and keep the rest. No call says whether more belong to the version. Earlier pushes show it: an engine
that held the committed version may receive some tensors. Any other engine needs all tensors that were ever sent over ``model.path``, or
it would serve a mixture. All engines of one update must receive the same tensors.

Handles (``spec.mode: Hybrid``) name no tensors, so such updates are not checked.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from sglang_rollout.coordinator.update.model import Fleet
from sglang_rollout.coordinator.update.progress import Update
from sglang_rollout.coordinator.update.requests import Body
from sglang_rollout.coordinator.update.steps import PATIENCE_SECONDS, Results, same_body, send
from sglang_rollout.coordinator.update.tensors import TensorSet, hash_name
from sglang_rollout.wire.agent import CheckpointRequest
from sglang_rollout.wire.ports import AGENT_CHECKPOINT
from sglang_rollout.wire.states import BASE, Version

ANSWER_MARGIN_SECONDS = 5.0
"""How much longer than the work that it was asked for the answer of an agent may take."""
WAY_OUT = "push all of them in one update, or load a checkpoint with update_weights_from_disk"


def announced_names(body: Body) -> frozenset[str]:
    """Return the tensors that an update call brings. The names are the same whether they come one by one or as a flat bucket."""
    return frozenset(str(name) for name in body["names"])


def note_held_weights(fleet: Fleet, update: Update, names: Iterable[str]) -> None:
    """Note what engines hold before they join an update: the committed version, what ``model.path`` holds, or nothing known."""
    for name in names:
        if fleet.committed is not None and fleet.engines[name].holds(fleet.committed):
            update.held_committed.add(name)
        if fleet.engines[name].holds(BASE):
            update.held_base.add(name)
        if fleet.engines[name].blank:
            update.blank.add(name)


def note_attempted(fleet: Fleet, names: frozenset[str]) -> frozenset[str]:
    """Note before an update call that engines may hold these tensors, even if no answer comes. Returns the names that are new."""
    new = names - fleet.weights.attempted
    fleet.weights.attempted |= new
    return new


def note_received(fleet: Fleet, update: Update, names: frozenset[str], new: frozenset[str], results: Results) -> None:
    """Note after an update call which tensors came, also if the update fails later.

    If all engines refused the call, the new names are forgotten: a tensor that the model does not have must not be required afterwards.
    """
    if all(not result.ok and result.status for result in results.values()):
        fleet.weights.attempted -= new
        return
    update.tensors.setdefault(tuple(results), set()).update(names)


def find_incomplete(fleet: Fleet, update: Update) -> dict[str, str]:
    """Return the engines that may still commit and would hold a mixture, and why."""
    if update.names_unknown:
        return {}
    got = {name: received_tensors(update, name) for name in update.remaining()}
    sent = frozenset[str]().union(*update.tensors.values())
    whole = TensorSet() if starts_from_base(fleet, update) else fleet.weights.tensors
    found: dict[str, str] = {}
    for name, names in got.items():
        missing = sorted(sent - names)
        if missing:
            found[name] = (
                f"lacks {len(missing)} of {len(sent)} tensors that other engines got in this update, the first is {missing[0]}: {WAY_OUT}"
            )
        elif name not in update.held_committed and (
            why := _required_tensors(fleet, update, whole, name).lacks(names) or _why_earlier_lacking(fleet, names)
        ):
            found[name] = f"did not hold version {fleet.committed} before and lacks {why}: {WAY_OUT}"
    return found


async def look_up_model_tensors(fleet: Fleet, update: Update) -> None:
    """Ask for the tensors of the model if blank engines may commit: they lack tensors that a trainer never sends, too."""
    blank = sorted(update.blank & set(update.remaining()))
    if blank and not update.names_unknown:
        limit = fleet.policy.deadlines.pause_seconds
        body = CheckpointRequest(path="", names=True, deadline=limit).model_dump(mode="json")
        results = await send(
            AGENT_CHECKPOINT, same_body(blank[:1], body), limit + ANSWER_MARGIN_SECONDS, patience=PATIENCE_SECONDS, idempotent=True
        )
        update.model = results[blank[0]].names or frozenset()


def _required_tensors(fleet: Fleet, update: Update, whole: TensorSet, name: str) -> TensorSet:
    """Return the tensors that an engine needs.

    An engine with the weights of its start lacks what was committed. Any other may also hold what failed updates left. A blank engine
    lacks everything.
    """
    if name in update.held_base:
        return whole
    lost = update.model if name in update.blank else frozenset()
    return replace(whole, names=whole.names | fleet.weights.attempted | fleet.engines[name].written | lost)


def _why_earlier_lacking(fleet: Fleet, got: frozenset[str]) -> str:
    """Return which tensors of an update that an earlier coordinator did not commit are missing, as a phrase; empty if none.

    An engine may hold such tensors. Or the update was committed while the store was away, and an engine with the weights of its start
    lacks them.
    """
    left = fleet.weights.attempted_before - {hash_name(one) for one in got}
    return f"{len(left)} tensors of an update that was open or had failed when the coordinator was restarted" if left else ""


def received_tensors(update: Update, name: str) -> frozenset[str]:
    """Return the tensors that this engine has received in the update."""
    return frozenset[str]().union(*(names for engines, names in update.tensors.items() if name in engines))


def starts_from_base(fleet: Fleet, update: Update) -> bool:
    """Return True if a new run begins on engines that all hold what ``model.path`` holds, so that earlier tensors are gone.

    While one engine still holds tensors of the run before, an update without these would be a mixture of both runs.
    """
    before = fleet.committed
    new = before is None or before.is_base or fleet.target().run > before.run
    return new and update.held_base >= set(fleet.engines)


def commit_tensors(fleet: Fleet, update: Update, version: Version) -> None:
    """Make it the committed version, and note which tensors make it."""
    if update.checkpoint is not None:
        fleet.weights.tensors = TensorSet(update.checkpoint)
    elif not update.names_unknown:
        before = TensorSet() if starts_from_base(fleet, update) else fleet.weights.tensors
        fleet.weights.tensors = before.plus(frozenset[str]().union(*update.tensors.values()))
    for name in update.remaining():
        fleet.engines[name].written = frozenset()
    if set(update.remaining()) >= set(fleet.engines):
        fleet.weights.attempted, fleet.weights.attempted_before = frozenset(), frozenset()
    fleet.commit(version)
