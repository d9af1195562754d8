"""Start and end of the ranks of an engine of several pods. Pure: no I/O, no clock.

torch's rendezvous does not suffice. An early rank waits in it for half an hour. A rank that meets a rank of an earlier run hangs. Ranks
that restart independently end each other repeatedly. So every container writes a boot ID and waits before it starts SGLang, and the head
pod decides:

    all ranks wait, each with a new boot ID       -> go: these boot IDs are a *generation*
    a rank ended, or has another boot ID          -> the generation is lost: all its other ranks end
    a rank cannot be reached over the network     -> the same, after a grace period
    an agent is silent, its machine answers       -> nothing: SGLang runs without its agents

A generation fails if it never comes up or is lost soon after its start. The pause before the next one grows, and after
:data:`RESTART_BUDGET` failures in a row no generation starts, because restarts do not help.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from pydantic import Field

from sglang_rollout.wire import Message
from sglang_rollout.wire.agent import Verdict
from sglang_rollout.wire.reasons import GateReason, Refusal

RESTART_BUDGET = 10
"""Generations that may fail in a row. Their pauses add up to an hour, without the time of the starts."""
QUICK_SECONDS = 600.0
"""A generation that came up and is lost later than this after its start does not count as failed."""
FIRST_PAUSE_SECONDS = 30.0
LONGEST_PAUSE_SECONDS = 600.0
GRACE_SECONDS = 15.0
"""Time that a network path may be cut: a switch restarts, a route changes. SGLang does not notice for minutes."""
MIN_FAILED_ATTEMPTS = 4
"""Attempts that must also fail in a row, because time also passes while the agent itself is suspended."""
SILENT_AFTER_SECONDS = 5.0
"""Silence of a rank's agent after which the rank is not started, and its pod is checked."""
START_SECONDS = 1800.0
"""Default of :attr:`Ranks.start_seconds`."""


class GenerationRecord(Message):
    """Persisted facts about the last generation. Times are of the machine's monotonic clock, in seconds."""

    number: int = 0
    """Number of generations so far."""
    boot_ids: list[str] = Field(default_factory=list)
    """Boot IDs of the last generation, by rank."""
    addresses: list[str] = Field(default_factory=list)
    """Addresses of their pods' gates."""
    started_at: float = 0.0
    """When the generation started."""
    came_up: bool = False
    loss: str = ""
    """Why the generation is lost, as a clause; empty while it runs."""
    failures: int = 0
    """Number of generations in a row that failed."""
    not_before: float = 0.0
    """Time when the next generation may start."""


@dataclass(frozen=True, slots=True)
class Member:
    """Last report of one rank."""

    boot_id: str | None
    reported_at: float
    address: str = ""
    started: bool = False
    """SGLang was started in this run of the container."""
    up: bool = False
    draining: bool = False


@dataclass(frozen=True, slots=True)
class Link:
    """Failed attempts to connect to another pod."""

    since: float = 0.0
    """Time of the first failed attempt."""
    failures: int = 0

    def after_attempt(self, now: float, *, cut: bool) -> Link:
        """Return the link after one more attempt. ``cut`` is True if there was no answer at all."""
        if not cut:
            return Link()
        return Link(self.since if self.failures else now, self.failures + 1)

    def is_lost(self, now: float) -> bool:
        """Return whether the path has been cut for longer than the grace period."""
        return self.failures >= MIN_FAILED_ATTEMPTS and now - self.since >= GRACE_SECONDS


