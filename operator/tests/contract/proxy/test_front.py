"""The front, a real haproxy over stubs of smg, coordinator and batch server, while all or some of them run."""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import aiohttp
import pytest
from aiohttp import web
from yarl import URL

from sglang_rollout.controller.render.router import SOFT_STOP_SCRIPT
from sglang_rollout.proxy.address import Address
from sglang_rollout.proxy.cli import find_haproxy
from sglang_rollout.proxy.config import FrontParams, front_config
from sglang_rollout.sglang.api import (
    DATA_PATHS,
    DIRECT_PATHS,
    HEALTH_PATHS,
    LOADS,
    MODEL_INFO,
    MODELS,
    SERVER_INFO,
    ControlCall,
)
from sglang_rollout.wire.access import CALLER_HEADER
from sglang_rollout.wire.ports import (
    BATCHES_HEALTH,
    BROKEN_HEADER,
    FLEET,
    FLEET_ENGINES,
    FLEET_HEALTH,
    FLEET_HELD,
    FLEET_LEASE,
    FLEET_METRICS,
    FLEET_RUN,
    FLEET_TENSORS,
    FRONT_HEALTH,
)
from tests.contract.support.agent_pod import Process, until
from tests.support.keepalive import read_connections
from tests.support.ports import free_port

pytestmark = pytest.mark.router


REQUEST_BYTES = 2_000_000
"""Largest body that the front accepts."""

BROKEN_BODY = json.dumps({"text": "a" * 50_000})
"""Request of nearly the size that the front can repeat."""


@dataclass
class Part:
    """A stub of smg, the coordinator or the batch server that can go away and come back."""

    name: str
    port: int
    workers: bool = True
    held: bool = False
    seconds: float = 0.0
    refuses: bool = False
    refusal: int = 0
    """Status with which requests for tokens are refused."""
    page: tuple[int, str, bytes] | None = None
    """Status, type and body of the answer to each request."""
    broken: int = 0
    """Requests for tokens that get the answer of a gate whose engine broke off."""
    attempts: int = 0
    """Requests for tokens that arrived."""
    received: dict[str, str] = field(default_factory=dict)
    """Headers of the last request that was no check, with names in lower case."""
    runner: web.AppRunner | None = None

    async def start(self) -> None:
        app = web.Application()
        app.router.add_route("*", "/{path:.*}", self._answer)
        self.runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
        await self.runner.setup()
        await web.TCPSite(self.runner, "127.0.0.1", self.port, reuse_address=True).start()

    async def stop(self) -> None:
        if self.runner is not None:
            await self.runner.cleanup()
            self.runner = None

    async def _answer(self, request: web.Request) -> web.Response:
        if request.path == "/readiness":
            return web.Response(status=200 if self.workers else 503)
        if request.path == FLEET_HELD:
            return web.Response(status=200 if self.held else 404)
        if self.refuses:
            return web.json_response({"error": {"code": "forbidden"}}, status=403)
        if self.page is not None:
            status, kind, page = self.page
            return web.Response(status=status, body=page, headers={"Content-Type": kind})
        if self.refusal:
            return web.json_response({"error": {"code": "forbidden"}}, status=self.refusal)
        self.received = {name.lower(): ",".join(request.headers.getall(name)) for name in request.headers}
        await request.read()
        await asyncio.sleep(self.seconds)
        if request.path == "/generate":
            self.attempts += 1
            if self.broken:
                self.broken -= 1
                return web.json_response({"error": {"code": "engine_broke_off"}}, status=501, headers={BROKEN_HEADER: "yes"})
        if self.name == "smg" and (not self.workers or "unknown" in await request.text()):
            return web.json_response({"error": {"code": "model_not_found"}}, status=404)
        answer = {"from": self.name, "path": request.path, "session": request.headers.get("x-session-id")}
        return web.json_response(answer | ({"term": 1} if request.path == FLEET_HEALTH else {}))


