"""``/init_weights_update_group`` over HTTP: the address that the front names decides what the body may name."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

from aiohttp.test_utils import TestClient, TestServer
from prometheus_client import CollectorRegistry

from sglang_rollout.api.security_spec import Security
from sglang_rollout.coordinator.callers.check import CallerCheck
from sglang_rollout.coordinator.http.app import Parts, make_app
from sglang_rollout.coordinator.http.control import routes
from sglang_rollout.coordinator.update.requests import Answer, Master, OpenGroup, Request
from sglang_rollout.credentials import Credentials
from sglang_rollout.wire.access import CALLER_HEADER
from tests.support.pods import make_pod, make_table


async def test_the_state_machine_gets_the_decision_about_the_address() -> None:
    asked: list[Request] = []

    async def ask(request: Request, caller: str) -> Answer:
        asked.append(request)
        return Answer(200, "")

    pods = make_table(make_pod(address="10.0.0.1"))
    callers = CallerCheck(name="fleet", namespace="ml", security=Security, pods=pods, credentials=Credentials("c").derive)
    parts = SimpleNamespace(
        callers=callers,
        ask=ask,
        machine=SimpleNamespace(fleet=SimpleNamespace(committed=None)),
        metrics=SimpleNamespace(registry=CollectorRegistry()),
    )
    async with TestClient(TestServer(make_app(cast("Parts", parts), routes))) as client:

        async def open_group(host: str) -> Master:
            body: dict[str, Any] = {"master_address": host, "master_port": 1}
            reply = await client.post("/init_weights_update_group", json=body, headers={CALLER_HEADER: "::ffff:10.0.0.1"})
            assert reply.status == 200
            request = asked.pop()
            assert isinstance(request, OpenGroup)
            assert request.body == body
            assert request.master is not None
            return request.master

        assert await open_group("10.0.0.1") == Master("10.0.0.1")
        refusal = (await open_group("127.0.0.1")).refusal
        assert refusal is not None
        assert "yours is 10.0.0.1" in refusal.message
