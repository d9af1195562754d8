"""The agent's state machine: above all, that the gate is open only while the engine holds the committed version completely."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_rollout.agent import events as ev
from sglang_rollout.agent import state as s
from sglang_rollout.sglang.api import ControlCall
from sglang_rollout.wire.reasons import GateReason, Refusal, RefusalCode
from sglang_rollout.wire.states import BASE, EngineState, FleetState, StagedVersion, Version, describe_state

V1, V2 = Version(run=1, step=1, label="1"), Version(run=1, step=2, label="2")


def message(refused: Refusal | None) -> str:
    return "" if refused is None else refused.message


def facts(boot: str = "a", live: str = "base", launch: str = "base") -> s.EngineFacts:
    return s.EngineFacts(boot_id=boot, live_label=live, launch_label=launch, sglang_version="0.5.23", tensor_size=1)


def run(state: s.State, *events: ev.Event) -> s.State:
    for event in events:
        state, _ = ev.step(state, event)
    return state


def call(name: str, ok: bool = True, boot: str = "a", what: str = "", tags: tuple[str, ...] = ()) -> tuple[ev.Event, ev.Event]:
    return ev.CallBegan(name, what, tags), ev.CallEnded(name, ok, boot, what, tags)


FRESH = run(s.State(), ev.EngineIdentified(facts()))
SERVING = run(FRESH, ev.CoordinatorCalled(1, BASE))
UPDATED = run(SERVING, *call(ControlCall.BEGIN_UPDATE), *call(ControlCall.UPDATE_DISTRIBUTED), *call(ControlCall.END_UPDATE))


def test_a_fresh_engine_is_clean_base_and_closed_until_syncs() -> None:
    assert FRESH.record.state is EngineState.CLEAN
    assert FRESH.record.version == BASE
    assert not s.gate_may_open(FRESH)
    assert s.gate_may_open(SERVING)


def test_the_gate_opens_only_while_the_plug_in_of_this_engine_process_has_proved_itself() -> None:
    started = run(ev.restore_state(s.EngineRecord(), requires_plugin=True), ev.EngineIdentified(facts()), ev.CoordinatorCalled(1, BASE))
    assert not s.gate_may_open(started)
    assert s.status(started, name="e0", gate_open=False).reason is GateReason.NOT_UP, "the reports have not been read"
    lacking = run(started, ev.PluginChecked("a", "No scheduler has seen a request."))
    status = s.status(lacking, name="e0", gate_open=False)
    assert status.reason is GateReason.PLUGIN_MISSING
    assert "SGLang 0.5.23" in status.message, "the release decides whether the plug-in fits"
    assert "No scheduler has seen a request." in status.message
    assert "engine.plugin: Optional" in status.message
    proved = run(lacking, ev.PluginChecked("a", ""))
    assert s.gate_may_open(proved)
    again = run(proved, ev.EngineDown("silent"), ev.EngineIdentified(facts()))
    assert s.gate_may_open(again), "the same process"
    other = run(proved, ev.EngineDown("gone"), ev.EngineIdentified(facts("b")), ev.PluginChecked("a", ""))
    assert not s.gate_may_open(other), "a proof of the earlier process says nothing about this one"
    restarted = run(ev.restore_state(proved.record, requires_plugin=True), ev.EngineIdentified(facts()), ev.RecordTrusted())
    assert not s.gate_may_open(restarted)
    assert s.gate_may_open(run(restarted, ev.PluginChecked("a", "")))


@pytest.mark.parametrize("requires_plugin", [True, False])
def test_the_status_says_that_sglang_refuses_updates_in_this_engine_process(requires_plugin: bool) -> None:
    started = run(ev.restore_state(s.EngineRecord(), requires_plugin=requires_plugin), ev.EngineIdentified(facts()))
    reported = run(started, ev.PluginChecked("a", "", "splits are active"))
    assert s.status(reported, name="e0", gate_open=False).updates_refused == "splits are active"
    other = run(reported, ev.EngineDown("gone"), ev.EngineIdentified(facts("b")))
    assert s.status(other, name="e0", gate_open=False).updates_refused == ""


def test_the_status_has_the_sampling_parameters_of_this_engine_process() -> None:
    reported = run(ev.restore_state(s.EngineRecord()), ev.EngineIdentified(facts()), ev.PluginChecked("a", "", sampling_params=("n",)))
    assert s.status(reported, name="e0", gate_open=False).sampling_params == ["n"]
    other = run(reported, ev.EngineDown("gone"), ev.EngineIdentified(facts("b")))
    assert s.status(other, name="e0", gate_open=False).sampling_params == []


def test_an_agent_that_does_not_require_the_plug_in_ignores_its_reports() -> None:
    assert s.gate_may_open(run(SERVING, ev.PluginChecked("a", "The plug-in has reported nothing.")))


def test_an_engine_whose_label_has_changed_before_the_first_poll_is_unknown() -> None:
    state = run(s.State(), ev.EngineIdentified(facts(live="7")), ev.CoordinatorCalled(1, BASE))
    assert state.record.state is EngineState.UNKNOWN
    assert not s.gate_may_open(state)


@pytest.mark.parametrize("update", [ControlCall.UPDATE_DISTRIBUTED, ControlCall.UPDATE_TENSOR])
def test_a_complete_update_opens_the_gate_after_ack_and_commit(update: str) -> None:
    updated = run(SERVING, *call(ControlCall.BEGIN_UPDATE), *call(update), *call(ControlCall.END_UPDATE))
    assert updated.record.state is EngineState.DIRTY
    assert s.ack_refusal(updated, "a", V1) is None
    acked = run(updated, ev.UpdateAcknowledged(V1, ("e0",)))
    assert not s.gate_may_open(acked)
    assert s.gate_may_open(run(acked, ev.CoordinatorCalled(1, V1)))


@pytest.mark.parametrize("began", [ControlCall.BEGIN_UPDATE, ControlCall.UPDATE_TENSOR])
def test_the_record_is_saved_before_the_gate_moves_and_dirty_before_the_call(began: str) -> None:
    state, effects = ev.step(SERVING, ev.CallBegan(began))
    assert [type(effect) for effect in effects] == [ev.Save, ev.SetGate]
    assert isinstance(effects[0], ev.Save)
    assert effects[0].record.state is EngineState.DIRTY
    assert not s.gate_may_open(state)


@pytest.mark.parametrize(
    ("events", "why"),
    [
        (call(ControlCall.BEGIN_UPDATE), "session is still open"),
        ((*call(ControlCall.BEGIN_UPDATE), *call(ControlCall.END_UPDATE)), "received no weights"),
        (
            (
                *call(ControlCall.BEGIN_UPDATE),
                *call(ControlCall.UPDATE_DISTRIBUTED),
                *call(ControlCall.UPDATE_DISTRIBUTED, ok=False),
                *call(ControlCall.END_UPDATE),
            ),
            "failed",
        ),
        (
            (
                *call(ControlCall.BEGIN_UPDATE),
                *call(ControlCall.UPDATE_TENSOR),
                *call(ControlCall.UPDATE_TENSOR, ok=False),
                *call(ControlCall.END_UPDATE),
            ),
            "failed",
        ),
        ((*call(ControlCall.BEGIN_UPDATE), *call(ControlCall.UPDATE_DISTRIBUTED), *call(ControlCall.END_UPDATE, ok=False)), "still open"),
        (
            (*call(ControlCall.BEGIN_UPDATE), *call(ControlCall.UPDATE_DISTRIBUTED), ev.CallBegan(ControlCall.END_UPDATE)),
            "not answered end_weight_update",
        ),
        (
            (*call(ControlCall.BEGIN_UPDATE), *call(ControlCall.UPDATE_DISTRIBUTED), *call(ControlCall.END_UPDATE), ev.UpdateGivenUp()),
            "failed",
        ),
        ((), "no update"),
        ((ev.EngineDown("x"),), "gone"),
    ],
)
def test_an_incomplete_update_cannot_be_acknowledged(events: tuple[ev.Event, ...], why: str) -> None:
    assert why in message(s.ack_refusal(run(SERVING, *events), "a", V1))


def test_an_ack_for_another_boot_id_is_refused() -> None:
    assert "gone" in message(s.ack_refusal(UPDATED, "b", V1))


def test_a_new_begin_clears_an_earlier_failure() -> None:
    state = run(
        SERVING,
        *call(ControlCall.BEGIN_UPDATE),
        *call(ControlCall.UPDATE_DISTRIBUTED, ok=False),
        ev.UpdateGivenUp(),
        *call(ControlCall.END_UPDATE),
    )
    state = run(state, *call(ControlCall.BEGIN_UPDATE), *call(ControlCall.UPDATE_DISTRIBUTED), *call(ControlCall.END_UPDATE))
    assert s.ack_refusal(state, "a", V2) is None


def test_a_restarted_engine_is_base_and_closed_when_another_version_is_committed() -> None:
    state = run(
        UPDATED, ev.UpdateAcknowledged(V1, ("e0",)), ev.CoordinatorCalled(1, V1), ev.EngineDown("gone"), ev.EngineIdentified(facts("b"))
    )
    assert state.record.version == BASE
    assert not s.gate_may_open(state)
    status = s.status(state, name="e0", gate_open=False)
    assert status.reason is GateReason.NOT_COMMITTED
    assert status.message == "The engine holds version base, and version 1/1 is committed."


def test_an_answer_of_an_earlier_engine_process_changes_nothing() -> None:
    began = run(
        SERVING,
        *call(ControlCall.BEGIN_UPDATE),
        ev.CallBegan(ControlCall.UPDATE_DISTRIBUTED),
        ev.EngineDown("gone"),
        ev.EngineIdentified(facts("b")),
    )
    assert run(began, ev.CallEnded(ControlCall.UPDATE_DISTRIBUTED, True, "a")).record == began.record


def test_a_label_that_changes_without_a_call_closes_the_gate() -> None:
    state = run(SERVING, ev.LabelPolled("9", SERVING.calls))
    assert state.record.state is EngineState.UNKNOWN
    assert not s.gate_may_open(state)


def test_a_poll_from_before_the_last_call_is_ignored() -> None:
    acked = run(UPDATED, ev.UpdateAcknowledged(V1, ()), ev.CoordinatorCalled(1, V1))
    assert s.gate_may_open(run(acked, ev.LabelPolled("base", UPDATED.calls)))


def test_a_restarted_agent_trusts_its_record_only_if_no_coordinator_contradicts() -> None:
    record = run(UPDATED, ev.UpdateAcknowledged(V1, ()), ev.CoordinatorCalled(4, V1)).record
    again = run(ev.restore_state(record), ev.EngineIdentified(facts(live="1")))
    assert again.record.term == 4
    assert not s.gate_may_open(again)
    assert s.gate_may_open(run(again, ev.RecordTrusted()))
    assert not s.gate_may_open(run(again, ev.CoordinatorCalled(4, V2), ev.RecordTrusted()))


def test_a_record_of_an_earlier_engine_process_has_no_committed_version() -> None:
    again = run(ev.restore_state(SERVING.record), ev.EngineIdentified(facts("b")), ev.RecordTrusted())
    assert again.record.committed is None
    assert not s.gate_may_open(again)


def test_a_call_without_an_answer_counts_as_failed() -> None:
    record = run(SERVING, *call(ControlCall.BEGIN_UPDATE), ev.CallBegan(ControlCall.UPDATE_DISTRIBUTED)).record
    again = run(ev.restore_state(record), ev.EngineIdentified(facts()))
    assert again.record.pending == ""
    assert again.record.failed
    assert "failed" in message(s.ack_refusal(run(again, *call(ControlCall.END_UPDATE)), "a", V1))


def test_released_weights_must_be_verified_and_released_cache_closes_the_gate() -> None:
    state = run(SERVING, *call(ControlCall.RELEASE_MEMORY, tags=("kv_cache",)))
    assert not s.gate_may_open(state)
    assert s.gate_may_open(run(state, *call(ControlCall.RESUME_MEMORY, tags=("kv_cache",))))
    lost = run(SERVING, *call(ControlCall.RELEASE_MEMORY, tags=("weights",)))
    assert lost.record.state is EngineState.UNKNOWN
    assert s.ack_refusal(lost, "a", BASE, verified=True), "not while they are released"
    back = run(lost, *call(ControlCall.RESUME_MEMORY, tags=("weights",)))
    assert not s.gate_may_open(back)
    assert s.ack_refusal(back, "a", BASE), "the weights have not been compared"
    assert s.ack_refusal(back, "a", BASE, verified=True) is None
    assert s.gate_may_open(run(back, ev.UpdateAcknowledged(BASE, ("e0",))))
    assert s.ack_refusal(run(SERVING, ev.LabelPolled("9", SERVING.calls)), "a", BASE, verified=True), "only after a release"


def test_the_record_names_the_adapters_of_one_engine_process() -> None:
    load = (ev.CallBegan(ControlCall.LOAD_ADAPTER, "a", ("/a",)), ev.CallEnded(ControlCall.LOAD_ADAPTER, True, "a", "a", ("/a",)))
    refused = (ev.CallBegan(ControlCall.LOAD_ADAPTER, "b", ("/b",)), ev.CallEnded(ControlCall.LOAD_ADAPTER, False, "a", "b", ("/b",)))
    state = run(SERVING, *load, *refused)
    assert state.record.adapters == {"a": "/a"}
    assert s.gate_may_open(state)
    assert run(state, *call(ControlCall.UNLOAD_ADAPTER, what="a")).record.adapters == {}
    assert run(state, ev.EngineIdentified(facts("b"))).record.adapters == {}


def test_draining_closes_the_gate() -> None:
    assert not s.gate_may_open(run(SERVING, ev.DrainingChanged(True)))
    assert s.gate_may_open(run(SERVING, ev.DrainingChanged(True), ev.DrainingChanged(False)))


def test_the_record_contains_groups_and_pause() -> None:
    state = run(
        SERVING, *call(ControlCall.INIT_GROUP, what="g"), *call(ControlCall.INIT_GROUP, ok=False, what="h"), *call(ControlCall.PAUSE)
    )
    assert (state.record.groups, state.record.interruption.is_pause) == (["g"], True)
    state = run(state, *call(ControlCall.DESTROY_GROUP, what="g"), *call(ControlCall.CONTINUE))
    assert (state.record.groups, state.record.interruption.is_pause) == ([], False)


def test_an_engine_paused_by_spec_stays_closed_after_restarts_of_agent_and_engine() -> None:
    held = run(SERVING, ev.CoordinatorCalled(1, BASE, spec_state=FleetState.PAUSED))
    assert s.closed_reason(held) == Refusal(GateReason.PAUSED, describe_state(FleetState.PAUSED))
    assert not s.gate_may_open(run(held, ev.CoordinatorCalled(1, BASE))), "a coordinator that does not know yet changes nothing"
    again = run(ev.restore_state(held.record), ev.EngineIdentified(facts("b")), ev.CoordinatorCalled(1, BASE))
    assert not s.gate_may_open(again)
    assert s.gate_may_open(run(again, ev.CoordinatorCalled(1, BASE, spec_state=FleetState.ACTIVE)))


def test_the_lease_does_not_end_a_pause_by_spec() -> None:
    paused = run(SERVING, *call(ControlCall.PAUSE))
    assert s.waits_for_coordinator(paused)
    held = run(paused, ev.CoordinatorCalled(1, BASE, spec_state=FleetState.PAUSED))
    assert not s.waits_for_coordinator(held)
    assert s.stays_paused(held.record)
    half_updated = run(held, *call(ControlCall.BEGIN_UPDATE))
    assert s.waits_for_coordinator(half_updated)
    assert not s.stays_paused(half_updated.record), "requests to a mixture must end"


def test_status_describes_the_engine_only_while_it_is_up() -> None:
    status = s.status(replace(SERVING, up=False, down=Refusal(GateReason.RESTART_BUDGET_EXHAUSTED, "it fell")), name="e0", gate_open=False)
    assert (status.boot_id, status.state, status.version) == (None, EngineState.UNKNOWN, None)
    assert (status.reason, status.message) == (GateReason.RESTART_BUDGET_EXHAUSTED, "The engine is not up: it fell.")


def load(attempt: str, ok: bool = True, boot: str = "a") -> tuple[ev.Event, ...]:
    """The calls of an attempt to load a staged version, up to the answer of the loader."""
    return (
        ev.ActivationBegan(attempt, "u", "base"),
        *call(ControlCall.PAUSE),
        ev.CallBegan(ControlCall.BEGIN_UPDATE, attempt=attempt),
        ev.CallEnded(ControlCall.BEGIN_UPDATE, True, boot),
        ev.CallBegan(ControlCall.UPDATE_TENSOR, attempt=attempt),
        ev.CallEnded(ControlCall.UPDATE_TENSOR, ok, boot),
    )


def test_an_engine_whose_loader_refused_holds_what_it_held() -> None:
    refused = run(SERVING, *load("x", ok=False))
    assert refused.record.state is EngineState.DIRTY
    assert not s.gate_may_open(refused)
    again = run(refused, ev.ActivationRefused("x"))
    assert (again.record.version, again.record.label, again.record.session, again.record.written) == (BASE, "base", False, False)
    assert again.record.activation is None
    assert s.gate_may_open(again)
    assert run(refused, ev.ActivationRefused("y")) == refused, "another attempt proves nothing"


def test_a_dirty_engine_whose_loader_refused_stays_dirty() -> None:
    dirty = run(SERVING, *call(ControlCall.BEGIN_UPDATE), ev.UpdateGivenUp())
    again = run(dirty, *load("x", ok=False), ev.ActivationRefused("x"))
    assert (again.record.state, again.record.failed) == (EngineState.DIRTY, True)


@pytest.mark.parametrize(
    "event",
    [
        ev.UpdateGivenUp(),
        ev.CallBegan(ControlCall.UPDATE_DISTRIBUTED),
        ev.CallBegan(ControlCall.BEGIN_UPDATE, attempt="y"),
        ev.CallBegan(ControlCall.RELEASE_MEMORY, details=("weights",)),
        ev.EngineIdentified(facts("b", live="1")),
    ],
)
def test_an_attempt_ends_with_a_fence_another_write_or_another_process(event: ev.Event) -> None:
    ended = run(SERVING, *load("x", ok=False), event, ev.CallEnded(ControlCall.BEGIN_UPDATE, True, "a"))
    assert run(ended, ev.ActivationRefused("x")) == ended
    assert not s.gate_may_open(ended)


def test_an_attempt_that_the_agents_restart_interrupts_has_failed_unless_verdicts_prove_that_nothing_was_written() -> None:
    for events in (load("x"), load("x")[:-1], load("x")[:-2]):
        again = run(ev.restore_state(run(SERVING, *events).record), ev.EngineIdentified(facts()), ev.RecordTrusted())
        assert again.record.failed
        assert not s.is_update_open(again.record)
        assert not s.gate_may_open(again)
        assert "failed" in message(s.ack_refusal(run(again, *call(ControlCall.END_UPDATE)), "a", V1))
        assert s.gate_may_open(run(again, ev.ActivationRefused("x")))
    paused = run(ev.restore_state(run(SERVING, *load("x")[:3]).record), ev.EngineIdentified(facts()), ev.RecordTrusted())
    assert s.gate_may_open(paused), "no call that writes had begun"


def test_a_loaded_version_is_acknowledged_like_any_other() -> None:
    loaded = run(SERVING, *load("x"), *call(ControlCall.END_UPDATE))
    assert s.ack_refusal(loaded, "a", V1) is None
    acked = run(loaded, ev.UpdateAcknowledged(V1, ("e0",)))
    assert acked.record.activation is None
    assert not s.gate_may_open(acked)
    assert s.gate_may_open(run(acked, ev.CoordinatorCalled(1, V1)))


@pytest.mark.parametrize(
    ("events", "code"),
    [
        ((), None),
        ((ev.EngineDown("gone"),), GateReason.NOT_UP),
        ((ev.EngineIdentified(facts("b")),), GateReason.NOT_UP),
        (call(ControlCall.RELEASE_MEMORY, tags=("kv_cache",)), GateReason.RELEASED),
        ((ev.CoordinatorCalled(1, BASE, spec_state=FleetState.ASLEEP),), GateReason.ASLEEP),
        ((ev.CoordinatorCalled(1, BASE, spec_state=FleetState.PAUSED),), None),
        ((ev.DrainingChanged(True),), GateReason.DRAINING),
        (call(ControlCall.BEGIN_UPDATE), RefusalCode.CONFLICT),
        ((*call(ControlCall.BEGIN_UPDATE), ev.UpdateGivenUp()), None),
    ],
)
def test_when_a_staged_version_may_be_loaded(events: tuple[ev.Event, ...], code: object) -> None:
    refused = s.activation_refusal(run(SERVING, *events), "a")
    assert (refused.code if refused else None) == code


def test_when_the_agent_loads_its_own_copy() -> None:
    staged = StagedVersion(update="a" * 32, digest="d" * 64, bytes=8)
    serving_1 = run(UPDATED, ev.UpdateAcknowledged(V1, ("e0",)), ev.CoordinatorCalled(1, V1, staged=staged))
    restarted = run(serving_1, ev.EngineDown("gone"), ev.EngineIdentified(facts("b")))
    assert s.needs_own_copy(restarted)
    assert not s.needs_own_copy(serving_1)
    assert not s.needs_own_copy(run(serving_1, ev.EngineDown("gone")))
    assert not s.needs_own_copy(SERVING), "base needs no copy"
    assert s.needs_own_copy(run(serving_1, ev.LabelPolled("9", serving_1.calls)))
    assert s.needs_own_copy(run(serving_1, *call(ControlCall.BEGIN_UPDATE), ev.UpdateGivenUp()))
    assert not s.needs_own_copy(run(serving_1, *call(ControlCall.BEGIN_UPDATE))), "an update is open"
    assert not s.needs_own_copy(run(restarted, ev.CoordinatorCalled(1, V1, (BASE,), staged=staged))), "the held version is tolerated"
    newer = run(
        serving_1,
        *call(ControlCall.BEGIN_UPDATE),
        *call(ControlCall.UPDATE_TENSOR),
        *call(ControlCall.END_UPDATE),
        ev.UpdateAcknowledged(V2, ("e0",)),
    )
    assert not s.needs_own_copy(newer), "it takes part in an update"
    assert s.needs_own_copy(run(serving_1, ev.CoordinatorCalled(1, V2, staged=staged))), "it missed the update"
    assert not s.needs_own_copy(run(restarted, ev.CoordinatorCalled(1, V1))), "the contents of the version are not known"
    woken = run(serving_1, *call(ControlCall.RELEASE_MEMORY, tags=("weights",)), *call(ControlCall.RESUME_MEMORY, tags=("weights",)))
    assert not s.needs_own_copy(woken), "a coordinator compares restored weights"
    for events in ((ev.DrainingChanged(True),), (ev.CoordinatorCalled(1, V1, spec_state=FleetState.ASLEEP, staged=staged),)):
        assert not s.needs_own_copy(run(restarted, *events))
    unconfirmed = run(ev.restore_state(serving_1.record), ev.EngineIdentified(facts()), ev.LabelPolled("9", 0))
    assert not s.needs_own_copy(unconfirmed), "the committed version of the record may be outdated"


_versions = st.sampled_from([BASE, V1, V2])
_calls = st.sampled_from(
    [
        ControlCall.BEGIN_UPDATE,
        ControlCall.END_UPDATE,
        ControlCall.UPDATE_DISTRIBUTED,
        ControlCall.UPDATE_TENSOR,
        ControlCall.UPDATE_DISK,
        ControlCall.PAUSE,
        ControlCall.CONTINUE,
        ControlCall.RELEASE_MEMORY,
        ControlCall.RESUME_MEMORY,
        ControlCall.SET_VERSION,
        "flush_cache",
    ]
)
_boots = st.sampled_from(["a", "b", "c"])
_attempts = st.sampled_from(["refused", "written"])
"""Attempts to load a staged version: in the first, every rank refuses."""
_labels = st.sampled_from(["base", "1", "2"])
_tags = st.sampled_from([(), ("weights",), ("kv_cache",)])
_events = st.one_of(
    st.just(ev.EngineDown("x")),
    st.builds(ev.EngineIdentified, st.builds(facts, _boots, _labels)),
    st.builds(ev.LabelPolled, _labels, st.integers(0, 8)),
    st.builds(ev.CoordinatorCalled, st.integers(0, 3), st.none() | _versions, spec_state=st.none() | st.sampled_from(FleetState)),
    st.just(ev.RecordTrusted()),
    st.builds(ev.CallBegan, _calls, _labels, _tags),
    st.builds(ev.CallBegan, st.sampled_from([ControlCall.BEGIN_UPDATE, ControlCall.UPDATE_TENSOR]), attempt=_attempts),
    st.builds(ev.ActivationBegan, _attempts, st.just("u"), _labels),
    st.just(ev.ActivationRefused("refused")),
    st.builds(ev.CallEnded, _calls, st.booleans(), _boots, _labels, _tags),
    st.builds(ev.UpdateAcknowledged, _versions, st.just(("e0",))),
    st.just(ev.UpdateGivenUp()),
    st.builds(ev.DrainingChanged, st.booleans()),
    st.builds(ev.PluginChecked, _boots, st.sampled_from(["", "A part is missing."])),
)


@given(st.lists(_events | st.sampled_from(["restart", "restart without a usable record"]), max_size=40), st.booleans())
@settings(deadline=None, max_examples=400)
def test_the_gate_is_open_only_for_the_committed_version(events: list[ev.Event | str], requires_plugin: bool) -> None:
    """Apply any events in any order, with restarts of the agent. Acknowledgements pass their check first, as in the agent."""
    # truth: the version that all tensors of the current engine process belong to, None for a mixture
    state, truth = ev.restore_state(s.EngineRecord(), requires_plugin=requires_plugin), None
    is_refused = is_proved = False
    for event in events:
        if isinstance(event, ev.CallEnded) and event.call == ControlCall.UPDATE_TENSOR:
            event = replace(event, ok=event.ok and not is_refused)  # noqa: PLW2901 - the agent reads the verdicts
        if isinstance(event, str):
            kept = event == "restart"
            record = state.record if kept else s.EngineRecord()
            state, is_proved = ev.restore_state(record, is_readable=kept, requires_plugin=requires_plugin), False
            continue
        if isinstance(event, ev.UpdateAcknowledged) and s.ack_refusal(state, state.record.boot_id or "", event.version):
            continue
        before = state
        state, effects = ev.step(state, event)
        match event:
            case ev.PluginChecked(boot, missing) if boot == before.record.boot_id:
                is_proved = missing == ""
            case ev.EngineIdentified(seen) if seen.boot_id != before.record.boot_id:
                is_proved = False
                truth = BASE if seen.live_label == seen.launch_label and not before.record.unreadable else None
            case ev.CallBegan(ControlCall.BEGIN_UPDATE | ControlCall.UPDATE_TENSOR, attempt="refused"):
                is_refused = event.call == ControlCall.UPDATE_TENSOR
            case ev.CallBegan(
                ControlCall.BEGIN_UPDATE | ControlCall.UPDATE_DISTRIBUTED | ControlCall.UPDATE_TENSOR | ControlCall.UPDATE_DISK
            ):
                truth, is_refused = None, False
            case ev.CallBegan(ControlCall.RELEASE_MEMORY, details=tags) if "weights" in tags:
                truth = None
            case ev.UpdateAcknowledged(version):
                truth = version
        record = state.record
        opened = s.gate_may_open(state)
        if opened:
            assert is_proved or not requires_plugin
            assert state.up
            assert record.state is EngineState.CLEAN
            assert truth is not None
            assert record.version is not None
            assert record.committed is not None
            assert record.applied_state is FleetState.ACTIVE
            assert s.version_identity(truth) == s.version_identity(record.version) == s.version_identity(record.committed)
        assert (record.version is not None) == (record.state is EngineState.CLEAN)
        assert record.term >= before.record.term
        # The effects contain every change of the record and of the gate.
        assert (ev.Save(record) in effects) == (record != before.record)
        assert (ev.SetGate() in effects) == (opened != s.gate_may_open(before))


def test_only_committed_and_tolerated_versions_are_served() -> None:
    holding_1 = run(UPDATED, ev.UpdateAcknowledged(V1, ("e0",)), ev.CoordinatorCalled(1, V1))
    assert not s.gate_may_open(run(holding_1, ev.CoordinatorCalled(1, V2)))
    assert s.gate_may_open(run(holding_1, ev.CoordinatorCalled(1, V2, (V1,))))
    assert not s.gate_may_open(run(holding_1, ev.CoordinatorCalled(1, V2, (BASE,))))
    restarted = ev.restore_state(run(holding_1, ev.CoordinatorCalled(1, V2, (V1,))).record)
    assert s.gate_may_open(run(restarted, ev.EngineIdentified(facts(live="1")), ev.RecordTrusted())), "the record knows what was tolerated"


def test_an_out_of_order_sync_changes_nothing() -> None:
    holding_1 = run(UPDATED, ev.UpdateAcknowledged(V1, ("e0",)), ev.CoordinatorCalled(1, V1, seq=10))
    replaced = run(holding_1, ev.CoordinatorCalled(1, V2, seq=12))
    assert not s.gate_may_open(run(replaced, ev.CoordinatorCalled(1, V1, seq=11))), "the other engines serve version 2 already"
    held = run(holding_1, ev.CoordinatorCalled(1, V1, spec_state=FleetState.PAUSED, seq=12))
    assert not s.gate_may_open(run(held, ev.CoordinatorCalled(1, V1, spec_state=FleetState.ACTIVE, seq=11)))
    assert not s.gate_may_open(run(held, ev.CoordinatorCalled(1, spec_state=FleetState.ACTIVE, seq=11)))
    assert s.gate_may_open(run(held, ev.CoordinatorCalled(1, V1, spec_state=FleetState.ACTIVE, seq=13)))
    for term in (1, 2):
        assert s.gate_may_open(run(replaced, ev.CoordinatorCalled(term, V1, seq=3, sender="another"))), (
            "another coordinator has another counter"
        )
    assert not s.gate_may_open(run(replaced, ev.CoordinatorCalled(2), ev.CoordinatorCalled(1, V1, seq=13))), "the term is over"


def test_a_sync_without_sequence_number_is_always_applied() -> None:
    holding_1 = run(UPDATED, ev.UpdateAcknowledged(V1, ("e0",)), ev.CoordinatorCalled(1, V2, seq=12))
    assert s.gate_may_open(run(holding_1, ev.CoordinatorCalled(1, V1)))


_syncs = st.builds(
    ev.CoordinatorCalled, st.just(1), st.none() | _versions, spec_state=st.none() | st.sampled_from(FleetState), sender=st.just("c")
)


@given(st.lists(_syncs, max_size=6), st.data())
def test_syncs_that_arrive_in_any_order_have_the_effect_of_the_order_of_sending(
    sent: list[ev.CoordinatorCalled], data: st.DataObject
) -> None:
    """A sync that is lost, repeated or delivered late changes nothing that a later sync has said."""
    numbered = [replace(sync, seq=place + 1) for place, sync in enumerate(sent)]
    arriving = data.draw(st.lists(st.sampled_from(numbered), max_size=12) if numbered else st.just([]))
    newest, applied = 0, []
    for sync in arriving:
        if sync.seq >= newest:
            newest = sync.seq
            applied.append(sync)
    late, in_order = run(SERVING, *arriving), run(SERVING, *applied)
    assert late == in_order
    assert s.closed_reason(late) == s.closed_reason(in_order)


def test_an_engine_without_a_usable_record_is_unknown_until_an_update_or_a_restart() -> None:
    blind = ev.restore_state(s.EngineRecord(), is_readable=False)
    met = run(blind, ev.CoordinatorCalled(1, BASE), ev.EngineIdentified(facts()))
    assert (met.record.state, met.record.version) == (EngineState.UNKNOWN, None)
    assert not s.gate_may_open(met)
    closed = s.closed_reason(met)
    assert closed is not None
    assert closed.code is GateReason.UNKNOWN
    again = run(ev.restore_state(met.record), ev.CoordinatorCalled(1, BASE), ev.EngineIdentified(facts()))
    assert not s.gate_may_open(again), "the agent's next start changes nothing"
    early = ev.restore_state(run(blind, ev.CoordinatorCalled(1, BASE)).record)
    early = run(early, ev.EngineIdentified(facts()), ev.CoordinatorCalled(1, BASE))
    assert not s.gate_may_open(early), "nor does one before it has met the engine"
    updated = run(
        met,
        *call(ControlCall.BEGIN_UPDATE),
        *call(ControlCall.UPDATE_DISTRIBUTED),
        *call(ControlCall.END_UPDATE),
        ev.UpdateAcknowledged(V1, ("e0",)),
        ev.CoordinatorCalled(1, V1),
    )
    assert s.gate_may_open(updated)
    assert s.gate_may_open(run(met, ev.EngineDown("gone"), ev.EngineIdentified(facts("b")))), (
        "a new engine process holds its launch weights"
    )