@dataclass
class Front:
    url: str
    smg: Part
    coordinator: Part
    batches: Part
    http: aiohttp.ClientSession
    process: Process
    generate: str
    """URL of the port for data paths."""

    async def ask(self, path: str, body: str = "{}") -> tuple[int, dict[str, object], str]:
        async with self.http.post(self.url + path, data=body, timeout=aiohttp.ClientTimeout(total=30)) as reply:
            return reply.status, await reply.json(), reply.headers.get("Retry-After", "")


@pytest.fixture
async def front(tmp_path: Path) -> AsyncIterator[Front]:
    smg, coordinator, batches = parts = [Part(name, free_port()) for name in ("smg", "coordinator", "batches")]
    port = free_port()
    for part in parts:
        await part.start()
    generate = free_port()
    line = ["proxy", "front", "--listen", f"127.0.0.1:{port}", "--generate-listen", f"127.0.0.1:{generate}"]
    line += ["--smg", f"127.0.0.1:{smg.port}", "--runtime-dir", str(tmp_path)]
    line += ["--coordinator", f"127.0.0.1:{coordinator.port}", "--batches", f"127.0.0.1:{batches.port}"]
    line += ["--limits", json.dumps({"requestBytes": REQUEST_BYTES})]
    process = Process(line, tmp_path / "front.log")
    await process.start()
    try:
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(force_close=True)) as http:
            made = Front(f"http://127.0.0.1:{port}", smg, coordinator, batches, http, process, f"http://127.0.0.1:{generate}")
            await until(lambda: _answers(made), 60, "the front answers")
            yield made
    finally:
        await process.end()
        for part in parts:
            await part.stop()


async def test_the_front_answers_its_own_health_in_json(front: Front) -> None:
    async with front.http.get(front.url + FRONT_HEALTH) as reply:
        assert (reply.status, await reply.json()) == (200, {"status": "ok"})


async def test_a_long_name_of_a_session_is_refused_with_the_reason(front: Front) -> None:
    for length, wanted in ((1024, 200), (1025, 400), (30_000, 400), (59_000, 400)):
        body = json.dumps({"session_id": "s" * length, "text": "a"})
        status, answer, _ = await front.ask("/generate", body)
        assert status == wanted, answer
        assert wanted == 200 or answer["error"]["code"] == "session_too_long"  # type: ignore[index]


@pytest.mark.parametrize(
    ("page", "message"),
    [
        ((422, "text/plain", b'Failed to parse "text":\n\xc3\xa9 \\ <x>'), 'Failed to parse "text":\n\u00e9 \\ <x>'),
        ((500, "text/plain; charset=utf-8", b"Internal Server Error"), "Internal Server Error"),
        ((400, "text/html", b"<h1>Bad</h1>"), "<h1>Bad</h1>"),
        ((404, "text/plain", b""), "no reason given"),
        ((413, "text/plain", b"a" * 100_000), "a" * 2000),
    ],
)
async def test_a_refusal_in_plain_text_becomes_json_with_the_reason(front: Front, page: tuple[int, str, bytes], message: str) -> None:
    for part, path in ((front.smg, "/v1/chat/completions"), (front.coordinator, "/flush_cache"), (front.batches, "/v1/embeddings")):
        part.page = page
        async with front.http.post(front.url + path, data="{}") as reply:
            error = (await reply.json())["error"]
            assert (reply.status, error["message"]) == (page[0], message)


@pytest.mark.parametrize(("status", "kind"), [(400, "application/json"), (200, "text/plain"), (400, "text/event-stream")])
async def test_other_answers_stay_unchanged(front: Front, status: int, kind: str) -> None:
    front.smg.page = (status, kind, b'{"a": 1}')
    async with front.http.post(front.url + "/v1/chat/completions", data="{}") as reply:
        assert (reply.status, reply.content_type, await reply.read()) == (status, kind, b'{"a": 1}')


