"""What a restarted coordinator may prove, and what not."""

from __future__ import annotations

from typing import Any

from sglang_rollout.coordinator.update.knowledge import complete_cohorts, is_everyone_heard, rebuild
from sglang_rollout.wire.agent import AgentStatus
from sglang_rollout.wire.record import EngineRow, GroupRow, Record
from sglang_rollout.wire.states import BASE, EngineState, Version

OLD, NEW = Version(run=1, step=4, label="4"), Version(run=1, step=5, label="5")
BOTH = ["a", "b"]


def clean(name: str, version: Version, cohort: list[str] | None = None, **more: Any) -> AgentStatus:
    return AgentStatus(
        name=name, boot_id=f"{name}1", state=EngineState.CLEAN, version=version, cohort=cohort or [], term=1,
        gate_open=False, **{"committed": None, **more},
    )  # fmt: skip


def dirty(name: str, **more: Any) -> AgentStatus:
    return AgentStatus(
        name=name, boot_id=f"{name}1", state=EngineState.DIRTY, version=None, term=1, gate_open=False,
        **{"committed": None, **more},
    )  # fmt: skip


def record(version: Version, **more: Any) -> Record:
    return Record(term=1, epoch=2, committed=version, **more)


def test_a_fresh_fleet_is_at_base() -> None:
    assert rebuild(None, [clean("a", BASE), clean("b", BASE)]).committed == BASE


def test_the_record_proves() -> None:
    assert rebuild(record(OLD), [clean("a", BASE), clean("b", BASE)]).committed == OLD


def test_a_complete_cohort_proves_more_than_the_record() -> None:
    """The API server was away, or the coordinator died before it could write."""
    assert rebuild(record(OLD), [clean("a", NEW, BOTH), clean("b", NEW, BOTH)]).committed == NEW


def test_an_incomplete_cohort_proves_nothing_and_reserves_its_version() -> None:
    found = rebuild(record(OLD), [clean("a", NEW, BOTH), dirty("b")])
    assert (found.committed, found.reserved) == (OLD, NEW)


def test_a_cohort_with_an_engine_that_is_not_heard_proves_nothing() -> None:
    assert complete_cohorts([clean("a", NEW, BOTH)]) == []


def test_engines_of_different_cohorts_prove_nothing() -> None:
    assert complete_cohorts([clean("a", NEW, ["a", "b"]), clean("b", NEW, ["b", "c"])]) == []


def test_an_agent_that_received_the_commit_proves_it() -> None:
    assert rebuild(None, [clean("a", NEW, BOTH, committed=NEW), dirty("b")]).committed == NEW


def test_an_open_update_is_given_up() -> None:
    statuses = [dirty("a", session=True), clean("b", OLD, paused=True), clean("c", OLD)]
    found = rebuild(record(OLD), statuses)
    assert (found.committed, found.give_up) == (OLD, ("a", "b"))


def test_groups_survive_only_with_all_members_in_the_boot_in_which_they_joined() -> None:
    rows = [EngineRow(name=name, state=EngineState.CLEAN, version=OLD, boot_id=f"{name}1", gate_open=True) for name in BOTH]
    group = GroupRow(name="g", epoch=2, world_size=3, master="h:1", backend="gloo", places=[0, 1])
    kept = record(OLD, engines=rows, joined=[group])
    both = [clean("a", OLD, groups=["g"]), clean("b", OLD, groups=["g"])]
    assert dict(rebuild(kept, both).groups["g"].boots) == {"a": "a1", "b": "b1"}
    assert rebuild(kept, both[:1]).groups == {}
    assert rebuild(kept, [both[0], clean("b", OLD)]).groups == {}
    restarted = both[1].model_copy(update={"boot_id": "b2"})
    assert rebuild(kept, [both[0], restarted]).groups == {}


def test_every_engine_with_an_address_must_have_been_heard() -> None:
    assert is_everyone_heard(["a"], ["a", "b"])
    assert not is_everyone_heard(["a", "b"], ["a"])
