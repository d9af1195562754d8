"""Events of an agent: :func:`step` returns the new state and the effects to carry out. Pure: no I/O, no clock."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TypeAlias, assert_never

from sglang_rollout.agent.state import BY_SPEC, UNSURE, EngineFacts, Memory, State, gate_may_open
from sglang_rollout.sglang.api import ControlCall, MemoryTag
from sglang_rollout.wire.reasons import GateReason, Refusal
from sglang_rollout.wire.states import BASE, EngineState, FleetState, Version


@dataclass(frozen=True, slots=True)
class Lost:
    """The engine does not answer."""

    message: str
    """Why, as a clause."""
    code: GateReason = GateReason.NOT_UP


@dataclass(frozen=True, slots=True)
class Identified:
    """The engine answers, has warmed up, and has identified itself."""

    facts: EngineFacts


@dataclass(frozen=True, slots=True)
class Polled:
    """The engine reported this weight version. ``calls`` is ``State.calls`` at the time of the poll."""

    label: str
    calls: int


@dataclass(frozen=True, slots=True)
class Told:
    """A call of a coordinator with this term; for a sync, with the committed version and ``spec.state`` if the coordinator knows them."""

    term: int
    committed: Version | None = None
    tolerated: tuple[Version, ...] = ()
    hold: FleetState | None = None
    sender: str = ""
    """Identifies the coordinator process."""
    seq: int = 0
    """Orders the messages of the sender in its term; 0: it sends no sequence numbers."""


@dataclass(frozen=True, slots=True)
class Unchallenged:
    """No coordinator has contradicted the record for some seconds after the agent's start."""


@dataclass(frozen=True, slots=True)
class CallBegan:
    """A control call is about to be sent to the engine. ``name`` is its process group or adapter, ``tags`` its memory tags."""

    call: str
    name: str = ""
    tags: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class CallEnded:
    """The engine answered a control call, or ended. ``boot_id`` is the boot ID when the call began."""

    call: str
    ok: bool
    boot_id: str | None
    name: str = ""
    tags: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Acknowledged:
    """The coordinator declared the update complete, and :func:`ack_refusal` allowed it."""

    version: Version
    cohort: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class GivenUp:
    """The coordinator gave up the current update."""


@dataclass(frozen=True, slots=True)
class Awake:
    """All memory that the spec released is restored."""


@dataclass(frozen=True, slots=True)
class Draining:
    """The pod is about to stop (``on``), or the drained engine has been replaced."""

    on: bool


Event: TypeAlias = Lost | Identified | Polled | Told | Unchallenged | CallBegan | CallEnded | Acknowledged | GivenUp | Awake | Draining


@dataclass(frozen=True, slots=True)
class Save:
    """Write the memory to disk."""

    memory: Memory


@dataclass(frozen=True, slots=True)
class SetGate:
    """Open or close the gate."""

    open: bool


Effect: TypeAlias = Save | SetGate


def restored(memory: Memory, *, usable: bool = True) -> State:
    """Return the initial state of an agent with this record.

    A call without an answer counts as failed, and the adapter that it named as unknown. ``usable`` is False if a record exists but
    cannot be read."""
    if not usable:
        return State(memory=memory.model_copy(update={"blind": True}))
    if not memory.pending:
        return State(memory=memory)
    doubted = {memory.pending_adapter: UNSURE} if memory.pending_adapter else {}
    changes = {"pending": "", "pending_adapter": "", "failed": memory.state is EngineState.DIRTY}
    return State(memory=memory.model_copy(update={**changes, "adapters": {**memory.adapters, **doubted}}))


def step(state: State, event: Event) -> tuple[State, list[Effect]]:
    """Apply one event. Return the same state object if nothing changes.

    ``Save`` precedes ``SetGate``: the record is on disk before the gate moves or the engine is called."""
    new = _apply(state, event)
    if new is state:
        return state, []
    effects: list[Effect] = []
    if new.memory != state.memory:
        effects.append(Save(new.memory))
    if gate_may_open(new) != gate_may_open(state):
        effects.append(SetGate(gate_may_open(new)))
    return new, effects


def _apply(state: State, event: Event) -> State:  # noqa: PLR0911 - one line per event
    match event:
        case Lost(message, code):
            return replace(state, up=False, down=Refusal(code, message))
        case Identified(facts):
            return _identified(state, facts)
        case Polled(label, calls):
            return _label_seen(state, label) if state.up and calls == state.calls else state
        case Told():
            return _told(state, event)
        case Unchallenged():
            return replace(state, informed=state.informed or state.memory.committed is not None)
        case CallBegan():
            return _call_began(replace(state, calls=state.calls + 1), event)
        case CallEnded():
            return _call_ended(replace(state, calls=state.calls + 1), event)
        case Acknowledged(version, cohort):
            clean = {"state": EngineState.CLEAN, "version": version, "label": version.label, "cohort": list(cohort)}
            return replace(_remember(state, **clean, received=0, failed=False, lost=False), calls=state.calls + 1)
        case Awake():
            return _remember(state, asleep=False)
        case GivenUp():
            return _remember(state, failed=True) if state.memory.state is EngineState.DIRTY else state
        case Draining(on):
            return replace(state, draining=on)
        case _:
            assert_never(event)


def _told(state: State, event: Told) -> State:
    """Ignore an out-of-order sync. It could reopen the gate for a version that has since been replaced."""
    memory = state.memory
    sender = (event.term, event.sender)
    is_overtaken = sender == state.synced_by and 0 < event.seq < state.synced_seq
    if event.term < memory.term or is_overtaken:
        return state
    if event.seq:
        state = replace(state, synced_by=sender, synced_seq=event.seq)
    state = _remember(state, term=event.term, hold=memory.hold if event.hold is None else event.hold)
    if event.committed is None:
        return state
    state = _remember(state, committed=event.committed, tolerated=list(event.tolerated))
    return state if state.informed else replace(state, informed=True)


