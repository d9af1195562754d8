"""The coordinator of a router pod: the front reaches a Unix socket, and other containers a port without control calls."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
import pytest

from sglang_rollout.coordinator.http.control import routes as control_routes
from sglang_rollout.coordinator.http.info import routes as info_routes
from sglang_rollout.proxy.address import Address, UnixSocket
from sglang_rollout.wire.access import CALLER_HEADER, POD_PATHS, RELAYED_CALLER_HEADER
from sglang_rollout.wire.ports import FLEET, FLEET_CALLER, FLEET_SERVING
from tests.contract.support.coordinator_process import Lab, fleet_lab

FORGED = [{}, {CALLER_HEADER: "127.0.0.1"}, {CALLER_HEADER: "10.0.0.1", RELAYED_CALLER_HEADER: "10.0.0.1"}]
CALLS = sorted(
    {(route.method, re.sub(r"{[^}]*}", "x", route.path)) for route in (*control_routes, *info_routes) if route.path not in POD_PATHS}
)


@pytest.fixture
async def lab(tmp_path: Path) -> AsyncIterator[Lab]:
    async with fleet_lab(tmp_path) as lab:
        await lab.kill()
        lab.start(listen=UnixSocket(str(tmp_path / "c.sock")), pod_listen=Address("127.0.0.1", lab.port))
        socket = aiohttp.UnixConnector(str(tmp_path / "c.sock"))
        named = {CALLER_HEADER: "127.0.0.1"}
        async with aiohttp.ClientSession(base_url="http://localhost", connector=socket, headers=named) as front:

            async def serves() -> bool:
                async with front.get(FLEET) as reply:
                    return reply.status == 200 and (await reply.json())["serving"] == len(lab.agents)

            await lab.until("the engines serve again", serves)
        yield lab


async def test_the_port_answers_no_path_but_those_of_the_pod(lab: Lab) -> None:
    for headers in FORGED:
        for method, path in CALLS:
            async with lab.session.request(method, lab.url + path, headers=headers, json={}) as reply:
                assert reply.status == 404, (method, path, headers)
    assert all(not agent.bodies_of("/pause_generation") for agent in lab.agents)


async def test_the_port_answers_the_batch_server(lab: Lab) -> None:
    async with lab.session.get(lab.url + FLEET_SERVING) as reply:
        assert len((await reply.json())["engines"]) == len(lab.agents)
    async with lab.session.get(f"{lab.url}{FLEET_CALLER}?path=/generate", headers={RELAYED_CALLER_HEADER: "192.168.0.7"}) as reply:
        assert reply.status == 204
