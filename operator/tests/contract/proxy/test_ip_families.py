"""Gate and front, real haproxy, listen on all addresses of clusters with IPv4, IPv6 or both."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import aiohttp
import pytest
from click.testing import CliRunner

from sglang_rollout.proxy import cli
from tests.contract.support.agent_pod import Process, until
from tests.support.ports import free_port, needs_ipv6

pytestmark = pytest.mark.router


def line(kind: str, listen: str, folder: Path) -> list[str]:
    parts = ["--socket", str(folder / "gate.sock")] if kind == "gate" else ["--runtime-dir", str(folder)]
    return ["proxy", kind, "--listen", listen, *parts]


async def reached(process: Process, *urls: str) -> list[str]:
    """Wait until haproxy answers at each of these; those that it did."""
    found = []
    await process.start()
    try:
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=10)) as http:
            for url in urls:

                async def answers(url: str = url) -> bool:
                    try:
                        async with http.get(url) as answer:
                            return answer.status in {200, 503}
                    except aiohttp.ClientConnectionError:
                        return False

                await until(answers, 40, f"{url} is answered")
                found.append(url)
    finally:
        await process.end()
    return found


@needs_ipv6
@pytest.mark.parametrize(("kind", "path"), [("gate", "/generate"), ("front", "/front/health")])
async def test_wildcard_address_listens_on_both_families(kind: str, path: str, tmp_path: Path) -> None:
    port = free_port()
    process = Process(line(kind, f"[::]:{port}", tmp_path), tmp_path / "log")
    both = [f"http://[::1]:{port}{path}", f"http://127.0.0.1:{port}{path}"]
    assert await reached(process, *both) == both


@pytest.mark.parametrize("kind", ["gate", "front"])
def test_without_ipv6_the_wildcard_address_is_that_of_ipv4(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """haproxy would not start. --print, whose text may be for another machine, does not look."""
    monkeypatch.setattr(cli, "has_dualstack_ipv6", lambda: False)
    became: list[str] = []
    monkeypatch.setattr(os, "execve", lambda _, command, _environ: became.append(Path(command[-1]).read_text()))
    args = line(kind, "[::]:24000", tmp_path)[1:]
    assert CliRunner().invoke(cli.command, args).exit_code == 0
    assert "bind 0.0.0.0:24000 " in became[0]
    assert "bind [::]:24000 v4v6" in CliRunner().invoke(cli.command, [*args, "--print"]).output


@needs_ipv6
async def test_gate_reaches_an_agent_at_an_ipv6_address(tmp_path: Path) -> None:
    port, asked = free_port(), asyncio.Event()

    async def agent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 503 Asked\r\nContent-Length: 0\r\nConnection: close\r\n\r\n")
        asked.set()
        writer.close()

    async with await asyncio.start_server(agent, "::1", 0) as server:
        there = f"[::1]:{server.sockets[0].getsockname()[1]}"
        process = Process([*line("gate", f"[::1]:{port}", tmp_path), "--agent", there], tmp_path / "log")
        await reached(process, f"http://[::1]:{port}/agent/health")
        await asyncio.wait_for(asked.wait(), 40)
        assert asked.is_set(), "haproxy has asked the agent"
