"""An engine that does not hold the committed version joins only a complete push, so that no engine serves a mixture."""

from __future__ import annotations

import pytest

from sglang_rollout.coordinator.update import requests as rq
from sglang_rollout.coordinator.update.events import Send
from sglang_rollout.coordinator.update.requests import Answer
from sglang_rollout.coordinator.update.tensor_names import TensorNames
from sglang_rollout.sglang.api import ControlCall
from sglang_rollout.wire.record import Record
from sglang_rollout.wire.states import Version
from tests.properties.support.coordinator_world import World, group_body, push
from tests.properties.support.simulated_agent import NAMES

FIRST = Version(run=1, step=1, label="1")


def served(min_committed: int | None = None, engines: int = 2) -> World:
    """A fleet that serves version 1, of all tensors."""
    world = World([1] * engines, min_committed)
    world.sync_all()
    assert push(world, "1", NAMES) == FIRST
    return world


def update(world: World, label: str, *names: str) -> Answer:
    """Make an update of these tensors. Returns the answer to its end."""
    assert world.do(rq.OpenGroup(group_body(world, f"g-{world.calls}"))).success
    assert world.do(rq.Begin()).success
    assert world.do(rq.Update(list(world.machine.fleet.groups)[-1], label, {"names": list(names)})).success
    return world.do(rq.End())


def restart(world: World, name: str) -> None:
    world.agents[name].restart()
    world.sync_all()
    world.drain()


def is_complete_push(world: World, *names: str) -> bool:
    """Return True if the record says that exactly these tensors are a complete push."""
    return world.record is not None and world.record.names == TensorNames(names).pack()


def open_gates(world: World) -> list[bool]:
    return [agent.gate_open for agent in world.agents.values()]


def test_engines_that_held_the_version_may_receive_some_tensors() -> None:
    world = served()
    assert update(world, "2", "w").success
    assert open_gates(world) == [True, True]


def test_a_restarted_engine_that_receives_some_tensors_is_left_out_and_named() -> None:
    world = served(min_committed=1)
    restart(world, "e1")
    answer = update(world, "2", "w")
    why = answer.fleet["fenced"]["e1"]
    assert (answer.status, answer.fleet["outcome"], open_gates(world)) == (200, "Partial", [True, False])
    assert "did not hold version 1/1 before and lacks 2 of 3 tensors of a complete push, the first is u" in why
    assert "load a checkpoint with update_weights_from_disk" in why
    last = world.machine.fleet.last_update
    assert last is not None
    assert why in last.message
    assert update(world, "3", *NAMES).message == "Success"
    assert open_gates(world) == [True, True]


def test_if_all_must_commit_the_update_fails_with_that_message_and_a_complete_one_succeeds() -> None:
    world = served()
    restart(world, "e1")
    answer = update(world, "2", "w")
    assert (answer.status, answer.fleet["engine"], world.machine.fleet.committed) == (400, "e1", FIRST)
    assert "lacks 2 of 3 tensors" in answer.message
    assert open_gates(world) == [False, False]
    assert update(world, "2", "u", "w").status == 400, "both hold a part of the update that failed"
    assert update(world, "2", *NAMES).success
    assert open_gates(world) == [True, True]


def announce(world: World, label: str, *names: str) -> Answer:
    """Begin a push whose trainer announces all names. Returns the answer to the begin."""
    assert world.do(rq.OpenGroup(group_body(world, f"g-{world.calls}"))).success
    return world.do(rq.Begin(label=label, names=frozenset(names)))


@pytest.mark.parametrize("restarted", [("e1",), ("e0", "e1")])
@pytest.mark.parametrize("readable", [True, False], ids=["listed", "unchecked"])
def test_a_push_that_announces_too_few_tensors_is_refused_before_any_engine_is_called(restarted: tuple[str, ...], readable: bool) -> None:
    world = served()
    for agent in world.agents.values():
        agent.readable = readable
    world.machine.fleet.membership.model = None
    for name in restarted:
        restart(world, name)
    gates, before = open_gates(world), len(world.sent)
    answer = announce(world, "2", "w")
    called = {send.path for send in world.sent[before:]} & {ControlCall.PAUSE.path, ControlCall.BEGIN_UPDATE.path}
    if not readable and len(restarted) == 1:
        assert answer.success, "only checksums can tell what the restarted engine lacks"
        return
    assert (answer.status, answer.fleet["reason"], answer.fleet["engine"]) == (400, "TensorsMissing", restarted[0])
    assert "lacks 2 of 3 tensors of a complete push, the first is u: push all of them in one update" in answer.message
    assert "Nothing was sent." in answer.message
    assert "Nothing was sent." in answer.fleet["cause"], "the client shows it"
    assert (called, open_gates(world)) == (set(), gates), "the engines that serve continue to serve"
    assert announce(world, "2", *NAMES).success


