"""What the record says about the weight store, for the condition ``StoreReady``."""

from __future__ import annotations

import pytest

from sglang_rollout.coordinator.update.staging import count_copies
from sglang_rollout.coordinator.update.store import MAX_MISSES
from sglang_rollout.wire.record import Record, StoreState
from tests.properties.support.staged_world import StagedWorld, serves


class WatchedWorld(StagedWorld):
    """A world that notes each state of the weight store in a record that was written."""

    states: list[StoreState]

    @property
    def record(self) -> Record | None:
        return self._record

    @record.setter
    def record(self, written: Record | None) -> None:
        self._record = written
        noted = self.__dict__.setdefault("states", [])
        if written is not None and written.store is not None and noted[-1:] != [written.store.state]:
            noted.append(written.store.state)

    def message(self) -> str:
        assert self.record is not None
        assert self.record.store is not None
        return self.record.store.message


@pytest.mark.parametrize("copies", [1, 2])
def test_no_push_and_no_restart_of_the_coordinator_changes_the_state(copies: int) -> None:
    """With one copy the store deletes the committed version when an update begins."""
    world = WatchedWorld(copies=copies)
    assert count_copies(world.machine.fleet) is None, "no version was pushed"
    for label in ("1", "2", "3"):
        world.push(label)
        world.settle()
        assert count_copies(world.machine.fleet) == len(world.agents) + 1
    world.start()
    world.settle()
    assert serves(world, "1/3")
    assert world.states == [StoreState.COMPLETE]


def test_a_store_that_lost_the_version_fetches_it() -> None:
    world = WatchedWorld()
    world.push("1")
    world.settle()
    world.store.restart()
    world.settle()
    assert world.states[0] is world.states[-1] is StoreState.COMPLETE
    assert StoreState.FETCHING in world.states


def test_a_version_that_no_pod_has_is_lacking_until_the_next_push() -> None:
    world = WatchedWorld()
    world.push("1")
    world.settle()
    world.store.restart()
    for name in list(world.agents):
        world.add_agent(name)
    world.tick(5)
    world.settle()
    assert (world.states[-1:], count_copies(world.machine.fleet)) == ([StoreState.LACKING], 0)
    assert "No pod and no usable snapshot has the committed version 1/1: push again" in world.message()
    world.push("2")
    world.settle()
    assert world.states[-1:] == [StoreState.COMPLETE]


def test_a_store_that_does_not_answer_is_away() -> None:
    world = WatchedWorld()
    world.push("1")
    world.settle()
    world.store.answers = False
    for _ in range(MAX_MISSES):
        world.poll_store()
    assert world.states[-1:] == [StoreState.AWAY]
    world.store.answers = True
    world.settle()
    assert world.states[-1:] == [StoreState.COMPLETE]
