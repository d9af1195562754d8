"""A local fleet over real engines, which are restarted when a case has ended them."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import requests

from e2e.child import start_child
from e2e.engine import Engine, environment, make_engine
from e2e.fuzz.run import CLASSIFY
from sglang_rollout.sglang.api import GENERATE
from sglang_rollout.wire.ports import FLEET

START_SECONDS = 240.0
KINDS = ("plain", "lora", "reward")
"""Engines without and with adapters, and engines with a reward model, which generate no tokens."""
LORA = ("--enable-lora", "--max-lora-rank", "4", "--lora-target-modules", "q_proj", "v_proj", "--lora-backend", "torch_native")


@dataclass(frozen=True)
class RestartableFleet:
    """A fleet's URL and its engines."""

    url: str
    engines: list[Engine]
    probe: str
    """Path at which an engine that works answers."""

    def restart(self) -> None:
        """Start all engines again, because a hung engine looks like a busy one, and wait until they serve."""
        for engine in self.engines:
            engine.kill()
            engine.start()
        for engine in self.engines:
            engine.wait()
        self.wait()

    def wait(self) -> None:
        """Wait until all engines serve with their current boot IDs. Raises TimeoutError."""
        end = time.monotonic() + START_SECONDS
        while time.monotonic() < end:
            with suppress(requests.RequestException, ValueError):
                if requests.get(self.url + FLEET, timeout=5).json().get("serving") == len(self.engines):
                    time.sleep(2)
                    return
            time.sleep(0.5)
        raise TimeoutError(f"the engines did not serve within {START_SECONDS:g} s")


def _make_engine(kind: str, port: int, log: Path) -> Engine:
    if kind == "lora":
        return make_engine(port, log=log, args=["--enable-metrics", *LORA], env={"SGLANG_CPU_PATCHES": "lora,paused-sleep"})
    if kind == "reward":
        return make_engine(port, log=log, model=environment.model("--arch", "reward"), args=["--enable-metrics", "--is-embedding"])
    return make_engine(port, log=log, args=["--enable-metrics"])


@contextmanager
def restartable_fleet(folder: Path, port: int, number: int, kind: str = "plain") -> Iterator[RestartableFleet]:
    """Run engines of one of ``KINDS`` and a fleet over them. Logs are in ``folder``."""
    with ExitStack() as stack:
        engines = [_make_engine(kind, port + 1 + index, folder / f"engine-{index}.log") for index in range(number)]
        for engine in engines:
            stack.callback(engine.kill)
            engine.start()
        for engine in engines:
            engine.wait()
        command = [sys.executable, "-m", "sglang_rollout.cli", "local", "--listen", f"127.0.0.1:{port}", "--backend", "gloo"]
        command += ["--state-dir", str(folder / "state"), *(part for engine in engines for part in ("--engine", engine.url))]
        with (folder / "local.log").open("wb") as log:
            local = start_child(command, stdout=log, stderr=subprocess.STDOUT)
        stack.callback(local.wait, 30)
        stack.callback(local.terminate)
        fleet = RestartableFleet(f"http://127.0.0.1:{port}", engines, CLASSIFY if kind == "reward" else GENERATE)
        fleet.wait()
        yield fleet
