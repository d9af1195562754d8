"""The preStop hook of smg, run by a shell against a socket of this process."""

from __future__ import annotations

import socket
import subprocess

from sglang_rollout.controller.render.router import WAIT_FOR_BATCHES_SCRIPT
from sglang_rollout.wire.ports import BATCHES_PORT


def begin_hook(port: int) -> subprocess.Popen[bytes]:
    known = f":{BATCHES_PORT:04X} "
    assert known in WAIT_FOR_BATCHES_SCRIPT
    script = WAIT_FOR_BATCHES_SCRIPT.replace(known, f":{port:04X} ").replace("sleep 1", "echo waits; sleep 0.1")
    return subprocess.Popen(["/bin/sh", "-c", script], stdout=subprocess.PIPE)


def test_smg_waits_while_the_batch_server_listens_or_has_a_request() -> None:
    listener = socket.create_server(("127.0.0.1", 0))
    port = listener.getsockname()[1]
    with begin_hook(port) as hook:
        assert hook.stdout is not None
        assert hook.stdout.readline() == b"waits\n"
        client = socket.create_connection(("127.0.0.1", port))
        server, _ = listener.accept()
        listener.close()
        assert hook.stdout.readline() == b"waits\n"
        with begin_hook(port) as second:
            assert second.stdout is not None
            assert second.stdout.readline() == b"waits\n", "a request keeps it waiting, without a listener"
            server.close()
            client.close()
            assert (hook.wait(30), second.wait(30)) == (0, 0), "closed connections do not count"


def test_smg_does_not_wait_for_a_batch_server_that_is_gone() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    with begin_hook(port) as hook:
        assert (hook.wait(30), hook.stdout.read() if hook.stdout else b"") == (0, b"")
