"""Engines load a staged version in turn (``weights.activation.strategy: Rolling``), with one fault or call at a time."""

from __future__ import annotations

import pytest

from sglang_rollout.api.weights_spec import VersionPolicy
from sglang_rollout.coordinator.update import events as ev
from sglang_rollout.coordinator.update import requests as rq
from sglang_rollout.coordinator.update.requests import Answer
from sglang_rollout.wire.ports import AGENT_ACTIVATE, AGENT_FENCE, AGENT_STAGE
from sglang_rollout.wire.states import FleetState
from tests.properties.support.simulated_agent import NAMES
from tests.properties.support.staged_world import StagedWorld, shard_of


def closed(world: StagedWorld) -> list[str]:
    """Return the engines that generate nothing: their gates are closed, or they are paused."""
    return [name for name, agent in world.agents.items() if not agent.gate_open or agent.paused]


def serves(world: StagedWorld, version: str) -> bool:
    """Return whether every engine serves this version, and none is paused."""
    world.settle()
    return not closed(world) and set(world.versions().values()) == {version}


def staged_world(engines: int = 4, min_committed: int | str | None = None, *, in_turn: int | str = 1, copies: int = 2) -> StagedWorld:
    """Return a fleet that serves version 1/1."""
    world = StagedWorld(engines, min_committed, in_turn=in_turn, copies=copies)
    assert world.push("1").success
    assert serves(world, "1/1")
    world.sent.clear()
    return world


def loads(world: StagedWorld) -> list[int]:
    """Return how many engines each call to load a version was for."""
    return [len(send.bodies) for send in world.sent if send.path == AGENT_ACTIVATE]


def check_turns(world: StagedWorld, most: int) -> None:
    """Check that at most ``most`` engines generate nothing, and that no engine serves a version two commits behind."""
    assert len(closed(world)) <= most
    held = [agent.version for agent in world.agents.values() if agent.gate_open]
    assert all(version in world.history[-2:] for version in held)


def step(world: StagedWorld, most: int) -> None:
    """Carry out one effect, let all agents hear of it, and check what serves."""
    world.complete()
    world.sync_all()
    check_turns(world, most)


def watch(world: StagedWorld, most: int) -> None:
    """Carry out all effects, and check after each what serves."""
    while world.pending:
        step(world, most)


def do(world: StagedWorld, request: rq.Call, most: int = 4) -> Answer:
    """Make a request, and carry out effects until it is answered. Engines may still load afterwards."""
    call = world.ask(request)
    while call not in world.answers:
        step(world, most)
    return world.answers[call]


def begin_commit(world: StagedWorld, label: str = "2", most: int = 4) -> int:
    """Upload a version, and ask for its commit. Returns the number of that call."""
    update = str(do(world, rq.Upload((shard_of(NAMES),), label), most).fleet["update"])
    world.fill_upload(update)
    return world.ask(rq.CommitUpload(update))


def run_to_load(world: StagedWorld, number: int) -> None:
    """Carry out effects until the call to load the version is pending for the ``number``-th time."""
    while len(loads(world)) < number:
        world.complete()
    assert any(isinstance(effect, ev.Send) and effect.path == AGENT_ACTIVATE for effect in world.pending)


# --- what works ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("in_turn", "most", "sizes"), [(1, 1, [1, 1, 1, 1]), (2, 2, [1, 2, 1]), ("50%", 2, [1, 2, 1]), ("10%", 1, [1] * 4)]
)
def test_engines_load_in_turn_and_the_others_serve_the_version_before(in_turn: int | str, most: int, sizes: list[int]) -> None:
    world = staged_world(4, in_turn=in_turn)
    call = begin_commit(world)
    run_to_load(world, 2)
    world.sync_all()
    assert sorted(str(agent.version) for agent in world.agents.values() if agent.gate_open) == ["1/1"] * 3 + ["1/2"]
    watch(world, most)
    answer = world.answers[call]
    assert (answer.success, answer.message, answer.fleet["outcome"]) == (True, "Success", "Committed")
    assert loads(world) == sizes
    assert serves(world, "1/2")


def test_the_trainer_is_answered_when_enough_engines_have_loaded_and_the_others_follow() -> None:
    world = staged_world(4, min_committed=2)
    call = begin_commit(world)
    while call not in world.answers:
        step(world, 1)
    answer = world.answers[call]
    assert (answer.success, answer.fleet["waiting"], answer.fleet["outcome"]) == (True, ["e2", "e3"], "Committed")
    assert "e2, e3" in answer.message
    assert sorted(world.versions().values()) == ["1/1", "1/1", "1/2", "1/2"]
    watch(world, 1)
    assert serves(world, "1/2")


