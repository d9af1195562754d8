"""The agent as a process behind a real gate, in front of a stub engine: access, forwarded calls and the record."""

from __future__ import annotations

import asyncio
import signal
from pathlib import Path
from typing import Any

import pytest

from sglang_rollout.agent.record import RecordFile
from sglang_rollout.wire.ports import AGENT_ENGINE, AGENT_METRICS, AGENT_PREFLIGHT, AGENT_SYNC, DEADLINE_HEADER, TERM_HEADER
from sglang_rollout.wire.reasons import GateReason, RefusalCode
from sglang_rollout.wire.states import BASE, EngineState, Version
from tests.contract.support.agent_pod import BASE_WIRE, TOKEN, Pod, run_pod, until
from tests.contract.support.stub_engine import StubEngine, stub_engine
from tests.support.ports import free_port
from tests.support.proven import prove

pytestmark = pytest.mark.router

V1 = Version(run=1, step=1, label="1")
V1_WIRE = V1.model_dump(mode="json")
GROUP = {"group_name": "g", "master_address": "127.0.0.1", "master_port": 1, "rank_offset": 1, "world_size": 2}


@pytest.fixture
async def pod(pod: Pod) -> Pod:
    """The pod, whose gate is open at the base version."""
    await pod.open_with_base()
    return pod


UPDATE: tuple[tuple[str, dict[str, Any]], ...] = (
    ("/init_weights_update_group", GROUP),
    ("/pause_generation", {"mode": "retract"}),
    ("/begin_weight_update", {}),
    ("/update_weights_from_distributed", {"names": [], "group_name": "g"}),
    ("/end_weight_update", {}),
)


async def update(pod: Pod, version: Version = V1) -> None:
    boot = (await pod.status()).boot_id
    for path, body in UPDATE:
        answer = await pod.control(path, body)
        assert answer.status == 200, answer.body
    answer = await pod.ack(version, boot)
    assert answer.status == 200, answer.body


async def test_only_the_coordinator_may_call(pod: Pod, stub: StubEngine) -> None:
    plain = await pod.ask("POST", "/pause_generation", {})
    assert plain.status == 401
    assert "need a proof" in plain.reason
    assert "Trainers call the fleet's URL" in plain.body["message"]
    assert (await pod.control("/pause_generation", token="guess")).status == 403
    assert (await pod.ask("POST", "/pause_generation", {}, {"Authorization": f"Bearer {TOKEN}"})).status == 403, "it never travels"
    without_term = await prove(pod.http, "POST", pod.url + "/pause_generation", token=TOKEN)
    assert (await pod.ask("POST", "/pause_generation", b"", without_term)).status == 400
    assert (await pod.ask("POST", AGENT_SYNC, {"committed": None})).status == 401
    assert stub.calls == []
    for path in ("/health", "/model_info", "/server_info", "/v1/loads", AGENT_ENGINE, AGENT_METRICS):
        assert (await pod.ask("GET", path)).status == 200, path


@pytest.mark.parametrize("credential", [b"Bearer \xff", b"Bearer s\xc3\xa9cret", b"\xff \xfe"])
async def test_a_credential_that_is_no_ascii_text_is_refused(pod: Pod, credential: bytes) -> None:
    reader, writer = await asyncio.open_unix_connection(pod.agent_socket)
    head = b"POST /pause_generation HTTP/1.1\r\nHost: e0\r\nConnection: close\r\nContent-Length: 0\r\nAuthorization: "
    writer.write(head + credential + b"\r\n\r\n")
    assert (await reader.readline()).startswith(b"HTTP/1.1 401 ")
    writer.close()


async def test_an_out_of_order_sync_does_not_reopen_the_gate(pod: Pod) -> None:
    later = {"committed": V1_WIRE, "sender": "c", "seq": 2}
    assert (await pod.control(AGENT_SYNC, later)).body["gate_open"] is False
    answer = await pod.control(AGENT_SYNC, {"committed": BASE_WIRE, "sender": "c", "seq": 1})
    assert answer.body["reason"] == GateReason.NOT_COMMITTED
    assert answer.body["committed"] == V1_WIRE


