"""Events of an agent: :func:`step` returns the new state and the effects to carry out. Pure: no I/O, no clock."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TypeAlias, assert_never

from sglang_rollout.agent.state import (
    UNKNOWN_PATH,
    Activation,
    EngineFacts,
    EngineRecord,
    PluginProof,
    State,
    gate_may_open,
)
from sglang_rollout.sglang.api import ControlCall, MemoryTag
from sglang_rollout.wire.reasons import GateReason, Refusal
from sglang_rollout.wire.states import BASE, EngineState, FleetState, StagedVersion, Version

_UPDATES = (ControlCall.UPDATE_DISTRIBUTED, ControlCall.UPDATE_TENSOR, ControlCall.UPDATE_DISK)
"""Calls that write weights."""


@dataclass(frozen=True, slots=True)
class EngineDown:
    """The engine does not answer."""

    message: str
    """Why, as a clause."""
    code: GateReason = GateReason.NOT_UP


@dataclass(frozen=True, slots=True)
class EngineIdentified:
    """The engine answers, has warmed up, and has identified itself."""

    facts: EngineFacts


@dataclass(frozen=True, slots=True)
class LabelPolled:
    """The engine reported this weight version. ``calls`` is ``State.calls`` at the time of the poll."""

    label: str
    calls: int


@dataclass(frozen=True, slots=True)
class CoordinatorCalled:
    """A call of a coordinator with this term; for a sync, with the committed version and ``spec.state`` if the coordinator knows them."""

    term: int
    committed: Version | None = None
    tolerated: tuple[Version, ...] = ()
    spec_state: FleetState | None = None
    sender: str = ""
    """Identifies the coordinator process."""
    seq: int = 0
    """Orders the messages of the sender in its term; 0: the sender has no sequence numbers."""
    staged: StagedVersion | None = None
    """Contents of the committed version (transport Staged); None: the coordinator does not know them."""


@dataclass(frozen=True, slots=True)
class RecordTrusted:
    """No coordinator has contradicted the record for some seconds after the agent's start."""


@dataclass(frozen=True, slots=True)
class CallBegan:
    """A control call is about to be sent to the engine."""

    call: str
    name: str = ""
    """Process group, adapter, version label or pause mode of the call."""
    details: tuple[str, ...] = ()
    """Memory tags of the call, or an adapter's path."""
    by_spec: bool = False
    """True for a release of memory that ``spec.state`` asks for."""
    attempt: str = ""
    """Attempt to load a staged version that the call belongs to; empty for every other call."""


@dataclass(frozen=True, slots=True)
class CallEnded:
    """The engine answered a control call, or ended. ``boot_id`` is the boot ID when the call began."""

    call: str
    ok: bool
    boot_id: str | None
    name: str = ""
    details: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class ActivationBegan:
    """The agent is about to load a staged version into the engine."""

    attempt: str
    update: str
    live_label: str
    """Label that the engine reports now."""


@dataclass(frozen=True, slots=True)
class ActivationRefused:
    """It is proved that no rank wrote in this attempt. Its session has ended, and the engine has its label back."""

    attempt: str


@dataclass(frozen=True, slots=True)
class UpdateAcknowledged:
    """The coordinator declared the update complete, and :func:`.state.ack_refusal` allowed it."""

    version: Version
    cohort: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class UpdateGivenUp:
    """The coordinator gave up the current update."""


@dataclass(frozen=True, slots=True)
class PluginChecked:
    """The reports of the plug-in in the engine process ``boot_id`` were read."""

    boot_id: str
    missing: str
    """Which part of the proof is missing, as a sentence; empty if the proof is complete."""
    updates_refused: str = ""
    """Why SGLang refuses updates of the weights; empty if it does not."""
    sampling_params: tuple[str, ...] = ()
    """Names of the sampling parameters that a request may set; empty if they are not known."""


@dataclass(frozen=True, slots=True)
class DrainingChanged:
    """The pod is about to stop, or the drained engine has been replaced."""

    draining: bool


Event: TypeAlias = (
    EngineDown
    | EngineIdentified
    | LabelPolled
    | CoordinatorCalled
    | RecordTrusted
    | CallBegan
    | CallEnded
    | ActivationBegan
    | ActivationRefused
    | UpdateAcknowledged
    | UpdateGivenUp
    | PluginChecked
    | DrainingChanged
)


@dataclass(frozen=True, slots=True)
class Save:
    """Write the record to disk."""

    record: EngineRecord


@dataclass(frozen=True, slots=True)
class SetGate:
    """Open or close the gate, as :func:`.state.gate_may_open` says."""


Effect: TypeAlias = Save | SetGate


