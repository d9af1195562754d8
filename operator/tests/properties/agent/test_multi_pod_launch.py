"""Pods of one engine: they start together, end together, and end only for a reason, whatever dies in which order."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field

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
    """One pod: the boot ID of its container, and what its agent knows about the link to pod 0."""

    boot: str | None
    released: bool = False
    agent: bool = True
    cut: bool = False
    """Nothing gets from here to pod 0 or back."""
    link: g.Link = field(default_factory=g.Link)
    doomed: str | None = None
    """The boot ID of the process that must end."""


class Engine:
    """An engine of several pods in virtual time; pod 0's agent decides with the code under test."""

    def __init__(self, size: int) -> None:
        self.serial = itertools.count()
        self.now = 1000.0
        self.pods = [Pod(self.new_boot()) for _ in range(size)]
        self.group = g.Group("e", size)
        self.harm = 0
        """Failures so far that an engine cannot survive."""
        self.ended_for: list[int] = []
        """At each generation's end: the harm done until then."""
        self.died: dict[str, float] = {}

    def new_boot(self) -> str:
        return f"boot-{next(self.serial)}"

    def end(self, rank: int, *, restart: bool) -> None:
        pod = self.pods[rank]
        if pod.boot is not None:
            self.died[pod.boot] = self.now
        pod.boot, pod.released = self.new_boot() if restart else None, False

    def tick(self, times: int = 1) -> None:
        for _ in range(times):
            self.now += TICK
            for rank, pod in enumerate(self.pods):  # the kubelet
                if pod.boot is None or pod.doomed == pod.boot:
                    self.end(rank, restart=True)
            for rank in range(1, len(self.pods)):
                self._follow(rank)
            if self.pods[0].agent:
                self._lead()

    def _lead(self) -> None:
        pod = self.pods[0]
        self._hear(0)
        self._obey(pod, g.verdict(self.group, 0, pod.boot, released=pod.released))
        for rank in g.silent(self.group, self.now):
            self.group = g.tried(self.group, rank, self.now, cut=self.pods[rank].cut)

    def _follow(self, rank: int) -> None:
        pod = self.pods[rank]
        if not pod.agent:
            return
        if pod.cut or not self.pods[0].agent:
            pod.link = pod.link.tried(self.now, cut=pod.cut)
            if pod.released and pod.link.is_lost(self.now):
                self._obey(pod, Verdict.END)
            return
        pod.link = g.Link()
        self._hear(rank)
        self._obey(pod, g.verdict(self.group, rank, pod.boot, released=pod.released))

    def _hear(self, rank: int) -> None:
        pod = self.pods[rank]
        member = g.Member(pod.boot, self.now, f"10.0.0.{rank}:1", released=pod.released, up=pod.released)
        before = self.group.record
        self.group = g.step(g.heard(self.group, rank, member), self.now)
        record = self.group.record
        if record.number > before.number:
            assert len(set(record.boots)) == len(self.pods)
            # A process that ended since its agent's last message may be among them: that is noticed next.
            assert all(self.died.get(boot, self.now) >= self.now - g.FRESH_SECONDS for boot in record.boots), "go for the dead"
            assert not any(p.released and p.boot in record.boots for p in self.pods)
        if record.lost and not before.lost:
            self.ended_for.append(self.harm)

    def _obey(self, pod: Pod, verdict: Verdict) -> None:
        if verdict is Verdict.GO:
            assert pod.boot in self.group.record.boots
            pod.released = True
        elif verdict is Verdict.END:
            pod.doomed = pod.boot

    def runs(self) -> bool:
        """Whether all ranks run, and are of one generation."""
        return self.group.lives and [pod.boot for pod in self.pods] == self.group.record.boots and all(pod.released for pod in self.pods)


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
        self.engine.end(rank % len(self.engine.pods), restart=False)
        self.engine.harm += 1

    @rule(rank=st.integers(0, 3))
    def a_rank_is_replaced_at_once(self, rank: int) -> None:
        self.engine.end(rank % len(self.engine.pods), restart=True)
        self.engine.harm += 1

    @rule(rank=st.integers(1, 3))
    def a_link_is_cut(self, rank: int) -> None:
        pod = self.engine.pods[1 + rank % (len(self.engine.pods) - 1)]
        pod.cut = True
        self.engine.harm += 1

    @rule(rank=st.integers(1, 3))
    def a_link_is_mended(self, rank: int) -> None:
        self.engine.pods[1 + rank % (len(self.engine.pods) - 1)].cut = False

    @rule(rank=st.integers(0, 3))
    def an_agent_is_away_or_back(self, rank: int) -> None:
        pod = self.engine.pods[rank % len(self.engine.pods)]
        pod.agent = not pod.agent
        if rank % len(self.engine.pods) == 0 and pod.agent:  # its memory is all that it kept
            self.engine.group = g.Group("e", len(self.engine.pods), self.engine.group.record)

    @rule()
    def pod_0_is_recreated(self) -> None:
        engine = self.engine
        engine.end(0, restart=False)
        engine.pods[0] = Pod(engine.new_boot())
        engine.group = g.Group("e", len(engine.pods))
        engine.harm += 1

    @invariant()
    def nothing_is_lost_without_a_failure(self) -> None:
        ended = self.engine.ended_for
        assert all(harm > 0 for harm in ended)
        assert len(ended) <= self.engine.harm, "one failure ends one generation at most"

    @precondition(lambda self: self.engine.group.record.failures < g.BUDGET)
    @rule()
    def left_in_peace_it_runs(self) -> None:
        engine = self.engine
        for pod in engine.pods:
            pod.agent, pod.cut = True, False
        for _ in range(int((g.LONGEST_PAUSE + 60) / TICK)):
            if engine.runs():
                break
            engine.tick()
        assert engine.runs(), message_of(g.why_down(engine.group, engine.now))
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