async def test_a_lower_term_is_refused_also_after_a_restart_of_the_agent(pod: Pod) -> None:
    assert (await pod.control("/pause_generation", term=5)).status == 200
    old = await pod.control("/continue_generation", term=4)
    assert old.status == 409
    assert "term 5" in old.reason
    await pod.agent.end()
    await pod.agent.start()
    await until(pod.agent_answers, 60, "the agent is back")
    assert (await pod.control(AGENT_SYNC, {"committed": None}, term=4)).status == 409
    assert (await pod.control(AGENT_SYNC, {"committed": None}, term=5)).status == 200


async def test_an_update_from_begin_to_commit(pod: Pod, stub: StubEngine) -> None:
    await update(pod)
    assert stub.label == "1"
    assert stub.bodies["update_weight_version"]["abort_all_requests"] is False
    assert await pod.is_closed()
    status = await pod.status(V1.model_dump())
    assert (status.state, status.version, status.cohort, status.gate_open) == (EngineState.CLEAN, V1, ["e0"], True)
    assert status.paused
    assert await pod.is_open()


async def test_dirty_is_on_disk_and_the_gate_closed_before_the_engine_receives_the_call(pod: Pod, stub: StubEngine) -> None:
    stub.held["begin_weight_update"] = asyncio.Event()
    begin = asyncio.create_task(pod.control("/begin_weight_update"))
    await until(lambda: _true("begin_weight_update" in stub.calls), 60, "the engine hears of begin")
    record, _ = RecordFile(pod.folder / "agent").load()
    assert (record.state, record.pending) == (EngineState.DIRTY, "begin_weight_update")
    assert await pod.is_closed()
    stub.held["begin_weight_update"].set()
    assert (await begin).status == 200


async def test_one_call_at_a_time_and_the_engine_continues_after_the_deadline(pod: Pod, stub: StubEngine) -> None:
    stub.held["init_weights_update_group"] = asyncio.Event()
    late = await pod.control("/init_weights_update_group", GROUP, headers={DEADLINE_HEADER: "0.5"})
    assert late.status == 504
    second = await pod.control("/pause_generation")
    assert second.status == 409
    assert "has not answered init_weights_update_group" in second.reason
    assert (await pod.status()).gate_open  # joining a group changes no weights: sync and gate continue
    assert await pod.is_open()
    stub.held["init_weights_update_group"].set()
    await until(lambda: _status(pod, "/pause_generation", 200), 60, "calls are taken again")
    assert (await pod.status()).groups == ["g"]


async def test_a_caller_that_disconnects_does_not_stop_the_call(pod: Pod, stub: StubEngine) -> None:
    stub.held["pause_generation"] = asyncio.Event()
    call = asyncio.create_task(pod.control("/pause_generation"))
    await until(lambda: _true("pause_generation" in stub.calls), 60, "the engine hears of the pause")
    call.cancel()
    assert (await pod.control("/flush_cache")).status == 409
    stub.held["pause_generation"].set()
    await until(lambda: _status(pod, "/flush_cache", 200), 60, "calls are taken again")
    assert stub.calls == ["pause_generation", "flush_cache"]


async def test_an_engine_that_is_slow_to_report_its_version_does_not_fail_the_update(pod: Pod, stub: StubEngine) -> None:
    boot = (await pod.status()).boot_id
    for path, body in UPDATE:
        assert (await pod.control(path, body)).status == 200
    stub.model_info_after = 3.0
    answer = await pod.ack(V1, boot)
    assert answer.status == 200, answer.body


async def test_a_failed_update_cannot_be_acknowledged_nor_resumed(pod: Pod, stub: StubEngine) -> None:
    boot = (await pod.status()).boot_id
    stub.failing.add("update_weights_from_distributed")
    await pod.control("/init_weights_update_group", GROUP)
    await pod.control("/pause_generation")
    await pod.control("/begin_weight_update")
    failed = await pod.control("/update_weights_from_distributed", {"group_name": "g"})
    assert failed.status == 400
    assert failed.reason == "update_weights_from_distributed failed on purpose"
    await pod.control("/end_weight_update")
    assert (await pod.ack(V1, boot)).status == 409
    resumed = await pod.control("/continue_generation")
    assert resumed.status == 409
    assert "mixture" in resumed.body["message"]
    status = await pod.fence()
    assert (status.state, status.paused, status.session, status.gate_open) == (EngineState.DIRTY, False, False, False)
    assert stub.calls[-2:] == ["abort_request", "continue_generation"]
    stub.failing.clear()
    await pod.control("/destroy_weights_update_group", {"group_name": "g"})
    await update(pod)
    assert (await pod.status(V1.model_dump())).gate_open


