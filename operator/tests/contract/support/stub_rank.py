"""Simulate one node of an SGLang server of several nodes: ``stub_rank.py PORT PID_FILE``. The environment sets its rank.

Rank 0 answers the agent's calls. Other ranks answer only that they run, as in SGLang. No rank notices when another rank dies.
"""

from __future__ import annotations

import json
import os
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

PID = os.getpid()
ANSWERS: dict[str, dict[str, object]] = {
    "/model_info": {"weight_version": "base"},
    "/server_info": {"version": "0.5.23", "tp_size": 2, "weight_version": "base", "served_model_name": "tiny", "random_seed": PID},
    "/ready": {},
    "/health_generate": {},
    "/v1/loads": {"loads": []},
}
RANK = int(os.environ["SGLANG_ROLLOUT_NODE_RANK"])


class Handler(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self._answer({} if self.path == "/ping" else ANSWERS.get(self.path) if RANK == 0 else None)

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers.get("Content-Length", 0)))
        self._answer({"output_ids": [1], "pid": PID} if self.path == "/generate" and RANK == 0 else None)

    def _answer(self, document: dict[str, object] | None) -> None:
        body = json.dumps(document or {}).encode()
        self.send_response(404 if document is None else 200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Log nothing."""


if __name__ == "__main__":
    server = ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), Handler)
    Path(sys.argv[2]).write_text(str(PID))
    server.serve_forever()
