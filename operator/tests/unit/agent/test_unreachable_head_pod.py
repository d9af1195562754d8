"""A pod that cannot reach pod 0 of its engine reports the reason once."""

from __future__ import annotations

import logging
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import aiohttp
import pytest
from aiohttp import web

from sglang_rollout.agent.agent import Agent
from sglang_rollout.agent.engine import Engine, RunFiles, StartBarrier
from sglang_rollout.agent.launch import rank_lifecycle as g
from sglang_rollout.agent.launch.head_pod import HeadPod
from sglang_rollout.agent.launch.member_pod import MemberPod, member_app
from sglang_rollout.credentials import Credentials
from sglang_rollout.internal.proven_calls import take_proven_calls
from sglang_rollout.internal.refusals import log_refusals
from sglang_rollout.internal.requests import answer_refusals
from sglang_rollout.proxy.address import Address
from sglang_rollout.wire.agent import GroupReply, MemberReport, Verdict
from sglang_rollout.wire.ports import AGENT_ENGINE, AGENT_GROUP
from tests.support.ports import free_port, needs_ipv6

POD_0, POD_1 = "demo-engine-1-0.demo-engines", "demo-engine-1-1.demo-engines"
UNKNOWN = socket.gaierror(socket.EAI_NONAME, "Name or service not known")
NAMELESS = f"it cannot reach pod 0: {POD_0}: Name or service not known"

Names = dict[str, str]


@pytest.fixture
def names(monkeypatch: pytest.MonkeyPatch) -> Names:
    """Return the names that the name server knows, at first all but pods."""
    known: Names = {}
    really: Callable[..., Any] = socket.getaddrinfo

    def lookup(host: Any, *args: Any, **more: Any) -> Any:
        if str(host).endswith(".demo-engines") and host not in known:
            raise UNKNOWN
        return really(known.get(host, host), *args, **more)

    monkeypatch.setattr(socket, "getaddrinfo", lookup)
    return known


def barrier(folder: Path) -> StartBarrier:
    folder.mkdir(exist_ok=True)
    return StartBarrier(RunFiles(folder / "boot"))


def member(folder: Path, port: int) -> MemberPod:
    place = {"rank": 1, "head": Address(POD_0, port), "own": Address("127.0.0.1", port)}
    return MemberPod(Engine("http://127.0.0.1:1"), barrier(folder), credentials=Credentials("t"), **place)  # type: ignore[arg-type]


def message(head: HeadPod) -> str:
    why = head.explain_down()
    return "" if why is None else why.message


def head_pod(folder: Path, port: int) -> HeadPod:
    agent = cast(Agent, SimpleNamespace(name="demo-engine-1", state=SimpleNamespace(up=False)))
    made = HeadPod(agent, barrier(folder), size=2, own=Address(POD_0, port), folder=folder, credentials=Credentials("t"))
    (folder / "boot").write_text("boot-0")
    return made


@asynccontextmanager
async def served(app: web.Application, host: str, port: int) -> AsyncIterator[None]:
    runner = web.AppRunner(app)
    await runner.setup()
    try:
        await web.TCPSite(runner, host, port).start()
        yield
    finally:
        await runner.cleanup()


async def test_an_unknown_name_is_logged_once_and_reported(names: Names, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    port = free_port()
    pod = member(tmp_path, port)
    with caplog.at_level(logging.INFO):
        await pod.report()
        assert not caplog.records, "no attempt has been made"
        for _ in range(3):
            await pod.resolve()
            await pod.report()
    assert [record.message for record in caplog.records] == [f"Pod 1 of the engine: {NAMELESS}."]
    async with (
        served(member_app(pod, name="demo-engine-1", credentials=Credentials("t"), model_path=None), "127.0.0.1", port),
        aiohttp.ClientSession() as http,
        http.get(f"http://127.0.0.1:{port}{AGENT_ENGINE}") as answer,
    ):
        assert answer.status == 503
        assert NAMELESS in (await answer.json())["message"]


async def test_a_pod_0_that_refuses_connections_is_reported_with_its_address(names: Names, tmp_path: Path) -> None:
    port = free_port()
    names[POD_0] = "127.0.0.1"
    pod = member(tmp_path, port)
    await pod.resolve()
    await pod.report()
    assert pod.unreachable.startswith(f"it cannot reach pod 0: 127.0.0.1:{port}: ")
    del names[POD_0]
    await pod.resolve()
    await pod.report()
    assert f"127.0.0.1:{port}" in pod.unreachable, "the last known address stays"
    assert "Name or service not known" in pod.unreachable


@needs_ipv6
async def test_a_pod_0_with_an_ipv6_address_receives_reports(names: Names, tmp_path: Path) -> None:
    port = free_port()
    names[POD_0] = "::1"
    pod = member(tmp_path, port)
    await pod.resolve()
    await pod.report()
    assert f"[::1]:{port}" in pod.unreachable
    heard: list[MemberReport] = []

    async def group(request: web.Request) -> web.Response:
        heard.append(MemberReport.model_validate(await request.json()))
        return web.json_response(GroupReply(verdict=Verdict.WAIT).model_dump(mode="json"))

    app = web.Application(middlewares=[answer_refusals])
    log_refusals(app)
    take_proven_calls(app, Credentials("t"))
    app.add_routes([web.post(AGENT_GROUP, group)])
    async with served(app, "::1", port):
        await pod.report()
    assert [report.rank for report in heard] == [1]
    assert not pod.unreachable


async def test_pod_0_asks_a_silent_pod_and_reports_its_answer(names: Names, tmp_path: Path) -> None:
    port = free_port()
    first, second = head_pod(tmp_path / "0", port), member(tmp_path / "1", port)
    await first.watch()
    await first.question_silent_pods()
    assert f"now for demo-engine-1-1 (pod 0 does not find {POD_1}: Name or service not known)" in message(first)

    names[POD_1] = "127.0.0.1"
    await second.resolve()
    await second.report()
    await first.question_silent_pods()
    assert message(first).endswith("now for demo-engine-1-1"), "the pod does not answer"
    async with served(member_app(second, name="demo-engine-1", credentials=Credentials("t"), model_path=None), "127.0.0.1", port):
        await first.question_silent_pods()
    assert message(first).endswith(f"now for demo-engine-1-1 ({NAMELESS})")

    first.report(MemberReport(rank=1, address=f"127.0.0.1:{port}", boot_id="boot-1"))
    assert first.ranks.is_running, "a report replaces the answer"
    assert NAMELESS not in message(first)


async def test_a_silent_pod_of_a_generation_that_runs_is_not_asked(names: Names, tmp_path: Path) -> None:
    first = head_pod(tmp_path, free_port())
    await first.watch()
    first.report(MemberReport(rank=1, address="127.0.0.1:1", boot_id="boot-1"))
    first.ranks = g.record_report(first.ranks, 1, g.Member("boot-1", reported_at=-100.0))
    assert first.ranks.is_running
    await first.question_silent_pods()
    assert not first.ranks.unreachable[1]
