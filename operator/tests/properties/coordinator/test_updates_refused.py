"""SGLang refuses updates in an engine because of its start: the fleet reports it at once, and refuses a push before its first byte."""

from __future__ import annotations

import pytest

from sglang_rollout.agent import events as ev
from sglang_rollout.coordinator.update import requests as rq
from sglang_rollout.coordinator.update.requests import Request
from sglang_rollout.wire.reasons import RefusalCode
from sglang_rollout.wire.states import FleetMode
from tests.properties.support.coordinator_world import World, group_body
from tests.properties.support.simulated_agent import NAMES
from tests.properties.support.staged_world import StagedWorld, shard_of

WHY = "Online weight updates are not supported while weight splits are active. Restart with SPLITS=0 to use them."
BODY = {"names": ["w"], "dtypes": ["bfloat16"], "shapes": [[2]]}
TENSORS = rq.Update(None, None, BODY)
DISTRIBUTED = (rq.Begin(), TENSORS, rq.FromDisk("/checkpoints/7", None, {}))
STAGED = (rq.Begin(), TENSORS, rq.Upload((shard_of(NAMES, (2,)),), None))


def report(world: World, engine: str, why: str) -> None:
    agent = world.agents[engine]
    agent.apply(ev.PluginChecked(agent.boot, "", why))
    world.settle()


@pytest.mark.parametrize("request_", DISTRIBUTED, ids=lambda one: type(one).__name__)
def test_every_kind_of_update_is_refused_before_an_engine_receives_anything(request_: Request) -> None:
    world = World([1, 1])
    world.settle()
    _check(world, request_)


@pytest.mark.parametrize("request_", STAGED, ids=lambda one: type(one).__name__)
def test_so_is_every_kind_with_transport_staged(request_: Request) -> None:
    world = StagedWorld(2)
    world.settle()
    _check(world, request_)


def _check(world: World, request: Request) -> None:
    assert world.do(rq.OpenGroup(group_body(world, "g"))).success
    report(world, "e1", WHY)
    assert world.record is not None
    assert world.record.updates_refused.startswith(f"SGLang refuses every update of the weights in engine e1: {WHY}")
    served, sent = [agent.gate_open for agent in world.agents.values()], len(world.sent)
    for refused in (request, rq.OpenGroup(group_body(world, "h"))):
        answer = world.do(refused)
        assert (answer.status, answer.code) == (409, RefusalCode.UPDATES_REFUSED)
        assert f"engine e1: {WHY}" in answer.message
        assert "Nothing was sent." in answer.message
    assert len(world.sent) == sent
    assert [agent.gate_open for agent in world.agents.values()] == served == [True, True], "the engines serve on"

    world.agents["e1"].restart()
    world.settle()
    assert world.record.updates_refused == "", "this run of the engine has said nothing"
    assert world.do(rq.OpenGroup(group_body(world, "h"))).success


def test_a_fleet_that_never_receives_weights_says_nothing() -> None:
    world = World([1])
    world.mode = FleetMode.COLOCATED
    world.start()
    world.settle()
    report(world, "e0", WHY)
    assert world.record is not None
    assert world.record.updates_refused == ""
