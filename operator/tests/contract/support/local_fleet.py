"""Two real engines behind one URL, with `sglang-rollout local`."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import requests
from e2e.child import start_child
from e2e.engine import environment, start_engine

from tests.support.ports import free_port


@dataclass
class Urls:
    """URLs of a fleet and, without their gates, of its engines."""

    fleet: str
    engines: list[str]
    model: str
    targets: list[dict[str, Any]]
    """Targets of Prometheus, in the format of ``file_sd_configs``."""

    def version(self) -> str:
        """Return the version that the engines hold."""
        return str(requests.get(f"{self.engines[0]}/model_info", timeout=10).json()["weight_version"])


def wait_serving(url: str, engines: int, seconds: float, local: subprocess.Popen[bytes], log: Path) -> None:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        assert local.poll() is None, f"local ended with {local.returncode}: {log.read_text()[-2000:]}"
        try:
            if requests.get(f"{url}/fleet", timeout=5).json().get("serving") == engines:
                return
        except requests.RequestException:
            pass  # front or coordinator do not answer yet
        time.sleep(0.5)
    pytest.fail(f"{engines} engines did not serve within {seconds:.0f} s: {log.read_text()[-2000:]}")


def wait_routed(url: str, engines: int) -> None:
    """Wait until smg routes to all engines, which is a moment after they serve."""
    end, seen = time.monotonic() + 60, set[str]()
    while len(seen) < engines:
        assert time.monotonic() < end, f"smg routes to {seen} only"
        body = {"input_ids": [5], "sampling_params": {"max_new_tokens": 1}}
        reply = requests.post(f"{url}/generate", json=body, headers={"x-session-id": str(time.monotonic_ns())}, timeout=60)
        seen |= {gate for name, gate in reply.headers.items() if name.lower() == "x-smg-routed-worker-id"}


@contextmanager
def engines_behind_a_url(folder: Path, number: int, args: Sequence[str] = ()) -> Iterator[Urls]:
    """Run engines behind one URL, with metrics as in pods. ``args``: more arguments of SGLang."""
    log = folder / "local.log"
    with ExitStack() as stack:
        engines = [stack.enter_context(start_engine(free_port(), wait=False, args=("--enable-metrics", *args))) for _ in range(number)]
        for engine in engines:
            engine.wait()
        address = f"127.0.0.1:{free_port()}"  # only now, because engines use ports while they start
        wanted = [part for engine in engines for part in ("--engine", engine.url)]
        command = [sys.executable, "-m", "sglang_rollout.cli", "local", *wanted, "--listen", address, "--backend", "gloo"]
        with log.open("wb") as out:
            local = start_child([*command, "--state-dir", str(folder / "state")], stdout=out, stderr=out)
        stack.callback(local.wait, 30)
        stack.callback(local.terminate)
        wait_serving(f"http://{address}", number, 90, local, log)
        wait_routed(f"http://{address}", number)
        targets = json.loads((folder / "state" / "prometheus-targets.json").read_text())
        yield Urls(f"http://{address}", [engine.url for engine in engines], str(environment.model()), targets)