def test_a_push_may_announce_some_tensors_if_enough_engines_are_complete_with_them() -> None:
    assert announce(served(), "2", "w").success, "both engines held the version"
    world = served(min_committed=1)
    restart(world, "e1")
    assert announce(world, "2", "w").success, "e0 is enough"
    restart(world, "e0")
    assert not announce(world, "2", "w").success


def test_a_push_may_announce_some_tensors_if_restarts_make_it_complete() -> None:
    world = served()
    assert world.do(rq.NewRun()).success
    assert announce(world, "1", "w").success, "engines that hold more restart when the update ends"
    world = served()
    for name in world.agents:
        restart(world, name)
    assert announce(world, "1", "w").success, "a lower label opens a run, and all engines hold model.path"


def test_a_fleet_of_one_that_restarted_is_not_complete_with_a_part() -> None:
    world = served(engines=1)
    restart(world, "e0")
    assert update(world, "2", "v").status == 400
    assert update(world, "2", *NAMES).success


def test_tensors_of_a_failed_update_are_required() -> None:
    world = World([1, 1])
    world.sync_all()
    assert world.do(rq.OpenGroup(group_body(world, "g"))).success
    assert world.do(rq.Begin()).success
    assert world.do(rq.Update("g", "1", {"names": ["v"]})).success
    assert world.do(rq.Begin()).success, "the trainer begins again"
    assert world.do(rq.Update("g", "1", {"names": ["w"]})).success
    assert "the first is v" in world.do(rq.End()).message
    assert update(world, "1", "v", "w").success


def test_tensors_of_a_failed_update_are_required_by_the_next_coordinator() -> None:
    world = World([1, 1])
    world.sync_all()
    assert world.do(rq.OpenGroup(group_body(world, "g"))).success
    assert world.do(rq.Begin()).success
    world.ask(rq.Update("g", "1", {"names": ["v"]}))
    while not (isinstance(world.pending[0], Send) and world.pending[0].path == ControlCall.UPDATE_DISTRIBUTED.path):
        world.complete()
    world.start()  # it dies before it hears what became of the call
    world.sync_all()
    world.drain()
    answer = update(world, "1", "u", "w")
    assert (answer.status, "lacks 1 of 3 tensors of a complete push" in answer.message) == (400, True)
    assert open_gates(world) == [False, False]
    assert update(world, "1", *NAMES).success
    assert is_complete_push(world, *NAMES)


def test_a_record_has_room_for_the_names_of_a_failed_update() -> None:
    names = [f"model.layers.{layer}.mlp.experts.{expert}.up_proj.weight" for layer in range(100) for expert in range(500)]
    text = TensorNames(names).pack()
    assert len(text) < 270_000
    assert not len(TensorNames.unpack(text) - TensorNames(names))
    assert len(TensorNames.unpack(text) - TensorNames(names[1:])) == 1


def test_a_tensor_that_every_engine_refused_is_not_required_later() -> None:
    world = served()
    assert world.do(rq.Begin()).success
    call = world.ask(rq.Update("g", "2", {"names": ["typo"]}))
    world.complete(broken=frozenset(world.agents))
    world.drain()
    assert not world.answers[call].success
    assert update(world, "2", *NAMES).success
    assert open_gates(world) == [True, True]


def test_the_stages_of_a_pipeline_make_one_set() -> None:
    world = World([1, 1], min_committed=1)
    world.sync_all()
    for label in ("1", "2"):
        for stage in ("a", "b"):
            assert world.do(rq.OpenGroup(group_body(world, stage + label))).success
        assert world.do(rq.Begin()).success
        assert world.do(rq.Update("a" + label, label, {"names": ["u", "v"]})).success
        assert world.do(rq.Update("b" + label, label, {"names": ["w"]})).success
        assert world.do(rq.End()).message == "Success"
        for stage in ("a", "b"):
            assert world.do(rq.CloseGroup(stage + label)).success
        restart(world, "e1")
    assert is_complete_push(world, *NAMES)
    assert list(update(world, "3", "u", "v").fleet["fenced"]) == ["e1"]


