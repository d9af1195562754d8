"""Which engines take part in updates, and how many must. Pure.

A member is a wanted engine that is up and is not about to leave. Engines that start, restart or drain do not delay a trainer: a process
group is opened with the members that are there, and the epoch tells when the set changes. Only a fleet that has never taken weights waits
until it is complete (its base is up, or ``weights.minCommitted``): a trainer that fixes its process group at its start would otherwise
leave out engines that start a moment later.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING

from sglang_rollout.coordinator.update.store import STORE
from sglang_rollout.wire.reasons import Refusal, RefusalCode, RefusedError, end_sentence
from sglang_rollout.wire.states import FleetMode, FleetState, describe_state

if TYPE_CHECKING:
    from sglang_rollout.coordinator.update.engine import Engine
    from sglang_rollout.coordinator.update.model import Fleet

UNCERTAIN_SECONDS = 10.0
"""An engine whose agent was heard less than this ago and does not answer now is not counted as gone yet."""


NO_ENGINE_UP = "No engine of this fleet is up"
_NO_ENGINES = "This fleet has no engines, because spec.replicas is 0 or spec.state is Suspended"
NO_STORE = "The weight store does not answer (weights.transport: Staged), so no weights can be received."


def required_engines(min_committed: int | str | None, wanted: int, taking_part: int) -> int:
    """Return how many engines must hold a version so that it is committed: at least one.

    Args:
        min_committed: A number of engines, a share of the wanted ones ("75%"), or None: all that take part.
        wanted: How many engines the fleet should have.
        taking_part: How many engines take part.
    """
    if min_committed is None:
        return max(1, taking_part)
    if isinstance(min_committed, int):
        return max(1, min(min_committed, wanted))
    return max(1, math.ceil(int(min_committed.rstrip("%")) * wanted / 100))


def is_enough(fleet: Fleet, holding: int, taking_part: int) -> bool:
    """Return True if this many engines are enough for a commit."""
    return holding >= required_engines(fleet.policy.min_committed, len(fleet.engines), taking_part)


def initial_size(fleet: Fleet) -> int:
    """Return how many engines a fleet that has never taken weights waits for if ``weights.minCommitted`` is not set."""
    wanted = len(fleet.engines)
    return wanted if fleet.membership.base is None else min(fleet.membership.base, wanted)


def require_members(fleet: Fleet) -> Mapping[str, str]:
    """Return the members and their boot IDs, in rank order. Raises RefusedError while they are too few or not certain."""
    refuse_asleep(fleet)
    if fleet.is_staged:
        return {STORE: require_store(fleet)}
    for name, engine in fleet.engines.items():
        wavers = _why_uncertain(engine, fleet.now)
        if wavers:
            sentence = f"engine {name} {wavers}. No engine has joined anything. Try again in a moment."
            raise RefusedError(sentence, status=503, fleet=fleet.advice())
    reason = why_incomplete(fleet)
    if reason:
        advice = " No engine has joined anything. Try again." if fleet.engines else ""
        raise RefusedError(f"{reason}{advice}", status=503, fleet=fleet.advice())
    return {name: engine.boot or "" for name, engine in fleet.members().items()}


def require_store(fleet: Fleet) -> str:
    """Return the run of the weight store's process. Raises RefusedError while the store cannot be called."""
    if fleet.store is None or not fleet.store.is_up or fleet.store.instance is None:
        raise RefusedError(f"{NO_STORE} Nothing has changed. Try again.", status=503, fleet=fleet.advice())
    return fleet.store.instance


def refuse_asleep(fleet: Fleet) -> None:
    """Raise RefusedError while the spec has released the memory of the engines."""
    if fleet.applied_state is FleetState.ASLEEP:
        raise RefusedError(describe_state(fleet.applied_state), status=409, fleet=fleet.advice())


def describe_refused_updates(fleet: Fleet) -> str:
    """Return which engine refuses updates of its weights, and why, as sentences; empty if SGLang takes them in all that are up."""
    for name, engine in fleet.members().items():
        if engine.updates_refused and not fleet.keeps_weights:
            why = f"SGLang refuses every update of the weights in engine {name}: {end_sentence(engine.updates_refused)}"
            return f"{why} Turn that off in engine.args, or in the environment of the engine's container."
    return ""


def refuse_updates(fleet: Fleet) -> None:
    """Raise RefusedError if SGLang will refuse the update in one of the engines, because of how it was started."""
    why = describe_refused_updates(fleet)
    if why:
        raise RefusedError(Refusal(RefusalCode.UPDATES_REFUSED, f"{why} Nothing was sent."), fleet=fleet.advice())


def _why_uncertain(engine: Engine, now: float) -> str:
    """Return why it is not certain yet whether an engine is there; empty if it is certain."""
    if engine.boot is not None and not engine.reachable and now - engine.heard < UNCERTAIN_SECONDS:
        return f"has not answered for {now - engine.heard:.0f} s, and it is not certain yet whether it is gone"
    if engine.up and engine.status is not None and 0 < engine.status.giving_up < UNCERTAIN_SECONDS:
        return "is still leaving an update that was given up"
    return ""


def why_incomplete(fleet: Fleet) -> str:
    """Return why no process group can be opened now, as a sentence; empty if one can."""
    if fleet.applied_state is FleetState.ASLEEP:
        return describe_state(fleet.applied_state)
    if fleet.is_staged and not fleet.is_up(STORE):
        return NO_STORE
    there, wanted = len(fleet.members()), len(fleet.engines)
    taking_part = there if fleet.membership.formed else initial_size(fleet)
    if there and is_enough(fleet, there, taking_part):
        return ""
    if not wanted:
        return describe_none_up(fleet)
    least = required_engines(fleet.policy.min_committed, wanted, taking_part)
    waits = " A fleet that has never taken weights waits for them; weights.minCommitted lets it begin with fewer."
    hint = "" if fleet.membership.formed else waits
    return f"{there} of {wanted} engines are up, and at least {least} must be. {absent_sentence(fleet)}{hint}"


def describe_none_up(fleet: Fleet, consequence: str = "") -> str:
    """Return that no engine is up, with the consequence, and what to do."""
    why, advice = (NO_ENGINE_UP, "Try again.") if fleet.engines else (_NO_ENGINES, "Change the spec.")
    return f"{why}{f', so {consequence}' if consequence else ''}. {advice}"


def absent_sentence(fleet: Fleet, limit: int = 4) -> str:
    """Return which wanted engines are no members, and why; empty if all are."""
    members = fleet.members()
    away = {name: engine.why_absent() for name, engine in fleet.engines.items() if name not in members}
    if not away:
        return ""
    shown = "; ".join(f"{name}: {why}" for name, why in list(away.items())[:limit])
    more = f"; and {len(away) - limit} more" if len(away) > limit else ""
    return f"Absent: {shown.rstrip('.')}{more}."


def engines_without_tensors(fleet: Fleet) -> list[str]:
    """Return the engines that have not received all of their tensors, in an update that comes to each engine by itself."""
    update = fleet.update
    if update is None or fleet.mode is not FleetMode.HYBRID:
        return []
    return [name for name in {**update.boots, **fleet.members()} if name not in update.ended and name not in update.dropped]


def name_engines(names: list[str]) -> str:
    """Return the first of these engines as a phrase."""
    more = f" and {len(names) - 4} more" if len(names) > 4 else ""
    return f"engine{'s' if len(names) > 1 else ''} {', '.join(names[:4])}{more}"
