"""What can go wrong between a trainer and its fleet. Every message is a sentence: what, where, what to do."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sglang_rollout.trainer.generate import Sample

NOTHING_SENT = "Nothing was sent, and the fleet is unchanged."


class FleetError(Exception):
    """Base of everything this package raises on purpose."""


class FleetUnreachable(FleetError):
    """Nothing answered at the URL, or not in time."""


class FleetRefused(FleetError):
    """The fleet answered, and the answer was no."""

    def __init__(self, path: str, status: int, reason: str, fleet: dict[str, Any] | None = None) -> None:
        super().__init__(f"The fleet refused {path} with HTTP {status}: {reason}")
        self.path = path
        self.status = status
        self.reason = reason
        self.fleet = fleet or {}
        """Per-engine results, and what would be right (``epoch``, ``world_size``, ``members``)."""


@dataclass(frozen=True, slots=True)
class FailedPrompt:
    """A prompt that got no sample, and why."""

    prompt_index: int
    reason: str


class GenerateFailed(FleetError):
    """At least one prompt was refused, or got no sample before the deadline. The first failure cancels what has not finished."""

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
        """Indices of prompts that ran or waited when the first failure came, in order. Nothing is wrong with them."""


class GroupFailed(FleetError):
    """The weight-update group could not be opened. No engine holds anything of this attempt."""

    def __init__(self, message: str, *, temporary: bool = False) -> None:
        super().__init__(message)
        self.temporary = temporary
        """The fleet itself says that trying again may help: engines are starting, or the coordinator was restarted."""


class PushFailed(FleetError):
    """A weight push did not become the fleet's committed version.

    The fleet goes on serving its old version from every engine that still holds it; engines that saw a part of this
    push serve nobody until the next complete one. So the remedy is nearly always: push again. The group is re-opened by
    then.
    """

    def __init__(self, *, phase: str, reason: str, engine: str | None = None, advice: str | None = None) -> None:
        where = f" on engine {engine}" if engine else ""
        advice = advice or "Push again: the group is opened anew, and a complete push makes every fenced engine serve."
        super().__init__(f"The weight push failed in phase '{phase}'{where}: {_ended(reason)} {advice}")
        self.phase = phase
        """``begin``, ``prepare``, ``transfer``, ``end`` or ``commit``."""
        self.engine = engine
        """Name of the engine that the fleet blamed, if it blamed one."""
        self.reason = reason
        self.advice = advice


class SnapshotFailed(FleetError):
    """A snapshot could not be written. The directory holds the ones before, complete, and the push it was made from is not touched."""


def _ended(sentence: str) -> str:
    return sentence if sentence.endswith((".", "!", "?")) else f"{sentence}."
