"""Connections stay open through NAT and load balancers, and a peer that is lost silently is noticed."""

from __future__ import annotations

import ast
import asyncio
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from aiohttp import web

import sglang_rollout
from sglang_rollout import keepalive
from sglang_rollout.bounded import open_connector, open_session
from sglang_rollout.proxy.address import Address
from sglang_rollout.proxy.listen import listen
from sglang_rollout.trainer.calls import Http
from tests.support.keepalive import assert_both_ends_are_probed
from tests.support.ports import free_port
from tests.unit.trainer.support.scripted_fleet import FakeFleet

PACKAGE = Path(sglang_rollout.__file__).parent


@pytest.mark.parametrize("host", ["127.0.0.1", "::"])
@pytest.mark.parametrize("own_connector", [False, True])
async def test_servers_and_clients_of_the_fleet_are_probed(host: str, own_connector: bool) -> None:
    port, release = free_port(), asyncio.Event()

    async def answer(_: web.Request) -> web.Response:
        await release.wait()
        return web.Response()

    app = web.Application()
    app.add_routes([web.get("/", answer)])
    runner = web.AppRunner(app)
    await runner.setup()
    await listen(runner, Address(host, port))
    async with open_session(**({"connector": open_connector(limit=0)} if own_connector else {})) as session:
        waiting = asyncio.create_task(session.get(f"http://127.0.0.1:{port}/"))
        await asyncio.sleep(0.3)
        assert_both_ends_are_probed(port)
        release.set()
        assert (await waiting).status == 200
    await runner.cleanup()


def test_the_client_is_probed(fake_fleet: FakeFleet) -> None:
    http = Http(fake_fleet.url)
    http.get("/health", timeout=5)
    (session,) = http._sessions
    (opened,) = session._sockets
    assert opened.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
    assert opened.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE) < 60
    assert opened.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) <= 180_000
    assert opened.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY) == 1
    http.close()


@pytest.fixture
def fake_fleet() -> Iterator[FakeFleet]:
    with FakeFleet() as made:
        yield made


def test_all_code_opens_connections_in_one_place() -> None:
    """A session, a connector or a site that is made elsewhere has none of the options."""
    homes = {"ClientSession": "bounded.py", "TCPConnector": "bounded.py", "TCPSite": "proxy/listen.py", "SockSite": "proxy/listen.py"}
    wrong = []
    for file in PACKAGE.rglob("*.py"):
        place = str(file.relative_to(PACKAGE))
        for node in ast.walk(ast.parse(file.read_text())):
            name = node.func.attr if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) else ""
            if name in homes and place != homes[name] and not place.startswith("testing/"):
                wrong.append(f"{place}:{node.lineno} {name}")  # type: ignore[attr-defined]
    assert wrong == []


LOST_PEER = """
import socket, subprocess, sys, time
from sglang_rollout import keepalive
subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
listener = socket.create_server(("127.0.0.1", 4000))
keepalive.keep_alive(listener)
sends = sys.argv[1] == "sends"
client = keepalive.open_socket((socket.AF_INET, socket.SOCK_STREAM, 0, "", None))
client.connect(("127.0.0.1", 4000))
accepted, _ = listener.accept()
for each in (client, accepted):
    for option, value in ((socket.TCP_KEEPIDLE, 1), (socket.TCP_KEEPINTVL, 1), (socket.TCP_KEEPCNT, 2)):
        assert each.getsockopt(socket.IPPROTO_TCP, option) > value
        each.setsockopt(socket.IPPROTO_TCP, option, value)
client.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 3000)
subprocess.run(["iptables", "-A", "INPUT", "-i", "lo", "-j", "DROP"], check=True)
if sends:
    client.sendall(b"request")
started = time.monotonic()
for each in [client] if sends else [client, accepted]:
    each.settimeout(15)
    try:
        each.recv(1)
        print("ended")
    except TimeoutError as error:
        print("noticed" if error.errno else "waits", round(time.monotonic() - started))
"""


@pytest.mark.parametrize("mode", ["waits", "sends"])
def test_a_peer_that_is_lost_silently_is_noticed(mode: str) -> None:
    """The options are shortened to seconds; all packets between the two ends are dropped."""
    line = ["unshare", "--user", "--map-root-user", "--net", sys.executable, "-c", LOST_PEER, mode]
    done = subprocess.run(
        line, capture_output=True, text=True, timeout=60, env={**os.environ, "PYTHONPATH": str(PACKAGE.parent)}, check=False
    )
    if done.returncode and ("unshare" in done.stderr or "iptables" in done.stderr):
        pytest.skip(f"no network namespaces here: {done.stderr[-200:]}")
    assert done.returncode == 0, done.stderr
    rows = [row.split() for row in done.stdout.splitlines()]
    assert [row[0] for row in rows] == ["noticed"] * len(rows), rows
    assert all(int(row[1]) <= 10 for row in rows)


def test_a_lost_peer_is_noticed_within_minutes() -> None:
    assert keepalive.IDLE_SECONDS < 60
    assert keepalive.IDLE_SECONDS + keepalive.PROBES * keepalive.PROBE_SECONDS <= 180
    assert keepalive.LOST_SECONDS <= 180
