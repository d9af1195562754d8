"""Coordinator ↔ agent: what an agent is told and asked, and what it says of its engine."""

from __future__ import annotations

from pydantic import Field

from sglang_rollout.wire.message import Message
from sglang_rollout.wire.ports import WIRE_VERSION
from sglang_rollout.wire.reasons import GateReason
from sglang_rollout.wire.states import FleetState
from sglang_rollout.wire.weights import EngineState, Version


class Nccl(Message):
    """The NCCL with which a process would join a group."""

    version: str | None = None
    """As NCCL writes it: ``2.28.3``. None: not known."""
    settings: dict[str, str] = Field(default_factory=dict)
    """Environment variables ``NCCL_…``, as they are when the process starts its communicators."""


class AgentStatus(Message):
    """What one agent knows about its engine: the reply to every coordinator call that changes or asks state."""

    wire: int = WIRE_VERSION
    name: str
    boot_id: str | None
    """Identifies one run of the engine process; None while it is not up."""
    seq: int = 0
    """Grows with every status that the agent reports, also across restarts of the agent. 0: the agent sends no sequence numbers."""
    state: EngineState
    version: Version | None
    """The version all tensors belong to; set exactly when ``state`` is clean."""
    cohort: list[str] = Field(default_factory=list)
    """Names of the engines that took part in the update to ``version``: what a new coordinator needs to prove a commit."""
    committed: Version | None
    """What this agent was last told is committed."""
    term: int
    """Highest coordinator term seen."""
    gate_open: bool
    paused: bool = False
    session: bool = False
    """A weight-update session (``begin_weight_update``) is open on the engine."""
    groups: list[str] = Field(default_factory=list)
    giving_up: float = 0.0
    """Seconds since the agent began to give an update up and has not ended: it takes no calls, and the engine may be stuck for good."""
    draining: bool = False
    """The engine is about to be stopped: it takes no new requests and no new update."""
    released: list[str] = Field(default_factory=list)
    """Memory tags that were released and not resumed."""
    adapters: dict[str, str] = Field(default_factory=dict)
    """Adapters that it has loaded in this life: path by name. No path: it may hold it or not, because the agent was restarted meanwhile."""
    woken: bool = False
    """Its weights were released and are back, and nobody has proved yet what they are."""
    tensor_size: int | None = None
    sglang_version: str | None = None
    nccl: Nccl | None = None
    """Of the engine's container; None: not known."""
    all_reduce: float | None = None
    """GB/s that the ranks of the pod reached before the start; None: not measured."""
    reason: GateReason | None = None
    """Why the gate is closed; None while it is open."""
    message: str = ""
    """The reason as a sentence; empty while the gate is open."""


class SyncRequest(Message):
    """Coordinator → agent, about twice a second: who leads and what is committed. Opens or closes the gate."""

    committed: Version | None
    """None: the coordinator itself does not know yet; the agent keeps what it had."""
    tolerated: list[Version] = Field(default_factory=list)
    """Older versions that may be served too (``weights.versionPolicy: MaxStaleness``)."""
    lease: float = 60.0
    """An engine that is paused or half updated and hears nothing of any coordinator for so long gives the update up."""
    silent: float = 120.0
    """An engine that has no call to answer and gives no sign of life for so long is restarted."""
    drain: float = 300.0
    """Requests have so many seconds to end before an engine falls asleep; the rest is aborted."""
    hold: FleetState | None = None
    """What the spec holds the fleet in. None: the coordinator itself does not know yet; the agent keeps what it had."""
    sender: str = ""
    """Identifies one run of the coordinator process."""
    seq: int = 0
    """Grows with every request of the sender. The agent ignores a request that arrives after a later one.
    0: the coordinator sends no sequence numbers."""


class AckRequest(Message):
    """Coordinator → agent at the end of an update: record that the engine holds ``version`` completely.

    The gate stays closed until a SyncRequest says that ``version`` is committed. Refused (409) unless the agent saw a complete update
    in this life of the engine (``boot_id``).
    """

    version: Version
    boot_id: str
    cohort: list[str]
    verified: bool = False
    """An engine whose memory was released holds the version's very bytes: its checksum was compared. No update is needed then."""


class FenceRequest(Message):
    """Coordinator → agent: an update was given up.

    End the session, resume if the engine is still clean; if it is dirty close the gate, cut the connections it holds, abort
    what it was generating, and only then let its scheduler run again.
    """

    reason: str
    stuck_after: float = 30.0
    """Seconds after which an engine that still has not answered a call of the update is asked to be killed."""


class PreflightRequest(Message):
    """Coordinator → agent: can this pod reach the trainer's store? Tried until it can or ``deadline`` seconds have passed."""

    host: str
    port: int = Field(ge=1, le=65535)
    deadline: float = Field(gt=0)


class PreflightReply(Message):
    """Whether the trainer's address resolves and accepts TCP from the engine's pod; ``reason`` is a sentence when not."""

    ok: bool
    reason: str = ""


ARCHITECTURE = "architecture"
UNCHECKED = ("sizes and quantization", "names, types and shapes of tensors")
"""Parts of a checkpoint that are compared only where a pod can read the engine's own model."""


class CheckpointRequest(Message):
    """Coordinator → agent, before any engine hears of a disk update: can this engine load the folder, as its own pod sees it?"""

    path: str
    """Folder of a Hugging Face model with safetensors files, absolute. Empty: the model that the engine runs, for its tensors' names."""
    model_path: str | None = None
    """The model to compare with. None: the one that the engine runs."""
    snapshot: Version | None = None
    """``path`` is a directory of snapshots: find the one of this version."""
    names: bool = False
    """Tell the tensors' names, too: asked of one engine only, they are many."""
    fleet_id: str = ""
    """With ``snapshot``: of the fleet that committed it. Another fleet's version of the same number is something else."""
    deadline: float = Field(default=60.0, gt=0)
    """Seconds until the agent answers that it could not finish."""


class CheckpointReply(Message):
    """Whether the engine can be told to load it; ``reason`` holds a sentence for each problem when not."""

    ok: bool
    reason: str = ""
    tensors: int = 0
    bytes: int = 0
    """Bytes of all tensors."""
    digest: str | None = None
    """Names, headers and samples of the files' content, hashed: agents that see the same files say the same."""
    names: list[str] | None = None
    """If they were asked for: the tensors that a complete checkpoint must have."""
    shapes: dict[str, list[int] | None] | None = None
    """With an empty ``path``: shape of each tensor of the engine's model, by name; None for a tensor with packed values."""
    compared: bool = False
    """Whether the engine's own model could be read here, so that architecture, names, types and shapes were compared."""
    path: str | None = None
    """The folder to load: of the snapshot, where one was asked for."""
    unchecked: list[str] = Field(default_factory=list)
    """What could not be compared with the engine's model, as noun phrases."""
    why_unchecked: str = ""
    """Why, as a clause; empty if all was compared."""
