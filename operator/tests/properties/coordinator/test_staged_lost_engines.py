"""Engines that end while a trainer updates a fleet with transport Staged: the trainer does not notice."""

from __future__ import annotations

import pytest

from sglang_rollout.coordinator.update import events as ev
from sglang_rollout.coordinator.update import requests as rq
from sglang_rollout.sglang.api import ControlCall
from sglang_rollout.wire.ports import AGENT_ACTIVATE, STORE_SEAL
from tests.properties.support.staged_world import TENSORS, StagedWorld, run_to, serves


def test_an_engine_that_is_killed_does_not_fail_an_update_that_all_engines_must_hold() -> None:
    world = StagedWorld(3)
    world.push("1")
    world.do(rq.Begin())
    assert world.send_tensors("2").success
    call = world.ask(rq.End())
    run_to(world, AGENT_ACTIVATE)
    world.agents["e0"].restart()
    world.drain()
    assert world.answers[call].success, world.answers[call].message
    assert serves(world, "1/2")


@pytest.mark.parametrize("path", [ControlCall.PAUSE.path, ControlCall.FLUSH_CACHE.path, ControlCall.CONTINUE.path])
def test_an_engine_that_ends_fails_no_call_of_a_trainer_that_pauses(path: str) -> None:
    world = StagedWorld(3)
    world.push("1")
    calls: list[rq.Call] = [rq.Pause("retract", {"mode": "retract"}), rq.Flush(), rq.Update("g", "2", TENSORS), rq.Continue()]
    for request in calls:
        call = world.ask(request)
        while world.pending:
            if isinstance(world.pending[0], ev.Send) and world.pending[0].path == path:
                world.agents["e0"].up = False
            world.complete()
        assert world.answers[call].success, (request, world.answers[call].message)
    world.settle()
    assert world.serving == ["e1", "e2"]
    world.agents["e0"].restart()
    assert serves(world, "1/2")


def test_an_engine_that_runs_and_cannot_be_paused_is_reported_to_the_trainer() -> None:
    """Its requests would run on while the trainer believes that none does."""
    world = StagedWorld(2)
    world.push("1")
    call = world.ask(rq.Pause("retract", {"mode": "retract"}))
    world.complete(broken=frozenset({"e0"}))
    world.drain()
    assert world.answers[call].status == 400
    assert serves(world, "1/1")


@pytest.mark.parametrize(("least", "success"), [(None, True), (2, False)])
def test_an_engine_that_ends_while_the_store_completes_the_version_is_lost_like_any_other(least: int | None, success: bool) -> None:
    world = StagedWorld(2, least)
    world.push("1")
    world.do(rq.Begin())
    assert world.send_tensors("2").success
    call = world.ask(rq.End())
    run_to(world, STORE_SEAL)
    world.agents["e1"].up = False
    world.sync("e1")
    world.drain()
    assert world.answers[call].success is success, world.answers[call].message
    world.agents["e1"].restart()
    assert serves(world, "1/2")
