"""Calls of a trainer at an engine's own URL, with the real application of an agent, a stub engine and a simulated coordinator."""

from __future__ import annotations

import asyncio
import base64
import json
import logging
import pickle
import ssl
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from click.testing import CliRunner

from sglang_rollout.agent import access
from sglang_rollout.agent.access import RELAYED, Relay
from sglang_rollout.agent.agent import Agent
from sglang_rollout.agent.app import MAX_BODY, make_app
from sglang_rollout.agent.authorities import Authorities
from sglang_rollout.agent.cli import command
from sglang_rollout.agent.engine import Engine
from sglang_rollout.agent.gate import Gate
from sglang_rollout.agent.record import RecordFile
from sglang_rollout.agent.update import Fence
from sglang_rollout.credentials import Credentials
from sglang_rollout.logs import MAX_REFUSED_LINES
from sglang_rollout.wire.access import CALLER_HEADER, RELAYED_AUTHORIZATION_HEADER, RELAYED_CALLER_HEADER
from sglang_rollout.wire.ports import FLEET_LEASE, TERM_HEADER, VERSION_HEADER
from tests.contract.support.agent_pod import TOKEN, until
from tests.contract.support.stub_engine import StubEngine, stub_engine
from tests.support.certificates import Authority
from tests.support.ports import free_port
from tests.support.proven import prove

NO_TENSORS = base64.b64encode(pickle.dumps([], 4)).decode()


@dataclass
class Coordinator:
    """Records its requests and gives the configured answer."""

    port: int = field(default_factory=free_port)
    tls: ssl.SSLContext | None = None
    asked: list[tuple[str, str, bytes, str | None]] = field(default_factory=list)
    """Method, path with query, body and type."""
    pages: list[tuple[str | None, str | None]] = field(default_factory=list)
    """Headers of browsers: origin and site."""
    callers: list[str] = field(default_factory=list)
    """Addresses that the agent names as those of the trainer."""
    tokens: list[str | None] = field(default_factory=list)
    """Authorization of the trainer."""
    checked: list[str] = field(default_factory=list)
    """Paths of the questions whether a caller is allowed."""
    refusal: int = 0
    """Status of the answer to such a question; 0: the caller is allowed."""
    silent: bool = False
    breaks: bool = False
    left: bool = False
    """The caller closed the connection before the answer."""

    @property
    def url(self) -> str:
        return f"{'https' if self.tls else 'http'}://127.0.0.1:{self.port}"

    async def handle(self, request: web.Request) -> web.Response:
        if request.method == "GET":
            self.checked.append(request.path_qs)
            if self.refusal:
                return web.json_response({"success": False, "message": "Not you."}, status=self.refusal)
            return web.Response(status=204)
        self.asked.append((request.method, request.path_qs, await request.read(), request.headers.get("Content-Type")))
        self.pages.append((request.headers.get("Origin"), request.headers.get("Sec-Fetch-Site")))
        assert request.headers["Authorization"] == f"Bearer {TOKEN}", "the agent proves itself"
        self.callers.append(request.headers[RELAYED_CALLER_HEADER])
        self.tokens.append(request.headers.get(RELAYED_AUTHORIZATION_HEADER))
        if self.breaks:
            assert request.transport is not None
            request.transport.abort()
        try:
            await asyncio.sleep(600 if self.silent else 0)
        except asyncio.CancelledError:
            self.left = True
            raise
        headers = {VERSION_HEADER: "step 7", "Content-Type": "application/json"}
        return web.Response(status=409, reason="The fleet is asleep.", body=b'{"success": false, "message": "As it is."}', headers=headers)


@dataclass
class Lab:
    """An agent at ``url``."""

    url: str
    engine: StubEngine
    coordinator: Coordinator
    http: aiohttp.ClientSession

    async def ask(self, path: str, method: str = "POST", **more: Any) -> tuple[int, str, str, aiohttp.ClientResponse]:
        async with self.http.request(method, self.url + path, **more) as reply:
            return reply.status, reply.reason or "", await reply.text(), reply

    async def control(self, path: str, body: object) -> tuple[int, str, str, aiohttp.ClientResponse]:
        """Send a call as the coordinator does."""
        data = json.dumps(body).encode()
        headers = await prove(self.http, "POST", self.url + path, data, {TERM_HEADER: "1"}, token=TOKEN)
        return await self.ask(path, data=data, headers=headers)


async def serve(stack: AsyncExitStack, app: web.Application, port: int, *, cancels: bool, tls: ssl.SSLContext | None = None) -> None:
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1, handler_cancellation=cancels)
    await runner.setup()
    stack.push_async_callback(runner.cleanup)
    await web.TCPSite(runner, "127.0.0.1", port, ssl_context=tls).start()