@dataclass(frozen=True, slots=True)
class Ranks:
    """Facts about the ranks of one engine, from which the head pod decides."""

    engine: str
    size: int
    record: GenerationRecord = field(default_factory=GenerationRecord)
    start_seconds: float = START_SECONDS
    """Time limit from the start until all ranks are up: a large model may first have to be downloaded."""
    members: Mapping[int, Member] = field(default_factory=dict)
    links: Mapping[int, Link] = field(default_factory=dict)
    unreachable: Mapping[int, str] = field(default_factory=dict)
    """Why silent ranks cannot reach the head pod, if their agents answered that question."""

    @property
    def is_running(self) -> bool:
        """True if the last generation is not lost."""
        return bool(self.record.boot_ids) and not self.record.loss

    @property
    def draining(self) -> list[str]:
        """Pods of the running generation that drain."""
        return [self.pod(rank) for rank, member in sorted(self.members.items()) if member.draining and self._is_current(rank, member)]

    def pod(self, rank: int) -> str:
        """Return the name of a pod."""
        return f"{self.engine}-{rank}"

    def _is_current(self, rank: int, member: Member) -> bool:
        return self.is_running and self.record.boot_ids[rank : rank + 1] == [member.boot_id]


def record_report(ranks: Ranks, rank: int, member: Member) -> Ranks:
    """Record a report of a rank, which also proves that its network path works."""
    return replace(
        ranks,
        members={**ranks.members, rank: member},
        links={**ranks.links, rank: Link()},
        unreachable={**ranks.unreachable, rank: ""},
    )


def record_attempt(ranks: Ranks, rank: int, now: float, *, cut: bool) -> Ranks:
    """Record an attempt to connect to the pod of a silent rank."""
    return replace(ranks, links={**ranks.links, rank: ranks.links.get(rank, Link()).after_attempt(now, cut=cut)})


def silent_addresses(ranks: Ranks, now: float) -> dict[int, str]:
    """Return the addresses of ranks of the running generation whose agents have not reported recently, by rank."""
    return {rank: ranks.record.addresses[rank] for rank in _silent_ranks(ranks, now)} if ranks.is_running else {}


def awaited_ranks(ranks: Ranks, now: float) -> list[int]:
    """Return the silent ranks that the next generation waits for."""
    return [] if ranks.is_running else _silent_ranks(ranks, now)


def record_answer(ranks: Ranks, rank: int, why: str) -> Ranks:
    """Record why a rank cannot reach the head pod; empty if the rank's agent did not answer."""
    return replace(ranks, unreachable={**ranks.unreachable, rank: why})


def decide_verdict(ranks: Ranks, rank: int, boot_id: str | None, *, started: bool) -> Verdict:
    """Return the verdict on a pod whose container has this boot ID."""
    if boot_id is not None and ranks.record.boot_ids[rank : rank + 1] == [boot_id]:
        return Verdict.GO if ranks.is_running else Verdict.END
    # The run belongs to an earlier generation, or to a generation whose record was lost with the previous head pod.
    return Verdict.END if started and boot_id is not None else Verdict.WAIT


def advance(ranks: Ranks, now: float) -> Ranks:
    """Detect a lost generation, or start a new one."""
    record = ranks.record
    if ranks.is_running:
        why = _find_loss(ranks, now)
        if why:
            return replace(ranks, record=_end_generation(record, why, now))
        if record.failures and not _counts_as_failed(record, now):
            record = record.model_copy(update={"failures": 0})
        if not record.came_up and len(ranks.members) == ranks.size and all(member.up for member in ranks.members.values()):
            record = record.model_copy(update={"came_up": True})
        return ranks if record is ranks.record else replace(ranks, record=record)
    if record.failures >= RESTART_BUDGET or now < record.not_before or _missing_ranks(ranks, now):
        return ranks
    boot_ids = [ranks.members[rank].boot_id or "" for rank in range(ranks.size)]
    addresses = [ranks.members[rank].address for rank in range(ranks.size)]
    fresh = {"number": record.number + 1, "boot_ids": boot_ids, "addresses": addresses, "started_at": now, "came_up": False, "loss": ""}
    return replace(ranks, record=record.model_copy(update=fresh))


