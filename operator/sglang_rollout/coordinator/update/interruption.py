"""What keeps engines from generating, and which memory it releases. Pure.

Several causes may hold at a time; an engine generates when none does. A trainer's own call never ends what the spec asks for.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import StrEnum

from sglang_rollout.sglang.api import MEMORY_TAGS, MemoryTag
from sglang_rollout.wire.states import RELEASED_TO_TRAINER, FleetMode, FleetState, describe_state


class Cause(StrEnum):
    """Who or what interrupts engines."""

    SPEC = "spec"
    """``spec.state``. Ends when the spec changes."""
    COLOCATED = "co-located trainer"
    """A trainer on the same GPUs has the engines' memory. Ends when that trainer resumes it."""
    TRAINER = "trainer"
    """A trainer paused the fleet. Ends by the trainer's own call, or when the trainer is lost."""
    UPDATE = "update"
    """The coordinator paused the fleet for an update whose trainer did not. Ends with the update."""
    TRAINER_LOST = "lost trainer"
    """The policy (``weights.trainerLease.onLoss``). Ends when a trainer calls."""


PAUSES = frozenset({Cause.TRAINER, Cause.UPDATE, Cause.TRAINER_LOST})
"""Causes that pause the fleet for a trainer or because of one. At most one of them is in effect."""


@dataclass
class Interruption:
    """One cause in effect."""

    cause: Cause
    memory: frozenset[str] = frozenset()
    """Memory tags that it releases."""
    mode: str | None = None
    """The mode of the pause; None: SGLang's default."""
    engines: tuple[str, ...] = ()
    """Engines that were paused."""
    since: float = 0.0
    """When it began."""
    author: str = ""
    """Caller of the trainer that began it; empty: not known, or no trainer did."""
    is_deferred: bool = False
    """True for a trainer's pause that engines do not keep: they generate until they load the version (``staging.trainerPause: Defer``)."""


@dataclass
class Interruptions:
    """The causes in effect, in the order in which they began."""

    in_effect: dict[Cause, Interruption] = field(default_factory=dict)
    desired_state: FleetState = FleetState.ACTIVE
    """What the spec asks for."""
    drain_seconds: float = 300.0
    """Time that requests have to end before engines release their memory for the spec."""
    mode: FleetMode | None = None
    """Whose GPUs the fleet uses; None: its own."""
    at_engines: dict[str, frozenset[str]] = field(default_factory=dict)
    """Memory that a co-located trainer has of engines at whose own URL it released or resumed memory, by the engine's name. For the others,
    the interruption with cause COLOCATED says."""

    def __post_init__(self) -> None:
        """Start as verl leaves a fleet before its first call: asleep until woken."""
        self.release_to_trainer((MemoryTag.KV_CACHE, MemoryTag.WEIGHTS))

    @property
    def pause(self) -> Interruption | None:
        """The pause by a trainer, for an update or for a lost trainer; None if engines may generate."""
        found = self.requested_pause
        return None if found is None or found.is_deferred else found

    @property
    def requested_pause(self) -> Interruption | None:
        """The same, or a trainer's pause that is deferred. The trainer believes that engines are paused, and its lease applies."""
        return next((found for cause, found in self.in_effect.items() if cause in PAUSES), None)

    @property
    def applied_state(self) -> FleetState:
        """The ``spec.state`` that is in effect. Trainer calls and leases never change it."""
        found = self.in_effect.get(Cause.SPEC)
        if found is None:
            return FleetState.ACTIVE
        return FleetState.ASLEEP if found.memory else FleetState.PAUSED

    @property
    def released_to_trainer(self) -> tuple[str, ...]:
        """Memory tags that a co-located trainer has of engines that it never called one by one."""
        return in_order(self.in_effect[Cause.COLOCATED].memory) if Cause.COLOCATED in self.in_effect else ()

    def begin(self, interruption: Interruption) -> None:
        """Put an interruption into effect. A pause replaces the pause before it."""
        if interruption.cause in PAUSES:
            self.end_pause()
        self.in_effect[interruption.cause] = interruption

    def end_pause(self) -> None:
        """End the pause, whatever its cause."""
        self.in_effect = {cause: found for cause, found in self.in_effect.items() if cause not in PAUSES}

    def apply_state(self, state: FleetState) -> None:
        """Put a value of ``spec.state`` into effect."""
        self.in_effect.pop(Cause.SPEC, None)
        if state is not FleetState.ACTIVE:
            self.begin(Interruption(Cause.SPEC, frozenset(MEMORY_TAGS) if state is FleetState.ASLEEP else frozenset()))

    def release_to_trainer(self, tags: Iterable[str]) -> None:
        """Note the memory that a co-located trainer has of all engines without an entry in ``at_engines``."""
        memory = frozenset(tags)
        if memory:
            self.begin(Interruption(Cause.COLOCATED, memory))
        else:
            self.in_effect.pop(Cause.COLOCATED, None)

    def trainer_memory(self, engine: str) -> tuple[str, ...]:
        """Return the memory tags of an engine that a co-located trainer has."""
        if self.mode is None:
            return ()
        return in_order(self.at_engines[engine]) if engine in self.at_engines else self.released_to_trainer

    def why_not_generating(self, engines: Iterable[str]) -> str:
        """Return why no engine generates until the spec or a co-located trainer changes that; empty if nothing does."""
        asleep = self.mode is not None and all(self.trainer_memory(name) for name in engines)
        return describe_state(self.applied_state) or (RELEASED_TO_TRAINER if asleep else "")


def in_order(tags: Iterable[str]) -> tuple[str, ...]:
    """Return memory tags in the order in which SGLang names them."""
    found = set(tags)
    return tuple(tag for tag in MEMORY_TAGS if tag in found)
