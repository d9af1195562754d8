"""Pods of one engine start together, end together, and end only after a failure, in any order of failures."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field, replace

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from sglang_rollout.agent.launch import rank_lifecycle as g
from sglang_rollout.wire.agent import Verdict
from sglang_rollout.wire.reasons import GateReason, Refusal
from tests.properties.support.search_depth import examples

TICK = 0.5


def message_of(why: Refusal | None) -> str:
    return "" if why is None else why.message


@dataclass
class Pod:
    """One pod: the boot ID of its container, and its agent's view of the network path to pod 0."""

    boot: str | None
    released: bool = False
    agent: bool = True
    cut: bool = False
    """The network path to pod 0 is cut."""
    link: g.Link = field(default_factory=g.Link)
    doomed: str | None = None
    """Boot ID of the run that has to end."""


class Engine:
    """An engine of several pods in virtual time; pod 0's agent decides with the code under test."""

    def __init__(self, size: int) -> None:
        self.serial = itertools.count()
        self.now = 1000.0
        self.pods = [Pod(self.new_boot_id()) for _ in range(size)]
        self.ranks = g.Ranks("e", size)
        self.harm = 0
        """Number of failures that an engine cannot survive."""
        self.ended_for: list[int] = []
        """Value of ``harm`` at the end of each generation."""
        self.died: dict[str, float] = {}

    def new_boot_id(self) -> str:
        return f"boot-{next(self.serial)}"

    def end(self, rank: int, *, restarts: bool) -> None:
        pod = self.pods[rank]
        if pod.boot is not None:
            self.died[pod.boot] = self.now
        pod.boot, pod.released = self.new_boot_id() if restarts else None, False

    def tick(self, times: int = 1) -> None:
        for _ in range(times):
            self.now += TICK
            for rank, pod in enumerate(self.pods):  # the kubelet
                if pod.boot is None or pod.doomed == pod.boot:
                    self.end(rank, restarts=True)
            for rank in range(1, len(self.pods)):
                self._follow(rank)
            if self.pods[0].agent:
                self._lead()

    def _lead(self) -> None:
        pod = self.pods[0]
        self._hear(0)
        self._obey(pod, g.decide_verdict(self.ranks, 0, pod.boot, started=pod.released))
        for rank in g.silent_addresses(self.ranks, self.now):
            self.ranks = g.record_attempt(self.ranks, rank, self.now, cut=self.pods[rank].cut)

    def _follow(self, rank: int) -> None:
        pod = self.pods[rank]
        if not pod.agent:
            return
        if pod.cut or not self.pods[0].agent:
            pod.link = pod.link.after_attempt(self.now, cut=pod.cut)
            if pod.released and pod.link.is_lost(self.now):
                self._obey(pod, Verdict.END)
            return
        pod.link = g.Link()
        self._hear(rank)
        self._obey(pod, g.decide_verdict(self.ranks, rank, pod.boot, started=pod.released))

    def _hear(self, rank: int) -> None:
        pod = self.pods[rank]
        member = g.Member(pod.boot, self.now, f"10.0.0.{rank}:1", started=pod.released, up=pod.released)
        before = self.ranks.record
        self.ranks = g.advance(g.record_report(self.ranks, rank, member), self.now)
        record = self.ranks.record
        if record.number > before.number:
            assert len(set(record.boot_ids)) == len(self.pods)
            # A run that ended after its agent's last report may be among them. The next report shows that.
            assert all(self.died.get(boot, self.now) >= self.now - g.SILENT_AFTER_SECONDS for boot in record.boot_ids), (
                "a rank that has ended was started"
            )
            assert not any(p.released and p.boot in record.boot_ids for p in self.pods)
        if record.loss and not before.loss:
            self.ended_for.append(self.harm)

    def _obey(self, pod: Pod, verdict: Verdict) -> None:
        if verdict is Verdict.GO:
            assert pod.boot in self.ranks.record.boot_ids
            pod.released = True
        elif verdict is Verdict.END:
            pod.doomed = pod.boot

    def runs(self) -> bool:
        """Return whether all ranks run and belong to one generation."""
        return (
            self.ranks.is_running
            and [pod.boot for pod in self.pods] == self.ranks.record.boot_ids
            and all(pod.released for pod in self.pods)
        )