def test_a_new_coordinator_knows_the_stages_of_the_update_before_it() -> None:
    world = World([1, 1])
    world.sync_all()
    for stage in ("a", "b"):
        assert world.do(rq.OpenGroup(group_body(world, stage))).success
    for label in ("1", "2"):
        assert world.do(rq.Begin()).success
        assert world.do(rq.Update("a", label, {"names": ["u", "v"]})).success
        if label == "1":
            assert world.do(rq.Update("b", label, {"names": ["w"]})).success
            assert world.do(rq.End()).success
            world.start()
            world.sync_all()
            world.drain()
    assert "group b sent no tensors, although it belonged to the update before" in world.do(rq.End()).message
    assert (world.machine.fleet.committed, open_gates(world)) == (FIRST, [False, False])


def test_an_engine_that_was_in_one_of_two_groups_lacks_the_tensors_of_the_other() -> None:
    world = World([1, 1], min_committed=1)
    world.agents["e1"].up = False
    world.sync_all()
    assert world.do(rq.OpenGroup(group_body(world, "old"))).success
    world.agents["e1"].up = True
    world.sync_all()
    assert world.do(rq.OpenGroup(group_body(world, "new"))).success
    assert world.do(rq.Begin()).success
    assert world.do(rq.Update("old", "1", {"names": ["u"]})).success
    assert world.do(rq.Update("new", "1", {"names": ["v", "w"]})).success
    answer = world.do(rq.End())
    assert "lacks 1 of 3 tensors that other engines got in this update, the first is u" in answer.fleet["fenced"]["e1"]


def test_after_a_restart_of_the_coordinator_the_same_names_are_complete_and_some_are_not() -> None:
    for names, outcome in ((("w",), "Partial"), (NAMES, "Committed")):
        world = served(min_committed=1)
        world.start()
        restart(world, "e1")
        assert is_complete_push(world, *NAMES)
        answer = update(world, "2", *names)
        assert answer.fleet["outcome"] == outcome, answer.message
        assert is_complete_push(world, *NAMES)


def test_after_a_restart_of_the_coordinator_more_tensors_than_before_are_not_complete_without_those_before() -> None:
    """An engine that restarted, too, would serve its initial weights in the tensor that does not come."""
    world = World([1, 1], min_committed=1)
    world.sync_all()
    push(world, "1", ("u",))
    world.start()
    restart(world, "e1")
    answer = update(world, "2", "v", "w")
    assert list(answer.fleet.get("fenced", [])) == ["e1"]
    assert open_gates(world) == [True, False]
    assert update(world, "3", *NAMES).message == "Success"
    assert open_gates(world) == [True, True]


def test_a_coordinator_that_was_restarted_names_the_missing_tensors_that_it_has_seen() -> None:
    read = TensorNames.unpack(TensorNames(NAMES).pack())
    missing = read - TensorNames("w")
    assert (len(missing), missing.first()) == (2, "")
    assert read.add("u") == []
    assert (read - TensorNames("w")).first() == "u"
    assert (TensorNames("u") & read).first() == (read | TensorNames("u")).first() == "u"


def test_a_record_without_tensors_is_read() -> None:
    old = Record(term=1, epoch=2, committed=FIRST).model_dump(mode="json")
    del old["names"]
    assert not len(TensorNames.unpack(Record.model_validate(old).names))


def test_a_checkpoint_is_complete_and_later_pushes_must_be() -> None:
    world = served(min_committed=1)
    restart(world, "e1")
    assert world.do(rq.FromDisk("/snapshots/9", "2", {})).message == "Success"
    assert open_gates(world) == [True, True]
    assert update(world, "3", "w").message == "Success"
    restart(world, "e1")
    assert list(update(world, "4", "w").fleet["fenced"]) == ["e1"]


def test_a_new_run_forgets_earlier_tensors_on_engines_that_hold_none_and_lets_the_others_restart() -> None:
    world = served(min_committed=1)
    restart(world, "e1")
    assert world.do(rq.NewRun()).success
    assert list(update(world, "1", "w").fleet["fenced"]) == ["e0"], "e0 still has tensors of the run before"
    world.settle()
    assert world.agents["e0"].starts == 2
    assert update(world, "2", "w").message == "Success"
    assert is_complete_push(world, "w")
