"""State of an agent, and the decisions that follow from this state, for example when the gate opens. Pure: no I/O, no clock.

The safety rule: **the gate is open only while the engine is up and holds the committed version completely**
(:func:`gate_may_open`). If a fact is uncertain, the gate stays closed. :mod:`.events` changes the state.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from pydantic import Field

from sglang_rollout.agent.interruption import Interruption
from sglang_rollout.sglang.api import MemoryTag
from sglang_rollout.wire import Message
from sglang_rollout.wire.agent import AgentStatus, Nccl
from sglang_rollout.wire.reasons import GateReason, Refusal, RefusalCode
from sglang_rollout.wire.states import EngineState, FleetState, StagedVersion, Version, describe_state

UNKNOWN_PATH = ""
"""Path of an adapter that the engine may hold, possibly in an older version. After an unload the engine does not hold the adapter."""


class Activation(Message):
    """A load of a staged version that has begun, and what the engine held before it.

    If no rank writes, the engine holds the same weights afterwards. The other fields are those of :class:`EngineRecord`.
    """

    attempt: str
    """Identifies the attempt, and names the folder of its verdicts."""
    update: str
    live_label: str
    """Label that the engine reported."""
    state: EngineState
    version: Version | None
    label: str | None
    cohort: list[str]
    unverified: bool
    written: bool
    received: int
    failed: bool


class EngineRecord(Message):
    """Persisted part of the state. It is written to disk before the engine receives the call that it describes."""

    boot_id: str | None = None
    """Boot ID of the engine process that the other fields describe."""
    state: EngineState = EngineState.UNKNOWN
    version: Version | None = None
    label: str | None = None
    """Label that the engine's ``/model_info`` must report while the state is clean."""
    cohort: list[str] = Field(default_factory=list)
    committed: Version | None = None
    tolerated: list[Version] = Field(default_factory=list)
    """Older versions that the engine may serve."""
    staged: StagedVersion | None = None
    """Contents of the committed version (transport Staged); None: the coordinator has not named them."""
    term: int = 0
    session: bool = False
    groups: list[str] = Field(default_factory=list)
    interruption: Interruption = Interruption()
    """The engine's pause, and its released memory."""
    applied_state: FleetState = FleetState.ACTIVE
    """Applied ``spec.state`` of the last sync. The record keeps it when the coordinator or the engine restarts."""
    adapters: dict[str, str] = Field(default_factory=dict)
    """Path of each loaded adapter by name; ``UNKNOWN_PATH`` if the agent does not know whether the adapter is loaded."""
    unverified: bool = False
    """The weights were released in this engine process, and their version has not been verified since."""
    written: bool = False
    """A call that writes weights has reached this engine process, so it may hold something else than ``model.path``."""
    received: int = 0
    """Update calls that succeeded since the engine became dirty."""
    failed: bool = False
    """A call failed since the engine became dirty; only a complete update makes it clean."""
    pending: str = ""
    """Control call that the engine has not answered yet."""
    pending_adapter: str = ""
    """Adapter of the pending call."""
    unreadable: bool = False
    """The previous record could not be read, and the engine has not been identified since: an update may be open on it."""
    served_name: str | None = None
    """Model name at launch. SGLang replaces it by the path of a disk update."""
    activation: Activation | None = None
    """The last load of a staged version; None once it is acknowledged or given up, or another call has changed the weights."""


@dataclass(frozen=True, slots=True)
class EngineFacts:
    """Facts that one engine process reports about itself."""

    boot_id: str
    live_label: str
    """``weight_version`` of /model_info: now."""
    launch_label: str
    """``weight_version`` of /server_info: as launched."""
    sglang_version: str | None = None
    tensor_size: int | None = None
    served_name: str | None = None
    nccl: Nccl | None = None
    has_external_draft: bool = False
    """The engine speculates with a draft model whose weights are not in the model's checkpoint."""


@dataclass(frozen=True, slots=True)
class PluginProof:
    """Whether the plug-in is active in all processes of the known engine process."""

    missing: str | None = None
    """Which part of the proof is missing, as a sentence; empty if the proof is complete. None: its reports have not been read yet."""
    is_required: bool = False
    """The gate stays closed until the proof is complete."""
    updates_refused: str = ""
    """Why SGLang refuses updates of the weights, in its own sentences; empty if it does not, or if nothing is known."""
    sampling_params: tuple[str, ...] = ()
    """Names of the sampling parameters that a request may set; empty if they are not known."""


_CLOSED_BY_SPEC = {FleetState.PAUSED: GateReason.PAUSED, FleetState.ASLEEP: GateReason.ASLEEP}
_NOT_ANSWERED = Refusal(GateReason.NOT_UP, "the engine has not answered yet")


