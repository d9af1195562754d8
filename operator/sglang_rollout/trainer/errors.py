"""Exceptions of the trainer library. Every message says what went wrong, where, and what to do."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from http import HTTPStatus
from typing import TYPE_CHECKING, Any

from sglang_rollout.wire.reasons import end_sentence
from sglang_rollout.wire.record import UpdateReason

if TYPE_CHECKING:
    from sglang_rollout.trainer.generate import Sample

_TEMPORARY = frozenset({HTTPStatus.TOO_MANY_REQUESTS, HTTPStatus.BAD_GATEWAY, HTTPStatus.SERVICE_UNAVAILABLE, HTTPStatus.GATEWAY_TIMEOUT})
_PASSING_4XX = frozenset({HTTPStatus.REQUEST_TIMEOUT, HTTPStatus.TOO_EARLY, HTTPStatus.TOO_MANY_REQUESTS})
_RETRYABLE = frozenset({UpdateReason.ENGINE_FAILED, UpdateReason.ENGINE_LOST, UpdateReason.COORDINATOR_RESTARTED, UpdateReason.STORE_LOST})
NOTHING_SENT = "Nothing was sent, and the fleet is unchanged."


class FleetError(Exception):
    """Base of all exceptions that this package defines."""


class FleetUnreachable(FleetError):
    """The URL did not answer, or did not answer in time."""


class FleetUntrusted(FleetError):
    """The certificate of the URL was not accepted, so that no call was sent. A retry does not help."""


class FleetRefused(FleetError):
    """The fleet answered a call with an error."""

    def __init__(self, path: str, status: int, reason: str, fleet: dict[str, Any] | None = None, *, code: str | None = None) -> None:
        super().__init__(f"The fleet refused {path} with HTTP {status}: {reason}")
        self.path = path
        """Path of the call."""
        self.status = status
        """HTTP status."""
        self.reason = reason
        """The fleet's message."""
        self.code = code
        """The fleet's code of a call that it refused before anything was done: ``Forbidden``, ``InvalidRequest``. None: it has none."""
        self.fleet = fleet or {}
        """Results of each engine, and the values to use instead (``epoch``, ``world_size``, ``members``)."""


def is_temporary(error: FleetError) -> bool:
    """Return True if the same call may succeed a little later: the fleet did not answer, or it cannot take the call now."""
    return isinstance(error, FleetUnreachable) or (isinstance(error, FleetRefused) and error.status in _TEMPORARY)


def is_permanent(error: FleetError) -> bool:
    """Return True if the same call gets the same refusal later, too."""
    if not isinstance(error, FleetRefused):
        return False
    return error.status == HTTPStatus.NOT_IMPLEMENTED or (400 <= error.status < 500 and error.status not in _PASSING_4XX)


@dataclass(frozen=True, slots=True)
class FailedPrompt:
    """A prompt that got no sample, and why."""

    prompt_index: int
    """Position of the prompt in the list given to ``generate``."""
    reason: str
    """Why it got no sample."""
    code: str | None = None
    """Code of the refusal: ``above_limit``, ``would_end_the_engine``. None: the prompt was not refused, or its refusal has no code."""


class GenerateFailed(FleetError):
    """At least one prompt was refused, or got no sample before the deadline.

    The first failure cancels all prompts that have not finished.
    """

    def __init__(
        self,
        message: str,
        *,
        samples: Sequence[Sample] = (),
        failed: Sequence[FailedPrompt] = (),
        cancelled: Sequence[int] = (),
    ) -> None:
        super().__init__(message)
        self.samples = list(samples)
        """Samples of the prompts that had finished, in the order of the prompts."""
        self.failed = list(failed)
        """Prompts that failed, in order, with their reasons."""
        self.cancelled = list(cancelled)
        """Indices of the prompts that ran or waited at the first failure, in order. Nothing is wrong with these prompts."""

    @property
    def code(self) -> str | None:
        """Code of the first failed prompt; None if it has none."""
        return self.failed[0].code if self.failed else None


class GroupFailed(FleetError):
    """The process group for weight updates could not be opened. No engine keeps any part of the failed attempt."""

    def __init__(self, message: str, *, temporary: bool = False) -> None:
        super().__init__(message)
        self.temporary = temporary
        """True if the fleet says that a retry may help, because engines are starting or the coordinator was restarted."""


class PushFailed(FleetError):
    """A weight push did not become the committed version, or too few engines have loaded it.

    Engines that still hold the committed version continue to serve it. Engines that received a part of this push serve no
    requests until the next complete push. The remedy is nearly always to push again: the next push opens a new process
    group. ``advice`` has the exception: with transport Staged engines may fail after the commit, and then load the version later.
    """

    def __init__(self, *, phase: str, reason: str, engine: str | None = None, advice: str | None = None, code: str | None = None) -> None:
        where = f" on engine {engine}" if engine else ""
        advice = advice or "Push again: a push opens a new process group, and a complete push makes every fenced engine serve."
        super().__init__(f"The weight push failed in phase '{phase}'{where}: {end_sentence(reason)} {advice}")
        self.phase = phase
        """``group``, ``begin``, ``prepare``, ``transfer``, ``end`` or ``commit``."""
        self.engine = engine
        """Name of the engine that caused the failure, if the fleet named one."""
        self.reason = reason
        """Why the push failed."""
        self.advice = advice
        """What to do."""
        self.code = code
        """The fleet's code of the failure, a value of ``UpdateReason``; None if the fleet named none."""
        self.attempts: tuple[str, ...] = ()
        """Why the attempts before this one failed (``push(retries=…)``), oldest first."""

    @property
    def is_retryable(self) -> bool:
        """True if the version is not committed, and the same push may succeed: an engine, the coordinator or the store failed."""
        return self.code in _RETRYABLE


class SnapshotFailed(FleetError):
    """A snapshot could not be written. Earlier snapshots stay complete, and the push itself is not affected."""
