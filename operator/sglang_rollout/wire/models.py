"""Messages between the parts, as pydantic models.

Field names are snake_case on the wire, as in SGLang's own API. Unknown fields are ignored, so that neighbouring releases
understand each other; a model only ever gains fields with defaults.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from sglang_rollout.wire.ports import WIRE_VERSION
from sglang_rollout.wire.states import FleetMode, FleetState

BASE_LABEL = "base"


class Message(BaseModel):
    """Base of all messages: immutable, tolerant of fields that a newer peer adds."""

    model_config = ConfigDict(frozen=True, extra="ignore", use_attribute_docstrings=True)


class Version(Message):
    """A weight version of the fleet: ``n`` grows within a ``run``; ``label`` is the trainer's own name for it.

    ``run`` 0, ``n`` 0 is *base*: what ``model.path`` holds, before the first update.
    """

    run: int = Field(ge=0)
    n: int = Field(ge=0)
    label: str
    """What SGLang reports as ``weight_version`` in ``/model_info`` and in every sample's ``meta_info``."""

    @property
    def is_base(self) -> bool:
        """Whether this is what ``model.path`` holds."""
        return self.run == 0

    def __str__(self) -> str:
        return BASE_LABEL if self.is_base else f"{self.run}/{self.n}"


BASE = Version(run=0, n=0, label=BASE_LABEL)
"""The version of a fleet that no trainer has updated yet."""


class EngineState(StrEnum):
    """What is known about the weights of one engine. Only ``clean`` at the committed version may have an open gate."""

    CLEAN = "clean"
    """All tensors belong to one version, which is named beside it."""
    DIRTY = "dirty"
    """A mixture: the engine was told of an update that has not been completed."""
    UNKNOWN = "unknown"
    """Not up, or up but nothing could be proved yet."""


class Transport(StrEnum):
    """How weights may reach the engines, if not in every way that SGLang knows."""

    DISK = "disk"
    """From checkpoints only: the engines cannot take tensors over a group."""


class PauseMode(StrEnum):
    """SGLang's pause modes (``/pause_generation``)."""

    RETRACT = "retract"
    ABORT = "abort"
    IN_PLACE = "in_place"


class Deadlines(Message):
    """How long each step of a weight update may take, in seconds."""

    group: float = 120.0
    """Opening a group: the trainer's address becomes reachable and every engine has joined."""
    update: float = 300.0
    """One forwarded call of an open update (a bucket, begin, end)."""
    idle: float = 120.0
    """A paused or half-updated fleet that hears nothing from its trainer: after this the update is given up."""
    pause: float = 60.0
    """Pause or continue on every engine."""
    total: float = 1800.0
    """A pause or an update altogether, however lively its trainer is."""
    stuck: float = 30.0
    """An engine that has not answered a call of a given-up update for so long is restarted."""
    silent: float = 120.0
    """An engine that has no call to answer and gives no sign of life for so long is restarted."""


class OnLoss(StrEnum):
    """What a fleet does that is idle when its trainer is lost."""

    KEEP_SERVING = "keep_serving"
    PAUSE = "pause"


class TrainerLease(Message):
    """How long a trainer is believed to live without a word."""

    ttl: float = 20.0
    """Seconds of silence after which the trainer's store is asked for; the agents' own lease, too."""
    on_loss: OnLoss = OnLoss.KEEP_SERVING


class Verify(StrEnum):
    """When the engines' weights are compared before a commit."""

    ALWAYS = "always"
    EVERY_N = "every_n"
    OFF = "off"


class CatchUp(Message):
    """Where an engine that restarted gets the committed version, if not from the trainer's next push."""

    disk: str | None = None
    """A directory of our client's snapshots, or the path of the trainer's checkpoints with ``{version}`` in it."""
    parallel: int = Field(default=4, ge=1)
    """So many engines load at a time."""


class WeightsPolicy(Message):
    """How weights reach the engines; ``spec.weights`` of the custom resource, in wire form."""

    transport: Transport | None = None
    """None: over groups, or from disk."""
    backend: str = "nccl"
    """torch.distributed backend used when the trainer names none: ``nccl`` or ``gloo``."""
    pause_mode: PauseMode = PauseMode.RETRACT
    """How the coordinator pauses engines when the trainer does not do it itself."""
    max_staleness: int = Field(default=0, ge=0)
    """How many commits an engine may be behind and still serve."""
    min_committed: int | str | None = None
    """How many engines must hold a new version so that it is committed: a number, or a share of the wanted ones ("75%").
    None: all that take part in the update."""
    verify: Verify = Verify.EVERY_N
    verify_every: int = Field(default=10, ge=1)
    """With ``every_n``: the first update of a coordinator's life, and then each n-th."""
    deadlines: Deadlines = Deadlines()
    trainer_lease: TrainerLease = TrainerLease()
    catch_up: CatchUp = CatchUp()