@dataclass(frozen=True, slots=True)
class State:
    """Everything the agent's decisions depend on."""

    record: EngineRecord = field(default_factory=EngineRecord)
    up: bool = False
    """The engine answers, has warmed up, and ``record.boot_id`` is its boot ID."""
    down: Refusal = _NOT_ANSWERED
    """Why the engine is not up, as a clause; meaningless while ``up``."""
    informed: bool = False
    """``record.committed`` is valid: a sync has confirmed it since the agent's start, or no coordinator contradicted it."""
    synced_by: tuple[int, str] = (0, "")
    """Term and process of the coordinator whose sync was applied last."""
    synced_seq: int = 0
    """Sequence number of that sync."""
    draining: bool = False
    plugin: PluginProof = PluginProof()
    """What the plug-in in the known engine process has reported."""
    calls: int = 0
    """Grows when a control call begins and when it ends, so it shows whether a poll is older than the last change."""
    facts: EngineFacts | None = None


def gate_may_open(state: State) -> bool:
    """Return whether requests may reach the engine."""
    return closed_reason(state) is None


def closed_reason(state: State) -> Refusal | None:  # noqa: PLR0911 - one line per case
    """Return why the gate is closed; None if it may be open."""
    record = state.record
    if not state.up:
        return Refusal(state.down.code, f"The engine is not up: {state.down.message}.")
    if state.plugin.is_required and state.plugin.missing != "":
        return _plugin_refusal(state.facts, state.plugin.missing)
    if record.interruption.released:
        return Refusal(GateReason.RELEASED, f"The engine's memory is released: {', '.join(record.interruption.released)}.")
    if record.state is EngineState.DIRTY:
        if is_update_open(record):
            return Refusal(GateReason.UPDATE_IN_PROGRESS, "A weight update is in progress.")
        return Refusal(GateReason.DIRTY, "The engine holds a mixture of weights after a failed update; it waits for a complete update.")
    if record.unverified and record.state is not EngineState.CLEAN:
        return Refusal(
            GateReason.UNVERIFIED,
            "The engine's weights were released; it waits for proof that they are the same, or for a complete update.",
        )
    if record.state is EngineState.UNKNOWN or record.version is None:
        return Refusal(GateReason.UNKNOWN, "The version of the engine's weights is not known; it waits for a complete update.")
    if state.draining:
        return Refusal(GateReason.DRAINING, "The engine is being drained.")
    if record.committed is None or not state.informed:
        return Refusal(GateReason.NO_COMMITTED_VERSION, "No coordinator has said yet which version is committed.")
    if version_identity(record.version) not in {version_identity(record.committed), *map(version_identity, record.tolerated)}:
        return Refusal(GateReason.NOT_COMMITTED, f"The engine holds version {record.version}, and version {record.committed} is committed.")
    code = _CLOSED_BY_SPEC.get(record.applied_state)
    return None if code is None else Refusal(code, describe_state(record.applied_state))


def _plugin_refusal(facts: EngineFacts | None, missing: str | None) -> Refusal:
    if missing is None:
        return Refusal(GateReason.NOT_UP, "The engine has started, and the reports of its plug-in have not been read yet.")
    release = f"SGLang {facts.sglang_version}" if facts is not None and facts.sglang_version else "the engine"
    advice = (
        "Use a release that the project supports, without tokenizer workers, gRPC and the Rust server, or accept the engine without the"
        " plug-in (engine.plugin: Optional)."
    )
    return Refusal(GateReason.PLUGIN_MISSING, f"The plug-in is not active in {release}: {missing} {advice}")


def closed_message(state: State) -> str:
    """Return the message of :func:`closed_reason`; empty if the gate may be open."""
    closed = closed_reason(state)
    return "" if closed is None else closed.message


def is_update_open(record: EngineRecord) -> bool:
    """Return whether a weight update has begun on the engine and has neither been acknowledged nor failed."""
    return record.state is EngineState.DIRTY and not record.failed


def waits_for_coordinator(state: State) -> bool:
    """Return whether the engine is paused, or an update is open on it, until a coordinator calls."""
    record, interruption = state.record, state.record.interruption
    # A pause by the spec, or for released memory, ends otherwise.
    is_paused = interruption.is_pause and record.applied_state is FleetState.ACTIVE and not interruption.released
    return state.up and (is_paused or record.session or is_update_open(record))


def stays_paused(record: EngineRecord) -> bool:
    """Return whether an engine stays paused when its update is given up: its memory is released, or the spec pauses the engine.

    A dirty engine resumes, so that its requests end. The coordinator pauses it again.
    """
    by_spec = record.applied_state is not FleetState.ACTIVE and record.state is not EngineState.DIRTY
    return by_spec or bool(record.interruption.released)


