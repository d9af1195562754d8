"""A real agent core over a simulated engine, which is a record of what its memory holds. No I/O, no clock.

The agent's state, decisions and refusals are the product's own (`agent.state`, `agent.events`, `agent.guards`). This module repeats only
the order in which the agent's I/O code applies them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from sglang_rollout.agent import events as ev
from sglang_rollout.agent import guards
from sglang_rollout.agent import state as s
from sglang_rollout.agent.interruption import Interruption, next_call, should_resume
from sglang_rollout.coordinator.update.events import Result
from sglang_rollout.sglang.api import MEMORY_TAGS, ControlCall, MemoryTag
from sglang_rollout.wire.agent import UNCHECKED, AckRequest, AgentStatus, SyncRequest
from sglang_rollout.wire.ports import (
    AGENT_ACK,
    AGENT_ACTIVATE,
    AGENT_CHECKPOINT,
    AGENT_DROP,
    AGENT_FENCE,
    AGENT_PREFLIGHT,
    AGENT_RUN,
    AGENT_STAGE,
    AGENT_SYNC,
)
from sglang_rollout.wire.reasons import RefusalCode
from sglang_rollout.wire.staged import ActivateRequest
from sglang_rollout.wire.states import EngineState, FleetState, StagedCopy, Version

MEMORY = tuple(MEMORY_TAGS)
NAMES = ("u", "v", "w")
"""The tensors of the model."""
WRITES = (ControlCall.BEGIN_UPDATE, ControlCall.UPDATE_DISTRIBUTED, ControlCall.UPDATE_TENSOR, ControlCall.UPDATE_DISK)
FAILED = Result(ok=False, status=400, message="the engine failed.")
DONE = Result(ok=True, status=200, message="Success")


@dataclass
class Engine:
    """State of one run of an engine process.

    A failing engine does nothing. Its agent refuses to release memory then, because it cannot tell whether the engine is idle.
    """

    content: object = "base"
    """Identifies the weights: one value per completed update, or ``mixture``."""
    tensors: dict[str, object] = field(default_factory=lambda: dict.fromkeys(NAMES, "base"))
    """Content of each tensor."""
    label: str = "default"
    session: bool = False
    groups: list[str] = field(default_factory=list)
    released: set[str] = field(default_factory=set)
    handles: list[str] = field(default_factory=list)
    """Handles that `/update_weights_from_tensor` received since the session was opened."""
    read: dict[str, str] = field(default_factory=dict)
    """Content of each loaded adapter."""
    pinned: set[str] = field(default_factory=set)
    loaded: str | None = None
    """The folder of the last update from disk."""
    written: frozenset[str] = frozenset()
    """The tensors that loads of staged versions have written. The agent keeps them on disk."""


@dataclass(frozen=True)
class Copy:
    """A complete staged version."""

    tensors: Mapping[str, object]
    digest: str
    version: Version | None = None


class Holder(Protocol):
    """A pod from which others copy versions."""

    copies: dict[str, Copy]

    @property
    def serves_copies(self) -> bool: ...


def fetch(peers: Mapping[str, Holder], body: Mapping[str, Any]) -> Copy | None:
    """Return the first complete copy with the right digest among the parents that a request names; None if no parent has one."""
    found = (peers[name].copies.get(body["update"]) for name in body["parents"] if name in peers and peers[name].serves_copies)
    right = next((copy for copy in found if copy is not None and copy.digest == body["digest"]), None)
    version = Version.model_validate(body["version"]) if body["version"] else None
    return replace(right, version=version) if right is not None else None


@dataclass
class SimulatedAgent:
    """One engine and its agent, as the coordinator reaches them."""

    name: str
    starts: int = 1
    """How many times the engine process has started."""
    answers: bool = True
    snapshots: dict[tuple[int, int], dict[str, object]] = field(default_factory=dict)
    """Tensors of committed versions on the shared volume."""
    chosen: tuple[int, int] | None = None
    """Run and step of the snapshot that the last check found."""
    folders: dict[str, str] = field(default_factory=dict)
    """Content of an adapter's path; empty if it cannot be loaded. Any other path contains its own name."""
    backup: bool = True
    """True if the engine restores released weights unchanged."""
    readable: bool = True
    """True if the agent can read `model.path`."""
    refuses: frozenset[str] = frozenset()
    """Tensors that the engine does not take, because their shape is another one. It has written those before them in the same call."""
    is_random: bool = False
    """True if the engine starts with random weights."""
    restarts_itself: bool = True
    """False: the container cannot be restarted, as with plain processes."""
    holds: tuple[str, ...] = NAMES
    """The tensors in the folders that the engine loads."""
    checksum: str | None = "same"
    """None if the engine's SGLang has no ``/weights_checker``."""
    digest: str = "same"
    stocked: bool = False
    forbidden: frozenset[str] = frozenset()
    """Folders out of which symbolic links lead."""
    """True if the shared volume has a snapshot of every committed version."""
    engine: Engine = field(default_factory=Engine)
    core: s.State = field(default_factory=s.State)
    takes_copies: bool = True
    """False: a pod that was made for another transport."""
    copies: dict[str, Copy] = field(default_factory=dict)
    """Staged versions in the memory of its pod, by update. They survive a restart of the engine."""
    begun: set[str] = field(default_factory=set)
    """Updates whose copies have begun and are not complete."""
    peers: Mapping[str, Holder] = field(default_factory=dict)
    """The pods and the weight store that it can copy from."""
    breaks: bool = False
    """True if a load that fails has written already; False if the loader refuses before its first write."""

    def __post_init__(self) -> None:
        self._identify()

    # State that tests read

    @property
    def boot(self) -> str:
        return f"{self.name}#{self.starts}"

    @property
    def record(self) -> s.EngineRecord:
        return self.core.record

    @property
    def gate_open(self) -> bool:
        return s.gate_may_open(self.core)

    @property
    def state(self) -> EngineState:
        return self.record.state

    @property
    def version(self) -> Version | None:
        return self.record.version

    @property
    def committed(self) -> Version | None:
        return self.record.committed

    @property
    def session(self) -> bool:
        return self.record.session

    @property
    def groups(self) -> list[str]:
        return self.record.groups

    @property
    def released(self) -> list[str]:
        return self.record.interruption.released

    @property
    def applied_state(self) -> FleetState:
        return self.record.applied_state

    @property
    def content(self) -> object:
        return self.engine.content

    @content.setter
    def content(self, content: object) -> None:
        self.engine.content = content

    @property
    def tensors(self) -> dict[str, object]:
        return self.engine.tensors

    @property
    def handles(self) -> list[str]:
        return self.engine.handles

    @property
    def read(self) -> dict[str, str]:
        return self.engine.read

    @property
    def pinned(self) -> set[str]:
        return self.engine.pinned

    @property
    def loaded(self) -> str | None:
        return self.engine.loaded

    # Changes that tests make

    @property
    def up(self) -> bool:
        return self.core.up

    @up.setter
    def up(self, up: bool) -> None:
        if up:
            self._identify()
        else:
            self.apply(ev.EngineDown("it is down"))

    @property
    def draining(self) -> bool:
        return self.core.draining

    @draining.setter
    def draining(self, on: bool) -> None:
        self.apply(ev.DrainingChanged(on))

    @property
    def term(self) -> int:
        return self.record.term

    @term.setter
    def term(self, term: int) -> None:
        self.apply(ev.CoordinatorCalled(term))

    @property
    def paused(self) -> bool:
        return self.record.interruption.is_pause

    @property
    def adapters(self) -> dict[str, str]:
        return self.record.adapters

    def resume(self) -> None:
        """Resume the engine, as a foreign call would."""
        self.forget(interruption=Interruption())

    def forget(self, **changes: object) -> None:
        """Change the agent's record, as a lost or foreign call would."""
        self.core = replace(self.core, record=self.record.model_copy(update=changes))

    def restart(self) -> None:
        """Restart the engine. Its agent continues and keeps what it has received."""
        self.starts += 1
        self.engine = Engine()
        self.apply(ev.EngineDown("it restarts"))
        self._identify()
        self.apply(ev.DrainingChanged(draining=False))

    def apply(self, event: ev.Event) -> None:
        self.core, _ = ev.step(self.core, event)

    def _identify(self) -> None:
        self.apply(ev.EngineIdentified(s.EngineFacts(self.boot, self.engine.label, "default")))

    # The agent's HTTP interface

    def status(self) -> AgentStatus:
        found = s.status(self.core, name=self.name, gate_open=self.gate_open)
        staged = [StagedCopy(update=update, version=copy.version, bytes=8, digest=copy.digest) for update, copy in self.copies.items()]
        more = {"takes_copies": self.takes_copies, "staged": staged, "restarts_engine": self.restarts_itself}
        return found.model_copy(update=more)

    @property
    def serves_copies(self) -> bool:
        return self.answers

    def call(self, path: str, body: dict[str, Any], token: object, works: bool) -> Result:
        """Answer one call of a coordinator.

        Args:
            path: Path of the call, with its query.
            body: JSON body.
            token: Content that an update writes; for an acknowledgement, content of the weights after it.
            works: False if the engine fails to do its part.
        """
        path = path.partition("?")[0]
        if not self.answers:
            return Result(ok=False, message="no answer within 60 s.")
        if path in (AGENT_SYNC, AGENT_RUN):
            self._apply_sync(SyncRequest.model_validate(body))
            continued = self._control(ControlCall.CONTINUE, {}, token, works) if path == AGENT_RUN else DONE
            return self._report() if continued.ok else continued
        if path == AGENT_FENCE:
            return self._give_up(token, restart=bool(body["restart"]))
        if path == AGENT_ACK:
            return self._acknowledge(AckRequest.model_validate(body), token, works)
        if path == AGENT_STAGE and not self.takes_copies:
            return Result(ok=False, status=404, message="An engine's agent offers no /agent/stage.")
        if path == AGENT_STAGE:
            return self._stage(body, works)
        if path == AGENT_DROP:
            self.copies.pop(body["update"], None)
            self.begun.discard(body["update"])
            return self._report()
        if path == AGENT_ACTIVATE:
            return self._activate_and_resume(body, works)
        if not self.up:
            return Result(ok=False, status=503, message="the engine is not up.")
        if path == AGENT_PREFLIGHT:
            return Result(ok=works, status=200, message="" if works else "connection refused.")
        if path == AGENT_CHECKPOINT:
            return self._check_folder(body, works)
        return self._control(ControlCall(path.removeprefix("/")), body, token, works)

    def _report(self) -> Result:
        return Result(ok=True, status=200, agent=self.status())

    def _apply_sync(self, sync: SyncRequest) -> None:
        tolerated = tuple(sync.tolerated)
        self.apply(ev.CoordinatorCalled(self.term, sync.committed, tolerated, sync.spec_state, sync.sender, sync.seq, sync.staged))
        self._follow_the_spec()

    def _follow_the_spec(self) -> None:
        """Release all memory if the spec says Asleep, and restore it afterwards."""
        if not self.up:
            return
        call = next_call(self.applied_state, self.record.interruption)
        if call is not None:
            self._control(call, {}, None, by_spec=True)

    def _give_up(self, token: object, *, restart: bool) -> Result:
        self.apply(ev.UpdateGivenUp())
        if restart and self.state is EngineState.DIRTY and self.restarts_itself:
            self.restart()
            return self._report()
        if self.up:
            if self.session:
                self._perform(ControlCall.END_UPDATE, {}, token)
            if self.paused and not s.stays_paused(self.record):
                self._perform(ControlCall.CONTINUE, {}, token)
        return self._report()

    def _acknowledge(self, request: AckRequest, token: object, works: bool) -> Result:
        refused = Result(ok=False, status=409, message="The engine cannot vouch for this version.")
        if s.ack_refusal(self.core, request.boot_id, request.version, verified=request.verified):
            return refused
        if self.state is EngineState.CLEAN and self.version == request.version:
            return self._report()
        if not works:
            return refused
        label = request.version.label
        if self.engine.label != label and not self._control(ControlCall.SET_VERSION, {"new_version": label}, token).ok:
            return refused
        if self.state is EngineState.DIRTY:
            self.engine.content = token
        self.apply(ev.UpdateAcknowledged(request.version, tuple(request.cohort)))
        return self._report()

    def _check_folder(self, body: dict[str, Any], works: bool) -> Result:
        if not body["path"]:
            names, shapes = (frozenset(NAMES), {name: [2] for name in NAMES}) if self.readable else (None, None)
            why = "" if self.readable else "no cache holds org/model"
            return Result(
                ok=True, status=200, names=names, shapes=shapes, compared=self.readable, why_unchecked=why, is_random=self.is_random
            )
        if body["path"] in self.forbidden:
            return Result(ok=False, status=200, message="links lead out of the folder.", code=RefusalCode.FORBIDDEN)
        found = works and (self.stocked or not body.get("snapshot"))
        self.chosen = (body["snapshot"]["run"], body["snapshot"]["step"]) if body.get("snapshot") else None
        message, names = "" if found else "model.safetensors is cut off.", frozenset(self.holds) if body.get("names") else None
        return Result(
            ok=found, status=200, message=message, digest=self.digest, path=body["path"], names=names, compared=self.readable,
            unchecked=() if self.readable else UNCHECKED, why_unchecked="" if self.readable else "no cache holds org/model",
        )  # fmt: skip

    # Staged versions

    def _stage(self, body: dict[str, Any], works: bool) -> Result:
        self.copies = {update: copy for update, copy in self.copies.items() if update in (*body["keep"], body["update"])}
        held = self.copies.get(body["update"])
        self.begun = {update for update in self.begun if update in body["keep"]} | ({body["update"]} if held is None else set())
        if not body["digest"] or (held is not None and held.digest == body["digest"]):
            return self._report()
        found = fetch(self.peers, body) if works else None
        if found is None:
            return Result(ok=False, status=502, message="no parent has the version.")
        self.copies[body["update"]] = found
        self.begun.discard(body["update"])
        return self._report()

    def _activate_and_resume(self, body: dict[str, Any], works: bool) -> Result:
        if body["sync"] is not None:
            self._apply_sync(SyncRequest.model_validate(body["sync"]))
        loaded = self._activate(body, works)
        if not loaded.ok or body["sync"] is None or self.applied_state is not FleetState.ACTIVE:
            return loaded
        return replace(loaded, running=self._control(ControlCall.CONTINUE, {}, None).ok)

    def _activate(self, body: dict[str, Any], works: bool) -> Result:
        """Load a copy: pause, session, write, compare, acknowledge."""
        ack, copy, before = AckRequest.model_validate(body["ack"]), self.copies.get(body["update"]), self.record
        refused = Result(ok=False, status=409, message="the engine cannot load the copy.", wrote=False)
        is_gone = not self.up or before.boot_id != ack.boot_id or self.draining or bool(self.released)
        if is_gone or copy is None or copy.digest != body["digest"] or s.is_update_open(before) or (not works and not self.breaks):
            return refused
        if self.find_left(copy):
            return replace(refused, message="this version lacks tensors that loads have written.", code=RefusalCode.RESTART_NEEDED)
        if self.state is EngineState.CLEAN and self.version == ack.version:
            self._perform(ControlCall.PAUSE, {"mode": body["mode"]}, None)
            return replace(self._compute_checksum(), agent=None)
        self._perform(ControlCall.PAUSE, {"mode": body["mode"]}, None)
        if not self.session:
            self._perform(ControlCall.BEGIN_UPDATE, {}, None)
        self.apply(ev.CallBegan(ControlCall.UPDATE_TENSOR, ""))
        tensors_before, written_before = dict(self.engine.tensors), self.engine.written
        self.engine.written = self.engine.written | frozenset(copy.tensors)
        written = dict(copy.tensors) if works else dict(list(copy.tensors.items())[:1])
        known = {name: content for name, content in written.items() if name in self.engine.tensors}
        self.engine.tensors, self.engine.loaded = {**self.engine.tensors, **known}, None
        self.apply(ev.CallEnded(ControlCall.UPDATE_TENSOR, ok=works, boot_id=before.boot_id))
        self._perform(ControlCall.END_UPDATE, {}, None)
        if not works:
            return Result(ok=False, status=500, message="the loader failed.")
        self._perform(ControlCall.SET_VERSION, {"new_version": ack.version.label}, None)
        sums = self._compute_checksum()
        if body["expected"] is not None and tuple(body["expected"]) != sums.checksums:
            self.apply(ev.UpdateGivenUp())
            return Result(ok=False, status=409, message="the engine holds other weights than it should.")
        is_compared = not self.readable and not copy.tensors.keys() <= written_before
        if is_compared and self.engine.tensors == tensors_before:
            self.engine.written, sums = written_before, replace(sums, changed=False)
        self.engine.content = ("staged", copy.digest)
        self.apply(ev.UpdateAcknowledged(ack.version, tuple(ack.cohort)))
        self.copies[body["update"]] = replace(copy, version=ack.version)
        return sums

    def find_left(self, copy: Copy) -> set[str]:
        """Return the tensors of earlier loads that a version would leave in the engine."""
        return {name for name in self.engine.written - copy.tensors.keys() if name in NAMES or not self.readable}

    def load_own_copy(self, works: bool) -> None:
        """Load the committed version from the pod's own copy without a coordinator, if that is needed and possible."""
        committed, staged, before = self.record.committed, self.record.staged, self.record
        copy = self.copies.get(staged.update) if staged is not None else None
        if not s.needs_own_copy(self.core) or copy is None or staged is None or committed is None:
            return
        if copy.digest != staged.digest:
            return
        if self.find_left(copy) and self.restarts_itself:
            self.restart()
            return
        ack = AckRequest(version=committed, boot_id=self.boot, cohort=[self.name])
        request = ActivateRequest(update=staged.update, digest=staged.digest, ack=ack)
        loaded = self._activate(request.model_dump(mode="json"), works)
        resumes = before.state is EngineState.DIRTY or not before.interruption.is_pause
        if loaded.ok and resumes and self.applied_state is FleetState.ACTIVE:
            self._control(ControlCall.CONTINUE, {}, None)

    # Control calls, in the order in which `agent.agent` applies them

    def _control(self, call: ControlCall, body: dict[str, Any], token: object, works: bool = True, by_spec: bool = False) -> Result:
        refused = guards.refusal(self.core, call, body)
        if refused is not None:
            return Result(ok=False, status=refused.status, message=refused.message)
        if call is ControlCall.RELEASE_MEMORY and not works:
            return Result(ok=False, status=503, message="cannot tell whether the engine is idle.")
        if call is ControlCall.RELEASE_MEMORY and not guards.tags_of(call, body, self.released):
            return DONE
        result = self._perform(call, body, token, works, by_spec)
        if call is ControlCall.RESUME_MEMORY and result.ok and should_resume(self.applied_state, self.record.interruption):
            self._control(ControlCall.CONTINUE, {}, token, works)
        return result

    def _perform(self, call: ControlCall, body: dict[str, Any], token: object, works: bool = True, by_spec: bool = False) -> Result:
        record, name = self.record, guards.name_of(call, body)
        details = guards.details_of(call, body, record.interruption.released)
        self.apply(ev.CallBegan(call, name, details, by_spec))
        if call in WRITES and self.record != record and (record.state is not EngineState.DIRTY or not record.session):
            self.engine.content = "mixture"
        result = self._engine_call(call, guards.prepare_body(call, body, record, None), token, works)
        if call is ControlCall.UNLOAD_ADAPTER and record.adapters.get(name) == s.UNKNOWN_PATH and name not in self.engine.read:
            result = DONE
        self.apply(ev.CallEnded(call, ok=result.ok, boot_id=record.boot_id, name=name, details=details))
        return result

    # The engine

    def _engine_call(self, call: ControlCall, body: dict[str, Any], token: object, works: bool) -> Result:
        engine = self.engine
        match call:
            case ControlCall.RELEASE_MEMORY:
                engine.released.update(body["tags"])
                if MemoryTag.WEIGHTS in body["tags"] and not self.backup:
                    engine.content, engine.tensors = "whatever was there", dict.fromkeys(NAMES, f"whatever was there in {self.name}")
            case ControlCall.UPDATE_DISK:
                return self._load_folder(body["model_path"], works)
            case ControlCall.CHECK_WEIGHTS:
                return self._compute_checksum() if works or self.checksum is None else FAILED
            case ControlCall.DESTROY_GROUP:
                known = body["group_name"] in engine.groups
                engine.groups = [name for name in engine.groups if name != body["group_name"]]
                return DONE if known else Result(ok=False, status=400, message="The group to be destroyed does not exist.")
            case _ if not works:
                return FAILED
            case ControlCall.RESUME_MEMORY:
                if not set(body["tags"]) <= engine.released:
                    return FAILED
                engine.released.difference_update(body["tags"])
            case ControlCall.BEGIN_UPDATE:
                if engine.session:
                    return FAILED
                engine.session, engine.handles = True, []
            case ControlCall.END_UPDATE:
                if not engine.session:
                    return FAILED
                engine.session = False
            case ControlCall.UPDATE_DISTRIBUTED:
                if not engine.session or body["group_name"] not in engine.groups:
                    return FAILED
                return self._receive(body["names"], token)
            case ControlCall.UPDATE_TENSOR:
                if not engine.session:
                    return FAILED
                engine.handles, engine.loaded = [*engine.handles, *body["serialized_named_tensors"]], None
            case ControlCall.INIT_GROUP:
                engine.groups = [*engine.groups, body["group_name"]]
            case ControlCall.SET_VERSION:
                engine.label = body["new_version"]
            case ControlCall.LOAD_ADAPTER:
                found = self.folders.get(body["lora_path"], body["lora_path"])
                if not found or body["lora_name"] in engine.read:
                    return FAILED
                engine.read = {**engine.read, body["lora_name"]: found}
                engine.pinned |= {body["lora_name"]} if body.get("pinned") else set()
            case ControlCall.UNLOAD_ADAPTER:
                if body["lora_name"] not in engine.read:
                    return FAILED
                engine.read = {name: what for name, what in engine.read.items() if name != body["lora_name"]}
                engine.pinned.discard(body["lora_name"])
            case _:
                pass
        return DONE if works else FAILED

    def _receive(self, names: list[str], token: object) -> Result:
        """Write tensors one after the other. Names that the model does not have are ignored; a refused one ends the call."""
        engine = self.engine
        engine.loaded = None
        for name in names:
            if name in self.refuses:
                return Result(ok=False, status=400, message=f"{name} has another shape; partially updated.")
            if name in engine.tensors:
                engine.tensors = {**engine.tensors, name: token}
        return DONE

    def _load_folder(self, path: str, works: bool) -> Result:
        engine = self.engine
        engine.loaded = path
        snapshot = self.snapshots.get(self.chosen) if self.chosen is not None else None
        written = snapshot if snapshot is not None else dict.fromkeys(self.holds, ("disk", path))
        if not works:
            engine.tensors = {**engine.tensors, NAMES[0]: written[NAMES[0]]}
            return Result(ok=False, status=400, message="no such file.")
        engine.tensors = {**engine.tensors, **written}
        return DONE

    def _compute_checksum(self) -> Result:
        """Return the engine's checksum, if its SGLang computes one."""
        if self.checksum is None:
            return Result(ok=False, status=404, message="Not Found")
        honest = f"of {sorted(self.tensors.items())}" if self.checksum == "same" else self.checksum
        found = honest if self.backup or self.state is not EngineState.UNKNOWN else "whatever was there"
        return Result(ok=True, status=200, checksums=("".join([found, *self.handles]),))
