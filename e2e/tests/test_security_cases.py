"""The tools of the cases in e2e/cases/security, without a cluster."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from e2e.cases.security.attacks import ATTACKS, Host, Source
from e2e.cases.security.reach import send_all
from e2e.cases.security.scene import Scene
from e2e.cases.stand_in_rollout import StandInRollout
from e2e.kube import Kubectl

CODES = {"/fleet": {"code": "Forbidden"}, "/%66leet": {"error": {"code": "encoded_path", "message": "No."}}, "/plain": {}, "/list": []}


class Refusing(BaseHTTPRequestHandler):
    """Answers 403, with the code of the path as it was sent."""

    def do_GET(self) -> None:
        body = json.dumps(CODES[self.path]).encode()
        self.send_response(403)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Print nothing."""


@pytest.fixture
def server() -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), Refusing) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"127.0.0.1:{server.server_port}"
        server.shutdown()


def test_answers_have_the_order_of_the_requests_and_paths_are_sent_as_written(server: str) -> None:
    requests = [{"address": server, "method": "GET", "path": path} for path in CODES] * 3
    refusals = [("Forbidden", ""), ("encoded_path", "No."), ("", ""), ("", "")] * 3
    assert send_all(requests, 20) == [(403, *refusal) for refusal in refusals]


def test_a_connection_that_is_not_accepted_has_the_status_0(server: str) -> None:
    requests = [{"address": "127.0.0.1:1", "method": "POST", "path": "/fleet"}, {"address": server, "method": "GET", "path": "/fleet"}]
    assert send_all(requests, 20) == [(0, "", ""), (403, "Forbidden", "")]


def test_requests_of_all_attacks_have_addresses_and_headers(tmp_path: Path) -> None:
    hosts = {host: f"10.0.0.{number}" for number, host in enumerate(Host)}
    words = {"trainer": "10.1.2.3", "token": "t", "control": "c", "foreign": "f", "unbound": "u", "engine": "e", "credential": "d"}
    stand = StandInRollout(Kubectl("e2e"), "stand", "http://127.0.0.1:4000", 3, tmp_path)
    scene = Scene(stand, "outsider", hosts, words, {})
    for attack in ATTACKS:
        for message in (scene.message(request, attack.source) for request in attack.requests()):
            host, _, port = message["address"].partition(":")
            assert (host, port) == ("127.0.0.1", "4000") if attack.source is Source.FORWARD else host in hosts.values()
            assert not any("{" in str(value) for value in (*message["headers"].values(), *message["body"].values()))
            assert json.dumps(message)