@asynccontextmanager
async def agent_lab(
    folder: Path,
    *,
    relays: bool = True,
    answers: bool = True,
    takes_tensors: bool = True,
    tls: ssl.SSLContext | None = None,
    authority: Path | None = None,
) -> AsyncIterator[Lab]:
    async with AsyncExitStack() as stack:
        stub, coordinator, port = await stack.enter_async_context(stub_engine()), Coordinator(tls=tls), free_port()
        if answers:
            app = web.Application(client_max_size=2 * MAX_BODY)
            app.router.add_route("*", "/{path:.*}", coordinator.handle)
            await serve(stack, app, coordinator.port, cancels=True, tls=tls)
        engine = await stack.enter_async_context(Engine(stub.url))
        agent = Agent(name="e0", engine=engine, gate=Gate(folder / "gate.sock"), record_file=RecordFile(folder))
        await agent.observe()
        relaying = Relay(coordinator.url, engine="e0", credentials=Credentials(TOKEN), authorities=Authorities(authority))
        relay = await stack.enter_async_context(relaying) if relays else None
        fence = Fence(agent, kill_file=None)
        app = make_app(agent, credentials=Credentials(TOKEN), fence=fence, relay=relay, takes_tensors=takes_tensors)
        await serve(stack, app, port, cancels=False)
        http = await stack.enter_async_context(aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=60)))
        yield Lab(f"http://127.0.0.1:{port}", stub, coordinator, http)


@pytest.fixture
async def lab(tmp_path: Path) -> AsyncIterator[Lab]:
    async with agent_lab(tmp_path) as made:
        yield made


@pytest.mark.parametrize("call", RELAYED)
async def test_a_trainers_call_is_forwarded_to_the_coordinator(lab: Lab, call: str) -> None:
    body = b'{"tags": ["kv_cache"],  "serialized_named_tensors": ["gASV"]}'
    status, reason, said, reply = await lab.ask(f"/{call}?timeout=5&a=b%20c", data=body, headers={"Content-Type": "application/json"})
    assert lab.coordinator.asked == [("POST", f"/fleet/engines/e0/{call}?timeout=5&a=b%20c", body, "application/json")]
    assert (status, reason, said) == (409, "The fleet is asleep.", '{"success": false, "message": "As it is."}')
    assert (reply.headers[VERSION_HEADER], reply.content_type) == ("step 7", "application/json")
    assert lab.engine.calls == [], "only the coordinator calls the engine"


async def test_the_coordinator_learns_which_address_called_the_gate(lab: Lab) -> None:
    forged = {CALLER_HEADER: "10.0.0.1", RELAYED_CALLER_HEADER: "10.0.0.2"}
    assert (await lab.ask("/end_weight_update", data=b"{}", headers=forged))[0] == 409
    assert lab.coordinator.callers == ["10.0.0.1"], "the gate has set the first header"


@pytest.mark.parametrize("token", [None, "Bearer s3cret"])
async def test_the_coordinator_learns_the_token_of_the_trainer(lab: Lab, token: str | None) -> None:
    forged = {RELAYED_AUTHORIZATION_HEADER: "Bearer forged"}
    assert (await lab.ask("/flush_cache", data=b"{}", headers=forged | ({"Authorization": token} if token else {})))[0] == 409
    assert lab.coordinator.tokens == [token]


async def test_the_coordinator_learns_which_page_sent_a_call(lab: Lab) -> None:
    headers = {"Origin": "https://example.org", "Sec-Fetch-Site": "cross-site", "Content-Type": "text/plain"}
    assert (await lab.ask("/end_weight_update", data=b"{}", headers=headers))[0] == 409
    assert (await lab.ask("/flush_cache", "HEAD"))[0] == 405
    ((_, _, _, kind),) = lab.coordinator.asked
    assert (kind, lab.coordinator.pages) == ("text/plain", [("https://example.org", "cross-site")])


async def test_flush_cache_may_be_a_get(lab: Lab) -> None:
    assert (await lab.ask("/flush_cache", "GET"))[0] == 409
    assert [asked[:3] for asked in lab.coordinator.asked] == [("POST", "/fleet/engines/e0/flush_cache", b"")]


async def test_the_coordinators_own_calls_reach_the_engine(lab: Lab) -> None:
    for call in ("begin_weight_update", "update_weights_from_tensor", "end_weight_update"):
        status, _, said, _ = await lab.control(f"/{call}", {"serialized_named_tensors": [NO_TENSORS]})
        assert status == 200, said
    assert lab.engine.calls == ["begin_weight_update", "update_weights_from_tensor", "end_weight_update"]
    assert (await lab.ask("/flush_cache", json={}, headers={"Authorization": "Bearer guess", TERM_HEADER: "1"}))[0] == 403
    assert lab.coordinator.asked == []


