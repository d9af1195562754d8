"""Messages of transport Staged: a version as shards and pieces, its index, and the calls of coordinator, weight store and agents.

A version is a list of *shards*. Each shard is one safetensors file whose header follows from its list of tensors. The bytes behind the
header are cut into *pieces* of ``PIECE_BYTES``. The *index* of a version is a list of entries that only grows: a shard, then its pieces in
any order as they arrive, and at last the end. So agents copy a version while it still arrives.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated

from pydantic import BeforeValidator, Field
from pydantic_core import PydanticCustomError

from sglang_rollout.wire import Message
from sglang_rollout.wire.agent import AckRequest, SyncRequest
from sglang_rollout.wire.arguments import find_shape_problem, find_tensor_name_problem
from sglang_rollout.wire.reasons import Refusal
from sglang_rollout.wire.states import SnapshotsState, Version
from sglang_rollout.wire.states import StagedCopy as StagedCopy  # noqa: PLC0414 - statuses of agents have copies, too

PIECE_BYTES = 16 * 2**20
"""Bytes of a piece; the last piece of a shard may be shorter."""
MAX_SHARDS = 100_000
DIGEST_PATTERN = "^[0-9a-f]{64}$"
UPDATE_PATTERN = "^[0-9a-f]{32}$"


def _checked(find: Callable[[object, str], str | None], name: str) -> BeforeValidator:
    """Return the validator of a field whose rule is one of :mod:`.arguments`."""

    def check(value: object) -> object:
        if problem := find(value, name):
            raise PydanticCustomError("rule", "{problem}", {"problem": problem.rstrip(".")})
        return value

    return BeforeValidator(check)


class StagedTensor(Message):
    """One tensor of a shard."""

    name: Annotated[str, _checked(find_tensor_name_problem, "name")]
    dtype: str
    """Type as safetensors writes it: ``BF16``, ``F32``."""
    shape: Annotated[list[int], _checked(find_shape_problem, "shape")]


class Shard(Message):
    """One safetensors file: these tensors, in this order, without gaps."""

    tensors: list[StagedTensor] = Field(min_length=1)


class Piece(Message):
    """A piece that has arrived completely."""

    shard: int = Field(ge=0)
    piece: int = Field(ge=0)
    digest: str = Field(pattern=DIGEST_PATTERN)
    """SHA-256 of its bytes, hexadecimal."""


class VersionEnd(Message):
    """The last entry: the version is complete."""

    digest: str = Field(pattern=DIGEST_PATTERN)
    """Digest of the version (:func:`sglang_rollout.staging.index.version_digest`)."""
    bytes: int = Field(ge=0)
    """Bytes of all tensors."""


class IndexEntry(Message):
    """One entry of an index; exactly one field is set."""

    shard: Shard | None = None
    piece: Piece | None = None
    end: VersionEnd | None = None


class IndexReply(Message):
    """Entries of an index from a position on."""

    entries: list[IndexEntry]
    next: int
    """Position after the last of these entries."""
    received: int = 0
    """Bytes that the pod has received of the version, also those of unfinished pieces. A pod whose number grows has not stalled."""


# --- coordinator -> agent ---------------------------------------------------------------------------------------------------


class StageRequest(Message):
    """Copy a version into the pod, or into the weight store. The copy continues after the answer.

    A copy that is complete already takes the ticket of the request: the tickets change with the rollout's key.
    """

    update: str = Field(pattern=UPDATE_PATTERN)
    version: Version | None = None
    """The version; None while its label is not known."""
    parents: list[str]
    """URLs of the data ports to copy from, in this order. The last one is the store. Empty, for the store only: it loads its snapshot."""
    names: dict[str, str] = Field(default_factory=dict)
    """Name of each parent, by its URL, for messages: ``engine e0``, ``the weight store``."""
    ticket: str
    """Ticket that the parents demand."""
    keep: list[str] = Field(default_factory=list)
    """Updates whose copies stay. All others are deleted, except this one."""
    size_limit: int = Field(ge=1)
    """Most bytes of one version."""
    digest: str = ""
    """Digest that the complete copy must have. Empty: answer at once; otherwise answer when the copy is complete, or has failed."""
    deadline: float = Field(default=600.0, gt=0)
    """Seconds after which a copy that is not complete has failed."""


class DropRequest(Message):
    """Delete the copy of an update that failed, unless the engine loads it now. Other copies stay, also if the request arrives late."""

    update: str = Field(pattern=UPDATE_PATTERN)


class ActivateRequest(Message):
    """Load a complete copy into the engine, and acknowledge the version. The engine is paused meanwhile."""

    update: str = Field(pattern=UPDATE_PATTERN)
    digest: str = Field(pattern=DIGEST_PATTERN)
    ack: AckRequest
    mode: str = "retract"
    """Pause mode of SGLang for running requests."""
    checksums: bool = True
    """Return the checksums of the engine's weights."""
    expected: list[str] | None = None
    """Checksums that the engine must have afterwards. An engine with other ones does not acknowledge the version, and stays dirty."""
    sync: SyncRequest | None = None
    """The committed version and the limits, which apply from the begin of the load. The engine generates again when it has loaded the
    version. None: it stays paused."""


class ActivateReply(Message):
    """Result of an activation that succeeded. A refusal has ``wrote`` in its body: false if the engine still holds what it held before."""

    checksums: list[str] | None = None
    """One checksum per rank, if the request asked for them."""
    flushed: bool = True
    """False if the engine kept its prefix cache, because requests still run in a pause in place."""
    running: bool = False
    """True if the engine generates again."""
    changed: bool = True
    """False if it is proved that the load changed no tensor of the engine."""
    seconds: dict[str, float] = Field(default_factory=dict)
    """Seconds of each step: pause, load, verify, flush."""