async def test_silent_connections_are_probed(front: Front) -> None:
    """Else NAT or a load balancer forgets the connection of a client that waits for a long answer."""
    for url in (front.url, front.generate):
        port = int(url.rsplit(":", 1)[1])
        _, writer = await asyncio.open_connection("127.0.0.1", port)
        await asyncio.sleep(0.2)
        probes = [seconds for is_server, seconds in read_connections(port) if is_server]
        assert probes
        assert all(seconds is not None and seconds <= 60 for seconds in probes), probes
        writer.close()


@pytest.mark.parametrize("path", ["/%67enerate", "/v1%2Fcompletions", "/%76%31/models/m", "/flush_cach%65"])
async def test_an_encoded_path_reaches_no_process(front: Front, path: str) -> None:
    async with front.http.post(URL(front.url + path, encoded=True), data="{}") as reply:
        assert (reply.status, (await reply.json())["error"]["code"]) == (400, "encoded_path")


async def test_the_port_for_data_paths_serves_what_the_url_serves(front: Front) -> None:
    for path in (*DATA_PATHS, MODELS, f"{MODELS}/org/model", *HEALTH_PATHS):
        for url in (front.url, front.generate):
            async with front.http.post(url + path, data='{"text": "a"}') as reply:
                assert (reply.status, (await reply.json())["path"]) == (200, path)


CONTROL_PATHS = [
    *(call.path for call in ControlCall),
    *(FLEET, FLEET_TENSORS, FLEET_RUN, FLEET_LEASE, FLEET_METRICS, FLEET_HEALTH, FLEET_HELD, f"{FLEET_ENGINES}/demo-engine-0/flush_cache"),
    *(SERVER_INFO, MODEL_INFO, LOADS, "/workers", "/get_weight_version", "/get_world_size", "/metrics", "/", "/unknown"),
    *("//flush_cache", "/GENERATE", "/generate/", "/generate/../flush_cache", "/v1/modelsx", "/flush_cache;/generate", "/health/../fleet"),
]


async def test_the_port_for_data_paths_refuses_every_other_path(front: Front) -> None:
    for method, path in itertools.product(("GET", "POST", "OPTIONS"), CONTROL_PATHS):
        async with front.http.request(method, URL(front.generate + path, encoded=True), data="{}") as reply:
            error = (await reply.json())["error"]
        assert (path, reply.status, error["code"]) == (path, 403, "data_paths_only")
        assert "status.endpoints.url" in error["message"]


async def test_the_port_for_data_paths_refuses_encoded_paths(front: Front) -> None:
    for path in ("/flush_cach%65", "/%66leet", "/v1%2Fmodels"):
        async with front.http.post(URL(front.generate + path, encoded=True), data="{}") as reply:
            assert (reply.status, (await reply.json())["error"]["code"]) == (400, "encoded_path")


async def test_the_url_answers_control_calls_while_callers_of_data_paths_use_all_connections(tmp_path: Path) -> None:
    coordinator, port, generate = Part("coordinator", free_port()), free_port(), free_port()
    await coordinator.start()
    line = ["proxy", "front", "--listen", f"127.0.0.1:{port}", "--generate-listen", f"127.0.0.1:{generate}", "--maxconn", "64"]
    line += ["--smg", "127.0.0.1:9", "--coordinator", f"127.0.0.1:{coordinator.port}", "--runtime-dir", str(tmp_path)]
    process = Process(line, tmp_path / "front.log")
    await process.start()
    writers = []
    try:
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(force_close=True)) as http:

            async def is_up() -> bool:
                try:
                    async with http.get(f"http://127.0.0.1:{port}{FRONT_HEALTH}") as reply:
                        return reply.status == 200
                except aiohttp.ClientError:
                    return False

            await until(is_up, 60, "the front answers")
            for number in range(64):
                _, writer = await asyncio.open_connection("127.0.0.1", generate, local_addr=(f"127.0.0.{2 + number // 16}", 0))
                writer.write(b"POST /generate HTTP/1.1\r\nHost: fleet\r\nContent-Length: 50\r\n\r\n{")
                writers.append(writer)
            late = asyncio.create_task(http.get(f"http://127.0.0.1:{generate}{FRONT_HEALTH}").__aenter__())
            await asyncio.wait({late}, timeout=1)
            assert not late.done(), "callers use all connections of this port"
            async with http.get(f"http://127.0.0.1:{port}{FLEET}") as reply:
                assert reply.status == 200
            for writer in writers:
                writer.close()
            (await late).close()
    finally:
        for writer in writers:
            writer.close()
        await process.end()
        await coordinator.stop()