class WantedEngine(Message):
    """One engine the fleet should have."""

    name: str
    """Name of the engine: its StatefulSet in Kubernetes (``<rollout>-engine-<i>``)."""
    tensor_size: int = Field(default=1, ge=1)
    """Tensor-parallel ranks of the engine; so many consecutive ranks it takes in a trainer's group."""
    url: str | None = None
    """Base URL of its gate. None: found by the engine's EndpointSlice hostname ``<name>-0`` (Kubernetes)."""
    port: int | None = Field(default=None, ge=1, le=65535)
    """Port of its gate at that address. None: the one that all gates have whose pods have a network of their own."""


class Adapter(Message):
    """An adapter (LoRA) that every engine should hold."""

    name: str
    path: str


class AdapterRow(Adapter):
    """One adapter in the record."""

    by_spec: bool
    """Not loaded by a trainer's call."""
    loaded: int
    """Engines that hold it."""
    wanted: int
    """Engines that should."""
    reason: str = ""
    """What an engine said that could not load or unload it."""


class Intent(Message):
    """What the operator wants of the coordinator: ConfigMap ``<name>-intent``, key ``intent.json``. One writer: the operator."""

    generation: int
    """``metadata.generation`` of the SGLangRollout that this was made from."""
    name: str
    namespace: str
    engines: list[WantedEngine]
    base: int | None = Field(default=None, ge=0)
    """A fleet that has never taken weights waits for so many engines. None: for all."""
    weights: WeightsPolicy = WeightsPolicy()
    state: FleetState = FleetState.ACTIVE
    """What ``spec.state`` asks of the engines."""
    drain: float = 300.0
    """Requests have so many seconds to end before an engine falls asleep."""
    adapters: list[Adapter] | None = None
    """Adapters of the spec. None: engines take no adapters, or nobody but trainers says which."""
    mode: FleetMode | None = None
    """None: the engines have GPUs of their own and take weights."""
    data_paths_url: str | None = None


class Nccl(Message):
    """The NCCL with which a process would join a group."""

    version: str | None = None
    """As NCCL writes it: ``2.28.3``. None: not known."""
    settings: dict[str, str] = {}
    """Environment variables ``NCCL_…``, as they are when the process starts its communicators."""


class AgentStatus(Message):
    """What one agent knows about its engine: the reply to every coordinator call that changes or asks state."""

    wire: int = WIRE_VERSION
    name: str
    boot_id: str | None
    """Identifies one life of the engine process; None while it is not up."""
    state: EngineState
    version: Version | None
    """The version all tensors belong to; set exactly when ``state`` is clean."""
    cohort: list[str] = []
    """Names of the engines that took part in the update to ``version``: what a new coordinator needs to prove a commit."""
    committed: Version | None
    """What this agent was last told is committed."""
    term: int
    """Highest coordinator term seen."""
    gate_open: bool
    paused: bool = False
    session: bool = False
    """A weight-update session (``begin_weight_update``) is open on the engine."""
    groups: list[str] = []
    giving_up: float = 0.0
    """Seconds since the agent began to give an update up and has not ended: it takes no calls, and the engine may be stuck for good."""
    draining: bool = False
    """The engine is about to be stopped: it takes no new requests and no new update."""
    released: list[str] = []
    """Memory tags that were released and not resumed."""
    adapters: dict[str, str] = {}
    """Adapters that it has loaded in this life: path by name."""
    woken: bool = False
    """Its weights were released and are back, and nobody has proved yet what they are."""
    tensor_size: int | None = None
    sglang_version: str | None = None
    nccl: Nccl | None = None
    """Of the engine's container; None: not known."""
    all_reduce: float | None = None
    """GB/s that the ranks of the pod reached before the start; None: not measured."""
    reason: str = ""
    """Why the gate is closed, as a sentence; empty while it is open."""


class SyncRequest(Message):
    """Coordinator → agent, about twice a second: who leads and what is committed. Opens or closes the gate."""

    committed: Version | None
    """None: the coordinator itself does not know yet; the agent keeps what it had."""
    tolerated: list[Version] = []
    """Older versions that may be served too (``weights.versionPolicy: MaxStaleness``)."""
    lease: float = 60.0
    """An engine that is paused or half updated and hears nothing of any coordinator for so long gives the update up."""
    silent: float = 120.0
    """An engine that has no call to answer and gives no sign of life for so long is restarted."""
    drain: float = 300.0
    """Requests have so many seconds to end before an engine falls asleep; the rest is aborted."""
    hold: FleetState | None = None
    """What the spec holds the fleet in. None: the coordinator itself does not know yet; the agent keeps what it had."""


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


class CheckpointRequest(Message):
    """Coordinator → agent, before any engine hears of a disk update: can this engine load the folder, as its own pod sees it?"""

    path: str
    """Folder of a Hugging Face model with safetensors files, absolute."""
    model_path: str | None = None
    """The model to compare with. None: the one that the engine runs."""
    snapshot: Version | None = None
    """``path`` is a directory of snapshots: find the one of this version."""
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
    compared: bool = False
    """Whether the engine's own model could be read here, so that architecture, names, types and shapes were compared."""
    path: str | None = None
    """The folder to load: of the snapshot, where one was asked for."""


