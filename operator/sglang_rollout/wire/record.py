"""Persisted state of a fleet. The coordinator writes it; the next coordinator process and the operator read it."""

from __future__ import annotations

from enum import StrEnum
from typing import Self

from pydantic import Field

from sglang_rollout.wire import Message
from sglang_rollout.wire.ports import WIRE_VERSION
from sglang_rollout.wire.reasons import GateReason
from sglang_rollout.wire.states import EngineState, FleetState, StagedVersion, Version


class EngineRow(Message):
    """One engine in the record and in the discovery document."""

    name: str
    """Name of the engine."""
    state: EngineState
    """``clean``, ``dirty`` or ``unknown``."""
    version: Version | None
    """Version of all tensors; None while it is not known."""
    boot_id: str | None
    """Identifies one run of the engine process; None while it is not known."""
    gate_open: bool
    """The engine serves new requests."""
    reason: GateReason | None = None
    """Why the gate is closed; None while it is open."""
    message: str = ""
    """The reason as a sentence; empty while the gate is open."""
    released: list[str] = Field(default_factory=list)
    """Memory tags that are released: ``weights``, ``kv_cache``, ``cuda_graph``."""
    comparing: bool = False
    """Released weights are restored and still to be compared with the committed version."""


class Adapter(Message):
    """An adapter (LoRA) that every engine should load."""

    name: str
    path: str
    pinned: bool = False
    """True if SGLang must never evict the adapter from the slots of running adapters."""


class AdapterRow(Adapter):
    """One adapter in the record."""

    by_spec: bool
    """The spec names the adapter; False if a trainer loaded it."""
    loaded: int
    """Number of engines that have loaded it."""
    wanted: int
    """Number of engines that should load it."""
    message: str = ""
    """Message of an engine that could not load or unload the adapter."""


class UpdateOutcome(StrEnum):
    """How the last weight update ended."""

    COMMITTED = "Committed"
    PARTIAL = "Partial"
    """Some engines hold the new version; the other engines are fenced."""
    FAILED = "Failed"
    """No engine holds the new version; the old version stays committed."""
    ABORTED = "Aborted"
    """The update was given up before any engine received weights; nothing has changed."""


class UpdateReason(StrEnum):
    """Why a weight update did not commit on all engines, or how its commit became known."""

    ENGINE_FAILED = "EngineFailed"
    """An engine refused or failed a call of the update, or did not answer it."""
    ENGINE_LOST = "EngineLost"
    """An engine was restarted or lost in the middle of the update."""
    MISFIT = "Misfit"
    """Tensors of the update are not in the engines' model, or have another shape there."""
    INCOMPLETE = "Incomplete"
    """An engine did not receive all tensors of the version."""
    TENSORS_MISSING = "TensorsMissing"
    """The push lacks tensors that the version needs, so that a push of the same tensors fails again."""
    VERIFICATION_FAILED = "VerificationFailed"
    """An engine holds other weights than the trainer or the other engines (`weights.verify`)."""
    UNEXPECTED_CALL = "UnexpectedCall"
    """The trainer made a call that its open update does not allow: for example, it began again."""
    TAKEN_OVER = "TakenOver"
    """Another trainer took the fleet over."""
    TRAINER_LOST = "TrainerLost"
    """The trainer is gone, was silent, or took too long (`weights.deadlines`)."""
    ASLEEP = "Asleep"
    """`spec.state` became `Asleep`."""
    COORDINATOR_RESTARTED = "CoordinatorRestarted"
    """The coordinator was restarted in the middle of the update. A commit was proved afterwards by the engines."""
    STORE_FAILED = "StoreFailed"
    """The weight store refused or failed a call of the update, or did not answer it."""
    STORE_LOST = "StoreLost"
    """The weight store was restarted in the middle of the update."""
    TOO_LARGE = "TooLarge"
    """The version is larger than `weights.staging.sizeLimit`."""
    WITHDRAWN = "Withdrawn"
    """The trainer withdrew its upload."""
    TOO_FEW_ENGINES = "TooFewEngines"
    """The version is committed, but fewer engines than `weights.minCommitted` have loaded it. The others load it from their copies."""
    OTHER = "Other"
    """A code of another release that this release does not know."""

    @classmethod
    def _missing_(cls, value: object) -> Self:
        return cls("Other")


MAX_RECENT_UPDATES = 10
"""Updates that the record and ``status`` list."""
MAX_RECENT_CHARACTERS = 256
"""Longest message of an update in that list."""


