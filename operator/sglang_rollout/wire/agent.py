"""Messages between coordinator and agents, and between the agents of one engine of several pods."""

from __future__ import annotations

from enum import StrEnum

from pydantic import Field

from sglang_rollout.wire import Message
from sglang_rollout.wire.ports import WIRE_VERSION
from sglang_rollout.wire.reasons import GateReason, Refusal
from sglang_rollout.wire.states import EngineState, FleetState, StagedCopy, StagedVersion, Version


class Nccl(Message):
    """NCCL with which a process would join a process group."""

    version: str | None = None
    """Version as NCCL writes it: ``2.28.3``. None: not known."""
    settings: dict[str, str] = Field(default_factory=dict)
    """Environment variables ``NCCL_…`` at the time when the process creates its communicators."""


class AgentStatus(Message):
    """State of one engine as its agent knows it: the reply to every coordinator call that reads or changes state."""

    wire: int = WIRE_VERSION
    name: str
    boot_id: str | None
    """Identifies one run of the engine process; None while it is not up."""
    state: EngineState
    version: Version | None
    """Version that all tensors belong to; set exactly while ``state`` is clean."""
    cohort: list[str] = Field(default_factory=list)
    """Names of the engines that took part in the update to ``version``. A new coordinator needs them to prove a commit."""
    committed: Version | None
    """Committed version of the last sync."""
    term: int
    """Highest coordinator term seen."""
    gate_open: bool
    paused: bool = False
    session: bool = False
    """A weight-update session (``begin_weight_update``) is open on the engine."""
    groups: list[str] = Field(default_factory=list)
    giving_up: float = 0.0
    """Seconds since the agent began to give up an update; 0 if it does not. The agent refuses calls until it has given up the update."""
    draining: bool = False
    """The engine is about to stop: it accepts no new requests and joins no new update."""
    released: list[str] = Field(default_factory=list)
    """Memory tags that are released."""
    adapters: dict[str, str] = Field(default_factory=dict)
    """Path of each loaded adapter by name. Empty path: unknown, because the agent restarted during the call."""
    woken: bool = False
    """The weights were released and are restored, and their version is not verified yet."""
    tensor_size: int | None = None
    sglang_version: str | None = None
    probes_port: bool = False
    """The pod's gate listens on the port of probes. Agents of earlier releases do not say so, and their gates do not."""
    takes_copies: bool = False
    """The pod was made for transport Staged, and can hold copies of versions."""
    staged: list[StagedCopy] = Field(default_factory=list)
    """Versions in the memory of the pod (transport Staged), oldest first; without ``digest`` while they arrive."""
    restarts_engine: bool = False
    """The agent can have the engine's container restarted."""
    nccl: Nccl | None = None
    """NCCL of the engine's container; None: not known."""
    updates_refused: str = ""
    """Why SGLang refuses updates of the weights, in its own sentences; empty if it does not, or if nothing is known."""
    sampling_params: list[str] = Field(default_factory=list)
    """Names of the sampling parameters that a request to the engine may set; empty if they are not known."""
    reason: GateReason | None = None
    """Why the gate is closed; None while it is open."""
    message: str = ""
    """The reason as a sentence; empty while the gate is open."""


class SyncRequest(Message):
    """Coordinator → agent, about twice a second: the committed version and the limits. Opens or closes the gate."""

    committed: Version | None
    """None: the coordinator does not know yet, and the agent keeps the previous value."""
    tolerated: list[Version] = Field(default_factory=list)
    """Older versions that may be served, too (``weights.versionPolicy: MaxStaleness``)."""
    staged: StagedVersion | None = None
    """Contents of ``committed``. An agent may load a copy by itself only if its update and digest are these: another update of the same
    run and step may have failed. None: the coordinator does not know them."""
    lease: float = 60.0
    """Seconds without a coordinator's call after which the agent gives up the update of a paused or half-updated engine."""
    silent: float = 120.0
    """Seconds without an answer after which the agent restarts an engine that no call keeps busy."""
    drain: float = 300.0
    """Seconds that requests have to finish before ``spec.state: Asleep`` releases the memory. Then they are aborted."""
    load: float = 300.0
    """Seconds for a load of a copy that the agent begins by itself. A slower engine counts as stuck."""
    pause_mode: str = "retract"
    """Pause mode of SGLang for requests that run when the agent begins such a load."""
    spec_state: FleetState | None = None
    """Applied ``spec.state``. None: the coordinator does not know yet, and the agent keeps the previous value."""
    sender: str = ""
    """Identifies one run of the coordinator process."""
    seq: int = 0
    """Grows with every request of the sender. The agent ignores a request that arrives after a request with a higher number.
    0: the coordinator sends no sequence numbers."""


class AckRequest(Message):
    """Coordinator → agent at the end of an update: record that the engine holds ``version`` completely.

    The gate stays closed until a SyncRequest says that ``version`` is committed. Refused (409) unless the agent saw a complete update
    in this run of the engine process (``boot_id``).
    """

    version: Version
    boot_id: str
    cohort: list[str]
    verified: bool = False
    """The weights were released and restored, and their checksum equals that of the version. The engine needs no update then."""


