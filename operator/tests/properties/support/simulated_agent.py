"""One engine and its agent as the coordinator's contract describes them. No I/O, no clock."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from sglang_rollout.coordinator.update.events import Result
from sglang_rollout.sglang.api import ControlCall
from sglang_rollout.wire.agent import UNCHECKED, AgentStatus
from sglang_rollout.wire.ports import AGENT_ACK, AGENT_CHECKPOINT, AGENT_FENCE, AGENT_PREFLIGHT, AGENT_RUN, AGENT_SYNC
from sglang_rollout.wire.states import FleetState
from sglang_rollout.wire.weights import BASE, EngineState, Version

MEMORY = ("kv_cache", "weights", "cuda_graph")
NAMES = ("u", "v", "w")
"""The tensors of the model."""
NEED_WEIGHTS = frozenset(
    {
        ControlCall.CHECK_WEIGHTS.path,
        ControlCall.BEGIN_UPDATE.path,
        ControlCall.UPDATE_DISTRIBUTED.path,
        ControlCall.UPDATE_TENSOR.path,
        ControlCall.UPDATE_DISK.path,
    }
)


@dataclass
class FakeAgent:
    """One engine and its agent: the semantics that the coordinator relies on."""

    name: str
    life: int = 1
    up: bool = True
    answers: bool = True
    state: EngineState = EngineState.CLEAN
    version: Version | None = BASE
    content: object = "base"
    """What the weights really are: one token per completed update, or a mixture."""
    tensors: dict[str, object] = field(default_factory=lambda: dict.fromkeys(NAMES, "base"))
    """What was written to each tensor last."""
    snapshots: dict[tuple[int, int], dict[str, object]] = field(default_factory=dict)
    """The tensors of committed versions, as a shared volume has them."""
    chosen: tuple[int, int] | None = None
    """The snapshot that the last check found."""
    cohort: list[str] = field(default_factory=list)
    committed: Version | None = None
    tolerated: list[Version] = field(default_factory=list)
    term: int = 0
    hold: FleetState = FleetState.ACTIVE
    paused: bool = False
    session: bool = False
    fed: int = 0
    failed: bool = False
    groups: list[str] = field(default_factory=list)
    draining: bool = False
    released: list[str] = field(default_factory=list)
    asleep: bool = False
    adapters: dict[str, str] = field(default_factory=dict)
    pinned: set[str] = field(default_factory=set)
    """Adapters that the engine has loaded as pinned."""
    folders: dict[str, str] = field(default_factory=dict)
    """What lies under an adapter's path; empty: nothing that can be loaded. A path not named here holds itself."""
    read: dict[str, str] = field(default_factory=dict)
    """What the engine has read for each adapter that it holds."""
    lost: bool = False
    """The weights were released in this life, and nobody has proved since what they are."""
    backup: bool = True
    """Released weights come back as they were."""
    readable: bool = True
    """Its agent can read ``model.path``."""
    holds: tuple[str, ...] = NAMES
    """The tensors in the folders that it is told to load."""
    checksum: str | None = "same"
    """None: its SGLang knows no /weights_checker."""
    digest: str = "same"
    stocked: bool = False
    """Snapshots of all committed versions lie on the shared volume."""
    handles: list[str] = field(default_factory=list)
    """What ``/update_weights_from_tensor`` brought since its session was opened."""
    loaded: str | None = None
    """The folder that it was told to load."""
    older: bool = False
    """Its agent is of the release before ``/agent/run``."""

    @property
    def boot(self) -> str:
        return f"{self.name}#{self.life}"

    @property
    def gate_open(self) -> bool:
        clean = self.up and not self.released and not self.draining and self.state is EngineState.CLEAN and self.hold is FleetState.ACTIVE
        return clean and self.version is not None and self.version in [self.committed, *self.tolerated]

    def restart(self) -> None:
        self.life += 1
        self.up, self.state, self.version, self.content, self.cohort = True, EngineState.CLEAN, BASE, "base", []
        self.committed, self.paused, self.session, self.fed, self.failed, self.groups = None, False, False, 0, False, []
        self.draining = self.asleep = self.lost = False
        self.tensors = dict.fromkeys(NAMES, "base")
        self.released, self.adapters, self.pinned, self.handles, self.read = [], {}, set(), [], {}

    def follow_the_spec(self) -> None:
        """What the agent does by itself: it falls asleep and wakes."""
        if not self.up or self.session:
            return  # memory is not released in the middle of an update's session
        if self.hold is FleetState.ASLEEP and not self.asleep:
            self.asleep = self.paused = True
            self._release([*MEMORY])
        elif self.hold is not FleetState.ASLEEP and self.asleep:
            self.asleep, self.released = False, []
            self.paused = self.hold is FleetState.PAUSED

    def _release(self, tags: list[str]) -> None:
        self.released = [*self.released, *(tag for tag in tags if tag not in self.released)]
        if "weights" in tags:
            self.state, self.version, self.cohort, self.lost = EngineState.UNKNOWN, None, [], True
            if not self.backup:
                self.content, self.tensors = "whatever was there", dict.fromkeys(NAMES, f"whatever was there in {self.name}")

    def status(self) -> AgentStatus:
        return AgentStatus(
            name=self.name, boot_id=self.boot if self.up else None,
            state=self.state if self.up else EngineState.UNKNOWN, version=self.version if self.up else None,
            cohort=self.cohort, committed=self.committed, term=self.term, gate_open=self.gate_open, paused=self.paused,
            session=self.session, groups=self.groups, draining=self.draining, released=self.released, adapters=self.adapters,
            woken=self.lost and "weights" not in self.released,
        )  # fmt: skip

    def soil(self) -> None:
        self.loaded = None
        if self.state is not EngineState.DIRTY:
            self.state, self.version, self.fed, self.failed, self.content = EngineState.DIRTY, None, 0, False, "mixture"

    def call(self, path: str, body: dict[str, Any], token: object, works: bool) -> Result:
        """Answer one call. ``works``: the engine does what it is told."""
        path = path.partition("?")[0]
        if not self.answers:
            return Result(ok=False, message="no answer within 60 s.")
        if path == AGENT_RUN and self.older:
            return Result(ok=False, status=404, message="An engine's agent offers no /agent/run.")
        if path in (AGENT_SYNC, AGENT_RUN):
            self._told(body)
            going_on = self.call(ControlCall.CONTINUE.path, {}, token, works) if path == AGENT_RUN else None
            return Result(ok=True, status=200, agent=self.status()) if going_on is None or going_on.ok else going_on
        if path == AGENT_FENCE:
            self.session = False
            held = self.released or (self.hold is not FleetState.ACTIVE and self.state is not EngineState.DIRTY)
            self.paused = self.paused and bool(held)
            self.failed = self.failed or self.state is EngineState.DIRTY
            return Result(ok=True, status=200, agent=self.status())
        if not self.up:
            return Result(ok=False, status=503, message="the engine is not up.")
        if path == AGENT_PREFLIGHT:
            return Result(ok=works, status=200, message="" if works else "connection refused.")
        if path == AGENT_CHECKPOINT and not body["path"]:
            return Result(ok=True, status=200, names=frozenset(NAMES) if self.readable else None, compared=self.readable)
        if path == AGENT_CHECKPOINT:
            found = works and (self.stocked or not body.get("snapshot"))
            self.chosen = (body["snapshot"]["run"], body["snapshot"]["step"]) if body.get("snapshot") else None
            message, names = "" if found else "model.safetensors is cut off.", frozenset(self.holds) if body.get("names") else None
            return Result(
                ok=found, status=200, message=message, digest=self.digest, path=body["path"], names=names, compared=self.readable,
                unchecked=() if self.readable else UNCHECKED, why_unchecked="" if self.readable else "no cache holds org/model",
            )  # fmt: skip
        return self._control(path, body, token, works)

    def _told(self, body: dict[str, Any]) -> None:
        committed = body.get("committed")
        if committed is not None:
            self.committed = Version.model_validate(committed)
            self.tolerated = [Version.model_validate(version) for version in body.get("tolerated", [])]
        if body.get("hold"):
            self.hold = FleetState(body["hold"])
        self.follow_the_spec()

    def _load(self, works: bool) -> Result:
        """Without a session; the tensors need no trainer."""
        if self.state is not EngineState.DIRTY or not self.session:
            self.state, self.version, self.fed, self.failed, self.content = EngineState.DIRTY, None, 0, False, "mixture"
        there = self.snapshots.get(self.chosen) if self.chosen is not None else None
        written = there if there is not None else dict.fromkeys(self.holds, ("disk", self.loaded))
        if not works:
            self.failed = True
            self.tensors = {**self.tensors, NAMES[0]: written[NAMES[0]]}
            return Result(ok=False, status=400, message="no such file.")
        self.tensors = {**self.tensors, **written}
        self.fed += 1
        return Result(ok=True, status=200, message="Success")

    def _control(self, path: str, body: dict[str, Any], token: object, works: bool) -> Result:
        refused = Result(ok=False, status=400, message="the engine failed.")
        done = Result(ok=True, status=200, message="Success")
        if "weights" in self.released and path in NEED_WEIGHTS:
            return refused
        if path == AGENT_ACK:
            return self._acknowledge(body, token, works)
        if path == ControlCall.UPDATE_DISK.path:
            self.loaded = body["model_path"]
            return self._load(works)
        if path == ControlCall.CHECK_WEIGHTS.path:
            return self._checked() if works or self.checksum is None else refused
        if path == ControlCall.CONTINUE.path:
            if self.state is EngineState.DIRTY or self.released or not works:
                return refused
            self.paused = False
            return done
        if path == ControlCall.BEGIN_UPDATE.path:
            self.soil()
            if not works or self.session:
                return refused
            # A new update begins from nothing: what an abandoned one brought or broke does not count.
            self.handles = []
            self.session, self.fed, self.failed = True, 0, False
            return done
        if path == ControlCall.UPDATE_DISTRIBUTED.path:
            self.soil()
            if not works or not self.session or body["group_name"] not in self.groups:
                self.failed = True
                return refused
            self.fed += 1
            self.tensors = {**self.tensors, **dict.fromkeys(body["names"], token)}
            return done
        if path == ControlCall.UPDATE_TENSOR.path:
            self.soil()
            if not works or not self.session:
                self.failed = True
                return refused
            self.fed += 1
            self.handles = [*self.handles, *body["serialized_named_tensors"]]
            return done
        if path == ControlCall.END_UPDATE.path:
            if not works or not self.session:
                return refused
            self.session = False
            return done
        if path in (
            ControlCall.LOAD_ADAPTER.path,
            ControlCall.UNLOAD_ADAPTER.path,
            ControlCall.RELEASE_MEMORY.path,
            ControlCall.RESUME_MEMORY.path,
        ):
            return done if self._keep(path, body, works) else refused
        if path == ControlCall.PAUSE.path:
            self.paused = True
            return done if works else refused
        if path == ControlCall.DESTROY_GROUP.path:
            known = body["group_name"] in self.groups
            self.groups = [name for name in self.groups if name != body["group_name"]]
            return done if known else Result(ok=False, status=400, message="The group to be destroyed does not exist.")
        if path == ControlCall.INIT_GROUP.path and works:
            self.groups = [*self.groups, body["group_name"]]
        return done if works else refused

    def _checked(self) -> Result:
        """Its checksum, if its SGLang can tell one."""
        if self.checksum is None:
            return Result(ok=False, status=404, message="Not Found")
        honest = f"of {sorted(self.tensors.items())}" if self.checksum == "same" else self.checksum
        told = honest if self.backup or self.state is not EngineState.UNKNOWN else "whatever was there"
        return Result(ok=True, status=200, checksums=("".join([told, *self.handles]),))

    def _acknowledge(self, body: dict[str, Any], token: object, works: bool) -> Result:
        refused = Result(ok=False, status=400, message="the engine failed.")
        version = Version.model_validate(body["version"])
        if not works or body["boot_id"] != self.boot or self.session:
            return refused
        if self.state is EngineState.CLEAN:
            return Result(ok=True, status=200, agent=self.status()) if self.version == version else refused
        if body["verified"] and self.lost and self.state is EngineState.UNKNOWN:
            self.state, self.version, self.cohort, self.lost = EngineState.CLEAN, version, body["cohort"], False
            return Result(ok=True, status=200, agent=self.status())
        if not self.fed or self.failed:
            return refused
        self.state, self.version, self.cohort, self.content = EngineState.CLEAN, version, body["cohort"], token
        self.lost = False
        return Result(ok=True, status=200, agent=self.status())

    def _keep(self, path: str, body: dict[str, Any], works: bool) -> bool:
        """Adapters and memory; whether it did what it was told."""
        if path == ControlCall.LOAD_ADAPTER.path:
            found = self.folders.get(body["lora_path"], body["lora_path"])
            if not works or not found or body["lora_name"] in self.adapters:
                return False
            self.read = {**self.read, body["lora_name"]: found}
            if body.get("pinned"):
                self.pinned.add(body["lora_name"])
            self.adapters = {**self.adapters, body["lora_name"]: body["lora_path"]}
            return True
        if path == ControlCall.UNLOAD_ADAPTER.path:
            if not works or body["lora_name"] not in self.adapters:
                return False
            self.adapters = {name: where for name, where in self.adapters.items() if name != body["lora_name"]}
            self.pinned.discard(body["lora_name"])
            self.read = {name: what for name, what in self.read.items() if name != body["lora_name"]}
            return True
        if path == ControlCall.RELEASE_MEMORY.path:
            if not works or self.session:
                return False
            self.paused = True
            self._release(body["tags"])
            return True
        if path == ControlCall.RESUME_MEMORY.path:
            if not works or self.asleep or not set(body["tags"]) <= set(self.released):
                return False
            self.released = [tag for tag in self.released if tag not in body["tags"]]
            self.paused = self.paused and bool(self.released)
            return True
        raise AssertionError(path)
