"""Who takes part: engines that are there now, and how many of them must be. Pure.

A member is a wanted engine that is up and is not about to leave. Engines that are starting, restarting or draining do
not hold up a trainer: a group is opened with the members that are there, and the epoch tells when that changes.
Only a fleet that has never taken weights waits until it is complete (as many as its base are up, or
``weights.minCommitted``): a trainer that fixes its group at its start would otherwise leave out whoever starts a moment later.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING

from sglang_rollout.coordinator.update.ranks import Refusal
from sglang_rollout.wire.states import FleetMode, FleetState, held_sentence

if TYPE_CHECKING:
    from sglang_rollout.coordinator.update.engine import Engine
    from sglang_rollout.coordinator.update.model import Fleet

WAVERING = 10.0
"""An engine whose agent was heard so many seconds ago and does not answer now is not counted out yet."""


def required(min_committed: int | str | None, wanted: int, taking_part: int) -> int:
    """How many engines must hold a version so that it is committed: at least one.

    ``min_committed``: a number of engines, a share of the wanted ones ("75%"), or None: all that take part.
    """
    if min_committed is None:
        return max(1, taking_part)
    if isinstance(min_committed, int):
        return max(1, min(min_committed, wanted))
    return max(1, math.ceil(int(min_committed.rstrip("%")) * wanted / 100))


def enough(fleet: Fleet, holding: int, taking_part: int) -> bool:
    """Whether so many engines suffice for a commit."""
    return holding >= required(fleet.policy.min_committed, len(fleet.engines), taking_part)


def at_first(fleet: Fleet) -> int:
    """With how many engines a fleet that has never taken weights begins, if ``weights.minCommitted`` says nothing."""
    wanted = len(fleet.engines)
    return wanted if fleet.membership.base is None else min(fleet.membership.base, wanted)


def present(fleet: Fleet) -> Mapping[str, str]:
    """Members and their lives, in rank order. Refuses while they are too few, or while it is not clear who is there."""
    refuse_asleep(fleet)
    for name, engine in fleet.engines.items():
        wavers = _wavers(engine, fleet.now)
        if wavers:
            sentence = f"engine {name} {wavers}. No engine has joined anything. Try again in a moment."
            raise Refusal(sentence, status=503, fleet=fleet.advice())
    reason = why_incomplete(fleet)
    if reason:
        raise Refusal(f"{reason} No engine has joined anything. Try again.", status=503, fleet=fleet.advice())
    return {name: engine.boot or "" for name, engine in fleet.members().items()}


def refuse_asleep(fleet: Fleet) -> None:
    """Engines whose memory is released by the spec take part in nothing."""
    if fleet.applied_state is FleetState.ASLEEP:
        raise Refusal(held_sentence(fleet.applied_state), status=409, fleet=fleet.advice())


def _wavers(engine: Engine, now: float) -> str:
    """Why it is not clear yet whether an engine is there; empty if it is clear."""
    if engine.boot is not None and not engine.reachable and now - engine.heard < WAVERING:
        return f"has not answered for {now - engine.heard:.0f} s, and it is not clear yet whether it is gone"
    if engine.up and engine.status is not None and 0 < engine.status.giving_up < WAVERING:
        return "still comes out of an update that was given up"
    return ""


def why_incomplete(fleet: Fleet) -> str:
    """Why no group can be opened now, as a sentence; empty if it can."""
    if fleet.applied_state is FleetState.ASLEEP:
        return held_sentence(fleet.applied_state)
    there, wanted = len(fleet.members()), len(fleet.engines)
    taking_part = there if fleet.membership.formed else at_first(fleet)
    if there and enough(fleet, there, taking_part):
        return ""
    if not wanted:
        return "This fleet has no engines."
    least = required(fleet.policy.min_committed, wanted, taking_part)
    waits = " A fleet that has never taken weights waits for them; weights.minCommitted lets it begin with fewer."
    first = "" if fleet.membership.formed else waits
    return f"{there} of {wanted} engines are up, and at least {least} must be. {absent_sentence(fleet)}{first}"


def absent_sentence(fleet: Fleet, limit: int = 4) -> str:
    """Which wanted engines are no members, and why; empty if all are."""
    away = {name: engine.why_absent() for name, engine in fleet.engines.items() if not engine.member}
    if not away:
        return ""
    shown = "; ".join(f"{name}: {why}" for name, why in list(away.items())[:limit])
    more = f"; and {len(away) - limit} more" if len(away) > limit else ""
    return f"Absent: {shown.rstrip('.')}{more}."


def untold(fleet: Fleet) -> list[str]:
    """Engines that have not got all of their tensors, in an update that comes to each engine by itself."""
    update = fleet.update
    if update is None or fleet.mode is not FleetMode.HYBRID:
        return []
    return [name for name in {**update.boots, **fleet.members()} if name not in update.ended and name not in update.dropped]


def some(names: list[str]) -> str:
    """The first of these engines, in words."""
    more = f" and {len(names) - 4} more" if len(names) > 4 else ""
    return f"engine{'s' if len(names) > 1 else ''} {', '.join(names[:4])}{more}"
