"""When the ranks of an engine that has several pods start, and when they end. Pure: no I/O, no clock.

torch's own rendezvous is no help here: a rank that comes early waits in it for half an hour, one that meets a rank of an earlier
life hangs, and ranks that each restart by themselves end one another in circles. So every container waits before it starts SGLang,
under an identity of that life (its boot id), and pod 0 decides:

    all ranks wait, each in a new life            -> go: these lives are a *generation*
    a rank of it ended, or another life is there  -> the generation is lost: all the others of it end, too
    a rank cannot be reached over the network     -> the same, after a grace
    an agent is silent, its machine answers       -> nothing: SGLang runs without its agents

A generation that never came up, or is lost soon after its start, counts as failed; the next one waits longer each time, and after
:data:`BUDGET` of them there is none: something is wrong that a restart does not cure.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from pydantic import Field

from sglang_rollout.wire.launch import Verdict
from sglang_rollout.wire.message import Message
from sglang_rollout.wire.reasons import GateReason, Refusal

BUDGET = 10
"""So many generations in a row may fail. With the pauses between them that takes an hour, and the time that the starts take."""
QUICK_SECONDS = 600.0
"""A generation that came up and is lost later than this after its start did not fail: it was lost to something else than its start."""
FIRST_PAUSE = 30.0
LONGEST_PAUSE = 600.0
GRACE_SECONDS = 15.0
"""A link may be away for so long: a switch that is restarted, a route that moves. SGLang itself notices nothing for minutes."""
LEAST_PROBES = 4
"""So many tries must fail in a row, too: an agent that was stopped itself finds that much time has passed."""
FRESH_SECONDS = 5.0
"""A rank whose agent has not spoken for so long is not started, and is looked after."""
START_SECONDS = 1800.0
"""How long all ranks may take from go until they are up: a large model comes over the network at first."""


class GroupMemory(Message):
    """What pod 0 must not forget when its agent restarts. Times are the machine's monotonic clock: the record does not outlive it."""

    number: int = 0
    """Generations so far."""
    boots: list[str] = Field(default_factory=list)
    """The lives of the last one, by rank."""
    addresses: list[str] = Field(default_factory=list)
    """Where their pods' gates are."""
    went: float = 0.0
    """When it started."""
    came_up: bool = False
    lost: str = ""
    """Why it is lost; empty while it lives."""
    failures: int = 0
    """Generations in a row that never came up, or were lost soon after their start."""
    not_before: float = 0.0
    """When the next one may start."""


@dataclass(frozen=True, slots=True)
class Member:
    """What one rank said last."""

    boot: str | None
    at: float
    address: str = ""
    released: bool = False
    up: bool = False
    draining: bool = False


@dataclass(frozen=True, slots=True)
class Link:
    """A way to another pod, as tries to connect find it."""

    since: float = 0.0
    failures: int = 0

    def tried(self, now: float, *, cut: bool) -> Link:
        """After one more try; ``cut``: nothing at all came back."""
        if not cut:
            return Link()
        return Link(self.since if self.failures else now, self.failures + 1)

    def is_lost(self, now: float) -> bool:
        """Whether it has been cut for longer than the grace."""
        return self.failures >= LEAST_PROBES and now - self.since >= GRACE_SECONDS


@dataclass(frozen=True, slots=True)
class Group:
    """Everything that pod 0 decides from."""

    engine: str
    size: int
    memory: GroupMemory = field(default_factory=GroupMemory)
    members: Mapping[int, Member] = field(default_factory=dict)
    links: Mapping[int, Link] = field(default_factory=dict)
    unheard: Mapping[int, str] = field(default_factory=dict)
    """Why ranks do not speak, as far as they could be asked."""

    @property
    def lives(self) -> bool:
        """Whether there is a generation that is not lost."""
        return bool(self.memory.boots) and not self.memory.lost

    @property
    def draining(self) -> list[str]:
        """Pods of the living generation that are going away."""
        return [self.pod(rank) for rank, member in sorted(self.members.items()) if member.draining and self._runs(rank, member)]

    def pod(self, rank: int) -> str:
        """Name of a pod."""
        return f"{self.engine}-{rank}"

    def _runs(self, rank: int, member: Member) -> bool:
        return self.lives and self.memory.boots[rank : rank + 1] == [member.boot]


def heard(group: Group, rank: int, member: Member) -> Group:
    """A rank has spoken, so the way to it is there."""
    return replace(group, members={**group.members, rank: member}, links={**group.links, rank: Link()}, unheard={**group.unheard, rank: ""})


def tried(group: Group, rank: int, now: float, *, cut: bool) -> Group:
    """Somebody tried to connect to a silent rank's pod."""
    return replace(group, links={**group.links, rank: group.links.get(rank, Link()).tried(now, cut=cut)})


def silent(group: Group, now: float) -> dict[int, str]:
    """Ranks of the living generation whose agents have not spoken for a while (or not to this life of pod 0's agent): where they are."""
    return {rank: group.memory.addresses[rank] for rank in _quiet(group, now)} if group.lives else {}


def awaited(group: Group, now: float) -> list[int]:
    """Ranks whose agents do not speak and without which there is no next generation: they may be asked why."""
    return [] if group.lives else _quiet(group, now)