def restore_state(record: EngineRecord, *, is_readable: bool = True, requires_plugin: bool = False) -> State:
    """Return the initial state of an agent with this record.

    A call without an answer counts as failed, and the path of its adapter becomes unknown. A load of a staged version counts as failed,
    too, because only the agent could continue it.

    Args:
        record: The record.
        is_readable: False if a record exists but cannot be read.
        requires_plugin: True if the gate stays closed until the plug-in has proved that it is active.
    """
    plugin = PluginProof(is_required=requires_plugin)
    if not is_readable:
        return State(record=record.model_copy(update={"unreadable": True}), plugin=plugin)
    if not record.pending and record.activation is None:
        return State(record=record, plugin=plugin)
    unknown = {record.pending_adapter: UNKNOWN_PATH} if record.pending_adapter else {}
    changes = {"pending": "", "pending_adapter": "", "failed": record.state is EngineState.DIRTY}
    return State(record=record.model_copy(update={**changes, "adapters": {**record.adapters, **unknown}}), plugin=plugin)


def step(state: State, event: Event) -> tuple[State, list[Effect]]:
    """Apply one event. Return the same state object if nothing changes.

    ``Save`` precedes ``SetGate``: the record is on disk before the gate moves or the engine is called.
    """
    new = _apply(state, event)
    if new is state:
        return state, []
    effects: list[Effect] = []
    if new.record != state.record:
        effects.append(Save(new.record))
    if gate_may_open(new) != gate_may_open(state):
        effects.append(SetGate())
    return new, effects


def _apply(state: State, event: Event) -> State:  # noqa: PLR0911, PLR0912 - one line per event
    match event:
        case EngineDown(message, code):
            return replace(state, up=False, down=Refusal(code, message))
        case EngineIdentified(facts):
            return _apply_facts(state, facts)
        case LabelPolled(label, calls):
            return _apply_label(state, label) if state.up and calls == state.calls else state
        case CoordinatorCalled():
            return _apply_sync(state, event)
        case RecordTrusted():
            return replace(state, informed=state.informed or state.record.committed is not None)
        case CallBegan():
            return _begin_call(replace(state, calls=state.calls + 1), event)
        case CallEnded():
            return _end_call(replace(state, calls=state.calls + 1), event)
        case ActivationBegan() | ActivationRefused():
            return _begin_activation(state, event) if isinstance(event, ActivationBegan) else _restore_weights(state, event.attempt)
        case UpdateAcknowledged(version, cohort):
            clean = {"state": EngineState.CLEAN, "version": version, "label": version.label, "cohort": list(cohort), "activation": None}
            return replace(_change(state, **clean, received=0, failed=False, unverified=False), calls=state.calls + 1)
        case UpdateGivenUp():
            return _fail_update(_change(state, activation=None))
        case PluginChecked(boot_id, missing, updates_refused, sampling_params):
            proof = replace(state.plugin, missing=missing, updates_refused=updates_refused, sampling_params=sampling_params)
            return replace(state, plugin=proof) if boot_id == state.record.boot_id and proof != state.plugin else state
        case DrainingChanged(draining):
            return replace(state, draining=draining)
        case _:
            assert_never(event)


def _apply_sync(state: State, event: CoordinatorCalled) -> State:
    """Apply a sync. Ignore an out-of-order sync, which could reopen the gate for a version that has since been replaced."""
    record, sender = state.record, (event.term, event.sender)
    is_late = sender == state.synced_by and 0 < event.seq < state.synced_seq
    if event.term < record.term or is_late:
        return state
    if event.seq:
        state = replace(state, synced_by=sender, synced_seq=event.seq)
    state = _change(state, term=event.term, applied_state=record.applied_state if event.spec_state is None else event.spec_state)
    if event.committed is None:
        return state
    state = _change(state, committed=event.committed, tolerated=list(event.tolerated), staged=event.staged)
    return state if state.informed else replace(state, informed=True)


def _apply_facts(state: State, facts: EngineFacts) -> State:
    record = state.record
    if facts.boot_id == record.boot_id:
        return _apply_label(replace(state, up=True, facts=facts), facts.live_label)
    # A new engine process holds model.path unless its label has changed already. Without a readable record the process may also be old:
    # it may have received tensors but not their label. If the process is new after all, the next push makes it clean.
    is_base = facts.live_label == facts.launch_label and not record.unreadable
    record = EngineRecord(
        boot_id=facts.boot_id,
        state=EngineState.CLEAN if is_base else EngineState.UNKNOWN,
        version=BASE if is_base else None,
        label=facts.live_label if is_base else None,
        # The committed version of a record from an earlier engine process may be outdated.
        committed=record.committed if state.informed else None,
        tolerated=record.tolerated if state.informed else [],
        staged=record.staged if state.informed else None,
        term=record.term,
        applied_state=record.applied_state,
        served_name=facts.served_name,
        written=record.unreadable,
    )
    return replace(state, record=record, up=True, facts=facts, plugin=PluginProof(is_required=state.plugin.is_required))


def _apply_label(state: State, label: str) -> State:
    record = state.record
    if record.pending or record.state is not EngineState.CLEAN or record.label == label:
        return state
    return _lose_version(state, EngineState.UNKNOWN, activation=None)