@pytest.mark.parametrize("path", ["/continue_generation", "/init_weights_update_group", "/update_weights_from_ipc", "/agent/sync"])
async def test_every_other_call_needs_the_token(lab: Lab, path: str) -> None:
    status, reason, said, _ = await lab.ask(path, json={})
    assert status == 401
    assert "need a proof" in reason
    assert all(call in said for call in RELAYED)
    assert lab.coordinator.url in said
    assert lab.coordinator.asked == []


async def test_calls_that_the_agent_refuses_leave_a_limited_number_of_lines(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, "sglang_rollout.internal.refusals")
    async with agent_lab(tmp_path) as lab:
        for _ in range(MAX_REFUSED_LINES + 5):
            assert (await lab.ask("/continue_generation", json={}, headers={CALLER_HEADER: "10.4.2.9"}))[0] == 401
        guess = {CALLER_HEADER: "10.4.2.8", "Authorization": "Bearer guess", TERM_HEADER: "1"}
        assert (await lab.ask(f"/agent/sync?{'x' * 500}", json={}, headers=guess))[0] == 403
        assert (await lab.ask("/agent/health", "GET"))[0] == 200
    lines = [record.getMessage() for record in caplog.records]
    assert lines[0] == "POST /continue_generation from 10.4.2.9 is refused: 401."
    assert lines[: MAX_REFUSED_LINES + 1] == [lines[0]] * MAX_REFUSED_LINES + ["POST /agent/sync from 10.4.2.8 is refused: 403."]
    assert lines[MAX_REFUSED_LINES + 1 :] == ["5 more refused calls from 10.4.2.9 have no line."]
    assert not any("guess" in line for line in lines)


async def test_a_pickle_that_names_more_than_handles_never_reaches_the_engine(lab: Lab) -> None:
    assert (await lab.control("/begin_weight_update", {}))[0] == 200
    body = {"serialized_named_tensors": [NO_TENSORS, base64.b64encode(pickle.dumps(eval, 4)).decode()]}
    status, reason, _, _ = await lab.control("/update_weights_from_tensor", body)
    assert (status, "serialized_named_tensors names builtins.eval" in reason) == (400, True)
    assert lab.engine.calls == ["begin_weight_update"]


async def test_an_engine_of_another_mode_takes_no_tensors(tmp_path: Path) -> None:
    async with agent_lab(tmp_path, takes_tensors=False) as lab:
        assert (await lab.control("/begin_weight_update", {}))[0] == 200
        body = {"serialized_named_tensors": [NO_TENSORS]}
        status, reason, _, _ = await lab.control("/update_weights_from_tensor", body)
        assert (status, "only engines with spec.mode Hybrid" in reason) == (501, True)
        assert (await lab.ask("/update_weights_from_tensor", json=body))[0] == 409, (
            "a trainer's call reaches the coordinator, which refuses it"
        )
        assert lab.engine.calls == ["begin_weight_update"]


async def test_without_a_fleet_url_every_call_needs_the_token(tmp_path: Path) -> None:
    async with agent_lab(tmp_path, relays=False) as lab:
        for call in RELAYED:
            status, _, said, _ = await lab.ask(f"/{call}", json={})
            assert (status, "takes only" in said) == (401, False)
        assert (await lab.ask("/flush_cache", "GET"))[0] == 401
        assert (lab.engine.calls, lab.coordinator.asked) == ([], [])


async def test_an_unreachable_coordinator_is_named_and_the_call_may_be_repeated(tmp_path: Path) -> None:
    async with agent_lab(tmp_path, answers=False) as lab:
        status, reason, said, reply = await lab.ask("/update_weights_from_tensor", json={})
        assert (status, reply.headers.get("Retry-After")) == (503, "1")
        assert f"{lab.coordinator.url} cannot be reached" in reason
        assert "Try again" in said
        assert lab.engine.calls == []


async def test_a_coordinator_that_closes_the_connection_leaves_the_outcome_open(lab: Lab) -> None:
    lab.coordinator.breaks = True
    status, _, said, _ = await lab.ask("/end_weight_update", json={})
    assert (status, "GET /fleet there shows the result of the call" in said) == (503, True)
    assert len(lab.coordinator.asked) == 1, "nothing is done twice"


async def test_a_trainer_that_disconnects_cancels_its_call(lab: Lab) -> None:
    lab.coordinator.silent = True
    call = asyncio.create_task(lab.ask("/update_weights_from_tensor", json={}))
    await until(lambda: _true(bool(lab.coordinator.asked)), 30, "the coordinator is asked")
    call.cancel()
    await until(lambda: _true(lab.coordinator.left), 30, "the coordinator sees that the trainer is gone")
    assert lab.coordinator.left


