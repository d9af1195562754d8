"""Weights from a shared volume: checked on every pod before any engine receives the call, and committed by all engines."""

from __future__ import annotations

import pytest

from sglang_rollout.api.weights_spec import Weights
from sglang_rollout.coordinator.update import requests as rq
from sglang_rollout.sglang.api import ControlCall
from sglang_rollout.wire.ports import AGENT_CHECKPOINT
from sglang_rollout.wire.states import Version
from tests.properties.support.coordinator_world import World

ASK = rq.FromDisk("/snapshots/5", "5", {"model_path": "/snapshots/5", "abort_all_requests": True})


def make(**policy: object) -> World:
    world = World([1, 1, 1])
    world.policy = Weights.model_validate(policy)
    world.send_intent()
    world.sync_all()
    world.sync_all()  # the first proves what is committed, the second tells the agents
    return world


def finish(world: World, call: int, path: str, broken: frozenset[str]) -> rq.Answer:
    """Let every call succeed but one call on some engines."""
    world.drain(failing=path, engines=broken)
    return world.answers[call]


def test_all_engines_load_and_serve_the_version() -> None:
    world = make()
    answer = world.do(ASK)
    assert answer.success, answer.message
    assert world.machine.fleet.committed == Version(run=1, step=5, label="5")
    assert all(agent.gate_open and not agent.paused for agent in world.agents.values())
    sent = next(send for send in world.sent if send.path == ControlCall.UPDATE_DISK.path)
    assert sent.bodies["e0"]["abort_all_requests"] is False, "the fleet pauses as its policy says"


def test_a_checkpoint_that_one_pod_cannot_read_is_refused_before_any_engine_receives_the_call() -> None:
    world = make()
    answer = finish(world, world.ask(ASK), AGENT_CHECKPOINT, frozenset({"e1"}))
    assert answer.status == 400
    assert "engine e1 cannot load /snapshots/5: model.safetensors is cut off. No engine received the call." in answer.message
    assert not any(send.path in {ControlCall.UPDATE_DISK.path, ControlCall.PAUSE.path} for send in world.sent)
    assert all(agent.gate_open for agent in world.agents.values())


def test_different_files_under_one_path_are_refused() -> None:
    world = make()
    world.agents["e2"].digest = "other"
    answer = world.do(ASK)
    assert answer.status == 400
    assert "holds different checkpoints" in answer.message
    assert all(agent.gate_open for agent in world.agents.values())


def test_an_engine_that_fails_to_load_fails_the_update_by_default() -> None:
    world = make()
    answer = finish(world, world.ask(ASK), ControlCall.UPDATE_DISK.path, frozenset({"e1"}))
    assert answer.status == 400
    assert answer.fleet["engine"] == "e1"
    assert world.machine.fleet.committed == Version(run=0, step=0, label="base")
    assert not any(agent.gate_open for agent in world.agents.values())
    assert world.do(ASK).success, "and a complete one takes all of them back"
    assert all(agent.gate_open for agent in world.agents.values())


def test_with_min_committed_it_is_fenced_alone() -> None:
    world = make(min_committed=2)
    answer = finish(world, world.ask(ASK), ControlCall.UPDATE_DISK.path, frozenset({"e1"}))
    assert answer.status == 200
    assert list(answer.fleet["fenced"]) == ["e1"]
    assert [agent.gate_open for agent in world.agents.values()] == [True, False, True]


@pytest.mark.parametrize("fenced", [frozenset(), frozenset({"e2"})], ids=["all commit", "one is fenced"])
def test_the_answer_names_what_no_pod_could_compare(fenced: frozenset[str]) -> None:
    world = make(min_committed=2)
    world.agents["e1"].readable = False
    answer = finish(world, world.ask(ASK), ControlCall.UPDATE_DISK.path, fenced)
    assert answer.success
    assert answer.message.endswith(
        ". Not compared with the model that engine e1 runs: sizes and quantization; names, types and shapes of tensors,"
        " because no cache holds org/model."
    )
    what = ["sizes and quantization", "names, types and shapes of tensors"]
    assert answer.fleet["unchecked"] == {"what": what, "why": "no cache holds org/model", "engines": ["e1"]}
    world.agents["e1"].readable = True
    again = world.do(ASK)
    assert (again.message, "unchecked" in again.fleet) == ("Success", False)


def test_inside_an_open_update_it_is_refused() -> None:
    world = make()
    body = {"master_address": "10.0.0.9", "master_port": 7, "rank_offset": 1, "group_name": "g", "world_size": 4}
    assert world.do(rq.OpenGroup(body)).success
    assert world.do(rq.Begin()).success
    assert world.do(ASK).status == 409
    assert world.do(rq.Update("g", "1", {"names": ["w"]})).success
    assert world.do(rq.End()).success


def test_an_engine_that_came_up_in_the_trainers_pause_does_not_load_while_it_generates() -> None:
    world = make()
    assert world.do(rq.Pause("abort", {"mode": "abort"})).success
    world.agents["e1"].restart()
    world.sync_all()
    world.sent.clear()
    call = world.ask(ASK)
    while not any(send.path == ControlCall.UPDATE_DISK.path for send in world.sent):
        world.complete()
    assert all(agent.paused for agent in world.agents.values())
    world.drain()
    assert world.answers[call].success
    assert world.do(rq.Continue()).success
    assert all(agent.gate_open and not agent.paused for agent in world.agents.values())
