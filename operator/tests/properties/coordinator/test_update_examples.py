"""Examples of updates: partial commits, engines that are away, drain or come late, staleness, new runs."""

from __future__ import annotations

import pytest

from sglang_rollout.api.weights_spec import Weights
from sglang_rollout.coordinator.update import requests as rq
from sglang_rollout.coordinator.update.model import Fleet
from sglang_rollout.sglang.api import ControlCall
from sglang_rollout.wire.ports import AGENT_ACK
from sglang_rollout.wire.record import Record, UpdateOutcome
from sglang_rollout.wire.states import Version
from tests.properties.support.coordinator_world import World, group_body, push


def test_a_push_reaches_every_engine_and_is_served() -> None:
    world = World([1, 2])
    world.sync_all()
    assert push(world, "5") == Version(run=1, step=5, label="5")
    assert [agent.gate_open for agent in world.agents.values()] == [True, True]
    assert not any(agent.paused for agent in world.agents.values())
    assert [send.path for send in world.sent if send.path == ControlCall.UPDATE_DISTRIBUTED.path] == [ControlCall.UPDATE_DISTRIBUTED.path]


@pytest.mark.parametrize(("last", "flushes"), [({}, 0), ({"flush_cache": True}, 0), ({"flush_cache": False}, 2)])
def test_caches_are_flushed_before_the_commit_unless_the_last_tensors_did(last: dict[str, bool], flushes: int) -> None:
    world = World([1, 1])
    world.sync_all()
    push(world, "1")
    world.sent.clear()
    assert world.do(rq.Begin()).success
    assert world.do(rq.Update("g", "2", {"names": ["v"], "flush_cache": True})).success
    assert world.do(rq.Update("g", "2", {"names": ["w"], **last})).success
    assert world.do(rq.End()).success
    assert sum(len(send.bodies) for send in world.sent if send.path == ControlCall.FLUSH_CACHE.path) == flushes


def test_one_missing_acknowledgement_means_no_commit() -> None:
    world = World([1, 1])
    world.sync_all()
    push(world, "1")
    assert world.do(rq.Begin()).success
    assert world.do(rq.Update("g", "2", {"names": ["w"]})).success
    call = world.ask(rq.End())
    world.drain(failing=AGENT_ACK, engines={"e1"})
    answer = world.answers[call]
    assert answer.status == 400
    assert "engine e1 did not acknowledge version 1/2" in answer.message
    assert world.machine.fleet.committed == Version(run=1, step=1, label="1")
    assert not any(agent.gate_open for agent in world.agents.values()), "one holds 1/2, one holds a mixture: no engine serves"
    again = push(world, "2")
    assert again == Version(run=2, step=2, label="2"), "1/2 is what e0 held: the number is not used for other weights"
    assert all(agent.gate_open for agent in world.agents.values())


def test_a_second_coordinator_proves_a_commit_that_the_first_could_not_write() -> None:
    world = World([1, 1])
    world.sync_all()
    push(world, "1")
    kept = world.record
    push(world, "2")
    world.record = kept
    world.start()
    world.sync_all()
    assert world.machine.fleet.committed == Version(run=1, step=2, label="2")


def test_equal_statuses_make_no_work_and_changes_are_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of 64 engines answers twice a second; making the fleet's record each time took longer than a push."""
    world = World([1] * 64)
    world.sync_all()
    world.sync_all()
    made: list[Record | None] = []
    make_record = Fleet.record

    def note_record(fleet: Fleet) -> Record | None:
        made.append(make_record(fleet))
        return made[-1]

    monkeypatch.setattr(Fleet, "record", note_record)
    world.sync_all()
    assert not made
    world.agents["e63"].restart()
    world.sync("e63")
    assert made
    assert world.record is not None
    assert [row.boot_id for row in world.record.engines if row.name == "e63"] == ["e63#2"]


def test_a_status_in_the_middle_of_a_call_is_recorded_within_a_tick() -> None:
    world = World([1, 1])
    world.sync_all()
    world.ask(rq.Pause("abort", {"mode": "abort"}))
    world.agents["e1"].restart()
    world.sync("e1")
    world.tick(1.0)
    assert world.record is not None
    assert world.record.engines[1].boot_id == "e1#2"


