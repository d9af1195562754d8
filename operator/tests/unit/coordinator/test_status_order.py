"""A status that describes an earlier state is ignored, however late it arrives."""

from __future__ import annotations

from sglang_rollout.api.intent import WantedEngine
from sglang_rollout.coordinator.update.engine import Engine
from sglang_rollout.wire.agent import AgentStatus
from sglang_rollout.wire.states import BASE, EngineState


def status(boot: str = "b1", state: EngineState = EngineState.CLEAN, **fields: object) -> AgentStatus:
    version = BASE if state is EngineState.CLEAN else None
    found = AgentStatus(name="e0", boot_id=boot, state=state, version=version, committed=BASE, term=1, gate_open=True)
    return found.model_copy(update=fields)


def engine_with(first: AgentStatus) -> Engine:
    engine = Engine(WantedEngine(name="e0"))
    engine.take(first, 1)
    return engine


def test_the_answer_to_an_earlier_sync_is_ignored() -> None:
    engine = engine_with(status())
    engine.take(status(paused=True), 4)
    engine.take(status(), 3)
    assert engine.paused


def test_no_sync_reverts_a_call_that_was_answered_after_the_sync_was_sent() -> None:
    engine = engine_with(status())
    engine.anticipate(5, paused=True)
    engine.take(status(), 4)
    assert engine.paused
    engine.take(status(), 6)
    assert not engine.paused


def test_an_engine_stays_dirty_until_a_sync_that_follows_the_update_call() -> None:
    engine = engine_with(status())
    engine.mark_dirty()
    engine.take(status(), 7)
    assert not engine.holds(BASE), "the call is under way"
    engine.changed_seq = 8
    engine.take(status(), 7)
    assert not engine.holds(BASE), "the sync was sent before the call was answered"
    engine.take(status(), 9)
    assert engine.holds(BASE), "the call never reached the engine"


def test_a_new_boot_has_received_no_call() -> None:
    engine = engine_with(status())
    engine.mark_dirty()
    engine.take(status("b2"), 7)
    assert engine.holds(BASE)
    engine.take(status("b1", EngineState.DIRTY), 6)
    assert engine.boot == "b2"