class EndedUpdate(Message):
    """A weight update that ended."""

    version: Version
    outcome: UpdateOutcome
    message: str = ""
    """Why the update did not commit on all engines, as a sentence."""
    finished: str
    """RFC 3339, UTC."""
    phases_ms: dict[str, int] = Field(default_factory=dict)
    """Milliseconds per phase: pause, transfer, commit, resume, total."""
    engines: list[str] = Field(default_factory=list)
    """The engines that committed."""
    author: str = ""
    """Caller whose update it was: ``namespace/owner``; empty: not known."""
    bytes: int | None = None
    """Bytes of the tensors that were sent; None: not known, as for handles of GPU memory."""
    reason: UpdateReason | None = None
    """Why the update did not commit on all engines, as a code; None: it did."""
    update: str = ""
    """ID of the update, with transport Staged; empty otherwise."""
    transferred: int | None = None
    """Bytes that were sent to the weight store: fewer than ``bytes`` after a delta upload. None: not known."""
    unchecked: str = ""
    """What was not compared with the engines' model, and why, as sentences; empty if all names and shapes were."""

    def shortened(self) -> EndedUpdate:
        """Return the update as the list of recent updates has it: a short message, and no engines."""
        message = self.message if len(self.message) <= MAX_RECENT_CHARACTERS else f"{self.message[: MAX_RECENT_CHARACTERS - 1]}…"
        total = {phase: spent for phase, spent in self.phases_ms.items() if phase == "total"}
        return self.model_copy(update={"message": message, "phases_ms": total, "engines": [], "unchecked": ""})


class FailedCommitRow(Message):
    """The answer to the calls that would have committed an update that failed, or that is open and fails if the coordinator ends."""

    calls: list[str]
    """Names of the requests that commit the update."""
    message: str
    """The answer, with what to do."""
    cause: str = ""
    """Why the update failed, without what to do."""
    reason: UpdateReason | None = None
    author: str = ""
    """Caller whose update it is; empty: not known."""
    groups: list[str] = Field(default_factory=list)
    """Process groups that have sent tensors."""


class EngineChecksums(Message):
    """Checksums of the weights that one boot of an engine was started with."""

    boot_id: str
    checksums: tuple[str, ...]
    """One per rank."""


class _Group(Message):
    name: str
    epoch: int
    world_size: int
    master: str
    backend: str


class FleetGroup(_Group):
    """A process group that is open now."""

    members: list[str]


class GroupRow(_Group):
    """A process group in the record. It refers to engines by index, because there may be many groups of many engines."""

    places: list[int]
    """Indexes of the members in the record's engines, in rank order."""
    author: str = ""
    """Caller that opened the process group; empty: not known."""
    store: str = ""
    """Run of the weight store's process that joined; empty: engines did."""


class GroupFailure(Message):
    """Why a process group could not be opened."""

    code: str
    """A CamelCase code."""
    message: str
    """A sentence."""


class OnDisk(Message):
    """Folder on a shared volume from which the fleet loaded a version."""

    version: Version
    path: str
    digest: str | None
    """Digest of the folder's contents."""


MAX_REACHED = 8
"""Engines that :attr:`Isolation.reached` names."""


class Isolation(Message):
    """Result of connections that the NetworkPolicies of the fleet forbid."""

    checked: int
    """Engines that a connection was tried to."""
    reached: list[str] = Field(default_factory=list)
    """The first engines that accepted a forbidden connection."""
    reached_count: int = 0
    """Engines that accepted a forbidden connection. 0: the policies are enforced."""


class StoreState(StrEnum):
    """What the weight store has of the committed version."""

    COMPLETE = "Complete"
    """It has the committed version. Also if no version came through it, and while it makes room for the open update (``copies: 1``)."""
    FETCHING = "Fetching"
    """It copies the version from agents, or loads its snapshot."""
    LACKING = "Lacking"
    """It lacks the version, and does not fetch it now."""
    AWAY = "Away"
    """It does not answer the coordinator."""


class StoreReport(Message):
    """The weight store, as the coordinator sees it."""

    state: StoreState
    message: str = ""
    """Why it lacks the version, as sentences; empty if nothing has failed."""