def test_a_commit_is_answered_after_25_seconds_while_engines_load_in_turn() -> None:
    world = staged_world(3)
    call = begin_commit(world)
    run_to_load(world, 2)
    world.tick(26)
    assert (world.answers[call].success, world.answers[call].fleet["state"]) == (True, "staged")
    watch(world, 1)
    assert serves(world, "1/2")


def test_an_engine_that_hangs_in_its_load_delays_the_others_for_a_minute() -> None:
    world = staged_world(3)
    begin_commit(world)
    watch(world, 1)
    seconds = [send.deadline for send in world.sent if send.path == AGENT_ACTIVATE]
    assert seconds == [65, 65, 65], "the load of version 1/1 has shown that this takes less than a second"


def test_engines_load_at_once_if_no_engine_can_wait() -> None:
    world = staged_world(4)
    assert world.do(rq.NewRun()).success
    assert world.push("1").success
    assert (loads(world), serves(world, "2/1")) == ([1, 3], True), "no version of the run before is permitted"
    assert world.do(rq.Pause("retract", {"mode": "retract"})).success
    assert world.push("2").success
    assert loads(world)[2:] == [1, 3], "the trainer has paused all engines"
    assert world.do(rq.Continue()).success
    assert serves(world, "2/2")


# --- calls during the roll -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("copies", [1, 2])
def test_the_next_version_is_committed_after_all_engines_have_loaded_the_one_before(copies: int) -> None:
    world = staged_world(4, min_committed=1, copies=copies)
    first = begin_commit(world, "2")
    while first not in world.answers:
        step(world, 1)
    assert sorted(world.versions().values()) == ["1/1", "1/1", "1/1", "1/2"]
    second = begin_commit(world, "3", most=1)
    watch(world, 1)
    assert world.answers[second].success
    assert serves(world, "1/3")
    assert loads(world) == [1] * 8


def test_a_call_has_its_turn_between_two_groups() -> None:
    world = staged_world(4, min_committed=1)
    first = begin_commit(world, "2")
    while first not in world.answers:
        step(world, 1)
    assert do(world, rq.Pause("abort", {"mode": "abort"})).success
    assert sorted(world.versions().values()) == ["1/1", "1/1", "1/2", "1/2"], "one group was loading"
    world.settle()
    assert all(agent.paused for agent in world.agents.values())
    assert len(loads(world)) == 2, "no engine loads while the trainer has paused the fleet"
    assert do(world, rq.Continue()).success
    watch(world, 1)
    assert serves(world, "1/2")


def test_a_pause_that_waits_lets_the_other_engines_load_at_once() -> None:
    world = staged_world(4)
    commit = begin_commit(world)
    run_to_load(world, 2)
    pause = world.ask(rq.Pause("abort", {"mode": "abort"}))
    world.drain()
    assert (world.answers[commit].success, world.answers[pause].success) == (True, True)
    assert loads(world) == [1, 1, 2]
    assert all(agent.paused and str(agent.version) == "1/2" for agent in world.agents.values())
    assert world.do(rq.Continue()).success
    assert serves(world, "1/2")


def test_a_pause_by_the_spec_lets_the_other_engines_load_at_once() -> None:
    world = staged_world(4)
    begin_commit(world)
    run_to_load(world, 2)
    world.set_state(FleetState.PAUSED)
    world.drain()
    world.settle()
    assert loads(world) == [1, 1, 2]
    assert all(agent.paused and str(agent.version) == "1/2" for agent in world.agents.values())
    world.set_state(FleetState.ACTIVE)
    assert serves(world, "1/2")


# --- restarts, joins and losses during the roll ----------------------------------------------------------------------


@pytest.mark.parametrize("steps", range(24))
def test_a_coordinator_that_restarts_continues_the_roll(steps: int) -> None:
    world = staged_world(4)
    begin_commit(world)
    for _ in range(steps):
        if world.pending:
            step(world, 1)
    world.start()
    for _ in range(40):
        world.tick(0.5)
        world.sync_all()
        if world.pending:
            world.complete()
        check_turns(world, 2)  # the engine whose load lost its coordinator, and the next one
    committed = str(world.machine.fleet.committed)
    assert serves(world, committed)
    assert world.push("3").success
    assert serves(world, "1/3")


def test_an_engine_that_joins_during_the_roll_loads_the_version_too() -> None:
    world = staged_world(3)
    begin_commit(world)
    run_to_load(world, 2)
    world.add_agent("e3")
    world.engines = [*world.engines, world.engines[0].model_copy(update={"name": "e3"})]
    world.generation += 1
    world.send_intent()
    world.drain()
    assert serves(world, "1/2")