class EngineRow(Message):
    """One engine in the record and in the discovery document."""

    name: str
    state: EngineState
    version: Version | None
    boot_id: str | None
    gate_open: bool
    reason: str = ""
    catch_up: str = ""
    """How it gets the committed version without the trainer, as a sentence; empty while it does not try."""
    released: list[str] = []
    """Memory that it has given back: ``weights``, ``kv_cache``, ``cuda_graph``."""
    all_reduce: float | None = None
    """GB/s that its ranks reached before the start; None: not measured."""


class UpdateOutcome(StrEnum):
    """How the last weight update ended."""

    COMMITTED = "Committed"
    PARTIAL = "Partial"
    """Some engines hold the new version, the others are fenced."""
    FAILED = "Failed"
    """No engine holds the new version; the old one stays committed."""
    ABORTED = "Aborted"
    """It was given up before any engine was told, while the fleet was paused: nothing has changed."""


class LastUpdate(Message):
    """The last weight update that ended."""

    version: Version
    outcome: UpdateOutcome
    reason: str = ""
    finished: str
    """RFC 3339, UTC."""
    phases_ms: dict[str, int] = {}
    """Milliseconds per phase: pause, transfer, commit, resume, total."""
    engines: list[str] = []
    """The engines that committed."""


class Noted(Message):
    """What one life of an engine was started with."""

    boot_id: str
    checksums: tuple[str, ...]
    """Of its ranks."""


class FleetGroup(Message):
    """A weight-update group that is open now."""

    name: str
    epoch: int
    world_size: int
    master: str
    backend: str
    members: list[str]


class Record(Message):
    """What the coordinator persists: ConfigMap ``<name>-weights``, key ``weights.json``. One writer: the coordinator."""

    wire: int = WIRE_VERSION
    term: int
    epoch: int
    committed: Version
    intent_generation: int = 0
    """Generation of the intent that has been acted on: the coordinator's acknowledgement."""
    engines: list[EngineRow] = []
    groups: list[FleetGroup] = []
    """Groups that are open, so that a restarted coordinator can go on with those whose members all still live."""
    last_update: LastUpdate | None = None
    history: list[Version] = []
    """Versions of this run, oldest first, that may be served: the committed one and those that the policy tolerates."""
    next_run: int = 0
    """The run that the next update opens, if somebody asked for a new one."""
    fleet_id: str = ""
    """Made once with the first record: versions of a fleet made anew under the old name are other versions."""
    world_size: int = 0
    """Of a group opened now."""
    state: FleetState = FleetState.ACTIVE
    """What of the intent's state is in effect."""
    checksums: dict[int, tuple[str, ...]] = {}
    """Of the committed version, by the number of an engine's ranks, as far as they are known."""
    adapters: list[AdapterRow] = []
    lent: list[str] | None = None
    """Memory of the engines that the trainer has; None: the engines share their GPUs with nobody."""
    lent_apart: dict[str, list[str]] = {}
    """The same of engines at whose own URL the trainer has said something else since."""
    noted: dict[str, Noted] = {}
    """Where nobody sends weights: what each engine holds, as it said before its first sleep."""

    @property
    def lends(self) -> bool:
        """Whether the trainer has memory of any engine."""
        return bool(self.lent) or any(self.lent_apart.values())


class FleetMember(EngineRow):
    """One engine in the discovery document."""

    url: str
    tensor_size: int
    rank_offset: int | None
    """First rank of this engine in a group opened now; None: it would not take part, ``reason`` says why."""
    routed: bool
    """smg has it in its list."""
    sglang_version: str | None = None
    nccl: Nccl | None = None
    """A trainer needs the same version, and the same ``NCCL_CUMEM_ENABLE``."""


class FleetDocument(Message):
    """``GET /fleet``: everything a trainer or a person needs to know."""

    wire: int = WIRE_VERSION
    name: str
    namespace: str
    term: int
    epoch: int
    """Grows whenever the set of members or any member's boot id changes. A group belongs to one epoch."""
    world_size: int
    """For a group opened now: 1 (trainer, rank 0) + the tensor sizes of all members."""
    backend: str
    fleet_id: str = ""
    """Tells this fleet's versions from those of another that had the same name."""
    lease: float = 20.0
    """Seconds within which a trainer should send the next heartbeat (``POST /fleet/lease``) while it holds a group."""
    committed: Version
    serving: int
    """Engines with an open gate."""
    members: list[FleetMember]
    groups: list[FleetGroup] = []
    phase: str = "idle"
    """Phase of the update that runs now, or ``idle``."""
    last_update: LastUpdate | None = None
    urls: dict[str, str] = {}
    adapters: list[AdapterRow] = []
    state: FleetState = FleetState.ACTIVE
    """What ``spec.state`` holds the fleet in now."""
    held: str = ""
    """Why nothing generates although all is well, as a sentence: what holds the fleet, and until when."""


class ControlReply(BaseModel):
    """SGLang's own shape for control calls, with our particulars beside it. SGLang's clients read ``success`` and ``message``."""

    success: bool
    message: str
    fleet: dict[str, Any] | None = None
    """Per-engine results, and on refusals what would be right (``epoch``, ``world_size``, ``members``)."""
