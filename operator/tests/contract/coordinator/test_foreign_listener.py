"""A process of an engine's container that has taken the port of its gate, and so gets the calls of the coordinator."""

from __future__ import annotations

import asyncio
import gzip
import json
import logging
import tracemalloc
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from sglang_rollout.bounded import MIB
from sglang_rollout.coordinator.agents import Agents
from sglang_rollout.coordinator.update.store import STORE
from sglang_rollout.credentials import Credentials
from sglang_rollout.internal.proofs import CHALLENGE_HEADER, PROOF_HEADER
from sglang_rollout.internal.proven_calls import require_proof, take_proven_calls
from sglang_rollout.internal.refusals import log_refusals
from sglang_rollout.internal.requests import Handler, answer_refusals
from sglang_rollout.wire.agent import AgentStatus, SyncRequest
from sglang_rollout.wire.ports import AGENT_CHECKPOINT, AGENT_RUN, AGENT_SYNC, STORE_STATUS, TERM_HEADER
from sglang_rollout.wire.states import BASE, EngineState

SECRET = "engine-credential"
STATUS = AgentStatus(name="e0", boot_id="b", state=EngineState.CLEAN, version=BASE, committed=BASE, term=1, gate_open=True)
SYNC = SyncRequest(committed=BASE)


@asynccontextmanager
async def coordinator(handle: Handler, *, is_agent: bool = False) -> AsyncIterator[Agents]:
    """Yield the coordinator's client, whose calls go to this handler: of an agent, or of a listener without the credential."""
    app = web.Application(middlewares=[answer_refusals])
    if is_agent:
        log_refusals(app)
        take_proven_calls(app, Credentials(SECRET))
    app.router.add_route("*", "/{tail:.*}", handle)
    async with TestServer(app) as server:
        url = str(server.make_url("")).rstrip("/")
        agents = Agents(address=lambda _: url, credentials=lambda _: Credentials(SECRET), term=lambda: 1)
        await agents.start()
        try:
            yield agents
        finally:
            await agents.close()


async def call_everything(agents: Agents) -> list[Any]:
    """Make each kind of call that the coordinator makes at the port of a gate or of the weight store."""
    return [
        await agents.sync("e0", SYNC),
        await agents.call("e0", AGENT_RUN, {}, 5.0),
        await agents.call("e0", "/begin_weight_update", {}, 5.0),
        await agents.call("e0", AGENT_CHECKPOINT, {}, 5.0),
        await agents.get("e0", "/v1/loads", 5.0),
        await agents.ask("e0", "/get_weights_by_name", {}, 5.0),
        await agents.call(STORE, STORE_STATUS, {}, 5.0),
    ]


async def test_the_credential_never_travels() -> None:
    seen: list[str] = []

    async def listen(request: web.Request) -> web.Response:
        seen.extend((*request.headers.values(), request.path_qs, (await request.read()).decode()))
        # It learns no more by asking for another call, as an agent with a new challenge does.
        return web.Response(status=401, headers={CHALLENGE_HEADER: f"challenge-{len(seen)}"})

    async with coordinator(listen) as agents:
        await call_everything(agents)
    assert seen
    assert not [text for text in seen if SECRET in text]


async def test_an_answer_without_proof_is_not_believed(caplog: pytest.LogCaptureFixture) -> None:
    async def listen(request: web.Request) -> web.Response:
        # It sends everything back that it got.
        return web.json_response(STATUS.model_dump(mode="json"), headers={PROOF_HEADER: request.headers[PROOF_HEADER]})

    with caplog.at_level(logging.WARNING):
        async with coordinator(listen) as agents:
            assert await agents.sync("e0", SYNC) is None
            result = await agents.call("e0", "/begin_weight_update", {}, 5.0)
            assert not result.ok
            assert "another process answers at this address" in result.message
            status, message = await agents.get("e0", "/v1/loads")
            assert status == 0
            assert "another process" in message
            assert agents.silence("e0") > 1000, "the agent has not answered"
    assert len([record for record in caplog.records if "another process" in record.getMessage()]) == 1, "one line, not one a second"


async def test_a_failure_without_proof_names_no_term() -> None:
    """A listener could otherwise make the coordinator give up its leadership, and with it the whole fleet."""
    outranked: list[int] = []

    async def listen(_: web.Request) -> web.Response:
        return web.json_response({"success": False, "message": "old"}, status=409, headers={TERM_HEADER: "999999"})

    async with coordinator(listen) as agents:
        agents.on_outranked = outranked.append
        await call_everything(agents)
    assert outranked == []