# --- head pod -> member pods of the same engine -----------------------------------------------------------------------------


class MemberStageReply(Message):
    """Answer of a member pod to a StageRequest or a DropRequest."""

    refusal: Refusal | None
    """Why the pod cannot have the version; None if its copy is complete, or has begun."""
    copies: list[StagedCopy] = Field(default_factory=list)
    """Versions in the memory of the pod."""


class AttemptRequest(Message):
    """Prepare a load of a version by the ranks of this pod, or return their verdicts on it."""

    attempt: str = Field(pattern=UPDATE_PATTERN)
    """Identifies the attempt to load the version."""
    update: str = Field(default="", pattern=f"^$|{UPDATE_PATTERN}")
    """To prepare a load: the update whose complete copy the pod must have."""
    digest: str = ""
    """Digest of the copy."""
    ranks: int = Field(default=1, ge=1)
    """Ranks of the engine in this pod."""


class RankVerdict(Message):
    """What one rank says about its load."""

    ok: bool
    wrote: bool
    message: str = ""
    ended: bool = True
    """False while the rank still loads."""


class AttemptReply(Message):
    """Answer of a member pod to an AttemptRequest."""

    refusal: Refusal | None
    """Why the ranks of this pod cannot load the version, or why their verdicts are not known."""
    verdicts: list[RankVerdict] = Field(default_factory=list)
    """One for each rank that has written its verdict."""


# --- coordinator -> store ---------------------------------------------------------------------------------------------------


class StoreOpenRequest(Message):
    """Begin a version in the store."""

    update: str = Field(pattern=UPDATE_PATTERN)
    upload_ticket: str = ""
    """Ticket of an uploader; empty: the version arrives through a process group."""
    upload_seconds: float = Field(default=3600.0, gt=0)
    """Seconds after which the uploader's ticket expires."""
    ticket: str
    """Ticket of readers."""
    size_limit: int = Field(ge=1)
    shards: list[Shard] = Field(default_factory=list)
    """All shards of an upload. Shards from a process group are added as their tensors are announced."""
    base: str = Field(default="", pattern=f"^$|{DIGEST_PATTERN}")
    """Digest of a complete version with the same shards: pieces of an upload may come as differences from it. Empty: all come whole."""
    keep: list[str] = Field(default_factory=list)
    """Updates whose versions stay. All others are deleted."""


class StoreGroupRequest(Message):
    """Join a process group of the trainer as its rank 1, or leave it."""

    group_name: str
    master_address: str = ""
    master_port: int = 0
    world_size: int = 2
    rank_offset: int = 1
    backend: str = "gloo"
    deadline: float = Field(default=120.0, gt=0)


class StoreReceiveRequest(Message):
    """Receive one bucket of tensors from a process group as the next shard of a version."""

    update: str = Field(pattern=UPDATE_PATTERN)
    group_name: str
    shard: Shard
    flattened: bool
    """True: one broadcast of all bytes; False: one broadcast per tensor."""
    deadline: float = Field(default=300.0, gt=0)


class StoreSealRequest(Message):
    """Declare a version complete. Refused while pieces are missing."""

    update: str = Field(pattern=UPDATE_PATTERN)
    version: Version


class StoreDropRequest(Message):
    """Delete all versions but these."""

    keep: list[str]


class StoreCommitRequest(Message):
    """Note that a complete version is committed, and write a snapshot of it if one is due. May be repeated."""

    update: str = Field(pattern=UPDATE_PATTERN)
    version: Version
    author: str = ""
    """Caller that pushed the version; empty: not known."""
    epoch: int = 0
    """Epoch of the fleet."""
    fleet_id: str = ""
    """ID of the fleet."""


class StoreReadRequest(Message):
    """Let readers with a ticket read a version at the data port, also one that is only a snapshot."""

    update: str = Field(pattern=UPDATE_PATTERN)
    ticket: str = Field(min_length=1)
    """Ticket that the readers present."""


class StoreReadReply(Message):
    """A version of the store."""

    version: Version | None = None
    digest: str
    bytes: int


class StoreVerifyRequest(Message):
    """Read all files of a snapshot, and compare them with their digests."""

    update: str = Field(pattern=UPDATE_PATTERN)
    deadline: float = Field(default=600.0, gt=0)
    """Seconds after which the store gives up."""


class StoreVerifyReply(Message):
    """Result of a check of a snapshot."""

    problems: list[str] = Field(default_factory=list)
    """What differs, as sentences; empty if the snapshot is sound."""


class StoreStatus(Message):
    """State of the store: the reply to every call of the coordinator."""

    instance: str
    """Identifies one run of the store's process: process groups and unfinished versions end with it."""
    copies: list[StagedCopy] = Field(default_factory=list)
    groups: list[str] = Field(default_factory=list)
    committed: str = ""
    """ID of the update whose version the coordinator last named as committed; empty: it named none to this process."""
    snapshots: SnapshotsState | None = None
    """The snapshots; None: the store writes none."""


class UploadStatus(Message):
    """State of an upload, for the uploader."""

    update: str
    bytes: int
    """Bytes that have arrived."""
    missing: list[tuple[int, int]] = Field(default_factory=list)
    """Shard and piece of the first 10,000 pieces that have not arrived."""