async def test_a_fence_while_the_engine_is_stuck_answers_and_finishes_later(pod: Pod, stub: StubEngine) -> None:
    stub.held["update_weights_from_distributed"] = asyncio.Event()
    await pod.control("/init_weights_update_group", GROUP)
    await pod.control("/pause_generation")
    await pod.control("/begin_weight_update")
    stuck = asyncio.create_task(pod.control("/update_weights_from_distributed", {"group_name": "g"}))
    await until(lambda: _true("update_weights_from_distributed" in stub.calls), 60, "the engine receives")
    status = await pod.fence()
    assert status.session
    assert not status.gate_open
    assert (await pod.control("/begin_weight_update")).status == 409
    stub.held["update_weights_from_distributed"].set()
    assert (await stuck).status == 200
    await until(lambda: _true(stub.calls[-1] == "continue_generation"), 60, "the fence is finished")
    assert "end_weight_update" in stub.calls


async def test_a_fence_on_a_clean_engine_only_resumes_it(pod: Pod, stub: StubEngine) -> None:
    await pod.control("/pause_generation")
    status = await pod.fence()
    assert (status.state, status.version, status.gate_open, status.paused) == (EngineState.CLEAN, BASE, True, False)
    assert stub.calls == ["pause_generation", "continue_generation"]


async def test_a_session_that_was_left_open_is_ended_by_the_next_begin(pod: Pod, stub: StubEngine) -> None:
    stub.session = True
    assert (await pod.control("/begin_weight_update")).status == 200
    assert stub.calls == ["begin_weight_update", "end_weight_update", "begin_weight_update"]


async def test_bad_bodies_and_unknown_paths(pod: Pod, stub: StubEngine) -> None:
    for raw in (b"{", b"[]", b"\xff"):
        headers = await prove(pod.http, "POST", pod.url + "/pause_generation", raw, {TERM_HEADER: "1"}, token=TOKEN)
        async with pod.http.post(pod.url + "/pause_generation", data=raw, headers=headers) as reply:
            assert reply.status == 400
            assert "the body" in (await reply.json())["message"]
    headers = await prove(pod.http, "POST", pod.url + "/begin_weight_update", b"", {TERM_HEADER: "1"}, token=TOKEN)
    async with pod.http.post(pod.url + "/begin_weight_update", headers=headers) as reply:
        assert reply.status == 200  # no body at all is {} for SGLang
    assert (await pod.control(AGENT_SYNC, {"committed": {"run": -1, "step": 0, "label": "x"}})).status == 400
    assert (await pod.control("/update_weights_from_ipc")).status == 501
    assert (await pod.ask("GET", "/nothing")).status == 404
    assert (await pod.ask("POST", "//generate", {})).status == 404
    assert stub.calls == ["begin_weight_update"]


async def test_keys_are_never_shown(pod: Pod) -> None:
    answer = await pod.ask("GET", "/server_info")
    assert "hush" not in str(answer.body)
    assert answer.body["launch_command"] == "--admin-api-key (hidden) --port 1"


async def test_an_engine_without_sessions_is_updated(tmp_path: Path) -> None:
    async with stub_engine(old=True) as stub, run_pod(tmp_path, stub.url) as pod:
        await pod.open_with_base()
        await update(pod)
        assert (await pod.status(V1.model_dump())).gate_open
        assert "begin_weight_update" not in stub.calls


async def test_an_engine_that_is_too_old_is_never_up_and_reports_why(tmp_path: Path) -> None:
    async with stub_engine() as stub, run_pod(tmp_path, stub.url) as pod:
        await until(pod.engine_up, 60, "the agent sees the engine")
        await stub.stop()
        stub.version = "0.5.19"
        await stub.start()
        sentence = "it is SGLang 0.5.19, and the oldest that can be driven is 0.5.20: use a newer image or installation"

        async def is_reported() -> bool:
            return sentence in (await pod.status(BASE_WIRE)).message

        await until(is_reported, 60, "the status has the reason")
        health = await pod.ask("GET", "/health")
        assert (health.status, sentence in health.reason) == (503, True)
        assert await pod.is_closed()
        await stub.stop()
        stub.version = "0.5.20.dev3+local"
        await stub.start()
        await until(pod.engine_up, 60, "a build of the same release is taken")


