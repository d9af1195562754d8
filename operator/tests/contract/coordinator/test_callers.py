"""Callers at the coordinator's own port. Without Kubernetes, programs of this machine are allowed, and others need a token."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from sglang_rollout.coordinator.http.audit import MAX_PATH_CHARACTERS
from sglang_rollout.coordinator.http.control import routes as control_routes
from sglang_rollout.credentials import Credentials
from sglang_rollout.logs import MAX_REFUSED_LINES
from sglang_rollout.wire.access import CALLER_HEADER, RELAYED_CALLER_HEADER
from sglang_rollout.wire.ports import FLEET, FLEET_CALLER, FLEET_ENGINES, FLEET_LEASE, FLEET_SERVING, FLEET_TENSORS
from tests.contract.support.agent_pod import until
from tests.contract.support.coordinator_process import TOKEN, Lab, fleet_lab

ELSEWHERE = {CALLER_HEADER: "192.0.2.7"}
KEY = Credentials(TOKEN)


@pytest.fixture
async def lab(tmp_path: Path) -> AsyncIterator[Lab]:
    async with fleet_lab(tmp_path) as lab:
        yield lab


async def test_every_control_call_from_another_machine_is_refused(lab: Lab) -> None:
    calls = [(route.method, route.path.format(engine="e0", call="flush_cache")) for route in control_routes]
    calls += [
        ("GET", FLEET),
        ("GET", FLEET_TENSORS),
        ("GET", "/workers"),
        ("GET", "/list_workers"),
        ("GET", "/get_weights_by_name"),
        ("POST", "/unknown"),
    ]
    for method, path in calls:
        async with lab.session.request(method, lab.url + path, headers=ELSEWHERE) as reply:
            body = await reply.json()
            assert (reply.status, body["code"], body["success"]) == (401, "Unauthenticated", False), path
            assert reply.headers["WWW-Authenticate"] == "Bearer"
            assert "192.0.2.7" in body["message"]
            assert "Authorization: Bearer" in (reply.reason or "")
    assert all(not agent.bodies_of("/pause_generation") for agent in lab.agents)


@pytest.mark.parametrize(
    ("credential", "is_refused"),
    [(KEY.derive("e0"), False), (KEY.derive("e1"), True), (KEY, True)],
    ids=["of this engine", "of another engine", "the key"],
)
async def test_an_agent_names_the_callers_of_its_own_engine_only(lab: Lab, credential: Credentials, is_refused: bool) -> None:
    headers = ELSEWHERE | credential.header | {RELAYED_CALLER_HEADER: "127.0.0.1"}
    async with lab.session.post(f"{lab.url}{FLEET_ENGINES}/e0/flush_cache", headers=headers) as reply:
        assert (reply.status == 401) is is_refused, await reply.text()


async def test_an_agent_asks_about_a_caller_before_it_reads_the_body(lab: Lab, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "sglang_rollout.audit")
    agent = ELSEWHERE | KEY.derive("e0").header
    url = f"{lab.url}{FLEET_ENGINES}/e0/update_weights_from_tensor"
    for caller, status in (("127.0.0.1", 204), ("192.0.2.9", 401)):
        async with lab.session.get(url, headers=agent | {RELAYED_CALLER_HEADER: caller}) as reply:
            assert reply.status == status
    assert [line["status"] for line in audit_lines(caplog)] == [401], "the call itself gets the line of an allowed caller"


async def test_each_control_call_leaves_one_line(lab: Lab, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "sglang_rollout.audit")
    secret = {"model_path": "/secret-path"}
    for headers in (ELSEWHERE, {CALLER_HEADER: "127.0.0.1"}):
        async with lab.session.post(lab.url + "/fleet/run", json=secret, headers=headers | {"Authorization": "Bearer guess"}) as reply:
            await reply.read()
    async with lab.session.get(lab.url + "/fleet") as reply:
        await reply.read()
    lines = audit_lines(caplog)
    assert not any("secret" in str(line) or "guess" in str(line) for line in lines)
    assert [(line["caller"], line["status"]) for line in lines] == [(None, 401), ("localhost", 200)]
    assert {(line["method"], line["path"]) for line in lines} == {("POST", "/fleet/run")}


async def test_refused_calls_of_every_control_path_leave_a_line(lab: Lab, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "sglang_rollout.audit")
    paths = [FLEET, FLEET_LEASE, f"/{'x' * 5000}"]
    for path in paths:
        async with lab.session.get(lab.url + path, headers=ELSEWHERE) as reply:
            assert reply.status == 401
    lines = audit_lines(caplog)
    assert [(line["path"], line["address"], line["caller"]) for line in lines] == [
        (path[:MAX_PATH_CHARACTERS], "192.0.2.7", None) for path in paths
    ]


async def test_a_flood_of_refused_calls_leaves_a_few_lines_and_a_count(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "sglang_rollout.audit")
    async with fleet_lab(tmp_path) as lab:
        for _ in range(MAX_REFUSED_LINES + 30):
            async with lab.session.post(lab.url + "/pause_generation", headers=ELSEWHERE) as reply:
                assert reply.status == 401
        async with lab.session.post(lab.url + FLEET_LEASE, headers={CALLER_HEADER: "192.168.0.8"}) as reply:
            assert reply.status == 401
        async with lab.session.post(lab.url + "/fleet/run") as reply:
            assert reply.status == 200
    lines = audit_lines(caplog)
    assert [line["address"] for line in lines[:-3]] == ["192.0.2.7"] * MAX_REFUSED_LINES
    other, accepted, count = lines[-3:]
    assert other["address"] == "192.168.0.8", "another caller is not hidden by the flood"
    assert (accepted["caller"], accepted["status"]) == ("localhost", 200)
    assert count == {"address": "192.0.2.7", "caller": None, "omittedRefusals": 30}


async def test_the_line_of_an_update_has_the_version_that_the_fleet_serves(lab: Lab, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "sglang_rollout.audit")
    async with lab.session.post(lab.url + "/flush_cache") as reply:
        assert reply.status == 200
    assert [line["version"] for line in audit_lines(caplog)] == ["base"]


def audit_lines(caplog: pytest.LogCaptureFixture) -> list[dict[str, Any]]:
    return [json.loads(record.getMessage()) for record in caplog.records if record.name == "sglang_rollout.audit"]


async def test_a_read_of_weights_and_a_flush_by_get_leave_a_line_and_other_reads_do_not(lab: Lab, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "sglang_rollout.audit")
    for path in ("/flush_cache", "/get_weights_by_name?name=w", FLEET, FLEET_SERVING, "/server_info", "/health", "/fleet/metrics"):
        async with lab.session.get(lab.url + path) as reply:
            await reply.read()
    assert [(line["method"], line["path"]) for line in audit_lines(caplog)] == [("GET", "/flush_cache"), ("GET", "/get_weights_by_name")]


async def test_a_call_whose_client_leaves_leaves_a_line(lab: Lab, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "sglang_rollout.audit")
    for agent in lab.agents:
        agent.slow["/pause_generation"] = 2.0
    _, writer = await asyncio.open_connection("127.0.0.1", lab.port)
    writer.write(b"POST /pause_generation HTTP/1.1\r\nHost: localhost\r\nContent-Length: 2\r\nContent-Type: application/json\r\n\r\n{}")

    async def is_called() -> bool:
        return any(agent.bodies_of("/pause_generation") for agent in lab.agents)

    async def is_logged() -> bool:
        return bool(audit_lines(caplog))

    await until(is_called, 60, "the engines are called")
    writer.close()
    await until(is_logged, 60, "the line is written")
    (line,) = audit_lines(caplog)
    assert (line["path"], line["status"], line["caller"]) == ("/pause_generation", 499, "localhost")


async def test_only_the_batch_server_asks_about_callers_of_data_paths(lab: Lab) -> None:
    url = f"{lab.url}{FLEET_CALLER}?path=/generate"
    async with lab.session.get(url, headers={RELAYED_CALLER_HEADER: "192.0.2.7"}) as reply:
        assert reply.status == 204, "everyone may generate by default"
    async with lab.session.get(url, headers={CALLER_HEADER: "127.0.0.1", RELAYED_CALLER_HEADER: "192.0.2.7"}) as reply:
        assert reply.status == 404


async def test_reads_that_generation_needs_are_open(lab: Lab) -> None:
    for path in ("/health", "/server_info", "/v1/models", "/get_weight_version"):
        async with lab.session.get(lab.url + path, headers=ELSEWHERE) as reply:
            assert reply.status == 200, path


async def test_a_refused_call_is_answered_before_its_body_arrives(lab: Lab) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", lab.port)
    head = f"POST /pause_generation HTTP/1.1\r\nHost: x\r\nContent-Length: 1000000\r\n{CALLER_HEADER}: 192.0.2.7\r\n\r\n"
    writer.write(head.encode())
    answer = await reader.read()  # to the end: the connection is closed
    writer.close()
    assert answer.startswith(b"HTTP/1.1 401 ")


async def test_this_machine_needs_no_token(lab: Lab) -> None:
    for headers in ({}, {CALLER_HEADER: "127.0.0.1"}, {CALLER_HEADER: "::1"}):
        async with lab.session.get(lab.url + FLEET, headers=headers) as reply:
            assert reply.status == 200