async def test_a_front_that_checks_callers_sends_all_data_requests_to_the_batch_server(tmp_path: Path) -> None:
    smg, coordinator, batches = parts = [Part(name, free_port()) for name in ("smg", "coordinator", "batches")]
    for part in parts:
        await part.start()
    port = free_port()
    line = ["proxy", "front", "--listen", f"127.0.0.1:{port}", "--check-data-callers", "--runtime-dir", str(tmp_path)]
    for part in parts:
        line += [f"--{part.name}", f"127.0.0.1:{part.port}"]
    process = Process(line, tmp_path / "front.log")
    await process.start()
    try:
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(force_close=True)) as http:
            made = Front(f"http://127.0.0.1:{port}", smg, coordinator, batches, http, process, "")
            await until(lambda: _answers(made), 60, "the front answers")
            for path in DATA_PATHS:
                assert (await made.ask(path, '{"text": "a"}'))[1]["from"] == "batches"
            assert (await made.ask("/pause_generation"))[1]["from"] == "coordinator"
    finally:
        await process.end()
        for part in parts:
            await part.stop()


@pytest.mark.parametrize("path", ["/pause_generation", "/fleet", "/unknown"])
async def test_the_coordinator_learns_the_address_of_the_caller_and_nothing_that_the_caller_says_of_it(front: Front, path: str) -> None:
    sent = [(CALLER_HEADER, "10.0.0.1"), (CALLER_HEADER.lower(), "10.0.0.2")]
    async with front.http.post(front.url + path, data="{}", headers=sent) as reply:
        assert (await reply.json())["from"] == "coordinator"
    assert front.coordinator.received[CALLER_HEADER.lower()] == "127.0.0.1"


async def test_an_address_that_is_refused_again_and_again_gets_no_further_control_call(front: Front) -> None:
    front.coordinator.refuses = True
    statuses = [(await front.ask("/pause_generation"))[0] for _ in range(1001)]
    assert set(statuses) == {403}
    front.coordinator.refuses = False
    for _ in range(2):
        async with front.http.post(front.url + "/pause_generation", data="{}") as reply:
            assert (reply.status, reply.headers["Retry-After"]) == (429, "10")
            assert (await reply.json())["error"]["code"] == "too_many_refused_calls"
    assert (await front.ask("/generate", '{"text": "a"}'))[1]["from"] == "smg"
    async with client_at("127.0.0.2") as other, other.post(front.url + "/pause_generation", data="{}") as reply:
        assert (await reply.json())["from"] == "coordinator"


@pytest.mark.parametrize("header", ["Origin", "Sec-Fetch-Site"])
async def test_refused_calls_of_a_web_page_are_counted_apart_from_those_of_a_program(front: Front, header: str) -> None:
    """A page in a browser has the address of a trainer on the same machine."""
    front.coordinator.refuses = True
    async with client_at("127.0.0.6" if header == "Origin" else "127.0.0.7") as http:

        async def call(path: str = "/pause_generation", **headers: str) -> int:
            async with http.post(URL(front.url + path, encoded=True), data="{}", headers=headers) as reply:
                return reply.status

        page = {header: "cross-site"}
        assert {await call(**page) for _ in range(600)} == {403}
        assert {await call("/%66leet", **page) for _ in range(401)} == {400}
        assert await call(**page) == 429
        front.coordinator.refuses = False
        assert await call() == 200


