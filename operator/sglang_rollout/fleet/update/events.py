"""What the state machine hears (events) and what it wants done (effects). Data only.

Time enters only as ``at`` (seconds of any steady clock) in events; waiting is done outside, with the deadlines that
effects carry. A request is what a trainer asked; it becomes an event when it arrives.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from sglang_rollout.wire.agent import AgentStatus
from sglang_rollout.wire.intent import Intent
from sglang_rollout.wire.record import Record

Body = Mapping[str, Any]
"""A JSON object as the trainer sent it."""


# --- requests: what a trainer asks ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class OpenGroup:
    """``/init_weights_update_group``: the body is checked against the engines when its turn comes."""

    body: Body


@dataclass(frozen=True)
class CloseGroup:
    """``/destroy_weights_update_group``. ``name`` None: the only open one."""

    name: str | None


@dataclass(frozen=True)
class Pause:
    """``/pause_generation``. ``mode`` None: the trainer named none, SGLang's own default (abort) applies."""

    mode: str | None
    body: Body = field(default_factory=dict)


@dataclass(frozen=True)
class Continue:
    """``/continue_generation``: also the commit point of trainers that use no session."""

    body: Body = field(default_factory=dict)


@dataclass(frozen=True)
class Begin:
    """``/begin_weight_update``."""

    body: Body = field(default_factory=dict)


@dataclass(frozen=True)
class Update:
    """``/update_weights_from_distributed``. ``group`` None: the only open one."""

    group: str | None
    label: str | None
    body: Body


@dataclass(frozen=True)
class End:
    """``/end_weight_update``: the commit point of a session."""

    checksums: Mapping[int, tuple[str, ...]] = field(default_factory=dict)
    """What the trainer says that its weights are: by the number of an engine's ranks, one checksum per rank."""


@dataclass(frozen=True)
class Flush:
    """``/flush_cache``: the commit point of trainers that neither pause nor use a session."""

    timeout: float | None = None


@dataclass(frozen=True)
class SetLabel:
    """``/update_weight_version``: the trainer's name for the version of the open update."""

    label: str


@dataclass(frozen=True)
class FromDisk:
    """``/update_weights_from_disk``."""

    path: str
    label: str | None
    body: Body


@dataclass(frozen=True)
class NewRun:
    """``/fleet/run``: the next update begins a new run, whatever it is called."""


@dataclass(frozen=True)
class ReleaseMemory:
    """``/release_memory_occupation``. No tags: all kinds."""

    tags: tuple[str, ...] = ()


@dataclass(frozen=True)
class ResumeMemory:
    """``/resume_memory_occupation``. No tags: all that is released."""

    tags: tuple[str, ...] = ()


@dataclass(frozen=True)
class Tensors:
    """``/update_weights_from_tensor``: handles of memory that only a process on the engine's node can open."""

    label: str | None
    body: Body


@dataclass(frozen=True)
class LoadAdapter:
    """``/load_lora_adapter``."""

    name: str
    path: str
    body: Body


@dataclass(frozen=True)
class UnloadAdapter:
    """``/unload_lora_adapter``."""

    name: str


Call = (
    OpenGroup
    | CloseGroup
    | Pause
    | Continue
    | Begin
    | Update
    | End
    | Flush
    | SetLabel
    | NewRun
    | FromDisk
    | ReleaseMemory
    | ResumeMemory
    | Tensors
    | LoadAdapter
    | UnloadAdapter
)


@dataclass(frozen=True)
class AtEngine:
    """A call at one engine's own URL, by a trainer that shares its GPUs."""

    engine: str
    call: Call


Request = Call | AtEngine


@dataclass(frozen=True)
class Answer:
    """What the trainer is told."""

    status: int
    message: str
    fleet: Mapping[str, Any] = field(default_factory=dict)
    """Particulars beside SGLang's shape: per-engine results, and on refusals what would be right."""

    @property
    def success(self) -> bool:
        """Whether the call did what it was asked to."""
        return self.status < 300


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
    path: str | None = None
    """Set when the reply was about a checkpoint: its folder."""


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
