"""Stands in for one node of an SGLang server over several: ``stub_rank.py PORT PID_FILE``; its rank comes from the environment.

Rank 0 answers what an agent asks; the others, as SGLang's do, only that they run. Neither notices when the other dies.
"""

from __future__ import annotations

import json
import os
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

LIFE = os.getpid()
ANSWERS = {
    "/model_info": {"weight_version": "base"},
    "/server_info": {"version": "0.5.23", "tp_size": 2, "weight_version": "base", "served_model_name": "tiny", "random_seed": LIFE},
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
        self._answer({"output_ids": [1], "life": LIFE} if self.path == "/generate" and RANK == 0 else None)

    def _answer(self, document: dict[str, object] | None) -> None:
        body = json.dumps(document or {}).encode()
        self.send_response(404 if document is None else 200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Nothing to say."""


if __name__ == "__main__":
    server = ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), Handler)
    Path(sys.argv[2]).write_text(str(LIFE))
    server.serve_forever()