class Record(Message):
    """State that the coordinator persists: ConfigMap ``<name>-weights``, key ``weights.json``. Only the coordinator writes it."""

    wire: int = WIRE_VERSION
    term: int
    epoch: int
    committed: Version
    author: str = ""
    """Caller that pushed the committed version; empty: not known, or no caller did."""
    intent_generation: int = 0
    """Generation of the intent that the coordinator has applied."""
    engines: list[EngineRow] = Field(default_factory=list)
    joined: list[GroupRow] = Field(default_factory=list)
    """Open process groups. A restarted coordinator continues with the groups whose members kept their boot IDs."""
    group_failure: GroupFailure | None = None
    """Why the last call to open a process group was refused or failed. None: it was not, or its trainer was asked to try again."""
    last_update: EndedUpdate | None = None
    earlier_updates: list[EndedUpdate] = Field(default_factory=list)
    """The updates before the last one, newest first."""
    history: list[Version] = Field(default_factory=list)
    """Versions of this run that may be served, oldest first: the committed version and the versions that the policy tolerates."""
    reserved: Version | None = None
    """Newest version of a failed update that an engine may hold. Its step is never used for other weights."""
    under_way: Version | None = None
    """Version of the open update; None: no update was open. If it commits while the store is down, only the engines know."""
    under_way_since: str = ""
    """When this update was opened (RFC 3339); empty: no update was open, or an earlier release wrote the record."""
    under_way_update: str = ""
    """ID of this update (transport Staged); empty: it has none."""
    failed_commit: FailedCommitRow | None = None
    """Failure that the calls repeat which would have committed the last update, or the open one. None: neither failed nor open."""
    next_run: int = 0
    """Run that the next update opens, if a new run was requested."""
    fleet_id: str = ""
    """Created with the first record. A recreated fleet of the same name has another ID, so its versions are distinct."""
    world_size: int = 0
    """World size of a process group opened now."""
    state: FleetState = FleetState.ACTIVE
    """Applied state."""
    waits_for_trainer: bool = False
    """The trainer is lost, and the fleet is paused until a trainer calls (``weights.trainerLease.onLoss``)."""
    checksums: dict[int, tuple[str, ...]] = Field(default_factory=dict)
    """Known checksums of the committed version, one per rank, by the number of an engine's ranks."""
    disk: OnDisk | None = None
    """Folder from which the committed version was loaded, if it was loaded from disk."""
    staged: StagedVersion | None = None
    """Contents of the committed version, if it came through the weight store."""
    adapters: list[AdapterRow] = Field(default_factory=list)
    names: str = ""
    """Tensors that this run has committed: hashes of their names, base64."""
    doubtful_names: str = ""
    """Tensors that engines may hold of updates that did not end on them, beside ``names``: hashes of their names, base64."""
    doubtful_engines: dict[int, str] = Field(default_factory=dict)
    """Boot ID of each engine that may hold them, by its index in ``engines``."""
    restarts: list[int] = Field(default_factory=list)
    """Those of these engines that must restart, as indexes."""
    sources: list[str] = Field(default_factory=list)
    """Process groups that sent the last committed tensors. An update that ends without one of them is incomplete."""
    released_to_trainer: list[str] | None = None
    """Memory tags released to the co-located trainer. None: the engines do not share their GPUs with a trainer."""
    released_at_engines: dict[str, list[str]] = Field(default_factory=dict)
    """Memory tags by engine, where the trainer released or restored memory at the engine's own URL."""
    engine_checksums: dict[str, EngineChecksums] = Field(default_factory=dict)
    """Checksums that each engine reported before its first release, in a fleet that receives no weights."""
    isolation: Isolation | None = None
    """Whether the NetworkPolicies are enforced. None: the fleet has none, or no engine could be checked."""
    callers_forbidden: bool = False
    """True if the coordinator may not watch pods and namespaces of the cluster, although ``spec.security`` selects callers there."""
    snapshot_problem: str = ""
    """Why the weight store could not write its newest snapshot, as a sentence; empty if it wrote it, or writes none."""
    updates_refused: str = ""
    """Which engine refuses updates of its weights, and why, as sentences; empty if all take them."""
    store: StoreReport | None = None
    """The weight store. None: there is none, the coordinator has not asked it yet, or an earlier release wrote the record."""
    holder: str = ""
    """Caller of the trainer that holds the fleet, or held it last; empty: not known. An open update belongs to this caller."""

    def members(self, group: GroupRow) -> list[EngineRow]:
        """Return the engines of a process group of this record, in rank order."""
        return [self.engines[place] for place in group.places]

    @property
    def recent_updates(self) -> list[EndedUpdate]:
        """The last updates that ended, newest first."""
        return [update for update in (self.last_update, *self.earlier_updates) if update is not None][:MAX_RECENT_UPDATES]

    @property
    def has_released_memory(self) -> bool:
        """True if memory of any engine is released to the trainer."""
        return bool(self.released_to_trainer) or any(self.released_at_engines.values())