@pytest.mark.parametrize("answers", [True, False])
def test_an_engine_that_is_lost_before_its_turn_delays_no_other(answers: bool) -> None:
    world = staged_world(4)
    call = begin_commit(world)
    run_to_load(world, 2)
    world.agents["e3"].restart()
    world.agents["e3"].answers = answers
    for _ in range(3):
        world.sync_all()
    world.drain()
    assert [name for send in world.sent if send.path == AGENT_ACTIVATE for name in send.bodies][:4] == ["e0", "e1", "e2", *["e3"] * answers]
    assert world.answers[call].success, world.answers[call].message
    world.agents["e3"].answers = True
    assert serves(world, "1/2")


# --- engines that fail -----------------------------------------------------------------------------------------------


def test_an_engine_that_fails_is_fenced_at_once_and_stops_no_other() -> None:
    world = staged_world(4, min_committed=3)
    world.agents["e1"].breaks = True
    call = begin_commit(world)
    run_to_load(world, 2)
    world.complete(broken=frozenset({"e1"}))
    while call not in world.answers:
        step(world, 2)
    answer = world.answers[call]
    assert (answer.success, answer.fleet["outcome"], list(answer.fleet["fenced"])) == (True, "Partial", ["e1"])
    fences = [place for place, send in enumerate(world.sent) if send.path == AGENT_FENCE]
    third = [place for place, send in enumerate(world.sent) if send.path == AGENT_ACTIVATE][2]
    assert fences[0] < third, "its requests wait no longer than its own load"
    world.drain()
    assert len([send for send in world.sent if send.path == AGENT_FENCE]) == 1, "a second fence would end a load of the agent's own"
    world.tick(30)
    assert serves(world, "1/2")


@pytest.mark.parametrize("lost", [False, True])
def test_a_version_that_engines_fail_at_leaves_the_others_serving(lost: bool) -> None:
    """``lost``: the failed engines take their pods with them."""
    world = staged_world(5, min_committed=1)
    world.policy = world.policy.model_copy(update={"min_committed": 5})
    world.generation += 1
    world.send_intent()
    for name in ("e1", "e2", "e3", "e4"):
        world.agents[name].breaks = True
    call = begin_commit(world)
    run_to_load(world, 2)
    world.drain(failing=AGENT_ACTIVATE, engines=["e1", "e2", "e3", "e4"])
    answer = world.answers[call]
    assert (answer.success, answer.fleet["reason"], answer.fleet["waiting"]) == (False, "TooFewEngines", ["e3", "e4"])
    assert "serve an older version: e3, e4" in answer.message
    for name in ("e1", "e2"):
        world.agents[name].answers = not lost
    for _ in range(4):
        world.tick(200)
        world.sync_all()
        world.drain(failing=AGENT_ACTIVATE, engines=["e1", "e2", "e3", "e4"])
    world.sync_all()
    assert [name for name, agent in world.agents.items() if agent.gate_open] == ["e0", "e3", "e4"]
    for name in ("e1", "e2"):
        world.agents[name].answers = True
    world.tick(600)
    assert serves(world, "1/2"), "once an engine of them has loaded it, the others follow"


@pytest.mark.parametrize("in_turn", [1, None])
def test_an_engine_that_refuses_a_version_serves_the_one_before_and_follows(in_turn: int | None) -> None:
    world = StagedWorld(3, 2, in_turn=in_turn, version_policy=VersionPolicy.MAX_STALENESS, max_staleness=1)
    assert world.push("1").success
    assert serves(world, "1/1")
    world.sent.clear()
    call = begin_commit(world)
    run_to_load(world, 2)
    while world.pending:
        world.complete(broken=frozenset({"e1"}) if len(loads(world)) < 4 else frozenset())
        world.sync_all()
        assert "e1" not in closed(world) or in_turn is None or world.pending
    assert world.answers[call].success
    world.tick(60)
    assert serves(world, "1/2")


def test_an_engine_without_copy_copies_the_version_before_its_turn() -> None:
    world = staged_world(3, min_committed=2)
    call = begin_commit(world)
    while not (isinstance(world.pending[0], ev.Send) and world.pending[0].path == AGENT_STAGE):
        world.complete()
    world.complete(broken=frozenset({"e2"}))
    world.drain()
    assert world.answers[call].success
    world.agents["e2"].copies = {}
    assert serves(world, "1/2")
    assert loads(world) == [1, 1, 1]
