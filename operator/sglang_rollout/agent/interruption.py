"""What interrupts an engine: the cause of its pause, and the memory that is released. Pure.

The side that began an interruption ends it:

    cause     begins with                                        ends with
    CALL      pause_generation                                   continue_generation
    RELEASE   a release of memory; the agent pauses the engine   the restore of all memory; the agent resumes the engine
    SPEC      spec.state Asleep; the agent releases all memory   another spec.state; the agent restores the memory

The coordinator sends ``spec.state`` with each sync, and :func:`next_call` leads the engine to this state.
"""

from __future__ import annotations

from collections.abc import Iterable
from enum import StrEnum

from pydantic import Field

from sglang_rollout.sglang.api import MEMORY_TAGS, ControlCall
from sglang_rollout.wire import Message
from sglang_rollout.wire.states import FleetState


class Cause(StrEnum):
    """Why an engine is paused."""

    CALL = "call"
    RELEASE = "release"
    SPEC = "spec"


class Interruption(Message):
    """Pause and released memory of one engine. The agent records it before the engine receives the call that causes it."""

    cause: Cause | None = None
    """None: the engine is not paused."""
    mode: str | None = None
    """Mode of the pause call. None: the agent pauses the engine, with mode *abort*, before memory is released."""
    released: list[str] = Field(default_factory=list)
    """Memory tags that are released."""

    @property
    def is_pause(self) -> bool:
        """True if the engine is paused."""
        return self.cause is not None

    def begin_pause(self, mode: str) -> Interruption:
        """Return the interruption after a pause call. The call does not take over a pause that the agent ends."""
        return self.model_copy(update={"cause": Cause.CALL, "mode": mode}) if self.cause in (None, Cause.CALL) else self

    def end_pause(self) -> Interruption:
        """Return the interruption after the engine has resumed."""
        return Interruption(released=self.released)

    def release(self, tags: Iterable[str], *, by_spec: bool) -> Interruption:
        """Return the interruption after a release of these tags."""
        released = [*self.released, *(tag for tag in tags if tag not in self.released)]
        return self.model_copy(update={"cause": Cause.SPEC if by_spec else self.cause or Cause.RELEASE, "released": released})

    def restore(self, tags: Iterable[str]) -> Interruption:
        """Return the interruption after a restore of these tags. The cause SPEC ends with the last tag."""
        restored = set(tags)
        left = [tag for tag in self.released if tag not in restored]
        cause = Cause.RELEASE if self.cause is Cause.SPEC and not left else self.cause
        return self.model_copy(update={"cause": cause, "released": left})


def next_call(state: FleetState, interruption: Interruption) -> ControlCall | None:
    """Return the call that leads the engine to ``spec.state``; None if there is nothing to do."""
    if state is FleetState.ASLEEP:
        return ControlCall.RELEASE_MEMORY if set(MEMORY_TAGS) - set(interruption.released) else None
    return ControlCall.RESUME_MEMORY if interruption.cause is Cause.SPEC else None


def should_resume(state: FleetState, interruption: Interruption) -> bool:
    """Return whether the agent resumes the engine after a restore: all memory is back, and only the release had paused it."""
    return state is FleetState.ACTIVE and interruption.cause is Cause.RELEASE and not interruption.released