def explain_down(ranks: Ranks, now: float) -> Refusal | None:
    """Return why SGLang is not up, as a clause that does not change from second to second; None if its pods are not the cause."""
    record = ranks.record
    if ranks.is_running:
        if record.came_up:
            return None
        return Refusal(GateReason.NOT_UP, f"its {ranks.size} pods have started it together, and it is not up yet")
    if record.failures >= RESTART_BUDGET:
        return Refusal(
            GateReason.RESTART_BUDGET_EXHAUSTED,
            f"its restart budget is exhausted: {record.failures} starts in a row failed, the last one because {record.loss}."
            " Delete its pods, or change the spec, to have it started again",
        )
    missing = _missing_ranks(ranks, now)
    if missing:
        pods = ", ".join(ranks.pod(rank) + (f" ({why})" if (why := ranks.unreachable.get(rank)) else "") for rank in missing)
        after = f"; it ended because {record.loss}" if record.loss else ""
        return Refusal(GateReason.GROUP_RESTART, f"it waits until all {ranks.size} pods can start together, now for {pods}{after}")
    if now < record.not_before:
        again = f"it is started again after a pause of {pause_seconds(record.failures):.0f} s"
        return Refusal(GateReason.GROUP_RESTART, f"it ended because {record.loss}; {again}")
    return Refusal(GateReason.GROUP_RESTART, "its pods are about to start it together")


def pause_seconds(failures: int) -> float:
    """Return the seconds before the next start after this many failures in a row."""
    return 0.0 if failures < 2 else min(LONGEST_PAUSE_SECONDS, FIRST_PAUSE_SECONDS * 2.0 ** (failures - 2))


def _find_loss(ranks: Ranks, now: float) -> str:
    """Return why the running generation is lost, as a clause; empty if it is not."""
    record = ranks.record
    for rank, member in sorted(ranks.members.items()):
        if member.boot_id is None:
            return f"pod {ranks.pod(rank)} has ended"
        if member.boot_id != record.boot_ids[rank]:
            return f"pod {ranks.pod(rank)} was restarted"
    for rank, link in sorted(ranks.links.items()):
        if link.is_lost(now):
            return f"pod {ranks.pod(rank)} could not be reached for {GRACE_SECONDS:.0f} s"
    if not record.came_up and now - record.started_at >= ranks.start_seconds:
        late = ", ".join(ranks.pod(rank) for rank in range(ranks.size) if rank not in ranks.members or not ranks.members[rank].up)
        return f"it was not up {ranks.start_seconds:.0f} s after its start ({late}); engine.startSeconds is the limit"
    return ""


def _counts_as_failed(record: GenerationRecord, now: float) -> bool:
    """Return whether the running generation counts as failed if it is lost now."""
    return not record.came_up or now - record.started_at < QUICK_SECONDS


def _end_generation(record: GenerationRecord, why: str, now: float) -> GenerationRecord:
    failures = record.failures + 1 if _counts_as_failed(record, now) else 0
    return record.model_copy(update={"loss": why, "failures": failures, "not_before": now + pause_seconds(failures)})


def _silent_ranks(ranks: Ranks, now: float) -> list[int]:
    """Return the ranks other than 0 whose agents have not reported recently."""
    spoke = {rank for rank, member in ranks.members.items() if now - member.reported_at < SILENT_AFTER_SECONDS}
    return [rank for rank in range(1, ranks.size) if rank not in spoke]


def _missing_ranks(ranks: Ranks, now: float) -> list[int]:
    """Return the ranks that cannot start yet: silent, draining, without a container, or still in a run of the lost generation."""
    boot_ids = [member.boot_id for member in ranks.members.values()]

    def waits(rank: int) -> bool:
        member = ranks.members.get(rank)
        if member is None or member.boot_id is None or member.started or member.draining or now - member.reported_at > SILENT_AFTER_SECONDS:
            return False
        return member.boot_id not in ranks.record.boot_ids and boot_ids.count(member.boot_id) == 1

    return [rank for rank in range(ranks.size) if not waits(rank)]
