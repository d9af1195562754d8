"""Faults on demand: what shall go wrong, when, how often, and a record of what did. Pure but for the clock of the record."""

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
    """The moments at which a fault can hit: SGLang's calls, and for an update the time after its tensors have arrived."""

    PAUSE = "pause"
    INIT = "init"
    DESTROY = "destroy"
    BEGIN = "begin"
    UPDATE = "update"
    """Before the tensors are received."""
    RECEIVED = "received"
    """After the tensors have been received and before they are written."""
    END = "end"
    CONTINUE = "continue"
    FLUSH = "flush"
    VERSION = "version"
    DISK = "disk"
    CHECK = "check"
    GENERATE = "generate"
    HEALTH = "health"


class Kind(StrEnum):
    """What goes wrong."""

    DIE = "die"
    """The engine is gone at once, as by SIGKILL; a process that hosts only this engine kills itself."""
    HANG = "hang"
    """The call never returns, and holds for ever what it holds in SGLang: the scheduler, or for pause and continue the lock for which new
    requests and updates wait. /model_info, /v1/models and /ping answer."""
    SLOW = "slow"
    """The call takes ``seconds`` longer, and holds the same meanwhile."""
    DROP = "drop"
    """The tensors of a call are received and not written; the answer says success."""
    CORRUPT = "corrupt"
    """One bit of the first tensor of a call is wrong; the answer says success."""
    WRONG_VERSION = "wrong_version"
    """The engine reports ``value`` (default: the right one and ``-wrong``) as its version."""
    OOM = "oom"
    """The answer that SGLang gives when memory runs out. In phase update nothing is received; in received, part is written."""
    UNAVAILABLE = "unavailable"
    """503, and nothing is done."""
    NCCL = "nccl"
    """A group of this call behaves as NCCL does: see ``groups``."""


_ONLY = {
    Kind.DROP: {Phase.RECEIVED},
    Kind.CORRUPT: {Phase.RECEIVED, Phase.DISK},
    Kind.WRONG_VERSION: {Phase.RECEIVED, Phase.VERSION, Phase.DISK},
    Kind.OOM: {Phase.UPDATE, Phase.RECEIVED},
    Kind.NCCL: {Phase.INIT},
}
"""Kinds that make sense in some phases only."""


class Fault(BaseModel):
    """One fault. It is also the JSON that ``/stand_in/faults`` takes."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    kind: Kind
    phase: Phase
    times: int | None = Field(default=1, ge=1)
    """How often it hits; None: until it is removed."""
    seconds: float = Field(default=1.0, ge=0)
    """How long ``slow`` takes."""
    value: str | None = None
    """What ``wrong_version`` reports."""

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
    """A fault that landed."""

    kind: str
    phase: str
    at: float
    """Seconds since 1970."""
    boot_id: str
    """The life that it hit."""
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
    """The faults of one engine. They outlive the engine's lives; any thread may use them."""

    on_hit: Callable[[Hit], None] | None = None
    fired: list[Hit] = field(default_factory=list)
    """What has been hit, oldest first."""
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
        """Arm a fault; returns its number. Raises ValueError for a combination that makes no sense."""
        return self.arm(Fault(kind=Kind(kind), phase=Phase(phase), times=times, seconds=seconds, value=value))

    def arm(self, fault: Fault) -> int:
        """Arm a fault that has been made already; returns its number."""
        with self._lock:
            self._count += 1
            self._armed.append(_Armed(self._count, fault, fault.times))
            return self._count

    def remove(self, number: int) -> bool:
        """Disarm one fault; whether it was still armed."""
        with self._lock:
            before = len(self._armed)
            self._armed = [armed for armed in self._armed if armed.number != number]
            return len(self._armed) < before

    def clear(self) -> None:
        """Disarm all faults; what has been hit stays on record."""
        with self._lock:
            self._armed.clear()

    def take(self, phase: Phase, *, boot_id: str, port: int) -> list[Fault]:
        """The faults that hit now, in the order in which they were armed; each is recorded before anything happens."""
        taken = []
        for armed in self._due(phase):
            hit = Hit(armed.fault.kind, phase, time.time(), boot_id, port, armed.number)
            self.fired.append(hit)
            if self.on_hit:
                self.on_hit(hit)
            taken.append(armed.fault)
        return taken

    def describe(self) -> dict[str, Any]:
        """What ``GET /stand_in/faults`` says."""
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


def into_file(path: Path) -> Callable[[Hit], None]:
    """Write each hit as a line of JSON: the record of a process that dies of a fault outlives it."""

    def write(hit: Hit) -> None:
        with path.open("a") as file:
            file.write(json.dumps(asdict(hit)) + "\n")

    return write
