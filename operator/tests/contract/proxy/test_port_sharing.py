"""Containers of a pod share its ports. None can listen beside a proxy, and so receive credentials that are sent to it."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from tests.contract.support.agent_pod import Process, until
from tests.support.ports import free_port

pytestmark = pytest.mark.router


@pytest.mark.parametrize("kind", ["gate", "front"])
async def test_no_other_process_can_listen_on_the_port_of_a_proxy(tmp_path: Path, kind: str) -> None:
    port = free_port()
    folder = ["--socket", str(tmp_path / "gate.sock")] if kind == "gate" else ["--runtime-dir", str(tmp_path)]
    proxy = Process(["proxy", kind, "--listen", f"127.0.0.1:{port}", *folder], tmp_path / "log")
    await proxy.start()
    try:

        async def listens() -> bool:
            with socket.socket() as client:
                return client.connect_ex(("127.0.0.1", port)) == 0

        await until(listens, 60, "the proxy listens")
        with socket.socket() as other:
            other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            with pytest.raises(OSError, match="in use"):
                other.bind(("127.0.0.1", port))
    finally:
        await proxy.end()
