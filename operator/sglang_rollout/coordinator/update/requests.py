"""Requests of a trainer, and answers to it. Data only: a request becomes an event when it arrives."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from sglang_rollout.wire.reasons import GateReason, Refusal, RefusalCode
from sglang_rollout.wire.staged import Shard

Body = Mapping[str, Any]
"""A JSON object as the trainer sent it."""


@dataclass(frozen=True)
class Master:
    """The decision whether engines may connect to the trainer's store."""

    address: str = ""
    """Address of the store, also if the trainer named a host."""
    refusal: Refusal | None = None
    """Why engines may not connect; None: they may."""
    hides_reasons: bool = False
    """True if the caller may not learn which addresses engines reach."""


@dataclass(frozen=True)
class OpenGroup:
    """``/init_weights_update_group``. The body is checked against the engines in the turn of the request."""

    body: Body
    master: Master | None = None
    """None: engines connect to the host that the body names."""


@dataclass(frozen=True)
class CloseGroup:
    """``/destroy_weights_update_group``. ``name`` None: the only open one."""

    name: str | None


@dataclass(frozen=True)
class Pause:
    """``/pause_generation``. ``mode`` None: the trainer named none, so SGLang's default (abort) applies."""

    mode: str | None
    body: Body = field(default_factory=dict)


@dataclass(frozen=True)
class Continue:
    """``/continue_generation``: also the commit point of trainers without sessions."""

    body: Body = field(default_factory=dict)


@dataclass(frozen=True)
class Begin:
    """``/begin_weight_update``."""

    body: Body = field(default_factory=dict)
    label: str | None = None
    """The trainer's label of the version. Tensors and ``/update_weight_version`` may name it later."""
    names: frozenset[str] = frozenset()
    """Every tensor of the push, if the trainer announces them; empty: it does not."""


@dataclass(frozen=True)
class Update:
    """``/update_weights_from_distributed``. ``group`` None: the only open one."""

    group: str | None
    label: str | None
    body: Body
    check_model: bool = True
    """False: the trainer knows that the engines' model may not have these tensors."""


@dataclass(frozen=True)
class End:
    """``/end_weight_update``: the commit point of a session."""

    checksums: Mapping[int, tuple[str, ...]] = field(default_factory=dict)
    """What the trainer says its weights are: one checksum per rank, by the number of an engine's ranks."""


@dataclass(frozen=True)
class Flush:
    """``/flush_cache``: the commit point of trainers that neither pause nor use a session."""

    timeout: float | None = None


@dataclass(frozen=True)
class SetLabel:
    """``/update_weight_version``: the trainer's label for the version of the open update."""

    label: str


@dataclass(frozen=True)
class FromDisk:
    """``/update_weights_from_disk``."""

    path: str
    label: str | None
    body: Body


@dataclass(frozen=True)
class NewRun:
    """``/fleet/run``: the next update begins a new run, whatever its label is."""


@dataclass(frozen=True)
class Claim:
    """``/fleet/claim``: the trainer holds the fleet from now on."""

    take_over: bool = False
    """True: although the lease of another trainer has not expired."""


@dataclass(frozen=True)
class Upload:
    """``POST /fleet/updates``: begin an update whose version the trainer uploads to the weight store."""

    shards: tuple[Shard, ...]
    label: str | None = None
    check_model: bool = True
    """False: the trainer knows that the engines' model may not have these tensors."""
    base: str = ""
    """Digest of the committed version from which pieces may come as differences; empty: all come whole."""


@dataclass(frozen=True)
class CommitUpload:
    """``POST /fleet/updates/{update}/commit``."""

    update: str
    wait: bool = True
    """False: answer when the weight store has the complete version; True: when it is committed."""
    checksums: Mapping[int, tuple[str, ...]] = field(default_factory=dict)
    """What the trainer says its weights are, as in :class:`End`."""


@dataclass(frozen=True)
class WithdrawUpload:
    """``DELETE /fleet/updates/{update}``."""

    update: str


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
    """``/load_lora_adapter``: all fields of SGLang's call, so that every engine gets them, whenever it loads the adapter."""

    name: str
    path: str
    pinned: bool = False


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
    | Claim
    | FromDisk
    | Upload
    | CommitUpload
    | WithdrawUpload
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
    """The answer to a request."""

    status: int
    message: str
    fleet: Mapping[str, Any] = field(default_factory=dict)
    """Details beside SGLang's shape: results by engine and, on refusals, the numbers that would be right."""
    code: RefusalCode | GateReason | None = None
    """Why the call was refused before anything was done; None: it was not refused."""

    @property
    def success(self) -> bool:
        """True if the call did what it was asked to do."""
        return self.status < 300
