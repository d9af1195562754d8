"""Transport Staged with a model that no pod can read, and without checksums: versions with fewer tensors than a version that was given up.

No engine serves such a version together with tensors of the one that was given up.
"""

from __future__ import annotations

import pytest

from sglang_rollout.api.weights_spec import Transport
from sglang_rollout.coordinator.update import requests as rq
from sglang_rollout.wire.ports import AGENT_ACTIVATE
from sglang_rollout.wire.states import EngineState
from tests.properties.support.staged_world import StagedWorld, last, run_to, serves

OLD, NEW = ("u", "v"), ("w", "u", "v")


def begin_world() -> StagedWorld:
    """Return a fleet that serves version 1, which has fewer tensors than the model."""
    world = StagedWorld(2, verify="Off")
    for agent in world.agents.values():
        agent.readable = False
    assert upload(world, OLD, "1").success
    assert serves(world, "1/1")
    return world


def upload(world: StagedWorld, names: tuple[str, ...], label: str) -> rq.Answer:
    update = open_upload(world, names, label)
    return world.do(rq.CommitUpload(update))


def open_upload(world: StagedWorld, names: tuple[str, ...], label: str) -> str:
    answer = world.open_upload(label, names)
    assert answer.success, answer.message
    update = str(answer.fleet["update"])
    world.fill_upload(update, names)
    return update


def serves_foreign_tensors(world: StagedWorld) -> bool:
    """Return whether an engine serves version 1 and has a tensor of version 2."""
    world.settle()
    return any(agent.gate_open and str(agent.version) == "1/1" and agent.tensors["w"] != "base" for agent in world.agents.values())


def fail_after_the_canary_has_loaded(world: StagedWorld) -> None:
    """Give version 2 up when one engine has loaded it: the record cannot be written, and another coordinator begins without it."""
    world.ask(rq.CommitUpload(open_upload(world, NEW, "2")))
    run_to(world, AGENT_ACTIVATE)
    world.complete()
    assert [name for name, agent in world.agents.items() if agent.tensors["w"] != "base"] == ["e0"]
    world.start()


def test_after_a_canary_that_was_given_up() -> None:
    world = begin_world()
    fail_after_the_canary_has_loaded(world)
    assert not serves_foreign_tensors(world)
    assert [name for name, agent in world.agents.items() if agent.gate_open] == ["e1"]
    world.agents["e0"].restart()
    world.settle()
    world.tick(600)
    assert serves(world, "1/1"), "a restarted engine has base tensors again"


def test_a_version_with_these_tensors_makes_the_engine_whole_again() -> None:
    world = begin_world()
    fail_after_the_canary_has_loaded(world)
    assert not serves_foreign_tensors(world)
    assert upload(world, NEW, "3").success
    assert serves(world, "1/3")


@pytest.mark.parametrize("restarts", [False, True])
def test_after_a_load_that_failed_half_way(restarts: bool) -> None:
    world = begin_world()
    for agent in world.agents.values():
        agent.breaks = True
    world.ask(rq.CommitUpload(open_upload(world, NEW, "2")))
    world.drain(failing=AGENT_ACTIVATE, engines=world.agents)
    assert "e0 did not load" in last(world).message
    if restarts:
        world.start()
    assert not serves_foreign_tensors(world)


def test_a_checkpoint_of_the_transport_before_is_loaded_by_restarted_engines_only() -> None:
    """It may lack tensors of a staged version that an engine has loaded and that was given up."""
    world = StagedWorld(2, verify="Off")
    staged, world.policy = world.policy, world.policy.model_copy(update={"transport": Transport.DISK, "staging": None})
    world.generation += 1
    world.send_intent()
    assert world.do(rq.FromDisk("/snapshots/1", "1", {"model_path": "/snapshots/1"})).success
    world.policy = staged
    world.generation += 1
    world.send_intent()
    world.settle()
    assert world.machine.fleet.weights.disk is not None
    world.agents["e0"].forget(state=EngineState.DIRTY, version=None)
    world.agents["e1"].restart()
    for _ in range(3):
        world.settle()
        world.tick(200)
    assert [name for name, agent in world.agents.items() if agent.gate_open] == ["e1"]
