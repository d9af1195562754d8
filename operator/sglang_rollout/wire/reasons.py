"""Why something is refused: a code that programs compare, and a message that people read.

Every process reports a :class:`GateReason` or a :class:`RefusalCode` beside its message. No process compares another process's messages.
"""

from __future__ import annotations

import reprlib
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Self

MAX_PHRASE_CHARACTERS = 200
"""Longest reason phrase in a status line."""
DATA_PATHS_ONLY = "data_paths_only"
"""Code of a refusal at the URL that serves data paths only."""
MAX_QUOTED_CHARACTERS = 120
"""Characters of a value that a message quotes."""


_MAX_QUOTED_BITS = 1000


class _Start(reprlib.Repr):
    """Writes as much of a value as a message can quote. All items and digits of a hostile value would take seconds."""

    def __init__(self) -> None:
        super().__init__()
        self.maxlevel = 20
        self.maxlist = self.maxtuple = self.maxdict = self.maxset = self.maxfrozenset = MAX_QUOTED_CHARACTERS
        self.maxstring = self.maxother = 2**30

    def repr_int(self, x: int, level: int) -> str:
        """Return the number, unless it has hundreds of digits; Python refuses to write thousands."""
        return repr(x) if x.bit_length() <= _MAX_QUOTED_BITS else f"(a number of {x.bit_length()} bits)"


_START = _Start()


class GateReason(StrEnum):
    """Why the gate of an engine is closed."""

    NOT_UP = "NotUp"
    """The engine process does not answer, or has not warmed up."""
    RESTART_BUDGET_EXHAUSTED = "RestartBudgetExhausted"
    """An engine of several pods failed to start too often in a row, so its pods do not start it again."""
    GROUP_RESTART = "GroupRestart"
    """An engine of several pods waits until all of its pods can start SGLang together."""
    AGENT_UNREACHABLE = "AgentUnreachable"
    """The coordinator gets no answer from the agent."""
    PLUGIN_MISSING = "PluginMissing"
    """The plug-in has not proved that it is active inside SGLang, and the fleet requires it."""
    RELEASED = "Released"
    """Memory of the engine is released."""
    RELEASE_FAILED = "ReleaseFailed"
    """The spec asks the engine to release its memory, and the release was refused or failed."""
    UPDATE_IN_PROGRESS = "UpdateInProgress"
    """A weight update has begun on the engine and has neither been acknowledged nor failed."""
    DIRTY = "Dirty"
    """The engine holds a mixture of weights after a failed update."""
    UNVERIFIED = "Unverified"
    """The engine's weights were released. Since then no comparison or update has shown which version the engine holds."""
    UNKNOWN = "Unknown"
    """The version of the engine's weights is not known."""
    DRAINING = "Draining"
    """The engine is about to stop."""
    NO_COMMITTED_VERSION = "NoCommittedVersion"
    """No coordinator has said yet which version is committed."""
    NOT_COMMITTED = "NotCommitted"
    """The engine holds a version that is neither committed nor tolerated."""
    PAUSED = "Paused"
    """``spec.state`` is Paused."""
    ASLEEP = "Asleep"
    """``spec.state`` is Asleep."""
    GATE_NOT_READY = "GateNotReady"
    """The gate may be open, but haproxy has not opened it yet or does not answer its agent."""
    CATCHING_UP = "CatchingUp"
    """The engine loads the committed version from disk, or waits before the next attempt."""
    OTHER = "Other"
    """A code of another release that this release does not know."""

    @classmethod
    def _missing_(cls, value: object) -> Self:
        return cls("Other")

    @property
    def status(self) -> int:
        """HTTP status of an answer that carries this code."""
        return 503


