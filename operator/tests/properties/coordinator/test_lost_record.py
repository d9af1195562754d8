"""A commit that only engines can prove: the store was away when the record had to be written, and then the coordinator ended."""

from __future__ import annotations

from sglang_rollout.coordinator.update import requests as rq
from sglang_rollout.coordinator.update.versions import order_key
from sglang_rollout.wire.ports import AGENT_ACK
from sglang_rollout.wire.states import EngineState
from tests.properties.support.coordinator_world import World, group_body
from tests.properties.support.simulated_agent import NAMES, SimulatedAgent


def without_a_record(world: World, names: tuple[str, ...], refusing: frozenset[str] = frozenset()) -> None:
    """A push that commits while the store is away; engines in `refusing` do not acknowledge it. Then a new coordinator starts."""
    world.sync_all()
    assert world.do(rq.OpenGroup(group_body(world, "g"))).success
    assert world.do(rq.Begin()).success
    assert world.do(rq.Update("g", None, {"names": list(names)})).success
    world.store_fails = True
    call = world.ask(rq.End())
    world.drain(failing=AGENT_ACK, engines=refusing)
    assert world.answers[call].success
    world.sync_all()
    assert world.record is not None
    assert world.record.committed.is_base
    world.store_fails = False
    world.start()


def test_a_number_that_may_have_been_committed_never_names_other_weights() -> None:
    """No engine that received the commit answers: the fleet continues without it, and it is no holder when it comes back."""
    world = World([1, 1], min_committed=1)
    without_a_record(world, NAMES)
    lost = world.agents["e0"]
    lost.answers = False
    world.agents["e1"] = SimulatedAgent("e1", starts=2)  # a new pod: its agent never heard of the commit
    world.sync_all()
    world.tick(6.0)
    assert world.machine.fleet.committed is not None
    assert world.machine.fleet.committed.is_base
    before, held = lost.version, lost.content
    assert before is not None
    assert world.do(rq.OpenGroup(group_body(world, "h"))).success
    assert world.do(rq.Update("h", None, {"names": list(NAMES)})).success
    assert world.do(rq.Continue()).success
    now = world.machine.fleet.committed
    assert order_key(now) > order_key(before)
    lost.answers = True
    world.sync_all()  # asks what it holds; only the next message says what is committed
    world.sync_all()
    world.drain()
    assert (lost.content, lost.gate_open) == (held, False)
    assert world.agents["e1"].gate_open


def test_a_number_that_only_recreated_pods_could_prove_never_names_other_weights() -> None:
    world = World([1])
    without_a_record(world, NAMES)
    before = world.agents["e0"].version
    assert before is not None
    world.agents["e0"] = SimulatedAgent("e0", starts=9)
    world.sync_all()
    assert world.machine.fleet.committed is not None
    assert world.machine.fleet.committed.is_base
    assert order_key(world.machine.fleet.target()) > order_key(before)


def test_an_engine_with_its_initial_weights_needs_tensors_that_another_engine_proves() -> None:
    """The record has an open update but not its outcome. An engine that committed it proves the outcome."""
    world = World([1, 1], min_committed=1)
    without_a_record(world, ("v",), refusing=frozenset({"e1"}))
    world.agents["e1"].restart()
    world.sync_all()
    assert world.machine.fleet.committed is not None
    assert not world.machine.fleet.committed.is_base
    assert world.agents["e1"].state is EngineState.CLEAN
    assert world.do(rq.OpenGroup(group_body(world, "h"))).success
    assert world.do(rq.Update("h", None, {"names": ["w"]})).success
    assert world.do(rq.Continue()).success
    world.sync_all()
    world.drain()
    assert world.agents["e0"].gate_open
    assert not world.agents["e1"].gate_open, "it lacks v"
    last = world.machine.fleet.last_update
    assert last is not None
    assert "lacks 1 of 1 tensors of a complete push" in last.message
