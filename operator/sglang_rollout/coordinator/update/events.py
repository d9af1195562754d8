"""What the state machine hears (events) and what it wants done (effects). Data only.

Time enters only as ``at`` (seconds of any steady clock) in events; waiting is done outside, with the deadlines that
effects carry.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from sglang_rollout.api.intent import Intent
from sglang_rollout.coordinator.update.requests import Answer, Body, Request
from sglang_rollout.wire.agent import AgentStatus
from sglang_rollout.wire.record import Record


@dataclass(frozen=True)
class Result:
    """What became of one call to one engine's agent. Every failure is a value: no answer is ``status`` 0."""

    ok: bool
    status: int = 0
    message: str = ""
    agent: AgentStatus | None = None
    """Set when the reply was the agent's status (sync, ack, fence)."""
    checksums: tuple[str, ...] | None = None
    """Set when the reply was one of ``/weights_checker``: one checksum per rank."""
    digest: str | None = None
    """Set when the reply was about a checkpoint: what tells its contents from others."""
    names: frozenset[str] | None = None
    """Set when the reply was about a checkpoint and names were asked for: its tensors."""
    shapes: Mapping[str, list[int] | None] | None = None
    """Set when the reply was about the engine's own model: shape of each tensor, None if its values are packed."""
    path: str | None = None
    """Set when the reply was about a checkpoint: its folder."""
    compared: bool = False
    """The reply was about a checkpoint, which has all tensors of the engine's model."""
    unchecked: tuple[str, ...] = ()
    """What of a checkpoint could not be compared with the engine's model."""
    why_unchecked: str = ""
    """Why, as a clause."""


# --- events --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Asked:
    """A trainer's request arrived."""

    call: int
    request: Request
    at: float


@dataclass(frozen=True)
class Beat:
    """The trainer's heartbeat: it lives, although it has nothing to ask."""

    at: float


@dataclass(frozen=True)
class Left:
    """The client of a request closed its connection. A request that has not begun is dropped."""

    call: int
    at: float


@dataclass(frozen=True)
class Answered:
    """A Send effect ended: one result for each engine it went to."""

    effect: int
    results: Mapping[str, Result]
    at: float


@dataclass(frozen=True)
class Written:
    """A Write effect ended. ``ok`` False: persisted later; the engines' acknowledgements are the commit."""

    effect: int
    ok: bool
    at: float


@dataclass(frozen=True)
class Seen:
    """The agent's answer to a sync; None: it did not answer."""

    name: str
    status: AgentStatus | None
    asked: float
    """When the sync was sent."""
    at: float


@dataclass(frozen=True)
class Wanted:
    """The engines this fleet should have, and the policy."""

    intent: Intent
    addressed: frozenset[str]
    """Engines that have an address: only those can hold anything that a rebuild must hear of."""
    at: float


@dataclass(frozen=True)
class Tick:
    """Time passes."""

    at: float


Event = Asked | Beat | Left | Answered | Written | Seen | Wanted | Tick


# --- effects -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Send:
    """POST ``bodies[engine]`` to ``path`` of each engine's agent, all at once. Answered comes within ``deadline``."""

    path: str
    bodies: Mapping[str, Body]
    deadline: float
    grace: float | None = None
    """After the first failure wait only so much longer for the others: whoever pushes must learn it soon, and engines
    that are blocked in a collective come free only when the trainer has been told."""
    patience: float | None = None
    """Where all have the same to do: once half of the engines have answered, the others may take ten times as long as those
    did, and at least so many seconds."""
    idempotent: bool = False
    """A lost connection may be tried again within the deadline."""
    id: int = 0


@dataclass(frozen=True)
class Write:
    """Persist this record, waiting only shortly; ends with Written."""

    record: Record
    id: int = 0


@dataclass(frozen=True)
class Save:
    """Persist this record when convenient."""

    record: Record


@dataclass(frozen=True)
class Cut:
    """Wait no longer for this Send: whoever has not answered counts as failed, for this reason."""

    effect: int
    reason: str


@dataclass(frozen=True)
class Reply:
    """Answer a trainer's request."""

    call: int
    answer: Answer


Effect = Send | Write | Save | Cut | Reply