class RefusalCode(StrEnum):
    """Why a call is refused."""

    INVALID_REQUEST = "InvalidRequest"
    """The call can never succeed as it was sent."""
    UNAUTHENTICATED = "Unauthenticated"
    FORBIDDEN = "Forbidden"
    NOT_FOUND = "NotFound"
    CONFLICT = "Conflict"
    """The engine or the fleet is in a state that forbids the call."""
    BASE_MISSING = "BaseMissing"
    """A delta upload names a base that is not the committed version, or that the weight store lacks: upload all pieces whole."""
    RESTART_NEEDED = "RestartNeeded"
    """The engine holds tensors that the version does not have. It has to restart before it can load the version."""
    UPDATES_REFUSED = "UpdatesRefused"
    """SGLang refuses every update of the weights in an engine, because of how the engine was started."""
    MISDIRECTED = "Misdirected"
    """Another pod answers this call."""
    INTERNAL_ERROR = "InternalError"
    NOT_OFFERED = "NotOffered"
    """A call of SGLang that a fleet does not offer."""
    UPSTREAM_FAILED = "UpstreamFailed"
    """An engine, an agent or the router did not answer."""
    UNAVAILABLE = "Unavailable"
    """The call may succeed later."""
    WORLD_SIZE_MISMATCH = "WorldSizeMismatch"
    """``world_size`` or ``rank_offset`` of a process group is not the fleet's."""
    MASTER_UNREACHABLE = "MasterUnreachable"
    """No store of the trainer's rank 0 answers at ``master_address`` and ``master_port``, or it has closed."""
    BACKEND_UNAVAILABLE = "BackendUnavailable"
    """The backend of a process group needs torch or a GPU, which the weight store does not have."""
    RANK_ZERO_ABSENT = "RankZeroAbsent"
    """The trainer's rank 0 did not open the process group with the values of the call: world size, name and backend."""
    RANKS_NOT_CONNECTED = "RanksNotConnected"
    """The ranks of a process group reach the trainer's store, and do not reach each other."""

    @classmethod
    def from_status(cls, status: int) -> RefusalCode:
        """Return the code that answers with this HTTP status; ``InvalidRequest`` for any other."""
        return next((code for code, number in _STATUS.items() if number == status), cls.INVALID_REQUEST)

    @property
    def status(self) -> int:
        """HTTP status of an answer that carries this code."""
        return _STATUS[self]


_STATUS = {
    RefusalCode.INVALID_REQUEST: 400,
    RefusalCode.UNAUTHENTICATED: 401,
    RefusalCode.FORBIDDEN: 403,
    RefusalCode.NOT_FOUND: 404,
    RefusalCode.CONFLICT: 409,
    RefusalCode.BASE_MISSING: 409,
    RefusalCode.RESTART_NEEDED: 409,
    RefusalCode.UPDATES_REFUSED: 409,
    RefusalCode.MISDIRECTED: 421,
    RefusalCode.INTERNAL_ERROR: 500,
    RefusalCode.NOT_OFFERED: 501,
    RefusalCode.UPSTREAM_FAILED: 502,
    RefusalCode.UNAVAILABLE: 503,
    RefusalCode.WORLD_SIZE_MISMATCH: 400,
    RefusalCode.MASTER_UNREACHABLE: 400,
    RefusalCode.BACKEND_UNAVAILABLE: 400,
    RefusalCode.RANK_ZERO_ABSENT: 400,
    RefusalCode.RANKS_NOT_CONNECTED: 400,
}


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why a call or a change is not allowed now. Functions return ``Refusal | None``; None: it is allowed."""

    code: RefusalCode | GateReason  # in this order: any text is a GateReason, if only Other
    message: str
    """A sentence."""

    @property
    def status(self) -> int:
        """HTTP status of an answer that carries the refusal."""
        return self.code.status


class RefusedError(Exception):
    """A request is refused before anything was done. ``str()`` is the message.

    Args:
        refusal: Code and message. A message alone gets the code that belongs to ``status``.
        status: HTTP status of the answer, if not the status of the code (400 for a message alone).
        fleet: Details for the trainer beside SGLang's fields: ``epoch``, ``world_size``, ``members``.
        headers: Headers of the answer.
    """

    def __init__(
        self,
        refusal: Refusal | str,
        *,
        status: int | None = None,
        fleet: Mapping[str, Any] | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        if isinstance(refusal, str):
            refusal = Refusal(RefusalCode.from_status(status or 400), refusal)
        super().__init__(refusal.message)
        self.refusal = refusal
        self.status = status or refusal.status
        self.fleet = dict(fleet or {})
        self.headers = dict(headers or {})


def end_sentence(text: str) -> str:
    """Return ``text`` with a full stop at its end, unless it ends with punctuation already, as a quoted log line may."""
    stripped = text.rstrip()
    return stripped if stripped.endswith((".", "!", "?")) else f"{stripped}."


def begin_sentence(text: str) -> str:
    """Return ``text`` with a capital letter, unless it begins with a name such as ``demo-engine-0`` or ``spec.replicas``."""
    first = text.partition(" ")[0]
    return text[:1].upper() + text[1:] if first.isalpha() else text


def reason_phrase(message: str) -> str:
    """Return a message as one short line of Latin-1 for the status line, which clients print while they drop the body."""
    line = " ".join(message.split()).encode("latin-1", "replace").decode("latin-1")
    line = "".join(character if character.isprintable() else "?" for character in line)
    return line if len(line) <= MAX_PHRASE_CHARACTERS else f"{line[: MAX_PHRASE_CHARACTERS - 3]}..."


def quote_value(value: object) -> str:
    """Return a value as Python writes it, shortened for a message."""
    text = _START.repr(value)
    return text if len(text) <= MAX_QUOTED_CHARACTERS else f"{text[:MAX_QUOTED_CHARACTERS]}…"