def ack_refusal(state: State, boot_id: str, version: Version, *, verified: bool = False) -> Refusal | None:
    """Return why this engine cannot acknowledge a version; None if it can.

    Args:
        state: State of the agent.
        boot_id: Boot ID of the engine that took part in the update.
        version: Version to acknowledge.
        verified: True if the checksum of the engine's weights equals that of the version.
    """
    message = _why_not_acknowledged(state, boot_id, version, verified=verified)
    return None if message is None else Refusal(RefusalCode.CONFLICT, message)


def _why_not_acknowledged(  # noqa: PLR0911 - one line per case
    state: State, boot_id: str, version: Version, *, verified: bool
) -> str | None:
    record = state.record
    if not state.up or record.boot_id != boot_id:
        return f"The engine that took part in the update is gone; its boot ID is now {record.boot_id if state.up else 'none'}."
    if record.pending:
        return f"The engine has not answered {record.pending} yet."
    if record.state is EngineState.CLEAN and record.version is not None and version_identity(record.version) == version_identity(version):
        return None
    if verified and record.unverified and record.state is EngineState.UNKNOWN and MemoryTag.WEIGHTS not in record.interruption.released:
        return None
    if record.state is not EngineState.DIRTY:
        return "The engine has received no update since it was clean."
    if record.session:
        return "The update session is still open on the engine: end_weight_update comes first."
    if record.failed:
        return "A call of the update failed on this engine."
    if record.received == 0:
        return "The engine has received no weights in this update."
    return None


def activation_refusal(state: State, boot_id: str) -> Refusal | None:
    """Return why this engine must not load a staged version now; None if it may.

    Args:
        state: State of the agent.
        boot_id: Boot ID of the engine process that is meant.
    """
    record, released = state.record, state.record.interruption.released
    if not state.up or record.boot_id != boot_id:
        now = f"its boot ID is now {record.boot_id}" if state.up else state.down.message
        return Refusal(GateReason.NOT_UP, f"The engine that should load the version is gone: {now}.")
    if released:
        return Refusal(GateReason.RELEASED, f"The engine's memory is released: {', '.join(released)}. It must be restored first.")
    if record.applied_state is FleetState.ASLEEP:
        return Refusal(GateReason.ASLEEP, describe_state(record.applied_state))
    if state.draining:
        return Refusal(GateReason.DRAINING, "The engine is being drained.")
    if is_update_open(record):
        return Refusal(RefusalCode.CONFLICT, "A weight update is open on the engine: end it, or give it up with /agent/fence.")
    return None


def needs_own_copy(state: State) -> bool:
    """Return whether the agent should load the committed version from its own copy, without a call of a coordinator.

    An engine at a newer version than the committed one takes part in an update. A coordinator compares restored weights.
    """
    record, committed = state.record, state.record.committed
    if committed is None or record.staged is None or not state.informed or record.pending or record.unverified:
        return False
    if activation_refusal(state, record.boot_id or "") is not None:
        return False
    if record.version is None:
        return True  # unknown, or dirty after a failed update
    held, tolerated = version_identity(record.version), map(version_identity, record.tolerated)
    return held < version_identity(committed) and held not in tolerated


def status(state: State, *, name: str, gate_open: bool) -> AgentStatus:
    """Return the status message. ``gate_open`` is the state that the gate itself reports."""
    record, facts = state.record, state.facts
    clean = state.up and record.state is EngineState.CLEAN
    closed = closed_reason(state)
    if closed is None and not gate_open:
        closed = Refusal(GateReason.GATE_NOT_READY, "The gate (haproxy) does not answer its agent, or has not opened yet.")
    return AgentStatus(
        name=name,
        boot_id=record.boot_id if state.up else None,
        state=record.state if state.up else EngineState.UNKNOWN,
        version=record.version if clean else None,
        cohort=record.cohort if clean else [],
        committed=record.committed,
        term=record.term,
        gate_open=closed is None,
        paused=record.interruption.is_pause,
        session=record.session,
        groups=record.groups,
        draining=state.draining,
        released=record.interruption.released,
        adapters=record.adapters,
        woken=record.unverified and MemoryTag.WEIGHTS not in record.interruption.released,
        tensor_size=facts.tensor_size if facts else None,
        sglang_version=facts.sglang_version if facts else None,
        probes_port=True,
        nccl=facts.nccl if facts else None,
        updates_refused=state.plugin.updates_refused if state.up else "",
        sampling_params=list(state.plugin.sampling_params) if state.up else [],
        reason=None if closed is None else closed.code,
        message="" if closed is None else closed.message,
    )


def version_identity(version: Version) -> tuple[int, int]:
    """Return the identity of a version, without the label, which a trainer may use twice."""
    return version.run, version.step