class Failures(RuleBasedStateMachine):
    """Everything that can happen to the pods of an engine."""

    @initialize(size=st.integers(2, 4))
    def start(self, size: int) -> None:
        self.engine = Engine(size)

    @rule(times=st.sampled_from([1, 2, 5, 40, 130]))
    def time_passes(self, times: int) -> None:
        self.engine.tick(times)

    @rule(rank=st.integers(0, 3))
    def a_rank_dies(self, rank: int) -> None:
        self.engine.end(rank % len(self.engine.pods), restarts=False)
        self.engine.harm += 1

    @rule(rank=st.integers(0, 3))
    def a_rank_is_replaced_at_once(self, rank: int) -> None:
        self.engine.end(rank % len(self.engine.pods), restarts=True)
        self.engine.harm += 1

    @rule(rank=st.integers(1, 3))
    def a_link_is_cut(self, rank: int) -> None:
        pod = self.engine.pods[1 + rank % (len(self.engine.pods) - 1)]
        pod.cut = True
        self.engine.harm += 1

    @rule(rank=st.integers(1, 3))
    def a_link_is_restored(self, rank: int) -> None:
        self.engine.pods[1 + rank % (len(self.engine.pods) - 1)].cut = False

    @rule(rank=st.integers(0, 3))
    def an_agent_is_away_or_back(self, rank: int) -> None:
        pod = self.engine.pods[rank % len(self.engine.pods)]
        pod.agent = not pod.agent
        if rank % len(self.engine.pods) == 0 and pod.agent:  # only the record survives
            self.engine.ranks = g.Ranks("e", len(self.engine.pods), self.engine.ranks.record)

    @rule()
    def pod_0_is_recreated(self) -> None:
        engine = self.engine
        engine.end(0, restarts=False)
        engine.pods[0] = Pod(engine.new_boot_id())
        engine.ranks = g.Ranks("e", len(engine.pods))
        engine.harm += 1

    @invariant()
    def no_generation_ends_without_a_failure(self) -> None:
        ended = self.engine.ended_for
        assert all(harm > 0 for harm in ended)
        assert len(ended) <= self.engine.harm, "one failure ends one generation at most"

    @precondition(lambda self: self.engine.ranks.record.failures < g.RESTART_BUDGET)
    @rule()
    def without_further_failures_the_engine_runs(self) -> None:
        engine = self.engine
        for pod in engine.pods:
            pod.agent, pod.cut = True, False
        for _ in range(int((g.LONGEST_PAUSE_SECONDS + 60) / TICK)):
            if engine.runs():
                break
            engine.tick()
        assert engine.runs(), message_of(g.explain_down(engine.ranks, engine.now))
        harm, ends = engine.harm, len(engine.ended_for)
        engine.tick(60)
        assert engine.runs()
        assert (harm, ends) == (engine.harm, len(engine.ended_for))


TestFailures = Failures.TestCase
TestFailures.settings = settings(max_examples=examples(60), stateful_step_count=25, deadline=None)


def running(size: int = 2) -> Engine:
    engine = Engine(size)
    engine.tick(4)
    assert engine.runs()
    return engine


def test_the_pauses_between_failed_starts_grow_until_the_budget_is_exhausted() -> None:
    engine = running()
    pauses = []
    while engine.ranks.record.failures < g.RESTART_BUDGET:
        engine.pods[1].boot = None
        died = engine.now
        while not engine.runs() and engine.ranks.record.failures < g.RESTART_BUDGET:
            engine.tick()
        pauses.append(round(engine.now - died, -1))
    assert pauses == [0, 30, 60, 120, 240, 480, 600, 600, 600, 0]
    engine.tick(10_000)
    assert not engine.runs()
    why = g.explain_down(engine.ranks, engine.now)
    assert why is not None
    assert why.code is GateReason.RESTART_BUDGET_EXHAUSTED
    assert "pod e-1 has ended" in why.message or "pod e-1 was restarted" in why.message
    assert "Delete its pods" in why.message


def test_an_engine_that_has_run_for_long_restarts_at_once() -> None:
    engine = running()
    for _ in range(g.RESTART_BUDGET + 2):
        engine.tick(int(g.QUICK_SECONDS / TICK) + 1)
        engine.pods[0].boot = None
        engine.tick(8)
        assert engine.runs()


def test_an_absent_agent_ends_no_rank() -> None:
    engine = running(3)
    boots = [pod.boot for pod in engine.pods]
    for away in (engine.pods[1:], engine.pods[:1], engine.pods):
        for pod in away:
            pod.agent = False
        engine.tick(1000)
        for pod in away:
            pod.agent = True
        engine.tick(10)
        assert [pod.boot for pod in engine.pods] == boots


def test_a_link_may_be_cut_for_the_grace_period_and_no_longer() -> None:
    engine = running()
    engine.pods[1].cut = True
    engine.tick(int(g.GRACE_SECONDS / TICK) - 2)
    engine.pods[1].cut = False
    engine.tick(10)
    assert engine.ranks.record.number == 1
    engine.pods[1].cut = True
    engine.tick(int((g.SILENT_AFTER_SECONDS + g.GRACE_SECONDS) / TICK) + 4)
    assert "pod e-1 could not be reached for 15 s" in engine.ranks.record.loss
    assert not any(pod.released for pod in engine.pods), "both ranks have ended"
    assert "now for e-1" in message_of(g.explain_down(engine.ranks, engine.now))


