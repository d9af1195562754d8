"""A fleet behind real HTTP whose answers a test defines, by path. The fleet records every call."""

from __future__ import annotations

import json
import threading
from collections import defaultdict
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from sglang_rollout.wire.ports import BASE_HEADER, DIGEST_HEADER, TICKET_HEADER

Reply = tuple[int, Any] | tuple[int, Any, dict[str, str]]
"""Status, JSON body and, optionally, headers."""
Script = Reply | Callable[[dict[str, Any]], Reply]


def document(**changes: Any) -> dict[str, Any]:
    """Return the discovery document of two engines at base. ``changes`` replaces fields."""
    base = {"run": 0, "step": 0, "label": "base"}
    members = [
        {
            "name": f"demo-engine-{i}",
            "state": "clean",
            "version": base,
            "boot_id": f"boot-{i}",
            "gate_open": True,
            "url": f"http://127.0.0.1:{9000 + i}",
            "tensor_size": 1,
            "rank_offset": 1 + i,
            "routed": True,
        }
        for i in range(2)
    ]
    fixed = {"name": "demo", "namespace": "default", "term": 1, "epoch": 1, "world_size": 3, "backend": "gloo"}
    return fixed | {"committed": base, "serving": 2, "members": members} | changes


class FakeFleet:
    """Use in a ``with`` block. ``replies[path]`` is a reply, a function of the body, or a list of them used up in
    order.

    The body of a PUT is given as ``{"data", "ticket", "digest"}``, and ``base`` if it is a difference; ``replies["PUT"]`` answers a path
    without replies.
    """

    def __init__(self) -> None:
        self.replies: dict[str, Script | list[Script]] = {
            "/health": (200, {}),
            "/fleet": (200, document()),
            "/fleet/health": (200, {"status": "ok", "term": 1}),
        }
        self.calls: list[tuple[str, dict[str, Any]]] = []
        self.counts: dict[str, int] = defaultdict(int)
        self.connections = 0
        self.authorizations: list[str | None] = []
        self.slow_read: Callable[[], None] | None = None
        """Called before each MiB of a body is read."""
        self._lock = threading.Lock()
        fleet = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def setup(self) -> None:
                fleet.connections += 1
                super().setup()

            def log_message(self, *_: object) -> None:
                """Log nothing."""

            def _read(self, size: int) -> bytes:
                data = bytearray()
                while len(data) < size:
                    if fleet.slow_read is not None:
                        fleet.slow_read()
                    part = self.rfile.read(min(1 << 20, size - len(data)))
                    if not part:
                        break
                    data += part
                return bytes(data)

            def _answer(self) -> None:
                sent = self._read(int(self.headers.get("Content-Length") or 0))
                fleet.authorizations.append(self.headers.get("Authorization"))
                if self.command == "PUT":
                    body = {"data": sent, "ticket": self.headers[TICKET_HEADER], "digest": self.headers[DIGEST_HEADER]}
                    body |= {"base": self.headers[BASE_HEADER]} if BASE_HEADER in self.headers else {}
                else:
                    body = json.loads(sent or b"{}")
                status, reply, *headers = fleet.answer(self.path, body, self.command)
                payload = json.dumps(reply).encode()
                self.send_response(status)
                for name, value in ({"Content-Length": str(len(payload))} | (headers[0] if headers else {})).items():
                    self.send_header(name, value)
                self.end_headers()
                self.wfile.write(payload)

            do_GET = do_POST = do_PUT = do_DELETE = _answer  # noqa: N815 - names of the standard library

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"

    def answer(self, path: str, body: dict[str, Any], method: str = "POST") -> Reply:
        """Record the call, and return the next reply of the path."""
        with self._lock:
            self.calls.append((path, body))
            self.counts[path] += 1
            script = self.replies.get(path) or self.replies.get(method, (404, {"success": False, "message": f"nothing at {path}"}))
            if isinstance(script, list):
                script = script.pop(0) if len(script) > 1 else script[0]
        return script(body) if callable(script) else script

    def __enter__(self) -> FakeFleet:
        threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()