def asked(group: Group, rank: int, why: str) -> Group:
    """A rank that does not speak was asked why; empty: it did not say."""
    return replace(group, unheard={**group.unheard, rank: why})


def verdict(group: Group, rank: int, boot: str | None, *, released: bool) -> Verdict:
    """What a pod is to do whose container lives this life."""
    if boot is not None and group.memory.boots[rank : rank + 1] == [boot]:
        return Verdict.GO if group.lives else Verdict.END
    # Of an earlier generation, or of one that pod 0 has forgotten with its own pod.
    return Verdict.END if released and boot is not None else Verdict.WAIT


def step(group: Group, now: float) -> Group:
    """Look whether the generation is lost, and whether there can be a new one."""
    memory = group.memory
    if group.lives:
        why = _loss(group, now)
        if why:
            return replace(group, memory=_lost(memory, why, now))
        if memory.failures and not _fails(memory, now):
            memory = memory.model_copy(update={"failures": 0})
        if not memory.came_up and len(group.members) == group.size and all(member.up for member in group.members.values()):
            memory = memory.model_copy(update={"came_up": True})
        return group if memory is group.memory else replace(group, memory=memory)
    if memory.failures >= BUDGET or now < memory.not_before or _missing(group, now):
        return group
    boots = [group.members[rank].boot or "" for rank in range(group.size)]
    addresses = [group.members[rank].address for rank in range(group.size)]
    fresh = {"number": memory.number + 1, "boots": boots, "addresses": addresses, "went": now, "came_up": False, "lost": ""}
    return replace(group, memory=memory.model_copy(update=fresh))


def why_down(group: Group, now: float) -> Refusal | None:
    """Return why SGLang is not up, as a clause that does not change from second to second; None if its pods are not the cause."""
    memory = group.memory
    if group.lives:
        if memory.came_up:
            return None
        return Refusal(GateReason.NOT_UP, f"its {group.size} pods have started it together, and it is not up yet")
    if memory.failures >= BUDGET:
        return Refusal(
            GateReason.RESTART_BUDGET_EXHAUSTED,
            f"its restart budget is exhausted: {memory.failures} starts in a row failed, the last one because {memory.lost}."
            " Delete its pods, or change the spec, to have it started again",
        )
    missing = _missing(group, now)
    if missing:
        pods = ", ".join(group.pod(rank) + (f" ({why})" if (why := group.unheard.get(rank)) else "") for rank in missing)
        after = f"; it ended because {memory.lost}" if memory.lost else ""
        return Refusal(GateReason.GROUP_RESTART, f"it waits until all {group.size} pods can start together, now for {pods}{after}")
    if now < memory.not_before:
        again = f"it is started again after a pause of {pause(memory.failures):.0f} s"
        return Refusal(GateReason.GROUP_RESTART, f"it ended because {memory.lost}; {again}")
    return Refusal(GateReason.GROUP_RESTART, "its pods are about to start it together")


def pause(failures: int) -> float:
    """Seconds before the next start, after so many failures in a row."""
    return 0.0 if failures < 2 else min(LONGEST_PAUSE, FIRST_PAUSE * 2.0 ** (failures - 2))


def _loss(group: Group, now: float) -> str:
    """Why the living generation is lost; empty if it is not."""
    memory = group.memory
    for rank, member in sorted(group.members.items()):
        if member.boot is None:
            return f"pod {group.pod(rank)} has ended"
        if member.boot != memory.boots[rank]:
            return f"pod {group.pod(rank)} was started anew"
    for rank, link in sorted(group.links.items()):
        if link.is_lost(now):
            return f"pod {group.pod(rank)} could not be reached for {GRACE_SECONDS:.0f} s"
    if not memory.came_up and now - memory.went >= START_SECONDS:
        late = ", ".join(group.pod(rank) for rank in range(group.size) if rank not in group.members or not group.members[rank].up)
        return f"it was not up {START_SECONDS:.0f} s after its start ({late})"
    return ""


def _fails(memory: GroupMemory, now: float) -> bool:
    """Whether the living generation has failed if it is lost now."""
    return not memory.came_up or now - memory.went < QUICK_SECONDS


def _lost(memory: GroupMemory, why: str, now: float) -> GroupMemory:
    failures = memory.failures + 1 if _fails(memory, now) else 0
    return memory.model_copy(update={"lost": why, "failures": failures, "not_before": now + pause(failures)})


def _quiet(group: Group, now: float) -> list[int]:
    """Ranks other than 0 whose agents have not spoken for a while."""
    spoke = {rank for rank, member in group.members.items() if now - member.at < FRESH_SECONDS}
    return [rank for rank in range(1, group.size) if rank not in spoke]


def _missing(group: Group, now: float) -> list[int]:
    """Ranks that are not there to be started: silent, going away, without a life, or still in one of the lost generation."""
    boots = [member.boot for member in group.members.values()]

    def waits(rank: int) -> bool:
        member = group.members.get(rank)
        if member is None or member.boot is None or member.released or member.draining or now - member.at > FRESH_SECONDS:
            return False
        return member.boot not in group.memory.boots and boots.count(member.boot) == 1

    return [rank for rank in range(group.size) if not waits(rank)]