def test_a_suspended_pod_does_not_lose_the_link_after_one_attempt() -> None:
    link = g.Link().after_attempt(100.0, cut=True).after_attempt(200.0, cut=True)
    assert not link.is_lost(200.0)
    for _ in range(g.MIN_FAILED_ATTEMPTS):
        link = link.after_attempt(201.0, cut=True)
    assert link.is_lost(201.0)
    assert not link.after_attempt(202.0, cut=False).is_lost(300.0)


def test_an_engine_that_never_comes_up_is_restarted() -> None:
    engine = Engine(2)
    ranks = engine.ranks
    for rank in range(2):
        ranks = g.record_report(ranks, rank, g.Member(f"b{rank}", 0.0))
    ranks = g.advance(ranks, 0.0)
    assert ranks.is_running
    for rank in range(2):
        ranks = g.record_report(ranks, rank, g.Member(f"b{rank}", g.START_SECONDS, started=True, up=rank == 0))
    assert "(e-1)" in g.advance(ranks, g.START_SECONDS).record.loss
    patient = replace(ranks, start_seconds=2 * g.START_SECONDS)
    assert g.advance(patient, g.START_SECONDS).is_running
    late = g.advance(patient, 2 * g.START_SECONDS).record.loss
    assert late == "it was not up 3600 s after its start (e-1); engine.startSeconds is the limit"


def end_repeatedly(after: float, *, comes_up: bool = False) -> g.Ranks:
    """Return an engine whose generations each end this many seconds after their start, until the budget is exhausted or for 48 hours."""
    ranks, now = g.Ranks("e", 2), 0.0
    while now < 48 * 3600 and ranks.record.failures < g.RESTART_BUDGET:
        number = ranks.record.number
        while not ranks.is_running and now < 48 * 3600:
            now += 1.0
            for rank in range(2):
                ranks = g.record_report(ranks, rank, g.Member(f"b{number}-{rank}", now))
            ranks = g.advance(ranks, now)
        went = now
        while ranks.is_running:
            now += 5.0
            ended = now - went >= after
            for rank in range(2):
                ranks = g.record_report(ranks, rank, g.Member(None if ended else f"b{number}-{rank}", now, started=True, up=comes_up))
            ranks = g.advance(ranks, now)
    return ranks


@pytest.mark.parametrize("after", [60.0, g.QUICK_SECONDS + 100, g.START_SECONDS, 2 * g.START_SECONDS])
def test_a_generation_that_never_came_up_counts_as_failed(after: float) -> None:
    ranks = end_repeatedly(after)
    assert ranks.record.failures == ranks.record.number == g.RESTART_BUDGET
    assert "restart budget is exhausted" in message_of(g.explain_down(ranks, 1e9))


def test_a_generation_that_came_up_and_ended_much_later_did_not_fail() -> None:
    ranks = end_repeatedly(g.QUICK_SECONDS + 100, comes_up=True)
    assert ranks.record.number > g.RESTART_BUDGET
    assert ranks.record.failures == 0


def test_failures_are_reset_only_when_a_generation_has_come_up() -> None:
    record = g.GenerationRecord(number=4, boot_ids=["b0", "b1"], addresses=["", ""], failures=4)
    ranks = g.Ranks("e", 2, record)
    for up, failures in ((False, 4), (True, 0)):
        now = g.QUICK_SECONDS + 100
        for rank in range(2):
            ranks = g.record_report(ranks, rank, g.Member(f"b{rank}", now, started=True, up=up))
        ranks = g.advance(g.advance(ranks, now), now)
        assert ranks.record.failures == failures


@pytest.mark.parametrize(
    "late",
    [
        g.Member("b0", 10.0),  # the boot ID of another rank
        g.Member(None, 10.0),
        g.Member("b1", 10.0, draining=True),
        g.Member("b1", 10.0, started=True),
        g.Member("b1", 10.0 - g.SILENT_AFTER_SECONDS - 1),
    ],
    ids=["same boot ID", "no boot ID", "draining", "of another generation", "silent"],
)
def test_no_rank_starts_before_every_rank_waits_with_its_own_boot_id(late: g.Member) -> None:
    ranks = g.record_report(g.record_report(g.Ranks("e", 2), 0, g.Member("b0", 10.0)), 1, late)
    assert not g.advance(ranks, 10.0).is_running
    assert "e-1" in message_of(g.explain_down(ranks, 10.0))
    assert g.advance(g.record_report(ranks, 1, g.Member("b1", 10.0)), 10.0).is_running
