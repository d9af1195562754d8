"""What the coordinator knows of one engine. Facts only."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from sglang_rollout.api.intent import WantedEngine
from sglang_rollout.wire.agent import AgentStatus
from sglang_rollout.wire.record import EngineRow
from sglang_rollout.wire.weights import EngineState, Version

MISSES = 3
"""An agent that left so many syncs in a row unanswered counts as away."""

UNDER_WAY = "A weight update is under way."


@dataclass
class Engine:
    """One wanted engine and the newest that is known of it."""

    wanted: WantedEngine
    status: AgentStatus | None = None
    misses: int = MISSES
    """Syncs in a row without an answer."""
    heard: float = 0.0
    """When it answered last."""
    asked: float = 0.0
    """When it was asked for what it said last: a sync's answer may cross a call, and then tells of the time before."""
    known_at: dict[str, float] = field(default_factory=dict)
    """By the status' field: when a call was answered that has changed it."""
    told_at: float = 0.0
    """When it had last been told of an update; infinite while it is being told."""
    catching: bool = False
    """It loads the committed version from somewhere else than the trainer; until then it takes part in nothing."""
    tries: int = 0
    """How often it tried that in vain."""
    again_at: float = 0.0
    """When it may try again."""
    pause_at: float = 0.0
    """When it may next be paused as the spec says."""
    release_at: float = 0.0
    """When it may next be told to give back the memory that the trainer has."""
    adapters_at: dict[str, float] = field(default_factory=dict)
    """By the adapter's name: when it may be tried again, after it could not be loaded or unloaded."""
    adapter_trouble: dict[str, str] = field(default_factory=dict)
    """By the adapter's name: what it said when it could not."""
    overwritten: dict[str, str | None] = field(default_factory=dict)
    """By the adapter's name: the life in which it was away while the others loaded the name anew."""
    wrote: frozenset[str] = frozenset()
    """Tensors that it has loaded from a folder without vouching for a version since."""
    compared: str | None = None
    """The life in which its weights were compared after they had been released."""
    note: str = ""
    """How catching up goes, as a sentence."""

    @property
    def reachable(self) -> bool:
        """Whether its agent answers."""
        return self.status is not None and self.misses < MISSES

    @property
    def boot(self) -> str | None:
        """The life of the engine process that was last seen."""
        return self.status.boot_id if self.status is not None else None

    @property
    def tensor_size(self) -> int:
        """Tensor-parallel ranks: as wanted, else as the engine reports; 1 until an engine without a wanted size has answered."""
        reported = self.status.tensor_size if self.status is not None else None
        return self.wanted.tensor_size or reported or 1

    @property
    def up(self) -> bool:
        """Whether the engine process runs and can be called."""
        return self.reachable and self.boot is not None

    @property
    def member(self) -> bool:
        """Whether it takes part in a group opened now: an engine that is being drained ends soon."""
        return self.up and self.status is not None and not (self.status.draining or self.status.giving_up or self.catching)

    @property
    def released(self) -> bool:
        """Whether memory of it is released."""
        return self.status is not None and bool(self.status.released)

    @property
    def blank(self) -> bool:
        """Whether nobody knows what any of its tensors is: its weights were released, or its agent lost its memory."""
        return self.status is not None and (self.status.woken or self.status.state is EngineState.UNKNOWN)

    @property
    def paused(self) -> bool:
        """Whether it is paused: it says so, or has answered the call for it since."""
        return self.status is not None and self.status.paused

    @property
    def comparing(self) -> bool:
        """Whether its weights are back in memory and are still to be compared: it serves again by itself if they are the same."""
        seen = self.status
        return seen is not None and seen.woken and seen.state is EngineState.UNKNOWN and self.compared != self.boot

    @property
    def serving(self) -> bool:
        """Whether its gate is open."""
        return self.reachable and self.status is not None and self.status.gate_open

    def holds(self, version: Version) -> bool:
        """Whether it says that all of its tensors belong to this version."""
        seen = self.status
        return seen is not None and seen.state is EngineState.CLEAN and seen.version == version

    def changed(self, adapter: str, path: str | None, at: float) -> None:
        """An adapter has been loaded from a path, or unloaded."""
        if self.status is not None:
            others = {name: where for name, where in self.status.adapters.items() if name != adapter}
            self.know(at, adapters=others if path is None else {**others, adapter: path})

    def know(self, at: float, **fields: object) -> None:
        """Know already what its agent will say, because the engine has just answered a call."""
        if self.status is not None:
            self.status = self.status.model_copy(update=fields)
            self.known_at |= dict.fromkeys(fields, at)

    def take(self, status: AgentStatus, asked: float) -> None:
        """Believe what its agent says, but for what calls have changed since it was asked, in the same life of the engine."""
        if self.status is None or status.boot_id != self.boot:
            self.told_at, self.known_at = 0.0, {}  # this life of the engine was told nothing
        if not self.outdates(status, asked):
            changed = {name: getattr(self.status, name) for name, at in self.known_at.items() if asked < at}
            self.status = status.model_copy(update=changed) if changed else status

    def outdated(self, adapter: str) -> bool:
        """Whether it holds, under an adapter's name, what the others have replaced."""
        return self.boot is not None and self.overwritten.get(adapter) == self.boot

    def soil(self) -> None:
        """Know already what its agent will say when it has been told of an update: dirty, and serving nobody."""
        self.told_at = math.inf
        if self.status is not None:
            told = {"state": EngineState.DIRTY, "version": None, "gate_open": False, "reason": UNDER_WAY}
            self.status = self.status.model_copy(update=told)

    def outdates(self, status: AgentStatus, asked: float) -> bool:
        """Whether the agent said this before it heard of the update of which it has been told since, in the same life of its engine."""
        return asked < self.told_at and status.state is EngineState.CLEAN and status.boot_id == self.boot

    def why_down(self) -> str:
        """Sentence: why it cannot take part."""
        if self.status is None:
            return "its agent has not answered yet"
        if not self.reachable:
            return "its agent does not answer"
        return self.status.reason or "the engine is not up"

    def why_absent(self) -> str:
        """Sentence: why it is no member."""
        if not self.up:
            return self.why_down()
        if self.catching:
            return self.note
        if self.status is not None and self.status.giving_up:
            since = f"{self.status.giving_up:.0f} s ago"
            return f"it has not come out of an update that was given up {since}; if it is stuck, it will be restarted"
        return "it is being drained"

    def row(self, room: int | None = None) -> EngineRow:
        """The engine in the record and in the discovery document. ``room``: so many characters may its reason have."""
        name = self.wanted.name
        if not self.reachable or self.status is None:
            return EngineRow(
                name=name, state=EngineState.UNKNOWN, version=None, boot_id=self.boot, gate_open=False,
                reason=self.why_down()[:room],
            )  # fmt: skip
        seen = self.status
        reason, note = ("", "") if seen.gate_open else ((self.note or seen.reason)[:room], self.note[:room])
        return EngineRow(
            name=name, state=seen.state, version=seen.version, boot_id=seen.boot_id, gate_open=seen.gate_open,
            reason=reason, catch_up=note, released=seen.released, comparing=self.comparing, all_reduce=seen.all_reduce,
        )  # fmt: skip
