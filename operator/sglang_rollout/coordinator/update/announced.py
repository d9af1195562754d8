"""The names that a trainer announces before it sends tensors: a push that can never be complete is refused before its first byte. Pure.

:mod:`.completeness` has the rule. It is applied here to what the engines hold now. Whatever may still change until the end of the update
counts for the push, and the end decides.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from sglang_rollout.coordinator.update.complete_push import (
    WAY_OUT,
    WAY_OUT_STAGED,
    describe_fewer,
    make_rule,
    may_open_run,
    read_held,
    read_model,
)
from sglang_rollout.coordinator.update.completeness import Held, Lacking, Model, find_lacking
from sglang_rollout.coordinator.update.membership import is_enough
from sglang_rollout.coordinator.update.model import Fleet
from sglang_rollout.coordinator.update.tensor_names import TensorNames
from sglang_rollout.wire.reasons import RefusedError
from sglang_rollout.wire.record import UpdateReason


async def refuse_fewer_at_engines(fleet: Fleet, names: Collection[str], label: str | None, engines: Collection[str]) -> None:
    """Refuse names that would leave too few engines complete, and that no restart of an engine makes complete.

    Args:
        fleet: The fleet.
        names: Every tensor of the push.
        label: The trainer's label of the version.
        engines: The engines that receive the tensors.

    Raises:
        RefusedError: The push lacks tensors.
    """
    model = await read_model(fleet)
    held = {name: read_held(fleet, name) for name in engines}
    lacking = find_lacking(make_rule(fleet, TensorNames(names), model, from_base=_may_start_from_base(fleet, label, held)), held)
    fewer = {name: what for name, what in lacking.items() if what.is_committed and not _may_be_proved(fleet, model, lacking, name, held)}
    if fewer and not is_enough(fleet, len(held) - len(fewer), len(held)):
        name, what = next(iter(fewer.items()))
        raise _refusal(fleet, f"engine {name} {describe_fewer(fleet, what, WAY_OUT)}", engine=name)


async def refuse_fewer_in_version(fleet: Fleet, names: Collection[str], label: str | None) -> None:
    """Refuse names that are no complete version of transport Staged. Raises RefusedError."""
    held = {name: read_held(fleet, name) for name in fleet.members()}
    rule = make_rule(fleet, TensorNames(names), await read_model(fleet), from_base=_may_start_from_base(fleet, label, held))
    lacking = rule.find_lacking(Held(base=rule.opens_run))
    if lacking is not None:
        raise _refusal(fleet, f"the version lacks {lacking}: {WAY_OUT_STAGED}")


def _may_start_from_base(fleet: Fleet, label: str | None, held: Mapping[str, Held]) -> bool:
    """Return True if a new run may begin on engines that hold ``model.path``. Engines that are not up start from there."""
    return may_open_run(fleet, label) and all(each.base for each in held.values())


def _may_be_proved(fleet: Fleet, model: Model, lacking: Mapping[str, Lacking], name: str, held: Mapping[str, Held]) -> bool:
    """Return True if checksums may show that an engine is complete, because nothing else tells which names belong to the model."""
    size = fleet.engines[name].tensor_size
    return not model.is_known and any(fleet.engines[other].tensor_size == size for other in held if other not in lacking)


def _refusal(fleet: Fleet, cause: str, **details: str) -> RefusedError:
    cause = f"{cause}. Nothing was sent."
    code = UpdateReason.TENSORS_MISSING.value
    return RefusedError(f"{cause[0].upper()}{cause[1:]}", fleet={**fleet.advice(), "reason": code, "cause": cause, **details})