async def test_a_body_up_to_the_limit_passes_and_a_larger_body_does_not(lab: Lab) -> None:
    assert (await lab.ask("/update_weights_from_tensor", data=bytes(MAX_BODY)))[0] == 409
    assert [len(asked[2]) for asked in lab.coordinator.asked] == [MAX_BODY]
    status, _, said, _ = await lab.ask("/update_weights_from_tensor", data=bytes(MAX_BODY + 1))
    assert (status, "larger than 16 MiB" in said) == (413, True)
    assert len(lab.coordinator.asked) == 1


async def test_a_refused_caller_gets_its_answer_before_its_body_arrives(lab: Lab) -> None:
    lab.coordinator.refusal = 403
    reader, writer = await asyncio.open_connection("127.0.0.1", int(lab.url.rpartition(":")[2]))
    writer.write(b"POST /update_weights_from_tensor?a=b HTTP/1.1\r\nHost: x\r\nContent-Length: 16000000\r\n\r\n" + bytes(70_000))
    async with asyncio.timeout(30):
        answer = await reader.read()  # to the end: the connection is closed
    writer.close()
    assert answer.startswith(b"HTTP/1.1 403 ")
    assert b"Not you." in answer
    assert (lab.coordinator.checked, lab.coordinator.asked) == (["/fleet/engines/e0/update_weights_from_tensor"], [])


async def test_a_body_that_does_not_arrive_is_refused(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(access, "BODY_SECONDS", 0.3)
    for length in (100, 16_000_000):
        reader, writer = await asyncio.open_connection("127.0.0.1", int(lab.url.rpartition(":")[2]))
        writer.write(f"POST /update_weights_from_tensor HTTP/1.1\r\nHost: x\r\nContent-Length: {length}\r\n\r\nx".encode())
        async with asyncio.timeout(30):
            answer = await reader.read()
        writer.close()
        assert answer.startswith(b"HTTP/1.1 408 ")
    assert lab.coordinator.asked == []


async def test_bodies_of_all_calls_share_a_budget(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(access, "MAX_RELAYED_BYTES", 3_000_000)
    lab.coordinator.silent = True
    call = asyncio.create_task(lab.ask("/update_weights_from_tensor", data=bytes(2_000_000)))
    await until(lambda: _true(bool(lab.coordinator.asked)), 30, "the coordinator has the first body")
    status, _, text, reply = await lab.ask("/update_weights_from_tensor", data=bytes(2_000_000))
    assert (status, reply.headers.get("Retry-After"), "Try again" in text) == (503, "1", True)
    lab.coordinator.silent = False
    assert (await lab.ask("/end_weight_update", data=b"{}"))[0] == 409, "a call with a small body passes"
    call.cancel()
    await until(lambda: _true(lab.coordinator.left), 30, "the first call ends")
    assert (await lab.ask("/update_weights_from_tensor", data=bytes(2_000_000)))[0] == 409, "its bytes are free again"


async def test_a_router_of_an_earlier_release_is_not_asked_about_callers(lab: Lab) -> None:
    lab.coordinator.refusal = 405
    assert (await lab.ask("/update_weights_from_tensor", data=bytes(2_000_000)))[0] == 409


@pytest.mark.parametrize(
    "url", ["demo-router:30000", "ftp://demo-router:30000", "http://", "http://demo-router:x", f"http://demo-router:30000{FLEET_LEASE}"]
)
def test_an_invalid_fleet_url_is_refused_at_the_start(tmp_path: Path, url: str) -> None:
    (tmp_path / "token").write_text(TOKEN)
    line = ["--name", "e0", "--gate-socket", "s", "--state-dir", str(tmp_path), "--token-file", str(tmp_path / "token"), "--fleet-url", url]
    refused = CliRunner().invoke(command, line)
    assert refused.exit_code == 2
    assert "is not the URL of a fleet" in refused.output


async def _true(value: bool) -> bool:
    return value


async def test_the_certificate_of_the_fleet_is_checked_with_an_authority_that_may_change(tmp_path: Path) -> None:
    authority, file = Authority(), tmp_path / "authority" / "ca.crt"
    authority.issue("127.0.0.1").write(tmp_path / "front.pem")
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    tls.load_cert_chain(tmp_path / "front.pem", tmp_path / "front.pem.key")
    async with agent_lab(tmp_path, tls=tls, authority=file) as lab:
        status, _, text, _ = await lab.ask("/flush_cache")
        assert (status, lab.coordinator.asked) == (503, []), "without the file, the authorities of the system are trusted"
        assert "a certificate that this agent does not trust" in text
        file.parent.mkdir()
        file.write_bytes(authority.certificate)
        assert (await lab.ask("/flush_cache"))[0] == 409, "the coordinator's answer"
        file.write_text("junk")
        assert (await lab.ask("/flush_cache"))[0] == 409, "the earlier authority stays"