def test_a_client_that_leaves_before_its_turn_changes_nothing() -> None:
    world = World([1])
    world.sync_all()
    first = world.ask(rq.Pause("abort", {"mode": "abort"}))
    second = world.ask(rq.Continue())
    world.disconnect(second)
    world.drain()
    assert world.answers[first].success
    assert second not in world.answers
    assert world.agents["e0"].paused


def test_with_min_committed_a_failing_engine_is_fenced_alone() -> None:
    world = World([1, 1, 1], min_committed="60%")
    world.sync_all()
    push(world, "1")
    assert world.do(rq.Begin()).success
    assert world.do(rq.Update("g", "2", {"names": ["w"]})).success
    call = world.ask(rq.End())
    world.drain(failing=ControlCall.END_UPDATE.path, engines={"e1"})
    answer = world.answers[call]
    assert answer.status == 200
    assert "2 of 3 engines hold version 1/2" in answer.message
    assert answer.fleet["outcome"] == "Partial"
    assert list(answer.fleet["fenced"]) == ["e1"]
    assert [agent.gate_open for agent in world.agents.values()] == [True, False, True]
    last = world.machine.fleet.last_update
    assert last is not None
    assert (last.outcome, last.engines) == (UpdateOutcome.PARTIAL, ["e0", "e2"])
    assert push(world, "3") == Version(run=1, step=3, label="3")
    assert all(agent.gate_open for agent in world.agents.values()), "the next complete update takes it back"


def test_fewer_than_min_committed_is_no_commit() -> None:
    world = World([1, 1, 1], min_committed=2)
    world.sync_all()
    push(world, "1")
    assert world.do(rq.Begin()).success
    assert world.do(rq.Update("g", "2", {"names": ["w"]})).success
    call = world.ask(rq.End())
    world.drain(failing=ControlCall.END_UPDATE.path, engines={"e1", "e2"})
    assert world.answers[call].status == 400
    assert world.answers[call].fleet["engine"] == "e1"
    assert world.machine.fleet.committed == Version(run=1, step=1, label="1")
    assert not any(agent.gate_open for agent in world.agents.values())


def test_a_fleet_that_never_took_weights_waits_until_it_is_complete() -> None:
    world = World([1, 1])
    world.agents["e1"].up = False
    world.sync_all()
    refused = world.do(rq.OpenGroup(group_body(world, "g")))
    assert refused.status == 503
    assert "1 of 2 engines are up" in refused.message
    assert "e1" in refused.message
    assert not any(send.path == ControlCall.INIT_GROUP.path for send in world.sent)
    world.agents["e1"].restart()
    world.sync_all()
    assert world.do(rq.OpenGroup(group_body(world, "g"))).success


def test_min_committed_lets_a_fleet_begin_with_fewer() -> None:
    world = World([1, 1], min_committed=1)
    world.agents["e1"].up = False
    world.sync_all()
    assert push(world, "1") == Version(run=1, step=1, label="1")
    assert [agent.gate_open for agent in world.agents.values()] == [True, False]


@pytest.mark.parametrize(("base", "begins"), [(1, True), (2, True), (3, False), (None, False)])
def test_a_fleet_that_never_took_weights_waits_for_as_many_as_its_base(base: int | None, begins: bool) -> None:
    world = World([1, 1, 1])
    world.base = base
    world.send_intent()
    world.agents["e2"].up = False
    world.sync_all()
    opened = world.do(rq.OpenGroup(group_body(world, "g")))
    assert opened.success is begins
    if not begins:
        assert "at least 3 must be" in opened.message
    world.agents["e2"].up = True
    world.sync_all()
    assert set(world.machine.fleet.members()) == {"e0", "e1", "e2"}, "one that comes later takes part in the next group"