def _begin_call(state: State, event: CallBegan) -> State:  # noqa: PLR0911 - one line per case
    """Record the worst effect that the call can have on the engine."""
    state = _change(state, pending=event.call)
    if _changes_weights(event) and state.record.activation is not None and event.attempt != state.record.activation.attempt:
        state = _change(state, activation=None)  # the engine no longer holds what it held before that attempt
    record = state.record
    match event.call:
        case ControlCall.BEGIN_UPDATE:
            return _lose_version(state, EngineState.DIRTY, received=0, failed=False, session=True, written=True)
        case ControlCall.UPDATE_DISTRIBUTED | ControlCall.UPDATE_TENSOR:
            return _lose_version(state, EngineState.DIRTY, written=True)
        case ControlCall.UPDATE_DISK:
            begins = {} if record.session else {"received": 0, "failed": False}
            return _lose_version(state, EngineState.DIRTY, **begins, written=True)
        case ControlCall.PAUSE:
            return _change(state, interruption=record.interruption.begin_pause(event.name))
        case ControlCall.INIT_GROUP:
            return _change(state, groups=list(dict.fromkeys([*record.groups, event.name])))
        case ControlCall.RELEASE_MEMORY:
            state = _change(state, interruption=record.interruption.release(event.details, by_spec=event.by_spec))
            # UNKNOWN, not DIRTY: the weights may come back unchanged.
            return _lose_version(state, EngineState.UNKNOWN, unverified=True) if MemoryTag.WEIGHTS in event.details else state
        case ControlCall.LOAD_ADAPTER | ControlCall.UNLOAD_ADAPTER:
            return _change(state, pending_adapter=event.name)
        case _:
            return state


def _changes_weights(event: CallBegan) -> bool:
    return event.call in (ControlCall.BEGIN_UPDATE, *_UPDATES) or (
        event.call == ControlCall.RELEASE_MEMORY and MemoryTag.WEIGHTS in event.details
    )


_HELD = ("state", "version", "label", "cohort", "unverified", "written", "received", "failed")
"""Fields of a record that say what the engine holds."""


def _begin_activation(state: State, event: ActivationBegan) -> State:
    held = {name: getattr(state.record, name) for name in _HELD}
    return _change(state, activation=Activation(attempt=event.attempt, update=event.update, live_label=event.live_label, **held))


def _restore_weights(state: State, attempt: str) -> State:
    """Return the state with what the engine held before the attempt."""
    activation = state.record.activation
    if activation is None or activation.attempt != attempt or state.record.pending:
        return state
    held = {name: getattr(activation, name) for name in _HELD}
    # The poll of a label from before the label was set back must not count.
    return replace(_change(state, **held, session=False, activation=None), calls=state.calls + 1)


def _end_call(state: State, event: CallEnded) -> State:
    if event.boot_id != state.record.boot_id:
        return state  # the called engine process has ended, which also ended the call
    state = _change(state, pending="", pending_adapter="")
    return _succeed(state, event) if event.ok else _fail(state, event)


def _succeed(state: State, event: CallEnded) -> State:  # noqa: PLR0911 - one line per case
    record = state.record
    match event.call:
        case ControlCall.UPDATE_DISTRIBUTED | ControlCall.UPDATE_TENSOR | ControlCall.UPDATE_DISK:
            return _change(state, received=record.received + 1)
        case ControlCall.END_UPDATE:
            return _change(state, session=False)
        case ControlCall.CONTINUE:
            return _change(state, interruption=record.interruption.end_pause())
        case ControlCall.DESTROY_GROUP:
            return _leave_group(state, event.name)
        case ControlCall.RESUME_MEMORY:
            return _change(state, interruption=record.interruption.restore(event.details))
        case ControlCall.LOAD_ADAPTER:
            return _change(state, adapters={**record.adapters, event.name: event.details[0]})
        case ControlCall.UNLOAD_ADAPTER:
            return _change(state, adapters={name: path for name, path in record.adapters.items() if name != event.name})
        case ControlCall.SET_VERSION:
            return _change(state, label=event.name) if record.state is EngineState.CLEAN else state
        case _:
            return state


def _fail(state: State, event: CallEnded) -> State:
    if event.call in (ControlCall.BEGIN_UPDATE, ControlCall.END_UPDATE, *_UPDATES):
        return _fail_update(state)
    return _leave_group(state, event.name) if event.call == ControlCall.INIT_GROUP else state


def _fail_update(state: State) -> State:
    return _change(state, failed=True) if state.record.state is EngineState.DIRTY else state


def _leave_group(state: State, name: str) -> State:
    return _change(state, groups=[group for group in state.record.groups if group != name])


def _lose_version(state: State, engine_state: EngineState, /, **changes: object) -> State:
    return _change(state, state=engine_state, version=None, label=None, cohort=[], **changes)


def _change(state: State, /, **changes: object) -> State:
    """Return the state with these changes to its record; the same object if nothing changes."""
    record = state.record
    if all(getattr(record, name) == value for name, value in changes.items()):
        return state
    return replace(state, record=record.model_copy(update=changes))