async def test_refused_calls_without_an_end_reach_the_coordinator_no_more(front: Front) -> None:
    """The rate of the calls decides, and not the rate of those that reach the coordinator, which would fall and let the next ones pass."""
    front.coordinator.refuses = True
    async with client_at("127.0.0.2") as http:

        async def call() -> int:
            async with http.post(front.url + "/pause_generation", data="{}") as reply:
                return reply.status

        statuses = [await asyncio.gather(*(call() for _ in range(250))) for _ in range(17)]
    assert {status for batch in statuses[:4] for status in batch} == {403}
    assert {status for batch in statuses[5:] for status in batch} == {429}


async def test_calls_that_the_front_refuses_count_like_those_that_the_coordinator_refuses(front: Front) -> None:
    for address, path in (("127.0.0.3", "/pause_generation"), ("127.0.0.4", "/%66leet")):
        async with client_at(address) as http:

            async def call(path: str = path, http: aiohttp.ClientSession = http) -> int:
                async with http.post(URL(front.generate + path, encoded=True), data="{}") as reply:
                    return reply.status

            statuses = [await call() for _ in range(1001)]
            assert (429 in statuses, await call()) == (False, 429)
            async with http.post(front.generate + "/generate", data='{"text": "a"}') as reply:
                assert (await reply.json())["from"] == "smg"


@pytest.mark.parametrize("status", [401, 403])
async def test_an_address_whose_data_requests_are_refused_gets_no_further_one(front: Front, status: int) -> None:
    front.batches.refusal = status
    async with client_at(f"127.0.0.{status - 393}") as http:

        async def ask(path: str = "/generate", **headers: str) -> int:
            async with http.post(front.url + path, data='{"text": ["a"]}', headers=headers) as reply:
                return reply.status

        assert {await ask() for _ in range(1001)} == {status}
        front.batches.refusal = 0
        assert await ask() == 429
        assert await ask("/pause_generation") == 200, "control calls are counted apart"
        assert await ask(Origin="http://example.com") == 200, "web pages, too"
    assert (await front.ask("/generate", '{"text": ["a"]}'))[1]["from"] == "batches"


async def test_one_address_has_a_limited_number_of_open_control_calls(front: Front) -> None:
    front.coordinator.seconds = 5
    async with client_at("127.0.0.2") as http:
        calls = [asyncio.create_task(http.post(front.url + "/pause_generation", data="{}")) for _ in range(300)]
        done, waiting = await asyncio.wait(calls, timeout=2)
        assert len(waiting) == 256
        assert {(call.result().status, call.result().headers["Retry-After"]) for call in done} == {(503, "1")}
        front.coordinator.seconds = 0
        assert (await front.ask("/pause_generation"))[1]["from"] == "coordinator"
        assert {(await call).status for call in waiting} == {200}