def test_the_pauses_between_failed_starts_grow_until_the_budget_is_spent() -> None:
    engine = running()
    pauses = []
    while engine.group.record.failures < g.BUDGET:
        engine.pods[1].boot = None
        died = engine.now
        while not engine.runs() and engine.group.record.failures < g.BUDGET:
            engine.tick()
        pauses.append(round(engine.now - died, -1))
    assert pauses == [0, 30, 60, 120, 240, 480, 600, 600, 600, 0]
    engine.tick(10_000)
    assert not engine.runs()
    why = g.why_down(engine.group, engine.now)
    assert why is not None
    assert why.code is GateReason.RESTART_BUDGET_EXHAUSTED
    assert "pod e-1 has ended" in why.message or "pod e-1 was restarted" in why.message
    assert "Delete its pods" in why.message


def test_an_engine_that_has_run_for_long_starts_again_at_once() -> None:
    engine = running()
    for _ in range(g.BUDGET + 2):
        engine.tick(int(g.QUICK_SECONDS / TICK) + 1)
        engine.pods[0].boot = None
        engine.tick(8)
        assert engine.runs()


def test_an_absent_agent_ends_no_process() -> None:
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


def test_a_link_may_be_away_for_the_grace_and_no_longer() -> None:
    engine = running()
    engine.pods[1].cut = True
    engine.tick(int(g.GRACE_SECONDS / TICK) - 2)
    engine.pods[1].cut = False
    engine.tick(10)
    assert engine.group.record.number == 1
    engine.pods[1].cut = True
    engine.tick(int((g.FRESH_SECONDS + g.GRACE_SECONDS) / TICK) + 4)
    assert "pod e-1 could not be reached for 15 s" in engine.group.record.lost
    assert not any(pod.released for pod in engine.pods), "both sides have ended"
    assert "now for e-1" in message_of(g.why_down(engine.group, engine.now))


