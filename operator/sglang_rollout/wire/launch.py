"""Messages between the agents of one engine that has several pods: the others tell pod 0 how they are, and it says what to do."""

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
    """What a pod is to do with the present life of its engine container."""

    WAIT = "wait"
    """SGLang is not started yet."""
    GO = "go"
    """SGLang runs, or may be started now."""
    END = "end"
    """This life cannot work with the others any more: the container is to be restarted."""


class MemberReport(Message):
    """Agent of another pod → agent of pod 0, twice a second."""

    rank: int = Field(ge=1)
    """Place of the pod in its engine (SGLang's node rank)."""
    address: str
    """Its gate, as ``IP:port``: pod 0 looks whether it can be reached when it falls silent."""
    boot_id: str | None
    """The life of its engine container; None: there is none now."""
    released: bool = False
    """This life has been told to start SGLang."""
    up: bool = False
    """Its part of SGLang has finished loading."""
    draining: bool = False
    """The pod is going away."""


class MemberHealth(Message):
    """What the agent of another pod answers at ``AGENT_HEALTH``."""

    status: str = "ok"
    unheard: str = ""
    """Why pod 0 does not hear it, if it does not: it can tell only those who ask."""


class GroupReply(Message):
    """What pod 0 answers."""

    verdict: Verdict
    reason: str = ""
    """Why it ends, as a sentence."""
    drained: bool = False
    """Nothing runs on the engine any more, and nothing new comes."""
