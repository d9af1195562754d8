"""The answer to a trainer when only a part of the engines commits, at each call that commits."""

from __future__ import annotations

import pytest

from sglang_rollout.coordinator.update import requests as rq
from sglang_rollout.sglang.api import ControlCall
from sglang_rollout.wire.ports import AGENT_ACK
from sglang_rollout.wire.states import Version
from tests.properties.support.coordinator_world import World, group_body, push

COMMITS: dict[str, rq.Request] = {"end": rq.End(), "continue": rq.Continue({}), "flush": rq.Flush(), "destroy": rq.CloseGroup("g")}
"""The calls that commit, by who makes them: a session's end; after a pause; without either; when the group is closed."""


def ready(commit: str, min_committed: int = 2) -> World:
    """Three engines have the tensors of version 1; only the call that commits is missing."""
    world = World([1, 1, 1], min_committed)
    world.sync_all()
    before: dict[str, rq.Request] = {"end": rq.Begin(), "continue": rq.Pause("abort", {"mode": "abort"})}
    assert world.do(rq.OpenGroup(group_body(world, "g"))).success
    if commit in before:
        assert world.do(before[commit]).success
    assert world.do(rq.Update("g", "1", {"names": ["w"]})).success
    return world


def until_answered(world: World, call: int, *broken: str) -> rq.Answer:
    """Complete pending effects until the trainer gets its answer. These engines fail to end their session."""
    while call not in world.answers:
        path = getattr(world.pending[0], "path", "")
        world.complete(broken=frozenset(broken if path == ControlCall.END_UPDATE.path else ()))
    return world.answers[call]


@pytest.mark.parametrize("commit", COMMITS)
def test_a_partial_commit_is_a_success_that_counts_the_engines_and_names_the_others(commit: str) -> None:
    world = ready(commit)
    answer = until_answered(world, world.ask(COMMITS[commit]), "e1")
    assert (answer.status, answer.fleet["outcome"], list(answer.fleet["fenced"])) == (200, "Partial", ["e1"])
    assert "2 of 3 engines hold version 1/1" in answer.message
    assert "engine e1 could not end the session: the engine failed." in answer.message
    others = [world.agents[name] for name in ("e0", "e2")]
    assert all(agent.gate_open and not agent.paused for agent in others), "the answer is true already"
    world.drain()
    assert (world.agents["e1"].gate_open, world.agents["e1"].session) == (False, False)


@pytest.mark.parametrize("commit", COMMITS)
def test_a_commit_of_all_engines_names_the_version_and_the_engines(commit: str) -> None:
    world = ready(commit)
    found = world.do(COMMITS[commit]).fleet
    assert (found["committed"], found["outcome"]) == ({"run": 1, "step": 1, "label": "1"}, "Committed")
    assert {name: engine["success"] for name, engine in found["engines"].items()} == dict.fromkeys(["e0", "e1", "e2"], True)


@pytest.mark.parametrize("commit", COMMITS)
def test_too_few_engines_are_an_error_with_the_first_reason(commit: str) -> None:
    world = ready(commit)
    answer = until_answered(world, world.ask(COMMITS[commit]), "e1", "e2")
    assert (answer.status, answer.fleet["engine"], answer.fleet["phase"]) == (400, "e1", "verify")
    assert "engine e1 could not end the session: the engine failed" in answer.message
    assert "Open a new process group with world_size=4 and push again." in answer.message
    assert answer.fleet["reason"] == "EngineFailed"
    world.drain()
    assert world.machine.fleet.committed == Version(run=0, step=0, label="base")
    assert not any(agent.gate_open for agent in world.agents.values())


def test_the_answer_to_continue_also_reports_that_generation_continued() -> None:
    world = ready("continue")
    answer = until_answered(world, world.ask(COMMITS["continue"]), "e1")
    assert answer.message.startswith("Generation continued successfully. 2 of 3 engines hold version 1/1")
    assert list(answer.fleet["resumed"]) == ["e0", "e2"]


def test_an_engine_that_does_not_answer_the_flush_is_left_behind() -> None:
    """It may have prompts cached from the old weights."""
    world = ready("continue")
    assert world.do(rq.Update("g", "1", {"names": ["w"], "flush_cache": False})).success
    call = world.ask(COMMITS["continue"])
    while getattr(world.pending[0], "path", "") != ControlCall.FLUSH_CACHE.path:
        world.complete()
    world.agents["e1"].answers = False
    answer = until_answered(world, call)
    assert (answer.status, list(answer.fleet["fenced"])) == (200, ["e1"])
    assert "engine e1 did not flush its cache: no answer" in answer.message


def test_a_number_that_was_reserved_is_not_used_again_by_the_next_coordinator() -> None:
    """e0 acknowledged it; a later update has made e0 dirty, so that no engine reports it any more."""
    world = World([1, 1])
    world.sync_all()
    assert world.do(rq.OpenGroup(group_body(world, "g"))).success
    for request in (rq.Begin(), rq.Update("g", None, {"names": ["w"]})):
        assert world.do(request).success
    call = world.ask(rq.End())
    while call not in world.answers:
        path = getattr(world.pending[0], "path", "")
        world.complete(broken=frozenset({"e1"} if path == AGENT_ACK else ()))
    world.drain()
    assert world.agents["e0"].version == Version(run=1, step=1, label="1")
    assert world.do(rq.OpenGroup(group_body(world, "g"))).success
    assert world.do(rq.Begin()).success
    world.start()
    world.sync_all()
    world.drain()
    assert push(world, None) == Version(run=1, step=2, label="2")
