"""Start and end of the ranks of an engine of several pods. Pure: no I/O, no clock.

torch's rendezvous does not suffice: an early rank waits in it for half an hour, a rank that meets one of an earlier run hangs, and
ranks that restart independently end one another in circles. So every container waits before it starts SGLang, identified by its
boot ID, and the head pod decides:

    all ranks wait, each with a new boot ID       -> go: these boot IDs are a *generation*
    a rank ended, or has another boot ID          -> the generation is lost: all its other ranks end
    a rank cannot be reached over the network     -> the same, after a grace period
    an agent is silent, its machine answers       -> nothing: SGLang runs without its agents

A generation fails if it never comes up or is lost soon after its start. The pause before the next one grows, and after
:data:`BUDGET` failures in a row no generation starts, because restarts do not help.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from pydantic import Field

from sglang_rollout.wire import Message
from sglang_rollout.wire.agent import Verdict
from sglang_rollout.wire.reasons import GateReason, Refusal

BUDGET = 10
"""Generations that may fail in a row. Their pauses add up to an hour, without the time of the starts."""
QUICK_SECONDS = 600.0
"""A generation that came up and is lost later than this after its start does not count as failed."""
FIRST_PAUSE = 30.0
LONGEST_PAUSE = 600.0
GRACE_SECONDS = 15.0
"""Time that a network path may be cut: a switch restarts, a route changes. SGLang does not notice for minutes."""
LEAST_PROBES = 4
"""Attempts that must fail in a row, too, because an agent that was suspended itself also sees time pass."""
FRESH_SECONDS = 5.0
"""Silence of a rank's agent after which the rank is not started, and its pod is checked."""
START_SECONDS = 1800.0
"""Time limit from the start until all ranks are up: a large model may first have to be downloaded."""


class GroupRecord(Message):
    """State that the head pod's agent keeps over a restart. Times are of the machine's monotonic clock."""

    number: int = 0
    """Number of generations so far."""
    boots: list[str] = Field(default_factory=list)
    """Boot IDs of the last generation, by rank."""
    addresses: list[str] = Field(default_factory=list)
    """Addresses of their pods' gates."""
    went: float = 0.0
    """When it started."""
    came_up: bool = False
    lost: str = ""
    """Why the generation is lost, as a clause; empty while it runs."""
    failures: int = 0
    """Generations in a row that failed."""
    not_before: float = 0.0
    """Time when the next generation may start."""


@dataclass(frozen=True, slots=True)
class Member:
    """Last report of one rank."""

    boot: str | None
    at: float
    address: str = ""
    released: bool = False
    up: bool = False
    draining: bool = False


@dataclass(frozen=True, slots=True)
class Link:
    """Network path to another pod, as connection attempts find it."""

    since: float = 0.0
    failures: int = 0

    def tried(self, now: float, *, cut: bool) -> Link:
        """Return the link after one more attempt; ``cut``: no answer at all."""
        if not cut:
            return Link()
        return Link(self.since if self.failures else now, self.failures + 1)

    def is_lost(self, now: float) -> bool:
        """True if the path has been cut for longer than the grace period."""
        return self.failures >= LEAST_PROBES and now - self.since >= GRACE_SECONDS


@dataclass(frozen=True, slots=True)
class Group:
    """All facts from which the head pod decides."""

    engine: str
    size: int
    record: GroupRecord = field(default_factory=GroupRecord)
    members: Mapping[int, Member] = field(default_factory=dict)
    links: Mapping[int, Link] = field(default_factory=dict)
    unheard: Mapping[int, str] = field(default_factory=dict)
    """Why ranks cannot reach the head pod, as far as they could be asked."""

    @property
    def lives(self) -> bool:
        """True if the last generation is not lost."""
        return bool(self.record.boots) and not self.record.lost

    @property
    def draining(self) -> list[str]:
        """Pods of the running generation that drain."""
        return [self.pod(rank) for rank, member in sorted(self.members.items()) if member.draining and self._runs(rank, member)]

    def pod(self, rank: int) -> str:
        """Return the name of a pod."""
        return f"{self.engine}-{rank}"

    def _runs(self, rank: int, member: Member) -> bool:
        return self.lives and self.record.boots[rank : rank + 1] == [member.boot]


def heard(group: Group, rank: int, member: Member) -> Group:
    """Record a report of a rank, which also proves that its network path works."""
    return replace(group, members={**group.members, rank: member}, links={**group.links, rank: Link()}, unheard={**group.unheard, rank: ""})


def tried(group: Group, rank: int, now: float, *, cut: bool) -> Group:
    """Record an attempt to connect to the pod of a silent rank."""
    return replace(group, links={**group.links, rank: group.links.get(rank, Link()).tried(now, cut=cut)})


def silent(group: Group, now: float) -> dict[int, str]:
    """Return the addresses of ranks of the running generation whose agents have not reported recently, by rank."""
    return {rank: group.record.addresses[rank] for rank in _quiet(group, now)} if group.lives else {}


def awaited(group: Group, now: float) -> list[int]:
    """Return silent ranks that the next generation waits for."""
    return [] if group.lives else _quiet(group, now)


