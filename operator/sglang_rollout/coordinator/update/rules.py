"""When each request is legal, and what happens otherwise. Pure.

Operations run one at a time, so a request meets the fleet in one of three phases: IDLE, PAUSE or TRANSFER (an update is open). One table,
:data:`RULES`, says in which of them a request is legal. Otherwise the request is refused, or the open update is abandoned first.
An operation takes its turn with :func:`take_turn`, which applies the rule.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from sglang_rollout.coordinator.update.interruption import Cause
from sglang_rollout.coordinator.update.membership import engines_without_tensors, name_engines
from sglang_rollout.coordinator.update.model import Fleet
from sglang_rollout.coordinator.update.outcome import abandon
from sglang_rollout.coordinator.update.phases import Phase
from sglang_rollout.coordinator.update.ranks import DEFAULT_GROUP_NAME
from sglang_rollout.coordinator.update.requests import (
    Begin,
    Call,
    CloseGroup,
    Continue,
    End,
    Flush,
    FromDisk,
    LoadAdapter,
    NewRun,
    OpenGroup,
    Pause,
    ReleaseMemory,
    ResumeMemory,
    SetLabel,
    Tensors,
    UnloadAdapter,
    Update,
)
from sglang_rollout.coordinator.update.steps import turn
from sglang_rollout.sglang.api import MemoryTag
from sglang_rollout.wire.reasons import RefusedError
from sglang_rollout.wire.states import FleetMode

ANY = frozenset({Phase.IDLE, Phase.PAUSE, Phase.TRANSFER})
NO_UPDATE = frozenset({Phase.IDLE, Phase.PAUSE})
UPDATE_OPEN = frozenset({Phase.TRANSFER})


@dataclass(frozen=True)
class Refuse:
    """Otherwise refuse the request."""

    message: str
    status: int = 409


@dataclass(frozen=True)
class Abandon:
    """Otherwise abandon the open update, then continue."""

    reason: str


@dataclass(frozen=True)
class Rule:
    """The phases in which a request is legal, and what happens in the others."""

    legal: frozenset[Phase]
    otherwise: Refuse | Abandon | None = None
    """Texts may name ``{engine}``, ``{rest}`` (engines that still wait for tensors) and ``{last}`` (why the last update failed)."""
    exception: Callable[[Fleet, Call, str | None], bool] | None = None
    """True where a request is legal in the other phases, too. Third argument: the engine at whose URL the request came."""


def _coordinator_paused(fleet: Fleet, _call: Call, _at: str | None) -> bool:
    return fleet.pause is None or fleet.pause.cause is not Cause.TRAINER


def _opens_another_group(fleet: Fleet, call: Call, _at: str | None) -> bool:
    return isinstance(call, OpenGroup) and call.body.get("group_name", DEFAULT_GROUP_NAME) not in fleet.groups


def _repeats_the_label(fleet: Fleet, call: Call, _at: str | None) -> bool:
    return isinstance(call, SetLabel) and fleet.committed is not None and fleet.committed.label == call.label


def _is_new_to_the_engine(fleet: Fleet, _call: Call, at: str | None) -> bool:
    return fleet.update is not None and at not in fleet.update.boots


def _continues_at_the_engine(fleet: Fleet, _call: Call, at: str | None) -> bool:
    return fleet.update is not None and at not in fleet.update.ended


def _wakes_no_updated_engine(fleet: Fleet, call: Call, at: str | None) -> bool:
    """Return True unless this wakes the weights of an engine that has received tensors.

    A trainer wakes weights before it sends any. After that it is another trainer, or the trainer starts again.
    """
    updated = fleet.update is not None and at in fleet.update.received
    return not (updated and isinstance(call, ResumeMemory) and MemoryTag.WEIGHTS in call.tags)


RULES: dict[type[Call], Rule] = {
    OpenGroup: Rule(NO_UPDATE, Abandon("the trainer opened the same group again in the middle of an update"), _opens_another_group),
    CloseGroup: Rule(ANY),
    Pause: Rule(NO_UPDATE, Abandon("the trainer paused again without ending its update"), _coordinator_paused),
    Continue: Rule(ANY),
    Begin: Rule(NO_UPDATE, Abandon("the trainer began again without ending its update")),
    Update: Rule(ANY),
    End: Rule(
        UPDATE_OPEN,
        Refuse(
            "no weight update is open: it was never begun, has ended, or was given up{last}. Call begin_weight_update first.",
            status=400,
        ),
    ),
    Flush: Rule(ANY),
    SetLabel: Rule(
        frozenset({Phase.PAUSE, Phase.TRANSFER}),
        Refuse(
            "no weight update is open, and committed weights keep their version: send new_version before"
            " end_weight_update, or weight_version with the tensors."
        ),
        _repeats_the_label,
    ),
    NewRun: Rule(NO_UPDATE, Refuse("a weight update is open: end it, then open a new run.")),
    FromDisk: Rule(NO_UPDATE, Refuse("a weight update is open: end it before one from disk.")),
    LoadAdapter: Rule(NO_UPDATE, Refuse("a weight update is open: end it before adapters change.")),
    UnloadAdapter: Rule(NO_UPDATE, Refuse("a weight update is open: end it before adapters change.")),
    ReleaseMemory: Rule(NO_UPDATE, Refuse("a weight update is open: end it before memory is released.")),
    ResumeMemory: Rule(ANY),
}
"""Every request of a fleet with GPUs of its own."""

HYBRID_RULES: dict[type[Call], Rule] = {
    Begin: Rule(NO_UPDATE, Abandon("the trainer began again at engine {engine} without ending its update"), _is_new_to_the_engine),
    Tensors: Rule(NO_UPDATE, Abandon("engine {engine} was sent new tensors before {rest} had got all of theirs"), _continues_at_the_engine),
    End: Rule(ANY),
    ReleaseMemory: Rule(NO_UPDATE, Abandon("the trainer released memory before all engines had got all of their tensors")),
    ResumeMemory: Rule(
        NO_UPDATE,
        Abandon("the trainer began again at engine {engine} before {rest} had got all of their tensors"),
        _wakes_no_updated_engine,
    ),
}
"""Requests that obey other rules on a fleet whose trainer sends each engine its tensors (``spec.mode: Hybrid``)."""


async def take_turn(fleet: Fleet, call: Call, at: str | None = None) -> None:
    """Wait for the turn of a request, then apply its rule."""
    await turn()
    await apply_rule(fleet, call, at)


async def apply_rule(fleet: Fleet, call: Call, at: str | None = None) -> None:
    """Refuse a request that is not legal now, or abandon the open update first.

    Args:
        fleet: The fleet, in the turn of this request.
        call: The request.
        at: The engine at whose own URL the request came; None: the fleet's URL.
    """
    rules = {**RULES, **HYBRID_RULES} if fleet.mode is FleetMode.HYBRID else RULES
    rule = rules[type(call)]
    if fleet.phase in rule.legal or (rule.exception is not None and rule.exception(fleet, call, at)):
        return
    words = {"engine": at, "rest": name_engines(engines_without_tensors(fleet)), "last": last_reason(fleet)}
    match rule.otherwise:
        case Refuse(message, status):
            raise RefusedError(message.format(**words), status=status, fleet=fleet.advice())
        case Abandon(reason):
            await abandon(fleet, reason.format(**words))
        case None:
            raise RuntimeError(f"{type(call).__name__} has no rule for phase {fleet.phase}")


def last_reason(fleet: Fleet) -> str:
    """Return why the last update failed, as a parenthesis; empty if it did not."""
    last = fleet.last_update
    return f" ({last.reason})" if last is not None and last.reason else ""
