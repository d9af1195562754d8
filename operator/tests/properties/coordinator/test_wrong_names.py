"""Pushes whose names or shapes the engines' model does not have: no engine serves a mixture, and one correct push repairs the fleet."""

from __future__ import annotations

import pytest

from sglang_rollout.coordinator.update import requests as rq
from sglang_rollout.coordinator.update.requests import Answer
from sglang_rollout.wire.record import UpdateReason
from tests.properties.support.coordinator_world import World, group_body
from tests.properties.support.simulated_agent import NAMES
from tests.properties.support.staged_world import StagedWorld, shard_of

WRONG = tuple(f"policy.{name}" for name in NAMES)


class Push:
    """Pushes names to a fleet through a process group, or as an upload."""

    def __init__(self, world: World) -> None:
        self.world = world

    def __call__(self, *names: str, check_model: bool = True, shape: tuple[int, ...] = (2,)) -> Answer:
        if isinstance(self.world, StagedWorld):
            answer = self._upload(self.world, names, check_model=check_model, shape=shape)
        else:
            answer = self._send(names, check_model=check_model, shape=shape)
        self.world.settle()
        return answer

    def _send(self, names: tuple[str, ...], *, check_model: bool, shape: tuple[int, ...]) -> Answer:
        world = self.world
        opened = world.do(rq.OpenGroup(group_body(world, f"g-{world.calls}")))
        assert opened.success, opened.message
        assert world.do(rq.Begin()).success
        body = {"names": list(names), "dtypes": ["bfloat16"] * len(names), "shapes": [list(shape)] * len(names)}
        sent = world.do(rq.Update(list(world.machine.fleet.groups)[-1], None, body, check_model=check_model))
        return world.do(rq.End()) if sent.success else sent

    @staticmethod
    def _upload(world: StagedWorld, names: tuple[str, ...], *, check_model: bool, shape: tuple[int, ...]) -> Answer:
        opened = world.do(rq.Upload((shard_of(names, shape),), None, check_model=check_model))
        if not opened.success:
            return opened
        update = str(opened.fleet["update"])
        world.fill_upload(update, names)
        return world.do(rq.CommitUpload(update))


def make(transport: str, *, readable: bool, engines: int = 2) -> tuple[World, Push]:
    world = StagedWorld(engines) if transport == "Staged" else World([1] * engines)
    for agent in world.agents.values():
        agent.readable = readable
    world.settle()
    return world, Push(world)


def holds(world: World) -> list[dict[str, object]]:
    """Return the tensors behind each open gate."""
    world.settle()
    return [agent.tensors for agent in world.agents.values() if agent.gate_open]


def assert_repaired(world: World) -> None:
    """Every engine serves the tensors of the last push, and nothing else."""
    world.settle()
    held = [agent.tensors for agent in world.agents.values()]
    assert all(agent.gate_open for agent in world.agents.values())
    assert all(len(set(map(str, one.values()))) == 1 and "base" not in one.values() for one in held), held
    assert all(one == held[0] for one in held), held


TRANSPORTS = pytest.mark.parametrize("transport", ["Distributed", "Staged"])
READABLE = pytest.mark.parametrize("readable", [True, False], ids=["listed", "unchecked"])


@pytest.mark.parametrize("refused", ["w", "unknown"])
def test_what_a_refused_call_has_written_is_never_forgotten(refused: str) -> None:
    world, push = make("Distributed", readable=False)
    for agent in world.agents.values():
        agent.refuses = frozenset({refused})
        agent.restarts_itself = False
    assert not push("u", "v", refused).success
    assert holds(world) == []
    answer = push("unknown-2")
    assert not answer.success
    assert holds(world) == [], "the engines still hold u and v of the push that failed"


@TRANSPORTS
@READABLE
@pytest.mark.parametrize("restarts", ["none", "one", "all"])
@pytest.mark.parametrize("new_run", [False, True])
def test_one_correct_push_repairs_a_fleet_that_committed_wrong_names(transport: str, readable: bool, restarts: str, new_run: bool) -> None:
    world, push = make(transport, readable=readable)
    wrong = push(*WRONG, check_model=False)
    assert wrong.success, wrong.message
    assert "not compared" in str(wrong.fleet["unchecked"]) or "do not fit" in str(wrong.fleet["unchecked"])
    for agent in list(world.agents.values())[: {"none": 0, "one": 1, "all": 2}[restarts]]:
        agent.restart()
    world.settle()
    if new_run:
        assert world.do(rq.NewRun()).success
    answer = push(*NAMES)
    assert answer.success, answer.message
    assert_repaired(world)
    world.agents["e0"].restart()
    world.settle()
    again = push(*NAMES)
    assert again.success, again.message
    assert_repaired(world)


