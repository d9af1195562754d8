"""Events that the state machine receives and effects that it asks for. Data only.

Time enters only as ``at`` (seconds of any steady clock) in events. Waiting is done outside, with the deadlines that effects carry.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from sglang_rollout.api.intent import Intent
from sglang_rollout.coordinator.update.requests import Answer, Body, Request
from sglang_rollout.wire.agent import AgentStatus
from sglang_rollout.wire.reasons import GateReason, RefusalCode
from sglang_rollout.wire.record import Isolation, Record
from sglang_rollout.wire.staged import StoreStatus


@dataclass(frozen=True)
class Result:
    """The result of one call to one agent. Every failure is a value: without an answer, ``status`` is 0."""

    ok: bool
    status: int = 0
    message: str = ""
    code: RefusalCode | GateReason | None = None
    """Code of the refusal, if an agent refused a folder or a store."""
    agent: AgentStatus | None = None
    """The agent's status, if the reply was one (sync, ack, fence)."""
    store: StoreStatus | None = None
    """The weight store's status, if the reply was one."""
    checksums: tuple[str, ...] | None = None
    """One checksum per rank, if the reply was one of ``/weights_checker`` or of an activation."""
    wrote: bool = True
    """False if an agent refused to load a staged version before the engine changed any weight."""
    flushed: bool = True
    """False if an engine that loaded a staged version kept its prefix cache."""
    changed: bool = True
    """False if it is proved that the load of a staged version changed no tensor of the engine."""
    running: bool = False
    """True if an engine that loaded a staged version generates again."""
    digest: str | None = None
    """What distinguishes the contents of a checkpoint, if the reply was about one."""
    bytes: int | None = None
    """Bytes of all tensors of a checkpoint, if the reply was about one."""
    names: frozenset[str] | None = None
    """The tensors of a checkpoint, if the reply was about one and names were asked for."""
    shapes: Mapping[str, list[int] | None] | None = None
    """Shape of each tensor, None if its values are packed, if the reply was about the engine's own model."""
    is_random: bool = False
    """True if the reply was about the engine's own model, and the engine was started with random weights."""
    path: str | None = None
    """The folder of a checkpoint, if the reply was about one."""
    compared: bool = False
    """True if the reply was about a checkpoint that has all tensors of the engine's model."""
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
    caller: str = ""
    """Who sends it; empty: not known."""
    gone: str = ""
    """The holder of the fleet, if it has no pods any more."""


@dataclass(frozen=True)
class Beat:
    """The trainer's heartbeat: it lives, although it asks for nothing."""

    at: float


@dataclass(frozen=True)
class Left:
    """The client of a request closed its connection. A request that has not begun is dropped."""

    call: int
    at: float


@dataclass(frozen=True)
class Answered:
    """A Send effect ended: one result for each engine that was called."""

    effect: int
    results: Mapping[str, Result]
    at: float


@dataclass(frozen=True)
class Written:
    """A Write effect ended. If not ``ok``, the record is written later, and the acknowledgements of the engines are the commit."""

    effect: int
    ok: bool
    at: float


@dataclass(frozen=True)
class Seen:
    """An agent answered a sync; ``status`` None: it did not."""

    name: str
    status: AgentStatus | None
    seq: int
    """Sequence number of the sync."""
    at: float


@dataclass(frozen=True)
class StoreSeen:
    """The weight store answered a poll; ``status`` None: it did not."""

    status: StoreStatus | None
    seq: int
    """Sequence number of the poll."""
    at: float


@dataclass(frozen=True)
class Wanted:
    """The engines that this fleet should have, and the policy."""

    intent: Intent
    addressed: frozenset[str]
    """Engines that have an address. Only these can hold anything that a rebuild must know."""
    at: float


@dataclass(frozen=True)
class NetworkChecked:
    """Connections that the NetworkPolicies forbid were tried. ``result`` None: no engine could be checked."""

    result: Isolation | None
    at: float


@dataclass(frozen=True)
class CallersForbidden:
    """The coordinator has lost or got the right to watch callers of other namespaces."""

    forbidden: bool
    at: float


@dataclass(frozen=True)
class Tick:
    """Time passes."""

    at: float


Event = Asked | Beat | Left | Answered | Written | Seen | StoreSeen | Wanted | NetworkChecked | CallersForbidden | Tick


# --- effects -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Send:
    """POST ``bodies[engine]`` to ``path`` of each agent, all at once. An Answered event follows within ``deadline``.

    The weight store is a peer like the agents: its name is ``update.store.STORE``.
    """

    path: str
    bodies: Mapping[str, Body]
    deadline: float
    grace: float | None = None
    """How much longer to wait for the other engines after the first failure.

    The trainer must learn of it soon, and engines that are blocked in a collective come free only when the trainer knows.
    """
    patience: float | None = None
    """How much longer another engine may take once half of the engines have answered a call that is the same work for all: ten times as
    long as those, and at least this many seconds.
    """
    idempotent: bool = False
    """True: a lost connection may be tried again within the deadline."""
    ends_held: bool = False
    """True: the call ends all requests of the fleet, so first those end that no engine has: the batch server holds them."""
    id: int = 0


@dataclass(frozen=True)
class Write:
    """Persist this record, waiting only shortly. A Written event follows."""

    record: Record
    id: int = 0


@dataclass(frozen=True)
class Save:
    """Persist this record when convenient."""

    record: Record


@dataclass(frozen=True)
class Cut:
    """Stop waiting for this Send: engines that have not answered count as failed, for this reason."""

    effect: int
    reason: str


@dataclass(frozen=True)
class Reply:
    """Answer a trainer's request."""

    call: int
    answer: Answer


Effect = Send | Write | Save | Cut | Reply