def endless(status: int, **headers: str) -> Handler:
    async def listen(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(status=status, headers=headers)
        await response.prepare(request)
        while True:
            await response.write(b" " * MIB)

    return listen


def packed(status: int) -> Handler:
    data = gzip.compress(b" " * (256 * MIB))

    async def listen(_: web.Request) -> web.Response:
        return web.Response(body=data, status=status, headers={"Content-Encoding": "gzip"})

    return listen


@pytest.mark.parametrize("listen", [endless(200), endless(500), endless(401, **{CHALLENGE_HEADER: "c"}), packed(200), packed(500)])
async def test_no_answer_fills_the_memory(listen: Handler) -> None:
    async with coordinator(listen) as agents:
        tracemalloc.start()
        try:
            results = await call_everything(agents)
            _, peak = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
    assert results[0] is None
    assert not any(result.ok for result in results[1:4])
    # The listener of this test shares the memory: it writes pieces of 1 MiB.
    assert peak < 24 * MIB, f"{peak / MIB:.0f} MiB"


async def test_an_honest_agent_is_limited_too() -> None:
    """What an engine says passes through its agent, which proves it."""
    body = json.dumps([{}] * (5 * MIB // 4)).encode()

    async def answer(request: web.Request) -> web.Response:
        require_proof(request)
        return web.Response(body=body)

    async with coordinator(answer, is_agent=True) as agents:
        assert "at most" in (await agents.call("e0", "/begin_weight_update", {}, 5.0)).message


class Relayed:
    """Passes calls on to the agent, as a listener can that lets the gate listen again or waits for it."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, str, dict[str, str], bytes]] = []

    async def note(self, request: web.Request) -> web.Response:
        kept = {name: value for name, value in request.headers.items() if name.startswith("X-Rollout") or name == "Content-Type"}
        self.calls.append((request.method, request.path_qs, kept, await request.read()))
        require_proof(request)
        return web.json_response(STATUS.model_dump(mode="json"))


CHANGES: list[Callable[[str, str, dict[str, str], bytes], tuple[str, str, dict[str, str], bytes]]] = [
    lambda method, path, headers, body: (method, path, headers, body),
    lambda method, path, headers, body: (method, "/agent/run", headers, body),
    lambda method, path, headers, body: (method, f"{path}?a=b", headers, body),
    lambda method, path, headers, body: (method, path, headers | {TERM_HEADER: "2"}, body),
    lambda method, path, headers, body: (method, path, headers, body + b" "),
    lambda method, path, headers, body: ("PUT", path, headers, body),
]


@pytest.mark.parametrize("change", CHANGES, ids=["again", "path", "query", "term", "body", "method"])
async def test_a_call_that_was_overheard_is_worth_nothing(change: Callable[..., tuple[str, str, dict[str, str], bytes]]) -> None:
    relayed = Relayed()
    app = web.Application(middlewares=[answer_refusals])
    log_refusals(app)
    take_proven_calls(app, Credentials(SECRET))
    app.router.add_route("*", "/{tail:.*}", relayed.note)
    async with TestServer(app) as server:
        url = str(server.make_url("")).rstrip("/")
        agents = Agents(address=lambda _: url, credentials=lambda _: Credentials(SECRET), term=lambda: 1)
        await agents.start()
        try:
            assert await agents.sync("e0", SYNC) is not None
            (overheard,) = relayed.calls
            method, path, headers, body = change(*overheard)
            async with agents._pool().request(method, url + path, data=body, headers=headers) as reply:
                assert reply.status == 403, await reply.text()
            assert len(relayed.calls) == 1
        finally:
            await agents.close()


async def test_an_agent_that_restarts_gets_the_call_at_once() -> None:
    """Its challenges are new, and the call is repeated with one of them."""
    for _ in range(2):
        calls: list[str] = []

        async def answer(request: web.Request, calls: list[str] = calls) -> web.Response:
            require_proof(request)
            calls.append(request.path)
            return web.json_response(STATUS.model_dump(mode="json"))

        async with coordinator(answer, is_agent=True) as agents:
            agents._peer("e0")._challenge = "of-an-earlier-process"
            assert await agents.sync("e0", SYNC) is not None
            assert await asyncio.gather(*(agents.sync("e0", SYNC) for _ in range(3)))
        assert calls == [AGENT_SYNC] * 4