async def test_an_engine_that_restarts_in_place_is_closed_and_at_base(pod: Pod, stub: StubEngine) -> None:
    await update(pod)
    assert (await pod.status(V1.model_dump())).gate_open
    first = (await pod.status()).boot_id
    await stub.stop()
    await stub.start()  # at once: no poll sees that it was away
    assert await until(pod.is_closed, 3, "the gate closes") < 1
    await until(pod.engine_up, 60, "the agent sees the new engine")
    status = await pod.status()
    assert (status.state, status.version, status.gate_open) == (EngineState.CLEAN, BASE, False)
    assert status.boot_id != first
    assert await pod.is_closed()


async def test_a_restarted_container_is_noticed_by_its_boot_file(tmp_path: Path) -> None:
    async with stub_engine() as stub, run_pod(tmp_path, stub.url, with_boot_file=True, start=False) as pod:
        pod.boot("first")
        await pod.start()
        await pod.open_with_base()
        assert (await pod.status()).boot_id == "first"
        await pod.control("/begin_weight_update")
        pod.boot("second")  # the engine behind it may answer already
        await until(lambda: _boot(pod, "second"), 60, "the new boot ID is noticed")
        status = await pod.status()
        assert (status.state, status.session) == (EngineState.CLEAN, False)


async def test_an_engine_paused_by_spec_drains_without_waiting_for_paused_requests(tmp_path: Path) -> None:
    async with stub_engine() as stub, run_pod(tmp_path, stub.url, with_boot_file=True, start=False) as pod:
        pod.boot("first")
        await pod.start()
        await pod.open_with_base()
        assert (await pod.control(AGENT_SYNC, {"committed": BASE_WIRE, "spec_state": "paused"})).status == 200
        assert (await pod.control("/pause_generation", {"mode": "retract"})).status == 200
        stub.running = 1
        (pod.boot_file.parent / "drain").touch()
        await until(lambda: _true((pod.boot_file.parent / "drained").exists()), 60, "it is drained")


async def test_drain(tmp_path: Path) -> None:
    async with stub_engine() as stub, run_pod(tmp_path, stub.url, with_boot_file=True, start=False) as pod:
        pod.boot("first")
        await pod.start()
        await pod.open_with_base()
        stub.running = 1
        drain, drained = pod.boot_file.parent / "drain", pod.boot_file.parent / "drained"
        drain.touch()
        await until(pod.is_closed, 60, "the gate closes")
        await asyncio.sleep(1)
        assert not drained.exists()
        stub.running = 0
        await until(lambda: _true(drained.exists()), 60, "drained is written when nothing runs")
        await asyncio.sleep(0.05)
        pod.boot("second")
        await until(lambda: _true(not drain.exists() and not drained.exists()), 60, "a new engine is not drained")
        await until(pod.is_open, 60, "it serves")


async def test_preflight_through_the_gate(pod: Pod) -> None:
    answer = await pod.control(AGENT_PREFLIGHT, {"host": "127.0.0.1", "port": pod.gate_port, "deadline": 2})
    assert answer.body == {"refusal": None}
    answer = await pod.control(AGENT_PREFLIGHT, {"host": "127.0.0.1", "port": free_port(), "deadline": 0.3})
    assert answer.body["refusal"]["code"] == RefusalCode.UNAVAILABLE
    assert (await pod.control(AGENT_PREFLIGHT, {"host": "x", "port": 0, "deadline": 1})).status == 400


async def test_metrics(pod: Pod) -> None:
    await pod.control("/pause_generation")
    text = (await pod.ask("GET", AGENT_METRICS)).body
    assert "sglang_rollout_agent_gate_open 1.0" in text
    assert 'sglang_rollout_agent_control_calls_total{call="pause_generation",status="200"} 1.0' in text
    assert "sglang_rollout_agent_pause_seconds_count 0.0" in text, "the pause has not ended"
    await pod.control("/continue_generation")
    assert "sglang_rollout_agent_pause_seconds_count 1.0" in (await pod.ask("GET", AGENT_METRICS)).body


async def test_the_agent_ends_on_sigterm(pod: Pod) -> None:
    assert await pod.agent.end(signal.SIGTERM) == 0


async def _true(value: bool) -> bool:
    return value


async def _status(pod: Pod, path: str, status: int) -> bool:
    return (await pod.control(path)).status == status


async def _boot(pod: Pod, boot: str) -> bool:
    return (await pod.status(BASE_WIRE)).boot_id == boot
