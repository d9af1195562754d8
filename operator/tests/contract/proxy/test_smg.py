"""The real smg before a stand-in."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest
import requests

from sglang_rollout.testing import StandIn
from tests.support.ports import free_port

pytestmark = pytest.mark.router


@pytest.fixture
def smg() -> Iterator[str]:
    """URL of an smg that was started in a shell with proxies."""
    port = free_port()
    line = ["proxy", "smg", "--listen", f"127.0.0.1:{port}", "--metrics-listen", f"127.0.0.1:{free_port()}"]
    nowhere = f"http://127.0.0.1:{free_port()}"
    proxies = dict.fromkeys(("HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy", "HTTPS_PROXY", "https_proxy"), nowhere)
    process = subprocess.Popen([sys.executable, "-m", "sglang_rollout.cli", *line], env={**os.environ, **proxies})
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        process.terminate()
        process.wait(20)


def test_smg_reaches_engines_although_the_shell_has_proxies(smg: str) -> None:
    with StandIn() as engine, requests.Session() as session:
        session.trust_env = False
        end = time.monotonic() + 30
        status, posted = 0, False
        while status != 200 and time.monotonic() < end:
            try:
                posted = posted or session.post(f"{smg}/workers", json={"url": engine.url}, timeout=5).ok
                body = {"text": "a", "sampling_params": {"max_new_tokens": 1}}
                status = session.post(f"{smg}/generate", json=body, timeout=5).status_code
            except requests.ConnectionError:
                time.sleep(0.1)
        assert status == 200