class FenceRequest(Message):
    """Coordinator → agent: give up the update.

    The agent ends the session and resumes a clean engine. If the engine is dirty, the agent first closes the gate, cuts the connections
    and aborts the requests.
    """

    message: str
    """Why, as a sentence for the agent's log."""
    restart: bool = False
    """True if no later update is known to replace everything that the engine may hold: the engine's container restarts, if the engine is
    dirty."""
    stuck_after: float = 30.0
    """Seconds after which the agent asks for the restart of an engine that has not answered a call of the update."""


class PreflightRequest(Message):
    """Coordinator → agent: connect to the trainer's store. The agent tries until it succeeds or ``deadline`` seconds have passed."""

    host: str
    port: int = Field(ge=1, le=65535)
    deadline: float = Field(gt=0)
    handshake: bool = False
    """True: the store must answer as torch's TCPStore does. False: an accepted connection is enough, as of a trainer that is stopped."""


class PreflightReply(Message):
    """Result of the attempt to connect from the engine's pod to the trainer's store."""

    refusal: Refusal | None
    """Why the address cannot be reached; None if it can."""


ARCHITECTURE = "architecture"
UNCHECKED = ("sizes and quantization", "names, types and shapes of tensors")
"""Parts of a checkpoint that are compared only if a pod can read the engine's own model."""


class CheckpointRequest(Message):
    """Coordinator → agent, before a disk update begins: check that this engine can load the folder as its own pod sees it."""

    path: str
    """Folder of a Hugging Face model with safetensors files, absolute. Empty: list the tensors of the model that the engine runs."""
    model_path: str | None = None
    """Model to compare with. None: the model that the engine runs."""
    snapshot: Version | None = None
    """Set if ``path`` is a directory of snapshots: find the snapshot of this version."""
    names: bool = False
    """Return the tensors' names, too. Sent to one engine only, because a model may have 50,000 tensors."""
    adapter: bool = False
    """True: ``path`` is a LoRA adapter. It is compared with no model."""
    allowed: list[str] = Field(default_factory=list)
    """Folders below which ``path`` and all its files must lie, also after symbolic links; empty: all. The refusal is ``Forbidden``."""
    fleet_id: str = ""
    """With ``snapshot``: ID of the fleet that committed the version."""
    deadline: float = Field(default=60.0, gt=0)
    """Seconds after which the agent answers that it could not finish."""


class CheckpointReply(Message):
    """Result of the check of a checkpoint."""

    refusal: Refusal | None
    """Why the engine cannot load the folder, with a sentence for each problem; None if it can."""
    tensors: int = 0
    bytes: int = 0
    """Bytes of all tensors."""
    digest: str | None = None
    """Hash of names, headers and samples of the files: equal for agents that see the same files."""
    names: list[str] | None = None
    """Tensors that a complete checkpoint must have, if the request asked for names."""
    shapes: dict[str, list[int] | None] | None = None
    """Shape of each tensor of the engine's model by name, if ``path`` was empty; None for a tensor with packed values."""
    is_random: bool = False
    """True if ``path`` was empty and the engine was started with random weights (``--load-format dummy``)."""
    compared: bool = False
    """True if the engine's own model could be read, so that architecture, names, types and shapes were compared."""
    path: str | None = None
    """Folder to load: the snapshot's, if the request named a snapshot."""
    unchecked: list[str] = Field(default_factory=list)
    """Parts that could not be compared with the engine's model, as noun phrases."""
    why_unchecked: str = ""
    """Why these parts could not be compared, as a clause; empty if everything was compared."""


def termination_message(message: str) -> str:
    """Return the last line in the log of a container that is ended because another pod of its engine failed."""
    return f"[{GateReason.GROUP_RESTART}] {message}\n"


def is_group_restart(log: str) -> bool:
    """Return whether a container with these last log lines was ended because another pod of its engine failed."""
    return f"[{GateReason.GROUP_RESTART}]" in log


class Verdict(StrEnum):
    """What a pod does with the current run of its engine container."""

    WAIT = "wait"
    """Do not start SGLang yet."""
    GO = "go"
    """Start SGLang, or let it run."""
    END = "end"
    """Restart the container: this run cannot join the other pods."""


class MemberReport(Message):
    """Agent of a member pod → agent of the head pod, twice a second."""

    rank: int = Field(ge=1)
    """SGLang's node rank of the pod."""
    address: str
    """Gate of the pod as ``IP:port``. The head pod connects to it when reports stop."""
    boot_id: str | None
    """Boot ID of the engine container; None: the container does not run."""
    released: bool = False
    """SGLang was started in this run of the container."""
    up: bool = False
    """SGLang's part in this pod has finished loading."""
    draining: bool = False
    """The pod is about to stop."""
    schedulers: int = 0
    """Number of schedulers in the pod in which the plug-in has proved that it is active."""
    staged: list[StagedCopy] = Field(default_factory=list)
    """Versions in the memory of the pod (transport Staged)."""
    data_address: str = ""
    """Where the pod gives its copies to other pods, as ``IP:port``; empty with another transport."""


class MemberHealth(Message):
    """Answer of a member pod's agent at ``AGENT_HEALTH``."""

    status: str = "ok"
    unheard: str = ""
    """Why the member cannot reach the head pod, as a clause; empty if it can."""


class GroupReply(Message):
    """Answer of the head pod to a report."""

    verdict: Verdict
    message: str = ""
    """Why the container restarts, as a sentence."""
    drained: bool = False
    """The engine is drained: no request runs, and none can arrive."""
