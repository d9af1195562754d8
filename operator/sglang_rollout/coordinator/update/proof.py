"""Which engines of an update are complete, where names decide and where only checksums can, and what the fleet notes at the commit. Pure.

An engine with the same checksums as a complete engine of its shape holds the same bytes, whatever the names are. An update that leaves
the checksums of every engine as they were has changed nothing, so its names are not needed later: the models do not have them, or their
values were the same.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from sglang_rollout.coordinator.update.complete_push import (
    describe_lacking,
    find_incomplete,
    find_unequal,
    read_model,
    replace_names,
    request_restarts,
    rule_of,
    sent_tensors,
    starts_from_base,
)
from sglang_rollout.coordinator.update.completeness import Held, Lacking, Model
from sglang_rollout.coordinator.update.model import Fleet
from sglang_rollout.coordinator.update.phases import Update
from sglang_rollout.coordinator.update.steps import PATIENCE_SECONDS, same_body, send
from sglang_rollout.coordinator.update.tensor_names import TensorNames
from sglang_rollout.sglang.api import ControlCall
from sglang_rollout.sglang.checksums import CHECKSUM, Checksums
from sglang_rollout.wire.record import UpdateReason
from sglang_rollout.wire.states import Version


async def read_checksums(fleet: Fleet, names: Iterable[str]) -> dict[str, Checksums]:
    """Return the checksums of these engines, as far as they report them."""
    limit = fleet.policy.deadlines.update_seconds
    results = await send(ControlCall.CHECK_WEIGHTS.path, same_body(names, CHECKSUM), limit, patience=PATIENCE_SECONDS)
    return {name: result.checksums for name, result in results.items() if result.checksums is not None}


async def note_before(fleet: Fleet, update: Update, model: Model, names: frozenset[str]) -> None:
    """Note the checksums of all engines before the first tensors of an update whose names may not belong to the model."""
    new = TensorNames(names) - fleet.weights.names
    if not model.is_known and not update.tensors and len(new):
        update.before = await read_checksums(fleet, update.boots)


async def drop_incomplete(fleet: Fleet, update: Update) -> None:
    """Drop the engines whose commit would leave a mixture of versions."""
    update.drop(find_unequal(update), UpdateReason.INCOMPLETE)
    if update.names_unknown:
        return
    model = await read_model(fleet)
    lacking = find_incomplete(fleet, update, model)
    if not lacking and not update.before:
        return
    found = await read_checksums(fleet, update.remaining())
    unchanged = [name for name, before in update.before.items() if update.held[name].committed and found.get(name) == before]
    update.has_changed_nothing = bool(unchanged) and set(unchanged) >= set(update.remaining())
    proved = _find_proved(fleet, update, lacking, found)
    update.is_whole = any(update.held[name].base for name in proved)
    unproved = {name: what for name, what in lacking.items() if name not in proved}
    described = {name: describe_lacking(fleet, name, what) for name, what in unproved.items()}
    fewer = {name: described[name] for name, what in unproved.items() if what.is_committed}
    update.drop(fewer, UpdateReason.TENSORS_MISSING)
    update.drop(described, UpdateReason.INCOMPLETE)
    request_restarts(fleet, [name for name, what in unproved.items() if not what.is_committed])


def _find_proved(fleet: Fleet, update: Update, lacking: Mapping[str, Lacking], found: Mapping[str, Checksums]) -> set[str]:
    """Return the engines that lack names and hold the same bytes as every complete engine of their shape."""
    complete = [name for name in update.remaining() if name not in lacking]
    right: dict[int, set[Checksums | None]] = {}
    for name in complete:
        right.setdefault(fleet.engines[name].tensor_size, set()).add(found.get(name))
    return {name for name in lacking if name in found and right.get(fleet.engines[name].tensor_size) == {found[name]}}


def find_dropped(fleet: Fleet, update: Update) -> TensorNames:
    """Return the names outside the model that the run had, and that engines of this update get no more.

    Nothing of them should be left in an engine, so their checksums must agree.
    """
    known = fleet.membership.model
    dropped = TensorNames()
    if known is not None and not update.names_unknown:
        rule = rule_of(fleet, update, known.model)
        for name in update.remaining():
            dropped |= rule.find_dropped(update.held.get(name, Held()))
    return dropped


def commit_names(fleet: Fleet, update: Update, version: Version, engines: Iterable[str], dropped: TensorNames) -> None:
    """Commit the version. Note which names the run has now, and that nothing else is left in these engines.

    Args:
        fleet: The fleet.
        update: The update that ends.
        version: What it becomes.
        engines: Engines that hold the version.
        dropped: Names outside the model that are proved to be gone.
    """
    weights, sent = fleet.weights, TensorNames(sent_tensors(update))
    weights.doubt.end(engines)
    names = weights.names
    if update.checkpoint is not None:
        names = TensorNames(update.checkpoint)
    elif not update.names_unknown and (update.is_whole or weights.opens_run or starts_from_base(fleet, update)):
        names = TensorNames() if update.has_changed_nothing else sent
    elif not update.has_changed_nothing:
        names = (names | sent) - dropped
    holders = {name: fleet.boot(name) or "" for name in engines}
    replace_names(fleet, names, holders)
    fleet.commit(version, update.author)
