"""What the matrix needs of the fleet that it does harm to."""

from __future__ import annotations

from typing import Any, Protocol

from e2e.chaos.talk import Trainer


class Ground(Protocol):
    """What faults are done to."""

    trainer: Trainer | None
    number: int
    """So many engines the fleet has."""
    start_seconds: float
    """How much longer than a stand-in an engine takes at most to start anew."""

    @property
    def url(self) -> str:
        """The fleet's one URL."""

    def new_trainer(self) -> Trainer:
        """End the trainer there is and start another."""

    def document(self) -> dict[str, Any]:
        """``GET /fleet``; empty while nobody answers."""

    def phases(self) -> list[tuple[float, str]]:
        """Return the phases that the coordinator's log names, oldest first, each with the Unix time at which it began."""

    def slow(self, phase: str, seconds: float, engines: list[int]) -> None:
        """Let one call of a phase take longer on some engines."""

    def calm(self) -> None:
        """Disarm what did not land."""

    def paused(self) -> list[int]:
        """Engines that say they are paused or in a session."""

    def rest(self) -> None:
        """Return when what the cell before has set going has come to its end."""

    def is_told(self) -> bool:
        """Whether what is published is the case: the status what the fleet says, or the fleet what its gates do."""

    def until(self, what: str, check: Any, within: float) -> float:
        """Wait for something; returns the seconds it took. Raises AssertionError with what is the case instead."""
