"""``security.paths``: a folder that a trainer names is checked on every pod before the first engine changes."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from sglang_rollout.coordinator.update import requests as rq
from sglang_rollout.coordinator.update.adapters import FORBIDDEN, rows, wanted_adapters
from sglang_rollout.coordinator.update.catch_up import find_checkpoint
from sglang_rollout.sglang.api import ControlCall
from sglang_rollout.wire.ports import AGENT_CHECKPOINT
from sglang_rollout.wire.record import Adapter
from tests.properties.support.coordinator_world import World

Ask = Callable[[str], rq.Call]
CHANGES = {ControlCall.UPDATE_DISK.path, ControlCall.LOAD_ADAPTER.path, ControlCall.UNLOAD_ADAPTER.path, ControlCall.PAUSE.path}


def make(*paths: str) -> World:
    world = World([1, 1])
    world.paths = list(paths)
    world.send_intent()
    world.sync_all()
    world.sync_all()
    return world


def from_disk(path: str) -> rq.FromDisk:
    return rq.FromDisk(path, "5", {"model_path": path})


def adapter(path: str) -> rq.LoadAdapter:
    return rq.LoadAdapter("math", path)


ASKS = pytest.mark.parametrize("ask", [from_disk, adapter])


@ASKS
@pytest.mark.parametrize("path", ["/etc", "/checkpoints-old/5", "/checkpoints/../etc", "//checkpoints/5", "/"])
def test_other_paths_reach_no_pod(ask: Ask, path: str) -> None:
    world = make("/checkpoints")
    answer = world.do(ask(path))
    assert answer.status == 400
    assert answer.message.startswith(f"{path} is no folder that an engine's agent can read below security.paths (/checkpoints)")
    assert not any(send.path in {AGENT_CHECKPOINT, *CHANGES} for send in world.sent)


def test_a_name_on_the_hub_is_refused_only_with_paths() -> None:
    assert "no absolute path" in make("/checkpoints").do(adapter("org/adapter")).message
    assert make().do(adapter("org/adapter")).success


@ASKS
def test_a_folder_below_the_paths_is_loaded(ask: Ask) -> None:
    world = make("/checkpoints")
    answer = world.do(ask("/checkpoints/5"))
    assert answer.success, answer.message
    checked = next(send for send in world.sent if send.path == AGENT_CHECKPOINT)
    assert {tuple(body["allowed"]) for body in checked.bodies.values()} == {("/checkpoints",)}
    assert {body["adapter"] for body in checked.bodies.values()} == {ask is adapter}


@ASKS
def test_links_that_one_pod_finds_are_refused_like_a_path_outside(ask: Ask) -> None:
    world = make("/checkpoints")
    world.agents["e1"].forbidden = frozenset({"/checkpoints/5"})
    answer = world.do(ask("/checkpoints/5"))
    assert answer.message == world.do(ask("/etc")).message.replace("/etc", "/checkpoints/5")
    assert not any(send.path in CHANGES for send in world.sent)


@ASKS
def test_a_folder_that_one_pod_cannot_read_changes_no_engine(ask: Ask) -> None:
    world = make("/checkpoints")
    call = world.ask(ask("/checkpoints/5"))
    world.drain(failing=AGENT_CHECKPOINT, engines={"e1"})
    assert "engine e1 cannot load /checkpoints/5: model.safetensors is cut off. No engine" in world.answers[call].message
    assert not any(send.path in CHANGES for send in world.sent)


@ASKS
def test_pods_that_see_different_files_are_refused(ask: Ask) -> None:
    world = make("/checkpoints")
    world.agents["e1"].digest = "other"
    assert "on the engines' nodes: it must be one shared volume" in world.do(ask("/checkpoints/5")).message


def test_adapters_of_the_spec_may_lie_elsewhere() -> None:
    world = make("/checkpoints")
    world.adapters = [Adapter(name="a", path="/lora/a")]
    world.generation += 1
    world.send_intent()
    world.settle()
    assert all(agent.adapters == {"a": "/lora/a"} for agent in world.agents.values())


def test_an_engine_that_catches_up_checks_the_links_again() -> None:
    world = make("/checkpoints")
    assert world.do(from_disk("/checkpoints/5")).success
    found = find_checkpoint(world.machine.fleet)
    assert found is not None
    assert found.request.allowed == ["/checkpoints"]


def narrow(world: World, *paths: str) -> None:
    """The user changes ``security.paths``."""
    world.paths = list(paths)
    world.generation += 1
    world.send_intent()
    world.settle()


@pytest.mark.parametrize("listed", [[Adapter(name="a", path="/lora/a")], [], None], ids=["listed", "none", "no list"])
def test_adapters_outside_of_narrowed_paths_are_unloaded_and_return_with_their_paths(listed: list[Adapter] | None) -> None:
    world = make()
    world.adapters = listed
    for name in ("kept", "old"):
        assert world.do(rq.LoadAdapter(name, f"/{name}/1")).success
    of_spec = {adapter.name: adapter.path for adapter in listed or []}
    narrow(world, "/kept")
    assert all(agent.adapters == {"kept": "/kept/1", **of_spec} for agent in world.agents.values())
    row = next(row for row in rows(world.machine.fleet) if row.name == "old")
    assert (row.loaded, row.wanted, row.message) == (0, 0, FORBIDDEN)
    assert "old" not in wanted_adapters(world.machine.fleet)

    world.agents["e0"].restart()
    world.start()
    world.settle()
    assert all(agent.adapters == {"kept": "/kept/1", **of_spec} for agent in world.agents.values()), "a new coordinator does the same"
    narrow(world, "/kept", "/old")
    assert all(agent.adapters == {"kept": "/kept/1", "old": "/old/1", **of_spec} for agent in world.agents.values())


def test_a_trainer_unloads_a_forbidden_adapter_for_good() -> None:
    world = make()
    assert world.do(adapter("/old/1")).success
    narrow(world, "/checkpoints")
    assert world.do(rq.UnloadAdapter("math")).success
    assert rows(world.machine.fleet) == []


def test_a_forbidden_adapter_does_not_return_after_a_failed_load() -> None:
    world = make()
    assert world.do(adapter("/old/1")).success
    narrow(world, "/checkpoints")
    call = world.ask(adapter("/checkpoints/1"))
    world.complete()
    world.complete(broken=frozenset({"e1"}))
    world.drain()
    assert "It is loaded on no engine." in world.answers[call].message
    assert not any(body["lora_path"] == "/old/1" for send in world.sent[-2:] for body in send.bodies.values() if "lora_path" in body)
    world.settle()
    assert all(agent.adapters == {} for agent in world.agents.values())


def test_an_engine_that_joins_reads_a_trainers_adapter_before_it_loads_it() -> None:
    world = make("/checkpoints")
    assert world.do(adapter("/checkpoints/1")).success
    world.agents["e1"].forbidden = frozenset({"/checkpoints/1"})
    world.agents["e1"].restart()
    world.settle()
    assert world.agents["e1"].adapters == {}
    row = rows(world.machine.fleet)[0]
    assert (row.loaded, row.message) == (1, "engine e1: links lead out of the folder.")
    world.agents["e1"].forbidden = frozenset()
    world.tick(31)
    world.settle()
    assert world.agents["e1"].adapters == {"math": "/checkpoints/1"}
