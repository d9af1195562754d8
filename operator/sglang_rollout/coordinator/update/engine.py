"""What the coordinator knows about one engine. Data only, no I/O."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from sglang_rollout.api.intent import WantedEngine
from sglang_rollout.wire.agent import AgentStatus
from sglang_rollout.wire.reasons import GateReason
from sglang_rollout.wire.record import EngineRow
from sglang_rollout.wire.states import EngineState, Version

MAX_MISSES = 3
"""An agent that left this many syncs in a row unanswered counts as away."""

FIRST_RETRY_SECONDS = 10.0
LONGEST_RETRY_SECONDS = 600.0
"""An engine that could not catch up tries again after 10 s, 20 s, … 10 min: the snapshot may be written by then."""

UPDATE_IN_PROGRESS = "A weight update is in progress."


def retry_pause(tries: int) -> float:
    """Return the seconds until the next attempt to catch up, after ``tries`` attempts before the failed one."""
    return min(FIRST_RETRY_SECONDS * 2.0 ** min(tries, 10), LONGEST_RETRY_SECONDS)


@dataclass
class Engine:
    """One wanted engine, and the newest facts about it."""

    wanted: WantedEngine
    status: AgentStatus | None = None
    misses: int = MAX_MISSES
    """Syncs in a row without an answer."""
    status_seq: int = 0
    """Sequence number of the newest status: of the sync that it answers. :meth:`take` compares it."""
    changed_seq: float = 0
    """Sequence number that was drawn when a call of the coordinator had changed the engine; infinite while a call that may modify its
    weights is under way. The answer to an earlier sync may describe the state before that call."""
    heard: float = 0.0
    """When its agent answered last."""
    is_catching_up: bool = False
    """True while it loads the committed version outside an update. It takes part in nothing else meanwhile."""
    tries: int = 0
    """Failed attempts to catch up."""
    retry_at: float = 0.0
    """When it may try to catch up again."""
    pause_at: float = 0.0
    """When it may next be paused for ``spec.state``."""
    release_at: float = 0.0
    """When it may next be asked to release the memory that a co-located trainer has."""
    adapters_at: dict[str, float] = field(default_factory=dict)
    """By adapter: when a failed load or unload may be tried again."""
    adapter_trouble: dict[str, str] = field(default_factory=dict)
    """By adapter: the engine's message after a failed load or unload."""
    overwritten: dict[str, str | None] = field(default_factory=dict)
    """By adapter: the boot ID in which the engine was away while the other engines loaded new contents under the name."""
    failed_version: Version | None = None
    """The version at whose load, from a staged copy, it failed last after its first write."""
    is_copying: bool = False
    """True while its pod copies the committed version outside an update, and nothing waits for that: the engine boots, for example."""
    compared: str | None = None
    """The boot ID in which its weights were compared after they had been released."""
    note: str = ""
    """Progress of catching up, as a sentence."""

    @property
    def reachable(self) -> bool:
        """True if its agent answers."""
        return self.status is not None and self.misses < MAX_MISSES

    @property
    def boot(self) -> str | None:
        """The boot ID of the engine process that was last seen."""
        return self.status.boot_id if self.status is not None else None

    @property
    def tensor_size(self) -> int:
        """Tensor-parallel ranks: as wanted, else as the engine reports; 1 until an engine without a wanted size has answered."""
        reported = self.status.tensor_size if self.status is not None else None
        return self.wanted.tensor_size or reported or 1

    @property
    def up(self) -> bool:
        """True if the engine process runs and can be called."""
        return self.reachable and self.boot is not None

    @property
    def member(self) -> bool:
        """True if it takes part in a process group opened now. A draining engine does not."""
        return self.up and self.status is not None and not (self.status.draining or self.status.giving_up or self.is_catching_up)

    @property
    def takes_copies(self) -> bool:
        """True if its pod can hold copies of versions (transport Staged)."""
        return self.status is not None and self.status.takes_copies

    @property
    def released(self) -> list[str]:
        """Its memory tags that are released."""
        return self.status.released if self.status is not None else []

    @property
    def adapters(self) -> dict[str, str]:
        """Path of each loaded adapter by name."""
        return self.status.adapters if self.status is not None else {}

    @property
    def blank(self) -> bool:
        """True if none of its tensors is known: its weights were released, or its agent lost its record."""
        return self.status is not None and (self.status.woken or self.status.state is EngineState.UNKNOWN)

    @property
    def restarts(self) -> bool:
        """True if its agent can have it restarted."""
        return self.status is not None and self.status.restarts_engine

    @property
    def updates_refused(self) -> str:
        """Why SGLang refuses updates of the weights in it, in SGLang's own sentences; empty if nothing is known."""
        return self.status.updates_refused if self.status is not None else ""

    @property
    def sampling_params(self) -> list[str]:
        """Names of the sampling parameters that a request to it may set; empty if they are not known."""
        return self.status.sampling_params if self.status is not None else []

    @property
    def paused(self) -> bool:
        """True if it is paused: its agent reports it, or it has answered the call."""
        return self.status is not None and self.status.paused

    @property
    def is_comparing(self) -> bool:
        """True if its weights are back in memory and are still to be compared. If they are unchanged, it serves again."""
        seen = self.status
        return seen is not None and seen.woken and seen.state is EngineState.UNKNOWN and self.compared != self.boot

    @property
    def serving(self) -> bool:
        """True if its gate is open."""
        return self.reachable and self.status is not None and self.status.gate_open

    def holds(self, version: Version) -> bool:
        """Return True if its agent reports that all of its tensors belong to this version."""
        seen = self.status
        return seen is not None and seen.state is EngineState.CLEAN and seen.version == version

    def retry_later(self, now: float) -> float:
        """Note a failed attempt to catch up. Returns the seconds until the next one."""
        pause = retry_pause(self.tries)
        self.tries, self.retry_at = self.tries + 1, now + pause
        return pause

    def note_adapter(self, adapter: str, path: str | None, seq: int) -> None:
        """Note that an adapter was loaded from a path, or unloaded."""
        others = {name: where for name, where in self.adapters.items() if name != adapter}
        self.anticipate(seq, adapters=others if path is None else {**others, adapter: path})

    def anticipate(self, seq: int, **fields: object) -> None:
        """Set fields of the status before the agent confirms them, because the engine has just answered a call."""
        if self.status is not None:
            self.status = self.status.model_copy(update=fields)
            self.changed_seq = max(self.changed_seq, seq)

    def take(self, status: AgentStatus, seq: int) -> None:
        """Accept the status of its agent, unless it describes an earlier state.

        Args:
            status: The status.
            seq: Sequence number of the sync that returned it. For the status in the answer to another call: a number drawn after that.
        """
        if seq < self.status_seq:
            return
        if status.boot_id != self.boot:
            self.changed_seq = 0  # no call has reached this boot
        if seq >= self.changed_seq:
            self.status, self.status_seq = status, seq

    def has_outdated_adapter(self, adapter: str) -> bool:
        """Return True if the other engines have replaced the contents of an adapter that this engine holds."""
        return self.boot is not None and self.overwritten.get(adapter) == self.boot

    def mark_dirty(self) -> None:
        """Mark the engine dirty and its gate closed before the agent confirms it."""
        self.changed_seq = math.inf
        if self.status is not None:
            closed = {"gate_open": False, "reason": GateReason.UPDATE_IN_PROGRESS, "message": UPDATE_IN_PROGRESS}
            dirty = {"state": EngineState.DIRTY, "version": None, **closed}
            self.status = self.status.model_copy(update=dirty)

    def why_down(self) -> str:
        """Return why it cannot take part, as a sentence."""
        if self.status is None:
            return "its agent has not answered yet"
        if not self.reachable:
            return "its agent does not answer"
        return self.status.message or "the engine is not up"

    def why_absent(self) -> str:
        """Return why it is no member, as a sentence."""
        if not self.up:
            return self.why_down()
        if self.is_catching_up:
            return self.note
        if self.status is not None and self.status.giving_up:
            since = f"{self.status.giving_up:.0f} s ago"
            return f"it has not left an update that was given up {since}; if it is stuck, it will be restarted"
        if self.status is not None and self.status.draining:
            return "it is being drained"
        return "its pod was made for another transport, and takes staged versions after its restart"

    def row(self, room: int | None = None) -> EngineRow:
        """Return its row in the record and in the discovery document.

        Args:
            room: Characters for its reason; None: all.
        """
        name = self.wanted.name
        if not self.reachable or self.status is None:
            return EngineRow(
                name=name, state=EngineState.UNKNOWN, version=None, boot_id=self.boot, gate_open=False,
                reason=GateReason.AGENT_UNREACHABLE, message=self.why_down()[:room],
            )  # fmt: skip
        seen = self.status
        reason, message = (GateReason.CATCHING_UP, self.note) if self.note else (seen.reason, seen.message)
        if seen.gate_open:
            reason, message = None, ""
        return EngineRow(
            name=name, state=seen.state, version=seen.version, boot_id=seen.boot_id, gate_open=seen.gate_open,
            reason=reason, message=message[:room], released=seen.released, comparing=self.is_comparing,
        )  # fmt: skip
