"""Faults on demand: what fails, in which phase, how often, and a record of the hits. Pure except for the clock of the record."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, model_validator


class Phase(StrEnum):
    """When a fault can hit: at one of SGLang's calls, or in an update after its tensors have arrived."""

    PAUSE = "pause"
    INIT = "init"
    DESTROY = "destroy"
    BEGIN = "begin"
    UPDATE = "update"
    """Before the tensors are received."""
    RECEIVED = "received"
    """After the tensors have been received and before they are written."""
    LOAD = "load"
    """In the loader of a staged version, before its first write."""
    WRITE = "write"
    """In that loader, when half of the tensors are written."""
    END = "end"
    CONTINUE = "continue"
    FLUSH = "flush"
    VERSION = "version"
    DISK = "disk"
    CHECK = "check"
    GENERATE = "generate"
    HEALTH = "health"


class Kind(StrEnum):
    """What a fault does."""

    DIE = "die"
    """The engine ends at once, as with SIGKILL. A process that hosts only this engine kills itself."""
    HANG = "hang"
    """The call never returns and keeps its lock, as in SGLang: the scheduler, or for pause and continue the lock that new requests and
    updates need. /model_info, /v1/models and /ping answer."""
    SLOW = "slow"
    """The call takes ``seconds`` longer and keeps the same lock meanwhile."""
    DROP = "drop"
    """The tensors of a call are received and not written; the answer says success. In phase load, no rank writes a verdict."""
    CORRUPT = "corrupt"
    """One bit of the first tensor of a call is wrong; the answer says success."""
    WRONG_VERSION = "wrong_version"
    """The engine reports ``value`` (default: the right one and ``-wrong``) as its version."""
    OOM = "oom"
    """The answer that SGLang gives when memory runs out. In phase update nothing is received; in received and write, part is written."""
    REFUSE = "refuse"
    """The loader of a staged version refuses on every rank, or on the rank ``value``; the answer says success."""
    RAISE = "raise"
    """The loader of a staged version raises after its first write, which ends the engine."""
    UNAVAILABLE = "unavailable"
    """503, and nothing is done."""
    NCCL = "nccl"
    """A process group of this call behaves as NCCL does: see ``process_groups``."""


_ONLY = {
    Kind.DROP: {Phase.RECEIVED, Phase.LOAD},
    Kind.CORRUPT: {Phase.RECEIVED, Phase.DISK, Phase.WRITE},
    Kind.WRONG_VERSION: {Phase.RECEIVED, Phase.VERSION, Phase.DISK, Phase.LOAD},
    Kind.OOM: {Phase.UPDATE, Phase.RECEIVED, Phase.WRITE},
    Kind.REFUSE: {Phase.LOAD},
    Kind.RAISE: {Phase.WRITE},
    Kind.NCCL: {Phase.INIT},
}
"""Kinds that are allowed in some phases only."""


class Fault(BaseModel):
    """One fault. It is also the JSON that ``/stand_in/faults`` takes."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    kind: Kind
    phase: Phase
    times: int | None = Field(default=1, ge=1)
    """Number of hits; None: until the fault is removed."""
    seconds: float = Field(default=1.0, ge=0)
    """Duration of ``slow``."""
    value: str | None = None
    """Version that ``wrong_version`` reports, or rank that ``refuse`` affects."""

    @model_validator(mode="after")
    def _fits(self) -> Fault:
        allowed = _ONLY.get(self.kind)
        if allowed and self.phase not in allowed:
            raise ValueError(f"{self.kind} cannot happen in phase {self.phase}; it can in: {', '.join(sorted(allowed))}.")
        return self

    @classmethod
    def parse(cls, text: str) -> Fault:
        """``KIND:PHASE[:TIMES]`` of a command line; TIMES ``always`` means until removed. Raises ValueError."""
        parts = text.split(":")
        if not 2 <= len(parts) <= 3:
            raise ValueError(f"{text!r} is no fault; it should look like die:init or slow:update:3.")
        fields: dict[str, Any] = {"kind": parts[0], "phase": parts[1]}
        if len(parts) == 3:
            fields["times"] = None if parts[2] == "always" else parts[2]
        return cls(**fields)


@dataclass(frozen=True, slots=True)
class Hit:
    """A fault that hit."""

    kind: str
    phase: str
    at: float
    """Seconds since 1970."""
    boot_id: str
    """Boot ID of the engine at that time."""
    port: int
    fault: int
    """Number of the fault, as ``add`` returned it."""


@dataclass
class _Armed:
    number: int
    fault: Fault
    left: int | None


@dataclass
class Faults:
    """Faults of one engine, kept over its restarts. Any thread may use them."""

    on_hit: Callable[[Hit], None] | None = None
    fired: list[Hit] = field(default_factory=list)
    """Hits, oldest first."""
    _armed: list[_Armed] = field(default_factory=list)
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _count: int = 0

    def add(
        self,
        kind: Kind | str,
        phase: Phase | str,
        *,
        times: int | None = 1,
        seconds: float = 1.0,
        value: str | None = None,
    ) -> int:
        """Arm a fault and return its number. Raises ValueError if the phase does not allow the kind."""
        return self.arm(Fault(kind=Kind(kind), phase=Phase(phase), times=times, seconds=seconds, value=value))

    def arm(self, fault: Fault) -> int:
        """Arm a fault object and return its number."""
        with self._lock:
            self._count += 1
            self._armed.append(_Armed(self._count, fault, fault.times))
            return self._count

    def remove(self, number: int) -> bool:
        """Disarm one fault and return whether it was armed."""
        with self._lock:
            before = len(self._armed)
            self._armed = [armed for armed in self._armed if armed.number != number]
            return len(self._armed) < before

    def clear(self) -> None:
        """Disarm all faults. The record of hits stays."""
        with self._lock:
            self._armed.clear()

    def take(self, phase: Phase, *, boot_id: str, port: int) -> list[Fault]:
        """Return the faults that hit now, in the order in which they were armed. Each is recorded before it takes effect."""
        taken = []
        for armed in self._due(phase):
            hit = Hit(armed.fault.kind, phase, time.time(), boot_id, port, armed.number)
            self.fired.append(hit)
            if self.on_hit:
                self.on_hit(hit)
            taken.append(armed.fault)
        return taken

    def describe(self) -> dict[str, Any]:
        """Return the reply of ``GET /stand_in/faults``."""
        with self._lock:
            armed = [{"number": a.number, "left": a.left, **a.fault.model_dump(mode="json")} for a in self._armed]
        return {"armed": armed, "fired": [asdict(hit) for hit in self.fired]}

    def _due(self, phase: Phase) -> Iterator[_Armed]:
        with self._lock:
            due = [armed for armed in self._armed if armed.fault.phase == phase]
            for armed in due:
                if armed.left is not None:
                    armed.left -= 1
            self._armed = [armed for armed in self._armed if armed.left is None or armed.left > 0]
        yield from due


def append_to_file(path: Path) -> Callable[[Hit], None]:
    """Return a callback that appends each hit to a file as a line of JSON, so that the record survives the process."""

    def write(hit: Hit) -> None:
        with path.open("a") as file:
            file.write(json.dumps(asdict(hit)) + "\n")

    return write
