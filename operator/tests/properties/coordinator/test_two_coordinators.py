"""Two coordinators at once: the term fences the one that does not know yet that another leads."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from sglang_rollout.coordinator.update import requests as rq
from sglang_rollout.coordinator.update.versions import order_key
from sglang_rollout.wire.states import EngineState
from tests.properties.support.coordinator_pair import Coordinator, Pair, contents
from tests.properties.support.search_depth import examples
from tests.properties.support.simulated_agent import NAMES

ENGINES = ["e0", "e1", "e2"]
which = st.integers(0, 1)
engines = st.sampled_from(ENGINES)


class TwoLead(RuleBasedStateMachine):
    """An old coordinator and a new one, each with a trainer, calls and links of its own."""

    @initialize(size=st.integers(1, 3), least=st.sampled_from([None, None, 1, 2]), first=st.booleans())
    def begin(self, size: int, least: int | None, first: bool) -> None:
        self.pair = Pair(size, least)
        self.served: dict[tuple[int, int], object] = {}
        for name in self.pair.agents:
            self.pair.sync(self.pair.leading[0], name)
        self.pair.drain(self.pair.leading[0])
        if first:
            self.push(0)

    def of(self, index: int) -> Coordinator:
        return self.pair.leading[min(index, len(self.pair.leading) - 1)]

    @precondition(lambda self: sum(one.alive for one in self.pair.leading) < 2)
    @rule(keep_record=st.sampled_from([True, True, True, False]))
    def another_leads(self, keep_record: bool) -> None:
        self.pair.start(keep_record=keep_record)

    @rule(index=which, name=engines)
    def sync(self, index: int, name: str) -> None:
        if name in self.pair.agents:
            self.pair.sync(self.of(index), name)

    @rule(index=which)
    def sync_all(self, index: int) -> None:
        for name in self.pair.agents:
            self.pair.sync(self.of(index), name)

    def world_size(self, who: Coordinator) -> int:
        return who.machine.fleet.table.world_size

    def open_group_body(self, who: Coordinator) -> dict[str, object]:
        return {
            "master_address": "10.0.0.9", "master_port": 1000 + who.term, "rank_offset": 1, "group_name": f"g{who.term}",
            "world_size": self.world_size(who),
        }  # fmt: skip

    @rule(index=which)
    def open_group(self, index: int) -> None:
        who = self.of(index)
        self.pair.ask(who, rq.OpenGroup(self.open_group_body(who)))

    @rule(index=which, request=st.sampled_from([rq.Begin(), rq.End(), rq.Continue(), rq.Flush(), rq.Pause("retract", {"mode": "retract"})]))
    def ask(self, index: int, request: rq.Request) -> None:
        self.pair.ask(self.of(index), request)

    @rule(index=which, label=st.sampled_from([None, "2", "step"]))
    def update(self, index: int, label: str | None) -> None:
        who = self.of(index)
        self.pair.ask(who, rq.Update(f"g{who.term}", label, {"names": list(NAMES)}))

    @rule(index=which)
    def push(self, index: int) -> None:
        """A whole push, but for its last call, whose steps the test takes one by one."""
        who = self.of(index)
        self.pair.drain(who)
        for request in (rq.OpenGroup(self.open_group_body(who)), rq.Begin(), rq.Update(f"g{who.term}", None, {"names": list(NAMES)})):
            self.pair.do(who, request)
        self.pair.ask(who, rq.End())

    @precondition(lambda self: any(one.pending for one in self.pair.leading))
    @rule(
        index=which, nth=st.integers(0, 9), engine=st.integers(0, 2), works=st.sampled_from([True, True, True, False]), lost=st.booleans()
    )
    def deliver(self, index: int, nth: int, engine: int, works: bool, lost: bool) -> None:
        who = self.of(index)
        if who.pending:
            self.pair.deliver(who, nth, engine, works=works, lost=lost)

    @rule(index=which)
    def drain(self, index: int) -> None:
        self.pair.drain(self.of(index))

    @rule(index=which, name=engines, on=st.booleans())
    def cut_off(self, index: int, name: str, on: bool) -> None:
        (self.of(index).cut_off.add if on else self.of(index).cut_off.discard)(name)

    @rule(index=which, on=st.booleans())
    def store_away(self, index: int, on: bool) -> None:
        self.of(index).store_fails = on
        self.pair.write(self.of(index))

    @rule(name=engines)
    def restart_engine(self, name: str) -> None:
        """Its agent continues, and remembers what it received."""
        if name in self.pair.agents:
            self.pair.agents[name].restart()

    @rule(seconds=st.sampled_from([0.5, 6.0, 200.0]))
    def wait(self, seconds: float) -> None:
        self.pair.tick(seconds)

    @invariant()
    def one_content_for_each_version_that_is_served(self) -> None:
        for agent in self.pair.agents.values():
            if agent.gate_open and agent.version is not None:
                known = self.served.setdefault(order_key(agent.version), contents(agent))
                assert known == contents(agent), f"two contents are served as {agent.version}"

    @invariant()
    def one_commits_a_version(self) -> None:
        for version, terms in self.pair.commits.items():
            assert len(terms) <= 1, f"{version} was committed in the terms {terms}"

    @invariant()
    def gates_follow_the_highest_term(self) -> None:
        for name, agent in self.pair.agents.items():
            if agent.gate_open:
                assert agent.state is EngineState.CLEAN
                assert agent.version is not None
                assert order_key(agent.version) in self.pair.received[name].served

    @invariant()
    def a_refused_coordinator_stops(self) -> None:
        assert not any(one.refused and one.alive for one in self.pair.leading)

    def teardown(self) -> None:
        """The one that is left serves a complete push everywhere."""
        if not hasattr(self, "pair"):
            return
        pair = self.pair
        for one in pair.leading:
            one.cut_off, one.store_fails = set(), False
            pair.write(one)
        for _ in range(8):
            for one in list(pair.leading):
                for name in pair.agents:
                    pair.sync(one, name)
                pair.drain(one)
            pair.tick(150.0)
        living = [one for one in pair.leading if one.alive]
        last = living[-1] if living else pair.start()
        for _ in range(3):
            for name in pair.agents:
                pair.sync(last, name)
            pair.drain(last)
            pair.tick(10.0)
        assert sum(one.alive for one in pair.leading) == 1
        for request in (
            rq.OpenGroup(self.open_group_body(last)),
            rq.Begin(),
            rq.Update(f"g{last.term}", None, {"names": list(NAMES)}),
            rq.End(),
        ):
            answer = pair.do(last, request)
            assert answer is not None
            assert answer.success, answer.message
        assert all(agent.gate_open for agent in pair.agents.values())
        assert len({contents(agent) for agent in pair.agents.values()}) == 1
        self.one_content_for_each_version_that_is_served()
        self.one_commits_a_version()


TwoLead.TestCase.settings = settings(max_examples=examples(60), stateful_step_count=30, deadline=None)
TestTwoLead = TwoLead.TestCase


def whole_push(pair: Pair, who: Coordinator) -> None:
    body = {
        "master_address": "10.0.0.9", "master_port": 1000, "rank_offset": 1, "group_name": f"g{who.term}",
        "world_size": who.machine.fleet.table.world_size,
    }  # fmt: skip
    for request in (rq.OpenGroup(body), rq.Begin(), rq.Update(f"g{who.term}", None, {"names": list(NAMES)}), rq.End()):
        answer = pair.do(who, request)
        assert answer is not None
        assert answer.success, answer.message


def test_what_an_agent_has_received_is_read_before_it_receives_anything_else() -> None:
    """The old coordinator commits without its store, and begins again; the new one has taken its record for the truth by then."""
    pair = Pair(1, None)
    old = pair.leading[0]
    pair.sync(old, "e0")
    new = pair.start()
    pair.tick(6.0)
    assert new.machine.fleet.committed is not None
    assert new.machine.fleet.committed.is_base
    old.machine.fleet.weights.names.add(NAMES)  # new names need the store
    old.store_fails = True
    whole_push(pair, old)
    pair.sync(old, "e0")
    first = contents(pair.agents["e0"])
    begun = pair.do(old, rq.Begin())
    assert begun is not None
    assert begun.success
    for _ in range(3):
        pair.sync(new, "e0")
        pair.drain(new)
    assert order_key(new.machine.fleet.committed) == (1, 1), "a commit that trainers were notified of is forgotten"
    pair.tick(10.0)
    whole_push(pair, new)
    assert order_key(new.machine.fleet.committed) == (1, 2)
    assert contents(pair.agents["e0"]) != first