@TRANSPORTS
@READABLE
def test_one_unknown_name_among_the_tensors_is_needed_by_no_later_push(transport: str, readable: bool) -> None:
    world, push = make(transport, readable=readable)
    assert push(*NAMES, "unknown", check_model=False).success
    world.agents["e1"].restart()
    world.settle()
    if transport == "Staged" and not readable:
        answer = push(*NAMES)
        assert "lacks 1 of 4 tensors" in answer.message
        assert "or open a run without them (POST /fleet/run)" in answer.message, "checksums cannot tell which of the names is wrong"
        assert world.do(rq.NewRun()).success
        push_run(world, push, NAMES)
    for _ in range(2):
        answer = push(*NAMES)
        assert answer.success, answer.message
        assert_repaired(world)


def push_run(world: World, push: Push, names: tuple[str, ...]) -> None:
    """Push to a run that was asked for, and push once more if engines had to restart first."""
    answer = push(*names)
    if not answer.success:
        assert "The engine restarts now" in answer.message
        assert holds(world) == [], "what they hold may be a mixture of two runs"
        answer = push(*names)
    assert answer.success, answer.message
    for _ in range(2):  # an engine restarts, and loads its copy then
        world.settle()
        for agent in world.agents.values():
            agent.load_own_copy(works=True)
    assert len(holds(world)) == len(world.agents)


def begin_run(transport: str, *, readable: bool, restarts: str, names: tuple[str, ...]) -> tuple[World, Push]:
    """Return a fleet that has committed these names, and whose trainer has asked for a new run."""
    world, push = make(transport, readable=readable)
    assert push(*names, check_model=False).success
    for agent in list(world.agents.values())[: {"none": 0, "one": 1, "all": 2}[restarts]]:
        agent.restart()
    world.settle()
    assert world.do(rq.NewRun()).success
    return world, push


RESTARTS = pytest.mark.parametrize("restarts", ["none", "one", "all"])


@TRANSPORTS
@READABLE
@RESTARTS
def test_a_new_run_repairs_a_fleet_that_committed_right_and_wrong_names_together(transport: str, readable: bool, restarts: str) -> None:
    world, push = begin_run(transport, readable=readable, restarts=restarts, names=(*NAMES, "unknown"))
    push_run(world, push, NAMES)
    assert_repaired(world)
    for name in world.agents:
        world.agents[name].restart()
        world.settle()
    assert push(*NAMES).success, "no push of this run needs the wrong name, whichever engines restart"
    assert_repaired(world)


@TRANSPORTS
@READABLE
@RESTARTS
def test_nothing_of_the_run_before_is_left_in_a_new_run(transport: str, readable: bool, restarts: str) -> None:
    world, push = begin_run(transport, readable=readable, restarts=restarts, names=("u", "v"))
    push_run(world, push, ("v", "w"))
    assert [held["u"] for held in holds(world)] == ["base", "base"]
    world.agents["e0"].restart()
    world.settle()
    assert push("v", "w").success
    held = holds(world)
    assert held[0] == held[1]
    assert held[0]["u"] == "base"
    if transport == "Staged":
        assert "lacks 1 of 2 tensors" in push("v").message, "within a run, versions have all names"


@TRANSPORTS
def test_a_run_that_only_a_lower_label_opens_keeps_what_the_engines_hold(transport: str) -> None:
    """A trainer that repeats a push after a lost answer opens a run, too, and it may send a part of the model."""
    world, push = make(transport, readable=True)
    assert push("u", "v").success
    assert push("u").success is (transport == "Distributed")
    assert [agent.starts for agent in world.agents.values()] == [1, 1]


@TRANSPORTS
def test_names_and_shapes_that_the_model_does_not_have_are_refused_before_an_engine_receives_anything(transport: str) -> None:
    world, push = make(transport, readable=True)
    assert push(*NAMES).success
    served = holds(world)
    for names, shape in ((("unknown", *NAMES), (2,)), (NAMES, (3,))):
        answer = push(*names, shape=shape)
        assert answer.status == 400
        assert "unknown is not in the model" in answer.message or "has shape [3], expected [2]" in answer.message
    if transport == "Staged":
        assert holds(world) == served
    assert push(*NAMES).success
    assert_repaired(world)


def test_wrong_names_in_a_later_bucket_fail_the_update() -> None:
    world, _ = make("Distributed", readable=True)
    assert world.do(rq.OpenGroup(group_body(world, "g"))).success
    assert world.do(rq.Begin()).success
    assert world.do(rq.Update("g", None, {"names": ["u"]})).success
    answer = world.do(rq.Update("g", None, {"names": ["policy.v"]}))
    assert (answer.status, "policy.v is not in the model" in answer.message) == (400, True)
    last = world.machine.fleet.last_update
    assert last is not None
    assert last.reason is UpdateReason.MISFIT
    assert holds(world) == []


