"""Messages between the agents of an engine of several pods: members report to the head pod, which answers with a verdict."""

from __future__ import annotations

from enum import StrEnum

from pydantic import Field

from sglang_rollout.wire.message import Message
from sglang_rollout.wire.reasons import GateReason


def termination_message(message: str) -> str:
    """Return the last line in the log of a container that is ended because another pod of its engine failed."""
    return f"[{GateReason.GROUP_RESTART}] {message}\n"


def is_group_restart(log: str) -> bool:
    """Whether a container that ended with these last log lines was ended because another pod of its engine failed."""
    return f"[{GateReason.GROUP_RESTART}]" in log


class Verdict(StrEnum):
    """What a pod does with the current run of its engine container."""

    WAIT = "wait"
    """SGLang is not started yet."""
    GO = "go"
    """SGLang runs or may start now."""
    END = "end"
    """This run cannot join the other pods: the container restarts."""


class MemberReport(Message):
    """Agent of a member pod → agent of the head pod, twice a second."""

    rank: int = Field(ge=1)
    """SGLang's node rank of the pod."""
    address: str
    """Gate of the pod as ``IP:port``. The head pod connects to it when reports stop."""
    boot_id: str | None
    """Boot ID of the engine container; None: the container does not run."""
    released: bool = False
    """SGLang was started in this run of the container."""
    up: bool = False
    """SGLang's part in this pod has finished loading."""
    draining: bool = False
    """The pod is about to stop."""


class MemberHealth(Message):
    """Answer of a member pod's agent at ``AGENT_HEALTH``."""

    status: str = "ok"
    unheard: str = ""
    """Why the member cannot reach the head pod, as a clause; empty if it can."""


class GroupReply(Message):
    """Answer of the head pod to a report."""

    verdict: Verdict
    reason: str = ""
    """Why the container restarts, as a sentence."""
    drained: bool = False
    """The engine is drained: no request runs, and none can arrive."""