async def test_one_address_has_a_quarter_of_the_open_data_requests(tmp_path: Path) -> None:
    async with small_front(tmp_path) as (port, _), unfinished_bodies(port, {"127.0.0.2": DATA_REQUESTS // 4}):
        url, body = f"http://127.0.0.1:{port}/generate", '{"text": ["a"]}'

        async def is_refused() -> bool:
            async with client_at("127.0.0.2") as http, http.post(url, data=body) as reply:
                answer = await reply.json()
                return (reply.status, reply.headers.get("Retry-After")) == (503, "1") and "quarter" in answer["error"]["message"]

        await asyncio.sleep(1)  # a request that comes before the last of the bodies would take its place
        await until(is_refused, 10, "the front counts the requests")
        async with client_at("127.0.0.3") as http, http.post(url, data=body) as reply:
            assert (await reply.json())["from"] == "batches"


def client_at(address: str) -> aiohttp.ClientSession:
    """Return a client that connects from an address."""
    return aiohttp.ClientSession(connector=aiohttp.TCPConnector(local_addr=(address, 0), limit=0))


async def test_smg_gets_neither_token_nor_address_of_a_caller_and_the_batch_server_gets_both(front: Front) -> None:
    token = {"Authorization": "Bearer secret"}
    for url, prompt in itertools.product((front.url, front.generate), ('"a"', '["a"]')):
        async with front.http.post(url + "/generate", data=f'{{"text": {prompt}}}', headers=token) as reply:
            assert (await reply.json())["from"] == ("smg" if prompt == '"a"' else "batches")
    assert not {"authorization", CALLER_HEADER.lower()} & front.smg.received.keys()
    assert (front.batches.received["authorization"], front.batches.received[CALLER_HEADER.lower()]) == ("Bearer secret", "127.0.0.1")


async def test_a_body_whose_length_is_above_the_limit_reaches_no_process(front: Front) -> None:
    for path in ("/generate", "/v1/chat/completions", DIRECT_PATHS[0]):
        reader, writer = await asyncio.open_connection("127.0.0.1", URL(front.url).port)
        writer.write(f"POST {path} HTTP/1.1\r\nHost: fleet\r\nContent-Length: {REQUEST_BYTES + 1}\r\n\r\n{{".encode())
        assert (await reader.readline()).startswith(b"HTTP/1.1 400 ")
        assert b'"code": "above_limit"' in await reader.readuntil(b"raises it.")
        writer.close()


CONNECTIONS = 64
"""Connections of a small front."""
DATA_REQUESTS = 48
"""Connections of these that data requests may use."""


@asynccontextmanager
async def small_front(folder: Path) -> AsyncIterator[tuple[int, Callable[[str], Awaitable[tuple[int, str]]]]]:
    """Run a front with few connections. Yield its port and a call that sends a probe and returns status and process of the answer."""
    coordinator, batches, port, probes = Part("coordinator", free_port()), Part("batches", free_port()), free_port(), free_port()
    await coordinator.start()
    await batches.start()
    line = ["proxy", "front", "--listen", f"127.0.0.1:{port}", "--probes-listen", f"127.0.0.1:{probes}", "--maxconn", str(CONNECTIONS)]
    line += ["--smg", "127.0.0.1:9", "--coordinator", f"127.0.0.1:{coordinator.port}"]
    line += ["--batches", f"127.0.0.1:{batches.port}", "--runtime-dir", str(folder)]
    process = Process(line, folder / "front.log")
    await process.start()
    try:
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(force_close=True)) as http:

            async def probe(path: str) -> tuple[int, str]:
                async with http.get(f"http://127.0.0.1:{probes}{path}") as reply:
                    body = await reply.json() if reply.content_type == "application/json" else {}
                    return reply.status, body.get("from", "")

            async def is_up() -> bool:
                try:
                    return (await probe(FRONT_HEALTH))[0] == 200
                except aiohttp.ClientError:
                    return False

            await until(is_up, 60, "the front answers probes")
            yield port, probe
    finally:
        await process.end()
        await coordinator.stop()
        await batches.stop()


@asynccontextmanager
async def unfinished_bodies(port: int, clients: Mapping[str, int]) -> AsyncIterator[list[asyncio.StreamWriter]]:
    """Open connections from each client's address and send bodies that do not end. The front resets those above its limit."""
    writers = []
    try:
        for address, number in clients.items():
            for _ in range(number):
                with suppress(ConnectionError):
                    _, writer = await asyncio.open_connection("127.0.0.1", port, local_addr=(address, 0))
                    writers.append(writer)
                    writer.write(b"POST /generate HTTP/1.1\r\nHost: fleet\r\nContent-Length: 50\r\n\r\n{")
        yield writers
    finally:
        for writer in writers:
            writer.close()


async def get(port: int, path: str) -> int:
    async with aiohttp.ClientSession() as http, http.get(f"http://127.0.0.1:{port}{path}") as reply:
        return reply.status


async def test_probes_are_answered_while_callers_use_all_connections(tmp_path: Path) -> None:
    clients = {f"127.0.0.{number}": CONNECTIONS // 8 for number in range(2, 10)}
    async with small_front(tmp_path) as (port, probe), unfinished_bodies(port, clients) as writers:
        late = asyncio.create_task(get(port, FLEET))
        await asyncio.wait({late}, timeout=1)
        assert not late.done(), "callers use all connections"
        assert [await probe(path) for path in (FRONT_HEALTH, FLEET, "/generate")] == [(200, ""), (404, ""), (404, "")]
        assert await probe(FLEET_HEALTH) == (200, "coordinator")
        assert await probe(BATCHES_HEALTH) == (200, "batches")
        writers.pop().close()
        assert await late == 200


async def test_three_clients_cannot_use_up_all_connections(tmp_path: Path) -> None:
    clients = {f"127.0.0.{number}": CONNECTIONS for number in range(2, 5)}
    async with small_front(tmp_path) as (port, probe), unfinished_bodies(port, clients):
        assert [await get(port, FLEET) for _ in range(5)] == [200] * 5
        assert await probe(FRONT_HEALTH) == (200, "")


async def test_a_body_that_never_ends_reaches_no_process(tmp_path: Path) -> None:
    coordinator, port = Part("coordinator", free_port()), free_port()
    await coordinator.start()
    unused = Address("127.0.0.1", 9)
    params = FrontParams(Address("127.0.0.1", port), unused, Address("127.0.0.1", coordinator.port), unused, maxconn=64)
    (tmp_path / "front.cfg").write_text(front_config(params).replace("wait-for-body time 60s", "wait-for-body time 1s"))
    haproxy = await asyncio.create_subprocess_exec(find_haproxy() or "haproxy", "-db", "-f", str(tmp_path / "front.cfg"))
    try:
        async with aiohttp.ClientSession() as http:

            async def is_up() -> bool:
                try:
                    async with http.get(f"http://127.0.0.1:{port}{FRONT_HEALTH}") as reply:
                        return reply.status == 200
                except aiohttp.ClientError:
                    return False

            await until(is_up, 60, "the front answers")
        for path in ("/generate", "/fleet/run"):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(f"POST {path} HTTP/1.1\r\nHost: fleet\r\nContent-Length: 50\r\n\r\n{{".encode())
            assert (await reader.readline()).startswith(b"HTTP/1.1 408 ")
            writer.close()
    finally:
        haproxy.terminate()
        await haproxy.wait()
        await coordinator.stop()


async def test_names_of_models_and_queries_may_be_encoded(front: Front) -> None:
    for path in ("/v1/models/policy%3Aadapter", "/flush_cache?timeout=%35"):
        async with front.http.get(URL(front.url + path, encoded=True)) as reply:
            assert (reply.status, (await reply.json())["from"]) == (200, "coordinator")


async def test_generation_goes_to_smg_and_other_calls_go_to_the_coordinator(front: Front) -> None:
    for path in ("/generate", "/v1/chat/completions", "/v1/completions"):
        assert (await front.ask(path))[1]["from"] == "smg"
    for path in ("/pause_generation", "/workers", "/fleet", "/generate/", "/metrics", "/v1/models", "/wasm", "/"):
        assert (await front.ask(path))[1]["from"] == "coordinator"


async def test_path_unknown_to_smg_goes_to_the_batch_server(front: Front) -> None:
    for path in DIRECT_PATHS:
        assert (await front.ask(path, '{"text": "a", "session_id": "s"}'))[1] == {"from": "batches", "path": path, "session": "s"}


async def test_a_request_is_sent_to_one_more_engine_when_its_engine_breaks_off(front: Front) -> None:
    front.smg.broken = 1
    assert (await front.ask("/generate", BROKEN_BODY))[1]["from"] == "smg"
    assert front.smg.attempts == 2
    front.smg.broken = 3
    status, answer, _ = await front.ask("/generate", BROKEN_BODY)
    assert (status, answer) == (502, {"error": {"code": "engine_broke_off"}})
    assert front.smg.attempts == 4


async def test_a_batch_whose_engines_broke_off_is_502(front: Front) -> None:
    front.batches.broken = 1
    status, answer, _ = await front.ask("/generate", '{"text": ["a", "b"]}')
    assert (status, answer) == (502, {"error": {"code": "engine_broke_off"}})


async def test_without_engines_clients_get_retry_after(front: Front) -> None:
    front.smg.workers = False
    await asyncio.sleep(1)
    for path in ("/generate", "/v1/chat/completions"):
        status, body, retry = await front.ask(path)
        assert (status, retry) == (503, "1")
        assert "GET /fleet" in str(body)
    front.smg.workers = True
    await asyncio.sleep(1)
    assert (await front.ask("/v1/chat/completions"))[0] == 200
    assert (await front.ask("/v1/chat/completions", '{"model": "unknown"}'))[0] == 404


async def test_batch_server_answers_while_the_spec_pauses_the_fleet(front: Front) -> None:
    async def asked() -> object:
        return (await front.ask("/generate"))[1].get("from")

    async def held() -> bool:
        return await asked() == "batches"

    async def let_go() -> bool:
        return await asked() == "smg"

    front.coordinator.held = True
    await until(held, 60, "the front has seen it")
    for path in ("/v1/chat/completions", "/v1/completions"):
        assert (await front.ask(path))[1]["from"] == "batches"
    front.coordinator.held = False
    await until(let_go, 60, "the front has seen it")
    front.coordinator.held = True
    await until(held, 60, "the front has seen it")
    await front.coordinator.stop()
    await until(let_go, 60, "a coordinator that is away holds nothing: the gates do")


async def test_restart_of_smg_delays_requests_only(front: Front) -> None:
    await front.smg.stop()
    waiting = asyncio.create_task(front.ask("/generate"))
    await asyncio.sleep(2.5)
    assert not waiting.done()
    assert (await front.ask("/fleet"))[0] == 200
    await front.smg.start()
    assert (await waiting)[0] == 200


async def test_pre_stop_hook_lets_requests_finish(front: Front) -> None:
    front.smg.seconds = 4
    running = asyncio.create_task(front.ask("/generate"))
    await asyncio.sleep(0.5)
    assert front.process.process is not None
    script = SOFT_STOP_SCRIPT.replace("USR1 1", f"USR1 {front.process.process.pid}")
    assert script != SOFT_STOP_SCRIPT
    hook = await asyncio.create_subprocess_exec("/bin/sh", "-c", script)
    await asyncio.sleep(2)
    with pytest.raises(aiohttp.ClientConnectionError):
        await front.ask("/generate")
    assert (await running)[0] == 200
    await asyncio.wait_for(hook.wait(), 15)
    assert front.process.process.returncode is not None, "the hook lasts as long as the front"


async def test_generation_continues_without_a_coordinator(front: Front) -> None:
    await front.coordinator.stop()
    control = asyncio.create_task(front.ask("/pause_generation"))
    assert (await front.ask("/generate"))[0] == 200
    assert (await front.ask("/generate", '{"text": ["a"]}'))[1]["from"] == "batches"
    status, body, retry = await control
    assert (status, retry) == (503, "1")
    assert "coordinator does not answer" in str(body)


async def test_control_calls_continue_without_a_batch_server(front: Front) -> None:
    await front.batches.stop()
    waiting = asyncio.create_task(front.ask("/generate", '{"text": ["a"]}'))
    assert (await front.ask("/fleet/lease"))[1]["from"] == "coordinator"
    assert (await front.ask("/generate"))[1]["from"] == "smg"
    await asyncio.sleep(1.5)
    assert not waiting.done()
    await front.batches.start()
    assert (await waiting)[1]["from"] == "batches"


async def test_front_health_needs_no_other_process(front: Front) -> None:
    await front.smg.stop()
    await front.coordinator.stop()
    async with front.http.get(front.url + "/front/health") as reply:
        assert reply.status == 200


async def _answers(front: Front) -> bool:
    try:
        return (await front.ask("/fleet"))[0] == 200
    except aiohttp.ClientError:
        return False