def test_a_base_that_was_complete_once_continues_with_the_engines_that_are_there() -> None:
    world = World([1, 1, 1])
    world.base = 2
    world.send_intent()
    world.agents["e1"].up = world.agents["e2"].up = False
    world.sync_all()
    assert "at least 2 must be" in world.do(rq.OpenGroup(group_body(world, "g"))).message
    world.agents["e1"].up = True
    world.sync_all()
    world.agents["e1"].up = False
    world.sync_all()
    assert world.do(rq.OpenGroup(group_body(world, "g"))).success


def test_an_engine_that_is_away_does_not_delay_a_fleet_that_has_weights() -> None:
    world = World([1, 2])
    world.sync_all()
    push(world, "1")
    epoch = world.machine.fleet.epoch
    world.agents["e1"].up = False
    world.sync_all()
    assert world.machine.fleet.epoch > epoch
    assert world.machine.fleet.table.world_size == 2
    assert push(world, "2") == Version(run=1, step=2, label="2")
    world.agents["e1"].restart()
    world.sync_all()
    assert not world.agents["e1"].gate_open, "it holds base"
    assert world.machine.fleet.table.world_size == 4
    push(world, "3")
    assert all(agent.gate_open for agent in world.agents.values())


def test_an_engine_that_is_silent_for_a_moment_is_still_waited_for() -> None:
    world = World([1, 1])
    world.sync_all()
    push(world, "1")
    world.agents["e1"].answers = False
    for _ in range(4):
        world.sync_all()
    refused = world.do(rq.OpenGroup(group_body(world, "h")))
    assert refused.status == 503
    assert "engine e1 has not answered" in refused.message
    world.tick(11)
    assert world.do(rq.OpenGroup(group_body(world, "h"))).success


def test_an_engine_that_drains_takes_no_new_update() -> None:
    world = World([1, 1])
    world.sync_all()
    push(world, "1")
    world.agents["e1"].draining = True
    world.sync_all()
    refused = world.do(rq.Begin())
    assert refused.status == 503
    assert "engine e1 cannot take an update now: it is being drained" in refused.message
    assert world.agents["e0"].gate_open, "nothing was begun"
    assert push(world, "2") == Version(run=1, step=2, label="2")
    assert [agent.gate_open for agent in world.agents.values()] == [True, False]


def away_for_one_update(world: World) -> None:
    """Version 1 reaches both engines, version 2 only e0; then e1 is back, in the same boot."""
    world.sync_all()
    push(world, "1")
    world.agents["e1"].answers = False
    for _ in range(4):
        world.sync_all()
    world.tick(11)
    push(world, "2")
    world.agents["e1"].answers = True
    world.sync_all()


def test_the_latest_only_is_served_by_default() -> None:
    world = World([1, 1])
    away_for_one_update(world)
    assert [agent.gate_open for agent in world.agents.values()] == [True, False]


def test_max_staleness_lets_an_engine_serve_that_is_not_further_behind() -> None:
    world = World([1, 1])
    world.policy = Weights(max_staleness=1)
    world.send_intent()
    away_for_one_update(world)
    assert [agent.gate_open for agent in world.agents.values()] == [True, True]
    world.start()
    world.sync_all()
    assert world.agents["e1"].gate_open, "the record has the tolerated versions"
    world.agents["e1"].answers = False
    for _ in range(4):
        world.sync_all()
    world.tick(11)
    push(world, "3")
    world.agents["e1"].answers = True
    world.sync_all()
    assert not world.agents["e1"].gate_open, "it is two behind now"


def test_a_new_run_on_demand() -> None:
    world = World([1])
    world.sync_all()
    push(world, "7")
    assert world.do(rq.NewRun()).fleet["next_run"] == 2
    world.start()
    world.sync_all()
    assert push(world, "8") == Version(run=2, step=8, label="8"), "8 follows 7, and yet it is another run"
    assert push(world, "9") == Version(run=2, step=9, label="9")


def test_a_session_begins_with_the_label_of_its_version() -> None:
    world = World([1, 1])
    world.sync_all()
    assert world.do(rq.OpenGroup(group_body(world, "g"))).success
    assert world.do(rq.Begin(label="7")).fleet["version"] == "1/7"
    for request in (rq.Update("g", None, {"names": ["w"]}), rq.End()):
        assert world.do(request).success
    assert str(world.machine.fleet.committed) == "1/7"