def test_the_output_layer_of_tied_embeddings_and_computed_frequencies_may_come() -> None:
    world, push = make("Distributed", readable=True)
    answer = push(*NAMES, "lm_head.weight", "model.layers.0.self_attn.rotary_emb.inv_freq")
    assert (answer.message, "unchecked" in answer.fleet) == ("Success", False)
    world.agents["e1"].restart()
    world.settle()
    assert push(*NAMES).success
    assert_repaired(world)


@TRANSPORTS
@READABLE
def test_a_run_may_leave_tensors_of_the_model_as_they_are(transport: str, readable: bool) -> None:
    """Layers for speculative decoding or images, or all but a few: they keep their values of ``model.path``."""
    world, push = make(transport, readable=readable)
    for _ in range(2):
        assert push("u", "v").success
        world.agents["e1"].restart()
        world.settle()
    assert push("u", "v").success
    held = holds(world)
    assert len(held) == 2
    assert held[0] == held[1]
    assert held[0]["w"] == "base"
    world.agents["e1"].restart()
    world.settle()
    if transport == "Distributed":
        assert "lacks 1 of 2 tensors" in push("u").message


@READABLE
def test_an_engine_that_fails_after_new_names_restarts_only_if_no_list_knows_them(readable: bool) -> None:
    world, push = make("Distributed", readable=readable)
    assert world.do(rq.OpenGroup(group_body(world, "g"))).success
    assert world.do(rq.Begin()).success
    assert world.do(rq.Update("g", None, {"names": ["u"]})).success
    assert world.do(rq.Begin()).success, "the trainer begins again, so its first update fails"
    assert not world.do(rq.End()).success
    world.settle()
    assert [agent.starts for agent in world.agents.values()] == ([1, 1] if readable else [2, 2])
    answer = push("v")
    assert answer.success is not readable
    assert push("u", "v", "w").success
    assert_repaired(world)


def test_a_listed_name_of_a_failed_update_that_comes_no_more_lets_the_engines_restart_once() -> None:
    world, push = make("Distributed", readable=True)
    assert push("u", "v").success
    world.do(rq.OpenGroup(group_body(world, "g")))
    world.do(rq.Begin())
    assert world.do(rq.Update("g", None, {"names": ["w"]})).success
    assert world.do(rq.Begin()).success
    world.do(rq.End())
    refused = push("u", "v")
    assert "may hold tensors of another update, and lacks 1 of 3 tensors" in refused.message
    assert "push again" in refused.message
    assert push("u", "v").success
    assert all(held["w"] == "base" for held in holds(world))


def test_the_answer_says_who_restarts_an_engine() -> None:
    world, push = make("Distributed", readable=True)
    assert push("u", "v").success
    world.agents["e1"].restarts_itself = False
    assert world.do(rq.NewRun()).success
    answer = push("v")
    assert "Restart the engine, which its agent cannot do here" not in answer.message, "the first engine restarts by itself"
    world.settle()
    assert [agent.starts for agent in world.agents.values()] == [2, 1]
    answer = push("v")
    assert "engine e1 may hold tensors of another update" in answer.message
    assert "Restart the engine, which its agent cannot do here" in answer.message
    assert "restarts now" not in answer.message
    world.agents["e1"].restart()
    world.settle()
    assert push("v").success


@pytest.mark.parametrize("restarts_itself", [True, False])
def test_so_does_the_answer_of_a_staged_push(restarts_itself: bool) -> None:
    world, push = make("Staged", readable=True, engines=1)
    assert push("u", "v").success
    world.agents["e0"].restarts_itself = restarts_itself
    world.settle()
    assert world.do(rq.NewRun()).success
    answer = push("v")
    assert ("which its agent requests" in answer.message) is restarts_itself
    assert ("its agent cannot restart it: do that by hand" in answer.message) is not restarts_itself


def test_an_engine_with_random_weights_needs_the_whole_model() -> None:
    world, push = make("Distributed", readable=True)
    for agent in world.agents.values():
        agent.is_random = True
    assert "lacks 1 of 3 tensors" in push("u", "v").message
    assert push(*NAMES).success
    assert push("u").success, "they hold the committed version now"
    world.agents["e1"].restart()
    world.settle()
    assert not push("u", "v").success
    assert push(*NAMES).success
    assert_repaired(world)


def test_new_names_that_cannot_be_recorded_reach_no_engine() -> None:
    world, push = make("Distributed", readable=False)
    world.store_fails = True
    assert "cannot be recorded" in push(*NAMES).message
    assert all(agent.tensors == dict.fromkeys(NAMES, "base") for agent in world.agents.values())
    world.store_fails = False
    assert push(*NAMES).success
    world.store_fails = True
    assert push(*NAMES).success, "names that the run has committed are recorded already"
