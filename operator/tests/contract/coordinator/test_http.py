"""The coordinator over HTTP, with scripted agents."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from sglang_rollout.batches import routes
from sglang_rollout.coordinator.http import app
from sglang_rollout.wire.record import Record
from tests.contract.support.coordinator_process import QUICK, Lab, fleet_lab

TRANSFER = "/update_weights_from_distributed"
UPDATE: dict[str, Any] = {"names": ["w"], "dtypes": ["torch.float32"], "shapes": [[2]]}


@pytest.fixture
async def lab(tmp_path: Path) -> AsyncIterator[Lab]:
    async with fleet_lab(tmp_path) as lab:
        yield lab


async def push(lab: Lab, version: object, group: str = "g") -> tuple[int, str, Any]:
    assert (await lab.open_group(group))[0] == 200
    assert (await lab.post("/begin_weight_update", {}))[0] == 200
    body = {**UPDATE, "group_name": group, "weight_version": version}
    assert (await lab.post("/update_weights_from_distributed", body))[0] == 200
    return await lab.post("/end_weight_update", {})


async def test_all_gates_are_open_when_a_push_has_committed(lab: Lab) -> None:
    status, _, body = await push(lab, 5)
    assert (status, body["success"]) == (200, True)
    assert all(agent.agent.gate_open and not agent.agent.paused for agent in lab.agents)
    found = await lab.document()
    assert found["committed"] == {"run": 1, "step": 5, "label": "5"}
    assert found["last_update"]["outcome"] == "Committed"
    assert set(found["last_update"]["phases_ms"]) >= {"pause", "transfer", "commit", "resume", "total"}
    assert (await lab.get("/get_weight_version"))[2] == {"weight_version": "5"}
    assert (await lab.get("/model_info"))[2]["weight_version"] == "5"
    record = Record.model_validate_json(lab.record.read_text())
    assert record.committed.step == 5
    sent = lab.agents[1].bodies_of("/init_weights_update_group")[0]
    assert (sent["rank_offset"], sent["master_port"], sent["backend"]) == (2, 29500, "gloo")
    assert lab.agents[0].bodies_of("/update_weights_from_distributed")[0]["dtypes"] == ["float32"]


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"world_size": 7}, "world_size 7 does not fit this fleet: rank_offset 1 + 2 GPUs on 2 engines [1, 1] = 3. Use world_size=3."),
        ({"rank_offset": 2}, "rank_offset 2 does not fit this fleet"),
        ({"master_address": ""}, "master_address is missing"),
        ({"master_port": "x"}, "master_port 'x' is not a whole number."),
        ({"group_name": ""}, "group_name '' is not a name"),
    ],
)
async def test_a_wrong_group_is_refused_before_any_engine_is_called(lab: Lab, changes: dict[str, Any], sentence: str) -> None:
    status, reason, body = await lab.open_group(**changes)
    assert status == 400
    assert sentence in reason
    assert sentence in body["message"]
    assert body["code"] == ("WorldSizeMismatch" if changes.keys() & {"world_size", "rank_offset"} else "InvalidRequest")
    assert all(agent.calls == [] for agent in lab.agents)
    assert (await lab.document())["serving"] == 2


async def test_an_unreachable_trainer_is_refused_and_no_engine_joins(lab: Lab) -> None:
    lab.agents[1].broken["/agent/preflight"] = "connection refused."
    status, reason, body = await lab.open_group()
    assert (status, body["code"]) == (400, "MasterUnreachable")
    assert "engine e1 cannot reach the trainer at 127.0.0.1:29500: connection refused." in reason
    assert all(not agent.bodies_of("/init_weights_update_group") for agent in lab.agents)


async def test_the_record_says_why_no_process_group_opened_until_one_opens(lab: Lab) -> None:
    """A trainer that waits in the collective never reads the answer. The operator posts an Event with this reason."""

    def noted(code: str | None) -> bool:
        failure = json.loads(lab.record.read_text()).get("group_failure") or {}
        return failure.get("code") == code and (code is None or "Use world_size=3." in failure["message"])

    async def is_noted() -> bool:
        return noted("WorldSizeMismatch")

    async def is_cleared() -> bool:
        return noted(None)

    await lab.open_group(world_size=7)
    await lab.until("the record has the reason", is_noted)
    assert (await lab.open_group())[0] == 200
    await lab.until("the record has no reason", is_cleared)


async def test_an_engine_that_cannot_join_is_named_and_the_others_leave(lab: Lab) -> None:
    lab.agents[0].slow["/init_weights_update_group"] = 2.9
    lab.agents[1].broken["/init_weights_update_group"] = "out of memory."
    status, reason, body = await lab.open_group()
    assert (status, body["fleet"]["phase"]) == (400, "open")
    assert "code" not in body, "the call was not refused: it failed"
    assert "engine e1 could not join process group g: out of memory." in reason
    await asyncio.sleep(0.3)
    assert all(agent.bodies_of("/destroy_weights_update_group") for agent in lab.agents)
    assert (await lab.document())["groups"] == []


async def test_trainers_without_a_session_commit_when_they_continue(lab: Lab) -> None:
    assert (await lab.open_group())[0] == 200
    assert (await lab.post("/pause_generation"))[0] == 200
    assert lab.agents[0].bodies_of("/pause_generation") == [{"mode": "abort"}]
    assert (await lab.call("GET", "/flush_cache"))[0] == 200
    single = {"name": "w", "dtype": "float32", "shape": [2]}
    assert (await lab.post("/update_weights_from_distributed", single))[0] == 200
    assert not any(agent.agent.gate_open for agent in lab.agents)
    status, _, body = await lab.post("/continue_generation", {"torch_empty_cache": True})
    assert (status, body["status"]) == (200, "ok")
    assert all(agent.agent.gate_open for agent in lab.agents)
    assert (await lab.document())["committed"]["step"] == 1


async def test_trainers_that_never_pause_commit_when_they_flush(lab: Lab) -> None:
    assert (await lab.open_group("skyrl", backend="gloo"))[0] == 200
    for _ in range(2):
        assert (await lab.post("/update_weights_from_distributed", {"name": "w", "dtype": "float32", "shape": [2]}))[0] == 200
    assert (await lab.post("/flush_cache"))[0] == 200
    assert (await lab.document())["committed"]["step"] == 1
    assert all(agent.agent.gate_open and not agent.agent.paused for agent in lab.agents)
    assert (await lab.post("/destroy_weights_update_group"))[0] == 200
    status, _, body = await lab.post("/destroy_weights_update_group", {"group_name": "other"})
    assert (status, body["message"], body["code"]) == (400, "The group to be destroyed does not exist.", "InvalidRequest")


async def test_one_failing_engine_fails_the_update_and_fences_all(lab: Lab) -> None:
    await push(lab, 1)
    assert (await lab.open_group("h"))[0] == 200
    lab.agents[1].broken["/update_weights_from_distributed"] = "Failed to receive weights."
    status, reason, body = await lab.post("/update_weights_from_distributed", {**UPDATE, "group_name": "h"})
    assert status == 400
    assert reason.startswith("engine e1 did not take the tensors: Failed to receive weights (phase transfer)")
    assert body["fleet"]["world_size"] == 3
    await lab.until("fenced", lambda: _all(agent.bodies_of("/agent/fence") for agent in lab.agents))
    found = await lab.document()
    assert (found["committed"]["step"], found["serving"], found["last_update"]["outcome"]) == (1, 0, "Failed")
    assert (await lab.get("/health"))[0] == 200, "the fleet accepts weights while no engine serves"
    lab.agents[1].broken.clear()
    assert (await push(lab, 2, "i"))[0] == 200
    await lab.serving(2)


async def _all(values: Any) -> bool:
    return all(values)


async def test_a_restarted_coordinator_gives_up_the_open_update(lab: Lab) -> None:
    await push(lab, 3)
    assert (await lab.post("/begin_weight_update", {}))[0] == 200
    await lab.kill()
    lab.agents[0].agent.restart()
    lab.start()
    await lab.until("fenced", lambda: _all([lab.agents[1].bodies_of("/agent/fence")]))
    found = await lab.document()
    assert (found["committed"]["step"], found["term"], found["serving"]) == (3, 2, 0)
    assert not lab.agents[1].agent.session
    assert (found["last_update"]["outcome"], found["last_update"]["version"]["step"]) == ("Failed", 4)
    assert 'sglang_rollout_coordinator_updates_total{outcome="Failed"} 1.0' in (await lab.get("/fleet/metrics"))[2]
    await lab.kill()
    lab.start()
    await lab.serving(0)
    assert 'sglang_rollout_coordinator_updates_total{outcome="Failed"} 0.0' in (await lab.get("/fleet/metrics"))[2], (
        "the update is counted once"
    )


async def test_a_lost_record_is_rebuilt_from_the_agents(lab: Lab) -> None:
    await push(lab, 3)
    await lab.kill()
    lab.record.unlink()
    lab.start()
    await lab.serving(2)
    assert (await lab.document())["committed"]["step"] == 3
    await lab.until("written again", lambda: _all([lab.record.exists()]))
    assert Record.model_validate_json(lab.record.read_text()).committed.step == 3


async def test_process_groups_survive_a_restart_of_the_coordinator(lab: Lab) -> None:
    await push(lab, 3)
    await asyncio.sleep(1.2)
    await lab.kill()
    lab.start()
    await lab.serving(2)
    assert [group["name"] for group in (await lab.document())["groups"]] == ["g"]
    assert (await lab.post("/update_weights_from_distributed", {**UPDATE, "group_name": "g"}))[0] == 200
    assert (await lab.post("/flush_cache"))[0] == 200
    assert (await lab.document())["committed"]["step"] == 4


async def test_a_restarted_engine_invalidates_its_group_and_is_not_routed(lab: Lab) -> None:
    await push(lab, 3)
    before = await lab.document()
    lab.agents[1].agent.restart()
    await lab.serving(1)
    after = await lab.document()
    assert after["epoch"] > before["epoch"]
    await lab.until("not routed", lambda: _all([set(lab.smg.workers.values()) == {lab.agents[0].url}]))
    status, reason, body = await lab.post("/update_weights_from_distributed", {**UPDATE, "group_name": "g"})
    assert status == 400
    assert "its member, engine e1, was restarted" in reason
    assert body["fleet"]["epoch"] == after["epoch"]
    assert (await push(lab, 4, "h"))[0] == 200
    await lab.serving(2)


async def test_smg_keeps_its_workers_during_an_update_and_gets_them_back_after_a_restart(lab: Lab) -> None:
    urls = {agent.url for agent in lab.agents}
    await lab.until("routed", lambda: _all([set(lab.smg.workers.values()) == urls]))
    lab.smg.workers.clear()
    await lab.until("routed again", lambda: _all([set(lab.smg.workers.values()) == urls]))
    lab.smg.seen.clear()
    await lab.open_group()
    await lab.post("/begin_weight_update", {})
    await asyncio.sleep(1.2)
    await lab.post("/update_weights_from_distributed", {**UPDATE, "group_name": "g"})
    await lab.post("/end_weight_update", {})
    await asyncio.sleep(0.7)
    assert all(seen == urls for seen in lab.smg.seen)


async def test_the_fleet_is_ready_when_smg_sends_requests_to_an_engine(lab: Lab, caplog: pytest.LogCaptureFixture) -> None:
    """The gate of an engine may be open while smg cannot reach the engine, or has just started."""
    lab.smg.reaches_engines = False
    lab.smg.workers.clear()
    await lab.serving(0)
    status, _, body = await lab.get("/ready")
    assert (status, "No engine gets requests yet: smg, the SGLang router, has not taken up any." in body["message"]) == (503, True)
    assert [member["gate_open"] for member in (await lab.document())["members"]] == [True, True]
    await asyncio.sleep(6)
    warnings = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert sum(f"smg sends no requests to {lab.agents[0].url}" in each for each in warnings) == 1
    lab.smg.reaches_engines = True
    await lab.serving(2)
    assert (await lab.get("/ready"))[0] == 200


async def test_the_pause_of_a_silent_trainer_ends(lab: Lab) -> None:
    lab.deadlines = lab.deadlines.model_copy(update={"idle_seconds": 1.0})
    lab.write_intent()
    await asyncio.sleep(0.8)
    assert (await lab.post("/pause_generation", {"mode": "retract"}))[0] == 200
    await lab.until("resumed", lambda: _all(not agent.agent.paused for agent in lab.agents))
    assert (await lab.document())["serving"] == 2


async def test_a_second_begin_gives_up_the_first_update(lab: Lab) -> None:
    await push(lab, 3)
    assert (await lab.post("/begin_weight_update", {}))[0] == 200
    status, _, body = await lab.post("/begin_weight_update", {})
    assert (status, body["message"]) == (200, "Success")
    assert (await lab.open_group("g"))[0] == 200
    assert (await lab.document())["phase"] == "idle", "a trainer that opens its group again gives up its update"
    assert (await push(lab, 4, "h"))[0] == 200
    assert (await lab.document())["committed"]["step"] == 4


async def test_invalid_requests_are_refused(lab: Lab) -> None:
    status, reason, _ = await lab.call("POST", "/init_weights_update_group", data=b'{"a": ')
    assert status == 400
    assert "line 1, column" in reason
    status, _, body = await lab.call("POST", "/init_weights_update_group", data=b"[1]")
    assert (status, body["success"]) == (400, False)
    status, reason, _ = await lab.call("POST", "/begin_weight_update", data=b"x" * 20_000_000)
    assert status == 413
    status, reason, body = await lab.post("/no_such_call", {})
    assert status == 404
    assert "/init_weights_update_group" in body["message"]
    assert (await lab.post("/update_weights_from_tensor", {}))[0] == 501
    status, reason, _ = await lab.post("/update_weights_from_disk", {})
    assert (status, "model_path is missing" in reason) == (400, True)
    status, reason, _ = await lab.post("/begin_weight_update", {})
    assert (status, "no process group is open" in reason) == (400, True)
    status, _, _ = await lab.post("/end_weight_update", {})
    assert status == 400
    status, reason, _ = await lab.post("/update_weights_from_distributed", {**UPDATE, "group_name": "other"})
    assert (status, "group other is not open" in reason) == (400, True)
    assert all(agent.calls == [] for agent in lab.agents)


@pytest.mark.parametrize(
    ("method", "path", "headers", "status"),
    [
        ("POST", "/pause_generation", {"Origin": "https://example.org"}, 403),
        ("POST", "/pause_generation", {"Origin": "null"}, 403),
        ("POST", "/fleet/run", {"Sec-Fetch-Site": "same-site"}, 403),
        ("GET", "/flush_cache", {"Sec-Fetch-Site": "cross-site"}, 403),
        ("POST", "/pause_generation", {"Content-Type": "text/plain"}, 415),
        ("POST", "/pause_generation", {"Content-Type": "application/x-www-form-urlencoded"}, 415),
        ("POST", "/fleet/engines/e0/release_memory_occupation", {"Content-Type": "multipart/form-data; boundary=b"}, 415),
    ],
)
async def test_control_calls_from_web_pages_reach_no_engine(lab: Lab, method: str, path: str, headers: dict[str, str], status: int) -> None:
    found, _, body = await lab.call(method, path, data=b"{}" if method == "POST" else None, headers=headers)
    assert (found, body["success"]) == (status, False)
    assert path in body["message"]
    assert all(agent.calls == [] for agent in lab.agents)


async def test_programs_may_leave_out_the_type_of_a_body(lab: Lab) -> None:
    untyped: dict[str, Any] = {"data": b'{"mode": "retract"}', "skip_auto_headers": ["Content-Type"]}
    async with lab.session.post(f"{lab.url}/pause_generation", **untyped) as reply:
        assert reply.status == 200
    assert lab.agents[0].bodies_of("/pause_generation") == [{"mode": "retract"}]
    for headers in ({"Content-Type": "application/json; charset=utf-8"}, {"Sec-Fetch-Site": "none", "Content-Type": "application/json"}):
        assert (await lab.call("POST", "/continue_generation", data=b"{}", headers=headers))[0] == 200
    assert (await lab.call("POST", "/flush_cache", data=b"now", headers={"Content-Type": "text/plain"}))[0] == 200
    assert (await lab.call("GET", "/fleet", headers={"Origin": "https://example.org"}))[0] == 200


@pytest.mark.parametrize("path", ["/pause_generation", "/generate"])
async def test_a_body_that_never_ends_is_refused(lab: Lab, monkeypatch: pytest.MonkeyPatch, path: str) -> None:
    monkeypatch.setattr(app, "BODY_SECONDS", 0.2)
    monkeypatch.setattr(routes, "BODY_SECONDS", 0.2)
    host, port = lab.url_of(path).removeprefix("http://").removesuffix(path).split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: 50\r\n\r\n"
    writer.write(head.encode() + b'{"text":')
    assert (await reader.readline()).startswith(b"HTTP/1.1 408 ")
    writer.close()
    assert all(agent.calls == [] for agent in lab.agents)


@pytest.mark.parametrize("path", ["/pause_generation", "/continue_generation", "/end_weight_update", "/abort_request", "/fleet/run"])
async def test_a_get_changes_nothing(lab: Lab, path: str) -> None:
    for method in ("GET", "HEAD"):
        assert (await lab.call(method, path))[0] == 405
    assert (await lab.call("HEAD", "/flush_cache"))[0] == 405
    assert all(agent.calls == [] for agent in lab.agents)


async def test_reading_calls_show_the_fleet_as_one_server(lab: Lab) -> None:
    info = (await lab.get("/get_server_info"))[2]
    assert (info["tp_size"], info["dp_size"], info["pp_size"], info["num_gpus"]) == (1, 2, 1, 2)
    assert info["admin_api_key"] == "[redacted]"
    assert (await lab.get("/get_world_size"))[2] == {"world_size": 2}
    assert [load["num_reqs"] for load in (await lab.get("/get_load"))[2]] == [3, 3]
    assert len((await lab.get("/v1/loads?include=core"))[2]["loads"]) == 2
    assert (await lab.get("/v1/models"))[2]["data"][0]["id"] == "m"
    assert [(worker["url"], worker["is_healthy"]) for worker in (await lab.get("/workers"))[2]["workers"]] == [(lab.url, True)]
    assert (await lab.get("/list_workers"))[2] == {"urls": [lab.url]}
    assert (await lab.post("/workers", {"url": lab.url}))[0] == 202
    assert (await lab.get("/health"))[0] == 200
    assert (await lab.call("GET", "/health", {}))[0] == 200, "some trainers send a body"
    assert "sglang_rollout_coordinator_serving 2.0" in (await lab.get("/fleet/metrics"))[2]
    assert (await lab.post("/abort_request", {"abort_all": True}))[0] == 200


@pytest.mark.parametrize("path", ["/server_info", "/model_info", "/v1/models", "/v1/models/m"])
async def test_a_reader_waits_for_the_first_answer_of_an_engine(lab: Lab, path: str) -> None:
    for agent in lab.agents:
        agent.slow["/server_info"] = 1
    await lab.kill()
    lab.start()
    await lab.serving(2)
    assert (await lab.get(path))[0] == 200


async def test_reading_calls_do_not_wait_for_an_update(tmp_path: Path) -> None:
    async with fleet_lab(tmp_path, 2, QUICK.model_copy(update={"update_seconds": 300})) as lab:
        assert (await lab.get("/server_info"))[0] == 200
        await lab.open_group()
        for agent in lab.agents:
            agent.slow[TRANSFER] = 300
        running = asyncio.create_task(lab.post(TRANSFER, {**UPDATE, "group_name": "g"}))
        await lab.until("the engines transfer", lambda: _all(agent.bodies_of(TRANSFER) for agent in lab.agents))
        for path in ("/fleet", "/server_info", "/model_info", "/health", "/get_weight_version", "/v1/models", "/v1/loads"):
            assert (await lab.get(path))[0] == 200
        assert (await lab.document())["phase"] == "transfer"
        assert not running.done()
        running.cancel()


async def test_engines_that_do_not_answer_for_a_moment_stay_routed(lab: Lab) -> None:
    urls = {agent.url for agent in lab.agents}
    await lab.until("routed", lambda: _all([set(lab.smg.workers.values()) == urls]))
    lab.smg.seen.clear()
    for agent in lab.agents:
        agent.agent.up = False
    await lab.serving(0)
    await asyncio.sleep(0.6)
    for agent in lab.agents:
        agent.agent.up = True
    await lab.serving(2)
    assert all(seen == urls for seen in lab.smg.seen)


async def test_an_engine_that_is_down_is_named(lab: Lab) -> None:
    lab.agents[1].agent.up = False
    await lab.serving(1)
    status, reason, _ = await lab.open_group()
    assert status == 400
    assert "Use world_size=2. Absent: e1: " in reason
    assert not any(agent.calls for agent in lab.agents)
    lab.agents[0].agent.up = False
    await lab.serving(0)
    assert (await lab.get("/health"))[0] == 503


async def test_a_coordinator_with_a_lower_term_ends(lab: Lab) -> None:
    lab.agents[0].agent.term = 9
    assert lab.coordinator is not None
    with pytest.raises(ExceptionGroup) as caught:
        await asyncio.wait_for(lab.coordinator, 5)
    assert "term 9" in str(caught.value.exceptions)
