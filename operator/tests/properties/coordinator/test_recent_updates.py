"""The record lists how the last updates ended, with author, duration, bytes and the reason of a failure."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from sglang_rollout.api.weights_spec import Verify
from sglang_rollout.coordinator.update import requests as rq
from sglang_rollout.coordinator.update.sources import count_bytes
from sglang_rollout.sglang.api import ControlCall
from sglang_rollout.wire.ports import AGENT_ACK
from sglang_rollout.wire.record import MAX_RECENT_UPDATES, EndedUpdate, Record, UpdateOutcome, UpdateReason
from sglang_rollout.wire.states import FleetState
from tests.properties.support.coordinator_world import World, group_body

ANNE, BEN = "ml/Job/anne", "ml/Job/ben"
TENSORS = {"names": ["w", "u"], "dtypes": ["bfloat16", "float32"], "shapes": [[2], [2]]}
TENSOR_BYTES = 2 * 2 + 2 * 4


def make() -> World:
    world = World([1, 1])
    world.sync_all()
    assert world.do(rq.OpenGroup(group_body(world, "g")), ANNE).success
    return world


def recent(world: World) -> list[EndedUpdate]:
    found = world.machine.fleet.record()
    assert found is not None
    return Record.model_validate_json(found.model_dump_json()).recent_updates


def push(world: World, label: str) -> None:
    assert world.do(rq.Begin(), ANNE).success
    assert world.do(rq.Update("g", label, TENSORS), ANNE).success
    assert world.do(rq.End(), ANNE).success


def test_the_newest_updates_are_listed_first_and_old_updates_are_forgotten() -> None:
    world = make()
    for step in range(1, MAX_RECENT_UPDATES + 3):
        push(world, str(step))
    updates = recent(world)
    assert [update.version.step for update in updates] == list(range(MAX_RECENT_UPDATES + 2, 2, -1))
    assert {(update.author, update.outcome, update.bytes, update.reason) for update in updates} == {
        (ANNE, UpdateOutcome.COMMITTED, TENSOR_BYTES, None)
    }
    assert all(update.phases_ms["total"] > 0 for update in updates)
    assert [len(update.engines) for update in updates] == [2] + [0] * (MAX_RECENT_UPDATES - 1)


def test_a_restarted_coordinator_continues_the_list() -> None:
    world = make()
    push(world, "1")
    push(world, "2")
    assert world.do(rq.Begin(), ANNE).success
    world.start()
    world.sync_all()
    assert [(update.version.step, update.reason) for update in recent(world)] == [
        (3, UpdateReason.COORDINATOR_RESTARTED), (2, None), (1, None),
    ]  # fmt: skip


def fail_at(path: str) -> Callable[[World], object]:
    """Return a push in which engine e1 fails the calls to a path."""

    def run(world: World) -> None:
        for request in (rq.Update("g", None, TENSORS), rq.End()):
            world.ask(request, ANNE)
            world.drain(failing=path, engines={"e1"})

    return run


def restart_engine(world: World) -> None:
    world.agents["e1"].restart()
    world.settle()


def wait_for_the_deadline(world: World) -> None:
    world.tick(100_000)
    world.drain()


@pytest.mark.parametrize(
    ("incident", "reason"),
    [
        (fail_at(ControlCall.UPDATE_DISTRIBUTED.path), UpdateReason.ENGINE_FAILED),
        (fail_at(AGENT_ACK), UpdateReason.ENGINE_FAILED),
        (fail_at(ControlCall.CHECK_WEIGHTS.path), UpdateReason.VERIFICATION_FAILED),
        (lambda world: world.do(rq.End(), ANNE), UpdateReason.INCOMPLETE),
        (lambda world: world.do(rq.Begin(), ANNE), UpdateReason.UNEXPECTED_CALL),
        (lambda world: world.do(rq.Continue(), ANNE), UpdateReason.UNEXPECTED_CALL),
        (lambda world: world.do(rq.Claim(take_over=True), BEN), UpdateReason.TAKEN_OVER),
        (restart_engine, UpdateReason.ENGINE_LOST),
        (wait_for_the_deadline, UpdateReason.TRAINER_LOST),
    ],
)
def test_a_failed_update_has_a_reason(incident: Callable[[World], object], reason: UpdateReason) -> None:
    world = make()
    world.policy = world.policy.model_copy(update={"verify": Verify.ALWAYS})
    world.send_intent()
    assert world.do(rq.Begin(), ANNE).success
    incident(world)
    (update,) = recent(world)
    assert (update.outcome, update.author, update.reason) == (UpdateOutcome.FAILED, ANNE, reason)
    assert update.message


def test_a_pause_that_ends_with_a_sleep_of_the_fleet_has_a_reason() -> None:
    world = make()
    assert world.do(rq.Pause("retract"), ANNE).success
    world.set_state(FleetState.ASLEEP)
    world.settle()
    (update,) = recent(world)
    assert (update.outcome, update.reason, update.bytes) == (UpdateOutcome.ABORTED, UpdateReason.ASLEEP, None)


def test_a_partial_commit_has_the_reason_of_the_engine_that_failed() -> None:
    world = World([1, 1], min_committed=1)
    world.sync_all()
    assert world.do(rq.OpenGroup(group_body(world, "g")), ANNE).success
    assert world.do(rq.Begin(), ANNE).success
    fail_at(AGENT_ACK)(world)
    (update,) = recent(world)
    assert (update.outcome, update.reason) == (UpdateOutcome.PARTIAL, UpdateReason.ENGINE_FAILED)


def test_bytes_of_all_calls_are_added() -> None:
    world = make()
    assert world.do(rq.Begin(), ANNE).success
    for name in ("u", "v"):
        assert world.do(rq.Update("g", None, {"names": [name], "dtypes": ["int8"], "shapes": [[2]]}), ANNE).success
    assert world.do(rq.End(), ANNE).success
    assert [update.bytes for update in recent(world)] == [4]


def test_bytes_of_a_checkpoint_without_sizes_are_not_known() -> None:
    world = make()
    assert world.do(rq.FromDisk("/checkpoints/7", None, {}), ANNE).success
    assert [update.bytes for update in recent(world)] == [None]


@pytest.mark.parametrize(
    ("more", "size"),
    [
        ({}, 4 * 8 * 2 + 8 * 4),
        ({"shapes": [[], [0, 7]]}, 2),
        ({"dtypes": ["bfloat16", "complex256"]}, None),
        ({"dtypes": ["bfloat16", 7]}, None),
        ({"dtypes": ["bfloat16"]}, None),
        ({"shapes": [[4, 8], "8"]}, None),
        ({"shapes": [[4, 8], [-8]]}, None),
        ({"shapes": [[4, 8], [True]]}, None),
        ({"shapes": [[4, 8], [8.0]]}, None),
        ({"shapes": [[4, 8], [2**60]]}, None),
        ({"shapes": [[4, 8], [2**52, 2**52]]}, None),
        ({"shapes": [[4, 8], [1] * 65]}, None),
    ],
)
def test_bytes_come_from_types_and_shapes(more: dict[str, Any], size: int | None) -> None:
    assert count_bytes({"shapes": [[4, 8], [8]], **{key: TENSORS[key] for key in ("names", "dtypes")}, **more}) == size