def test_a_pod_that_was_away_itself_does_not_call_the_link_cut_after_one_try() -> None:
    link = g.Link().tried(100.0, cut=True).tried(200.0, cut=True)
    assert not link.is_lost(200.0)
    for _ in range(g.LEAST_PROBES):
        link = link.tried(201.0, cut=True)
    assert link.is_lost(201.0)
    assert not link.tried(202.0, cut=False).is_lost(300.0)


def test_an_engine_that_never_comes_up_is_started_again() -> None:
    engine = Engine(2)
    group = engine.group
    for rank in range(2):
        group = g.heard(group, rank, g.Member(f"b{rank}", 0.0))
    group = g.step(group, 0.0)
    assert group.lives
    for rank in range(2):
        group = g.heard(group, rank, g.Member(f"b{rank}", g.START_SECONDS, released=True, up=rank == 0))
    assert "(e-1)" in g.step(group, g.START_SECONDS).record.lost


def lost_again_and_again(after: float, *, comes_up: bool = False) -> g.Group:
    """An engine each of whose generations is lost so many seconds after its start, until there is none any more or 48 h are over."""
    group, now = g.Group("e", 2), 0.0
    while now < 48 * 3600 and group.record.failures < g.BUDGET:
        number = group.record.number
        while not group.lives and now < 48 * 3600:
            now += 1.0
            for rank in range(2):
                group = g.heard(group, rank, g.Member(f"b{number}-{rank}", now))
            group = g.step(group, now)
        went = now
        while group.lives:
            now += 5.0
            ended = now - went >= after
            for rank in range(2):
                group = g.heard(group, rank, g.Member(None if ended else f"b{number}-{rank}", now, released=True, up=comes_up))
            group = g.step(group, now)
    return group


@pytest.mark.parametrize("after", [60.0, g.QUICK_SECONDS + 100, g.START_SECONDS, 2 * g.START_SECONDS])
def test_a_generation_that_never_came_up_failed_however_late_it_is_lost(after: float) -> None:
    group = lost_again_and_again(after)
    assert group.record.failures == group.record.number == g.BUDGET
    assert "restart budget is exhausted" in message_of(g.why_down(group, 1e9))


def test_a_generation_that_came_up_and_is_lost_much_later_did_not_fail() -> None:
    group = lost_again_and_again(g.QUICK_SECONDS + 100, comes_up=True)
    assert group.record.number > g.BUDGET
    assert group.record.failures == 0


def test_failures_are_forgotten_only_when_a_generation_has_come_up() -> None:
    record = g.GroupRecord(number=4, boots=["b0", "b1"], addresses=["", ""], failures=4)
    group = g.Group("e", 2, record)
    for up, failures in ((False, 4), (True, 0)):
        now = g.QUICK_SECONDS + 100
        for rank in range(2):
            group = g.heard(group, rank, g.Member(f"b{rank}", now, released=True, up=up))
        group = g.step(g.step(group, now), now)
        assert group.record.failures == failures


@pytest.mark.parametrize(
    "late",
    [
        g.Member("b0", 10.0),  # the boot ID of another rank
        g.Member(None, 10.0),
        g.Member("b1", 10.0, draining=True),
        g.Member("b1", 10.0, released=True),
        g.Member("b1", 10.0 - g.FRESH_SECONDS - 1),
    ],
    ids=["same boot ID", "no boot ID", "going away", "of another generation", "silent"],
)
def test_nothing_starts_before_every_rank_waits_with_a_boot_id_of_its_own(late: g.Member) -> None:
    group = g.heard(g.heard(g.Group("e", 2), 0, g.Member("b0", 10.0)), 1, late)
    assert not g.step(group, 10.0).lives
    assert "e-1" in message_of(g.why_down(group, 10.0))
    assert g.step(g.heard(group, 1, g.Member("b1", 10.0)), 10.0).lives
