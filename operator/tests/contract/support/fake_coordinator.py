"""A fleet's URL with transport Staged: the coordinator's calls of an upload, without engines, in front of a real weight store.

It forwards pieces to the store, as the front does. A commit seals the version in the store.
"""

from __future__ import annotations

import json
import secrets
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import requests

from sglang_rollout.wire.ports import DIGEST_HEADER, FLEET_HEALTH, FLEET_UPDATES, STORE_DROP, STORE_OPEN, STORE_SEAL, TICKET_HEADER
from sglang_rollout.wire.staged import PIECE_BYTES
from sglang_rollout.wire.trainer import TRANSPORT_STAGED
from tests.contract.support.store_process import SIZE_LIMIT, StoreProcess, new_update
from tests.unit.trainer.support.scripted_fleet import document

Reply = tuple[int, dict[str, Any]]


class FakeCoordinator:
    """Begins, commits and aborts uploads. ``deleted`` lists the updates that were aborted."""

    def __init__(self, store: StoreProcess) -> None:
        self.store = store
        self.size_limit = SIZE_LIMIT
        self.url = ""
        self.committed = {"run": 0, "step": 0, "label": "base"}
        self.update = ""
        """Update of the committed version."""
        self.deleted: list[str] = []
        self._begun: dict[str, dict[str, Any]] = {}
        self._steps = 0

    def get(self, path: str) -> Reply:
        if path == "/health":
            return 200, {}
        if path == FLEET_HEALTH:
            return 200, {"status": "ok", "term": 1}
        if path == "/fleet":
            return 200, document(transport=TRANSPORT_STAGED, committed=self.committed)
        return 404, {"success": False, "message": f"nothing at {path}"}

    def post(self, path: str, body: dict[str, Any]) -> Reply:
        if path == FLEET_UPDATES:
            return self.begin(body)
        update = path.removeprefix(f"{FLEET_UPDATES}/").removesuffix("/commit")
        version = self._begun[update]
        status, reply = self.store.call(STORE_SEAL, {"update": update, "version": version})
        if status == 200:
            self.committed, self.update = version, update
            return 200, {"success": True, "message": "", "fleet": {"state": body["wait"], "fenced": {}}}
        return status, reply

    def begin(self, body: dict[str, Any]) -> Reply:
        update, ticket = new_update(), secrets.token_hex(8)
        self._steps += 1
        self._begun[update] = {"run": 1, "step": self._steps, "label": body["label"]}
        wanted = {"update": update, "upload_ticket": ticket, "ticket": "t", "size_limit": self.size_limit, "shards": body["shards"]}
        status, reply = self.store.call(STORE_OPEN, {**wanted, "keep": [self.update]})
        if status != 200:
            return status, reply
        begun = {"update": update, "ticket": ticket, "piece_bytes": PIECE_BYTES, "expires_seconds": 3600, "version": self._begun[update]}
        return 200, {"success": True, "message": "", "fleet": begun}

    def delete(self, path: str) -> Reply:
        self.deleted.append(path.removeprefix(f"{FLEET_UPDATES}/"))
        self.store.call(STORE_DROP, {"keep": [self.update]})
        return 200, {"success": True, "message": ""}

    def put(self, path: str, data: bytes, headers: dict[str, str]) -> Reply:
        reply = requests.put(self.store.data_url + path, data=data, headers=headers, timeout=60)
        return reply.status_code, reply.json()


def _handler(fake: FakeCoordinator) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *_: object) -> None:
            """Log nothing."""

        def _answer(self) -> None:
            data = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            if self.command == "GET":
                status, reply = fake.get(self.path)
            elif self.command == "DELETE":
                status, reply = fake.delete(self.path)
            elif self.command == "PUT":
                status, reply = fake.put(self.path, data, {name: self.headers[name] for name in (TICKET_HEADER, DIGEST_HEADER)})
            else:
                status, reply = fake.post(self.path, json.loads(data))
            payload = json.dumps(reply).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(payload)))
            self.end_headers()
            self.wfile.write(payload)

        do_GET = do_POST = do_PUT = do_DELETE = _answer  # noqa: N815 - names of the standard library

    return Handler


@contextmanager
def fake_coordinator(store: StoreProcess) -> Iterator[FakeCoordinator]:
    """Serve the URL for the length of the block."""
    fake = FakeCoordinator(store)
    server = ThreadingHTTPServer(("127.0.0.1", 0), _handler(fake))
    server.daemon_threads = True
    fake.url = f"http://127.0.0.1:{server.server_address[1]}"
    threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
    try:
        yield fake
    finally:
        server.shutdown()
        server.server_close()