def _identified(state: State, facts: EngineFacts) -> State:
    memory = state.memory
    if facts.boot_id == memory.boot_id:
        return _label_seen(replace(state, up=True, facts=facts), facts.live_label)
    # A new engine process holds model.path unless its label has changed already. Without a readable record it may also be an old process
    # that received tensors and not yet their label. If it is new after all, the next push makes it clean.
    pristine = facts.live_label == facts.launch_label and not memory.blind
    memory = Memory(
        boot_id=facts.boot_id,
        state=EngineState.CLEAN if pristine else EngineState.UNKNOWN,
        version=BASE if pristine else None,
        label=facts.live_label if pristine else None,
        # The committed version of a record from an earlier engine process may be outdated.
        committed=memory.committed if state.informed else None,
        tolerated=memory.tolerated if state.informed else [],
        term=memory.term,
        hold=memory.hold,
        served_name=facts.served_name,
    )
    return replace(state, memory=memory, up=True, facts=facts)


def _label_seen(state: State, label: str) -> State:
    memory = state.memory
    if memory.pending or memory.state is not EngineState.CLEAN or memory.label == label:
        return state
    return _remember(state, state=EngineState.UNKNOWN, version=None, label=None, cohort=[])


def _call_began(state: State, event: CallBegan) -> State:  # noqa: PLR0911 - one line per case
    """Record the worst effect that the call can have on the engine."""
    memory = state.memory
    state = _remember(state, pending=event.call)
    match event.call:
        case ControlCall.BEGIN_UPDATE:
            return _dirty(state, received=0, failed=False, session=True)
        case ControlCall.UPDATE_DISTRIBUTED | ControlCall.UPDATE_TENSOR:
            return _dirty(state)
        case ControlCall.UPDATE_DISK:
            return _dirty(state) if memory.session else _dirty(state, received=0, failed=False)
        case ControlCall.PAUSE:
            return _remember(state, paused=True, pause_mode=event.name or "abort")
        case ControlCall.INIT_GROUP:
            return _remember(state, groups=_with(memory.groups, [event.name]))
        case ControlCall.RELEASE_MEMORY:
            # The agent pauses a running engine before it releases memory.
            asleep, paused_for_release = memory.asleep or event.name == BY_SPEC, memory.paused_for_release or not memory.paused
            state = _remember(
                state, released=_with(memory.released, event.tags), asleep=asleep, paused_for_release=paused_for_release, paused=True
            )
            return _lost(state) if MemoryTag.WEIGHTS in event.tags else state
        case ControlCall.LOAD_ADAPTER | ControlCall.UNLOAD_ADAPTER:
            return _remember(state, pending_adapter=event.name)
        case _:
            return state


def _call_ended(state: State, event: CallEnded) -> State:  # noqa: PLR0911 - one line per case
    if event.boot_id != state.memory.boot_id:
        return state  # the called engine process has ended, and its pending call with it
    state = _remember(state, pending="", pending_adapter="")
    memory = state.memory
    match event.call, event.ok:
        case ((ControlCall.UPDATE_DISTRIBUTED | ControlCall.UPDATE_TENSOR | ControlCall.UPDATE_DISK), True):
            return _remember(state, received=memory.received + 1)
        case (
            (
                ControlCall.BEGIN_UPDATE
                | ControlCall.END_UPDATE
                | ControlCall.UPDATE_DISTRIBUTED
                | ControlCall.UPDATE_TENSOR
                | ControlCall.UPDATE_DISK
            ),
            False,
        ):
            return _remember(state, failed=True) if memory.state is EngineState.DIRTY else state
        case ControlCall.END_UPDATE, True:
            return _remember(state, session=False)
        case ControlCall.CONTINUE, True:
            return _remember(state, paused=False, paused_for_release=False)
        case (ControlCall.INIT_GROUP, False) | (ControlCall.DESTROY_GROUP, True):
            return _remember(state, groups=[group for group in memory.groups if group != event.name])
        case ControlCall.RESUME_MEMORY, True:
            return _remember(state, released=[tag for tag in memory.released if tag not in event.tags])
        case ControlCall.LOAD_ADAPTER, True:
            return _remember(state, adapters={**memory.adapters, event.name: event.tags[0]})
        case ControlCall.UNLOAD_ADAPTER, True:
            return _remember(state, adapters={name: path for name, path in memory.adapters.items() if name != event.name})
        case ControlCall.SET_VERSION, True:
            return _remember(state, label=event.name) if memory.state is EngineState.CLEAN else state
        case _:
            return state


def _dirty(state: State, /, **changes: object) -> State:
    return _remember(state, state=EngineState.DIRTY, version=None, label=None, cohort=[], **changes)


def _lost(state: State) -> State:
    """Mark the weights as unknown, not as a mixture: they may be unchanged."""
    return _remember(state, state=EngineState.UNKNOWN, version=None, label=None, cohort=[], lost=True)


def _remember(state: State, /, **changes: object) -> State:
    memory = state.memory
    if all(getattr(memory, name) == value for name, value in changes.items()):
        return state
    return replace(state, memory=memory.model_copy(update=changes))


def _with(present: list[str], more: list[str] | tuple[str, ...]) -> list[str]:
    return [*present, *(item for item in more if item not in present)]
