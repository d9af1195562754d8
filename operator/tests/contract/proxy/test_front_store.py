"""Uploads of versions through a real front: to the weight store, and never to the coordinator."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import aiohttp
import pytest
from aiohttp import web
from yarl import URL

from sglang_rollout.wire.access import CALLER_HEADER
from sglang_rollout.wire.ports import DIGEST_HEADER, FLEET, FLEET_UPDATES, FRONT_HEALTH, TICKET_HEADER
from sglang_rollout.wire.staged import PIECE_BYTES
from tests.contract.support.agent_pod import Process, until
from tests.support.ports import free_port

pytestmark = pytest.mark.router

UPDATE = f"{FLEET_UPDATES}/{'0123456789abcdef' * 2}"
PIECE = f"{UPDATE}/pieces/7/123"


class Server:
    """A stub of coordinator or weight store, which accepts every call."""

    def __init__(self, name: str) -> None:
        self.name, self.port, self.received = name, free_port(), dict[str, str]()
        self._runner: web.AppRunner | None = None

    async def start(self) -> None:
        app = web.Application(client_max_size=2 * PIECE_BYTES)
        app.router.add_route("*", "/{path:.*}", self._answer)
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", self.port, reuse_address=True).start()

    async def stop(self) -> None:
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None

    async def _answer(self, request: web.Request) -> web.Response:
        body = await request.read()
        if not request.path.startswith("/fleet/held"):
            self.received = {name.lower(): value for name, value in request.headers.items()}
        return web.json_response({"from": self.name, "bytes": len(body)})


@dataclass
class Front:
    url: str
    generate: str
    store: Server
    http: aiohttp.ClientSession

    async def ask(self, method: str, path: str, body: bytes = b"", *, url: str = "", **headers: str) -> tuple[int, dict[str, object]]:
        async with self.http.request(method, URL((url or self.url) + path, encoded=True), data=body, headers=headers) as reply:
            return reply.status, await reply.json(content_type=None)


@asynccontextmanager
async def running(tmp_path: Path, host: str) -> AsyncIterator[Front]:
    coordinator, store, port, generate = Server("coordinator"), Server("store"), free_port(), free_port()
    await coordinator.start()
    await store.start()
    command = [
        *("proxy", "front", "--listen", f"127.0.0.1:{port}", "--generate-listen", f"127.0.0.1:{generate}"),
        *("--coordinator", f"127.0.0.1:{coordinator.port}", "--smg", "127.0.0.1:9", "--batches", "127.0.0.1:9"),
        *("--store", f"{host}:{store.port}", "--runtime-dir", str(tmp_path)),
    ]
    process = Process(command, tmp_path / "front.log")
    async with aiohttp.ClientSession() as http:
        front = Front(f"http://127.0.0.1:{port}", f"http://127.0.0.1:{generate}", store, http)

        async def is_up() -> bool:
            try:
                async with http.get(front.url + FRONT_HEALTH) as reply:
                    return reply.status == 200
            except aiohttp.ClientError:
                return False

        try:
            await process.start()
            await until(is_up, 60, "the front answers")
            yield front
        finally:
            await process.end()
            await coordinator.stop()
            await store.stop()


@pytest.fixture
async def front(tmp_path: Path) -> AsyncIterator[Front]:
    async with running(tmp_path, "127.0.0.1") as made:
        yield made


async def test_a_piece_reaches_the_store_whole_and_without_the_callers_token(front: Front) -> None:
    headers = {"Authorization": "Bearer t", CALLER_HEADER: "10.0.0.9", TICKET_HEADER: "a", DIGEST_HEADER: "b"}
    assert await front.ask("PUT", PIECE, bytes(PIECE_BYTES), **headers) == (200, {"from": "store", "bytes": PIECE_BYTES})
    received = front.store.received
    assert (received[TICKET_HEADER.lower()], received[DIGEST_HEADER.lower()]) == ("a", "b")
    assert not {"authorization", CALLER_HEADER.lower()} & received.keys()


@pytest.mark.parametrize(
    ("method", "path", "server"),
    [
        ("PUT", PIECE, "store"),
        ("GET", UPDATE, "store"),
        ("GET", f"{UPDATE}?wait=1", "store"),
        ("DELETE", UPDATE, "coordinator"),
        ("POST", FLEET_UPDATES, "coordinator"),
        ("POST", f"{UPDATE}/commit", "coordinator"),
        ("GET", FLEET, "coordinator"),
        ("GET", PIECE, "coordinator"),
        ("POST", PIECE, "coordinator"),
        ("PUT", f"{PIECE}/x", "coordinator"),
        ("PUT", f"{UPDATE}/pieces/../pieces/1/2", "coordinator"),
        ("PUT", f"{FLEET_UPDATES}/ABC/pieces/1/2", "coordinator"),
    ],
)
async def test_only_pieces_and_their_state_go_to_the_store(front: Front, method: str, path: str, server: str) -> None:
    status, body = await front.ask(method, path)
    assert (status, body["from"]) == (200, server)


async def test_the_port_for_data_paths_takes_no_uploads(front: Front) -> None:
    for method, path in (("PUT", PIECE), ("GET", UPDATE)):
        status, body = await front.ask(method, path, url=front.generate)
        assert (status, body["error"]["code"]) == (403, "data_paths_only")  # type: ignore[index]
    assert front.store.received == {}


async def test_a_store_that_is_away_is_named_until_it_is_back(front: Front) -> None:
    await front.store.stop()
    status, body = await front.ask("GET", UPDATE)
    assert (status, body["error"]["code"]) == (503, "store_unavailable")  # type: ignore[index]
    await front.store.start()
    assert (await front.ask("GET", UPDATE))[0] == 200


async def test_a_front_serves_although_the_name_of_the_store_is_unknown(tmp_path: Path) -> None:
    async with running(tmp_path, "demo-store.default.svc") as front:
        assert (await front.ask("GET", FLEET))[0] == 200
        assert (await front.ask("PUT", PIECE))[0] == 503
