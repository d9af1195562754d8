"""The interface between the fault matrix and a fleet."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from e2e.chaos.trainer_process import Trainer


class FaultTarget(Protocol):
    """A fleet that faults are injected into."""

    trainer: Trainer | None
    number: int
    """Number of engines."""
    trainer_host: str
    """Address of trainers, as engines see it."""
    start_seconds: float
    """Maximum extra time that an engine needs to restart, compared with a stand-in."""

    @property
    def headers(self) -> Mapping[str, str]:
        """Headers of control calls: a token, if the fleet asks for one."""

    @property
    def url(self) -> str:
        """The fleet's URL."""

    def new_trainer(self) -> Trainer:
        """End the current trainer and start another."""

    def document(self) -> dict[str, Any]:
        """Return ``GET /fleet``; empty while the coordinator does not answer."""

    def phases(self) -> list[tuple[float, str]]:
        """Return the phases that the coordinator's log names, oldest first, each with the Unix time at which it began."""

    def slow(self, phase: str, seconds: float, engines: list[int]) -> None:
        """Slow down one call of a phase on some engines."""

    def calm(self) -> None:
        """Disarm the faults that did not hit."""

    def paused(self) -> list[int]:
        """Return the engines that report a pause or an open session."""

    def rest(self) -> None:
        """Wait until the effects of the previous cell have ended."""

    def is_status_current(self) -> bool:
        """Return whether the published state is true: the CR status matches the fleet, or the fleet matches its gates."""

    def until(self, what: str, check: Any, within: float) -> float:
        """Wait for a condition and return the seconds it took. Raises AssertionError with the actual state."""
