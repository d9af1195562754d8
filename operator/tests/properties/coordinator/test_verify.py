"""Engines that hold other weights than the rest are found before the commit, fenced and named."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_rollout.api.weights_spec import Verify, Weights
from sglang_rollout.coordinator.update import requests as rq
from sglang_rollout.coordinator.update.verify import find_differing
from sglang_rollout.sglang.api import ControlCall
from sglang_rollout.wire.states import Version
from tests.properties.support.coordinator_world import World


def begun(sizes: list[int], **policy: object) -> World:
    """An update that lacks only its end."""
    world = World(sizes)
    world.policy = Weights.model_validate({"verify": Verify.ALWAYS, **policy})
    world.send_intent()
    world.sync_all()
    again(world)
    return world


def again(world: World) -> None:
    size = world.machine.fleet.table.world_size
    body = {"master_address": "10.0.0.9", "master_port": 7, "rank_offset": 1, "group_name": "g", "world_size": size}
    for request in (rq.OpenGroup(body), rq.Begin(), rq.Update("g", None, {"names": ["w"]})):
        assert world.do(request).success


def test_an_engine_that_differs_is_named_and_nothing_is_committed() -> None:
    world = begun([1, 1, 1])
    world.agents["e1"].checksum = "other"
    answer = world.do(rq.End())
    assert answer.status == 400
    assert "engine e1 holds other weights than 2 engines of its shape (rank 0)" in answer.message
    assert answer.fleet["engine"] == "e1"
    assert world.machine.fleet.committed == Version(run=0, step=0, label="base")
    assert not any(agent.gate_open for agent in world.agents.values())


def test_with_min_committed_it_is_fenced_alone() -> None:
    world = begun([1, 1, 1], min_committed=2)
    world.agents["e1"].checksum = "other"
    answer = world.do(rq.End())
    assert (answer.status, answer.fleet["outcome"]) == (200, "Partial")
    assert [agent.gate_open for agent in world.agents.values()] == [True, False, True]


@pytest.mark.parametrize(("verify", "opened"), [(Verify.ALWAYS, [True, False]), (Verify.OFF, [True, True])])
def test_an_engine_without_a_checksum_commits_only_if_the_policy_allows_it(verify: Verify, opened: list[bool]) -> None:
    world = begun([1, 1], min_committed=1, verify=verify)
    world.agents["e1"].checksum = None
    answer = world.do(rq.End())
    assert answer.status == 200
    assert [agent.gate_open for agent in world.agents.values()] == opened
    assert ("engine e1 could not be verified: Not Found (weights.verify Off commits without)" in answer.message) is (
        verify is Verify.ALWAYS
    )


def test_the_checksums_of_the_trainer_win_over_the_majority_and_the_policy() -> None:
    world = begun([1, 1, 1], min_committed=1, verify=Verify.OFF)
    for name, checksum in {"e0": "wrong", "e1": "right", "e2": "wrong"}.items():
        world.agents[name].checksum = checksum
    answer = world.do(rq.End({1: ("right",)}))
    assert (answer.status, answer.fleet["outcome"]) == (200, "Partial")
    assert "engine e0 holds other weights than the trainer says (rank 0 has wrong, not right)" in answer.message
    assert [agent.gate_open for agent in world.agents.values()] == [False, True, False]


def test_engines_of_a_shape_without_a_checksum_of_the_trainer_are_compared_with_each_other() -> None:
    world = begun([2, 1], verify=Verify.OFF)
    world.agents["e1"].checksum = "right"
    assert world.do(rq.End({1: ("right",)})).success


def test_engines_of_different_shape_are_not_compared() -> None:
    world = begun([1, 2])
    world.agents["e1"].checksum = "sharded otherwise"
    assert world.do(rq.End()).success


def test_without_a_majority_no_engine_is_trusted() -> None:
    world = begun([1, 1], min_committed=1)
    world.agents["e1"].checksum = "other"
    answer = world.do(rq.End())
    assert answer.status == 400
    assert "no majority" in answer.message


@pytest.mark.parametrize(("verify", "expected"), [(Verify.ALWAYS, 5), (Verify.EVERY_N, 2), (Verify.OFF, 0)])
def test_how_often_is_a_policy(verify: Verify, expected: int) -> None:
    world = begun([1], verify=verify, verify_every=4)
    assert world.do(rq.End()).success
    for _ in range(4):
        again(world)
        assert world.do(rq.End()).success
    assert sum(send.path == ControlCall.CHECK_WEIGHTS.path for send in world.sent) == expected


@given(st.dictionaries(st.text(min_size=1, max_size=3), st.tuples(st.sampled_from("ab"), st.sampled_from("ab")), max_size=7))
def test_only_equal_engines_remain(alike: dict[str, tuple[str, ...]]) -> None:
    wrong = find_differing(alike)
    assert len({sums for name, sums in alike.items() if name not in wrong}) <= 1
    assert len(wrong) < len(alike) / 2 or set(wrong) == set(alike)