def asked(group: Group, rank: int, why: str) -> Group:
    """Record why a rank cannot reach the head pod; empty if it did not answer."""
    return replace(group, unheard={**group.unheard, rank: why})


def verdict(group: Group, rank: int, boot: str | None, *, released: bool) -> Verdict:
    """Return the verdict on a pod whose container has this boot ID."""
    if boot is not None and group.record.boots[rank : rank + 1] == [boot]:
        return Verdict.GO if group.lives else Verdict.END
    # The run belongs to an earlier generation, or to one that was forgotten when the head pod was recreated.
    return Verdict.END if released and boot is not None else Verdict.WAIT


def step(group: Group, now: float) -> Group:
    """Advance: detect a lost generation, or start a new one."""
    record = group.record
    if group.lives:
        why = _loss(group, now)
        if why:
            return replace(group, record=_lost(record, why, now))
        if record.failures and not _fails(record, now):
            record = record.model_copy(update={"failures": 0})
        if not record.came_up and len(group.members) == group.size and all(member.up for member in group.members.values()):
            record = record.model_copy(update={"came_up": True})
        return group if record is group.record else replace(group, record=record)
    if record.failures >= BUDGET or now < record.not_before or _missing(group, now):
        return group
    boots = [group.members[rank].boot or "" for rank in range(group.size)]
    addresses = [group.members[rank].address for rank in range(group.size)]
    fresh = {"number": record.number + 1, "boots": boots, "addresses": addresses, "went": now, "came_up": False, "lost": ""}
    return replace(group, record=record.model_copy(update=fresh))


def why_down(group: Group, now: float) -> Refusal | None:
    """Return why SGLang is not up, as a clause that does not change from second to second; None if its pods are not the cause."""
    record = group.record
    if group.lives:
        if record.came_up:
            return None
        return Refusal(GateReason.NOT_UP, f"its {group.size} pods have started it together, and it is not up yet")
    if record.failures >= BUDGET:
        return Refusal(
            GateReason.RESTART_BUDGET_EXHAUSTED,
            f"its restart budget is exhausted: {record.failures} starts in a row failed, the last one because {record.lost}."
            " Delete its pods, or change the spec, to have it started again",
        )
    missing = _missing(group, now)
    if missing:
        pods = ", ".join(group.pod(rank) + (f" ({why})" if (why := group.unheard.get(rank)) else "") for rank in missing)
        after = f"; it ended because {record.lost}" if record.lost else ""
        return Refusal(GateReason.GROUP_RESTART, f"it waits until all {group.size} pods can start together, now for {pods}{after}")
    if now < record.not_before:
        again = f"it is started again after a pause of {pause(record.failures):.0f} s"
        return Refusal(GateReason.GROUP_RESTART, f"it ended because {record.lost}; {again}")
    return Refusal(GateReason.GROUP_RESTART, "its pods are about to start it together")


def pause(failures: int) -> float:
    """Return the seconds before the next start after this many failures in a row."""
    return 0.0 if failures < 2 else min(LONGEST_PAUSE, FIRST_PAUSE * 2.0 ** (failures - 2))


def _loss(group: Group, now: float) -> str:
    """Return why the running generation is lost, as a clause; empty if it is not."""
    record = group.record
    for rank, member in sorted(group.members.items()):
        if member.boot is None:
            return f"pod {group.pod(rank)} has ended"
        if member.boot != record.boots[rank]:
            return f"pod {group.pod(rank)} was restarted"
    for rank, link in sorted(group.links.items()):
        if link.is_lost(now):
            return f"pod {group.pod(rank)} could not be reached for {GRACE_SECONDS:.0f} s"
    if not record.came_up and now - record.went >= START_SECONDS:
        late = ", ".join(group.pod(rank) for rank in range(group.size) if rank not in group.members or not group.members[rank].up)
        return f"it was not up {START_SECONDS:.0f} s after its start ({late})"
    return ""


def _fails(record: GroupRecord, now: float) -> bool:
    """Return whether the running generation counts as failed if it is lost now."""
    return not record.came_up or now - record.went < QUICK_SECONDS


def _lost(record: GroupRecord, why: str, now: float) -> GroupRecord:
    failures = record.failures + 1 if _fails(record, now) else 0
    return record.model_copy(update={"lost": why, "failures": failures, "not_before": now + pause(failures)})


def _quiet(group: Group, now: float) -> list[int]:
    """Return the ranks other than 0 whose agents have not reported recently."""
    spoke = {rank for rank, member in group.members.items() if now - member.at < FRESH_SECONDS}
    return [rank for rank in range(1, group.size) if rank not in spoke]


def _missing(group: Group, now: float) -> list[int]:
    """Return the ranks that cannot start yet: silent, draining, without a container, or still in a run of the lost generation."""
    boots = [member.boot for member in group.members.values()]

    def waits(rank: int) -> bool:
        member = group.members.get(rank)
        if member is None or member.boot is None or member.released or member.draining or now - member.at > FRESH_SECONDS:
            return False
        return member.boot not in group.record.boots and boots.count(member.boot) == 1

    return [rank for rank in range(group.size) if not waits(rank)]
