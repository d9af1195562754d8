"""The engines under fault: stand-ins, or real SGLang, each a process that can be killed and started again."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path

import requests

from e2e.chaos.tokens import MANY, Expected, stand_in
from e2e.child import start_child
from e2e.cluster.paths import REPOSITORY
from e2e.engine import Engine, environment, make_engine
from sglang_rollout.plugin.install import LOADER

STAND_INS, REAL = 3, 2
"""Number of engines. Two cores have room for two real engines."""
STATE = "state"
"""Name of the state folder of `sglang-rollout local`, in the folder of the run."""
TOKEN_MS = "20"
"""Milliseconds for each token of a stand-in, so that some answers are in flight when an update begins."""
ANSWER_SECONDS = 3.0
"""Seconds without an answer to one token after which a real engine counts as paused."""


class Engines(ABC):
    """Use as a context manager."""

    start_seconds = 0.0
    """Maximum extra time that an engine needs to restart, compared with a stand-in."""
    trainer_options: Sequence[str] = ()
    """Command-line options of the trainer for these engines."""

    def __init__(self, folder: Path, port: int, number: int, *, staged: bool = False) -> None:
        self.folder = folder
        self.staged = staged
        """True if the engines are started with the loader of staged versions."""
        self.ports = [port + index for index in range(number)]
        """Addresses at which the fleet reaches the engines."""
        self.processes: list[Engine] = []
        self._ends = ExitStack()

    @property
    def urls(self) -> list[str]:
        """Addresses at which the fleet reaches the engines."""
        return [f"http://127.0.0.1:{port}" for port in self.ports]

    @property
    def loader_options(self) -> list[str]:
        """Options of an engine that loads staged versions; none for other engines."""
        return ["--custom-weight-loader", LOADER] if self.staged else []

    def __enter__(self) -> Engines:
        with ExitStack() as ends:
            self.processes = [self.make(index) for index in range(len(self.ports))]
            for engine in self.processes:
                ends.callback(engine.kill)
                engine.start()
            for engine in self.processes:
                engine.wait()
            for process in self.start_beside():
                ends.callback(process.wait)
                ends.callback(process.kill)
            self._ends = ends.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._ends.close()

    def start_beside(self) -> Iterator[subprocess.Popen[str]]:
        """Start the additional processes that engines of this kind need."""
        return iter(())

    @abstractmethod
    def make(self, index: int) -> Engine:
        """Return an engine that is not started yet."""

    @abstractmethod
    def expected(self, label: str, digest: str) -> Expected:
        """Return the expected tokens of an engine with the weights of this label, which have this digest."""

    @abstractmethod
    def paused(self, index: int) -> bool:
        """Return whether the engine is paused or in a session. Raises RequestException if the engine does not run."""

    def slow(self, index: int, phase: str, seconds: float) -> None:
        """Slow down one call of a phase."""
        fault = {"kind": "slow", "phase": phase, "times": 1, "seconds": seconds}
        requests.post(f"{self.urls[index]}/stand_in/faults", json=fault, timeout=5).raise_for_status()

    def calm(self) -> None:
        """Disarm all faults."""
        for url in self.urls:
            with suppress(requests.RequestException):
                requests.delete(f"{url}/stand_in/faults", timeout=3)


class StandIns(Engines):
    """Stand-in engines."""

    def __init__(self, folder: Path, port: int, *, staged: bool = False) -> None:
        super().__init__(folder, port, STAND_INS, staged=staged)

    def make(self, index: int) -> Engine:
        """Return an engine that is not started yet."""
        port = self.ports[index]
        command = [str(environment.python(make=False)), "-m", "sglang_rollout.testing", "--port", str(port), "--token-ms", TOKEN_MS]
        command += self.loader_options
        paths = {**os.environ, "PYTHONPATH": str(REPOSITORY / "operator")}
        return Engine(port, command, self.folder / f"engine-{index}.log", paths)

    def expected(self, label: str, digest: str) -> Expected:
        """Return the tokens that follow from the digest."""
        return stand_in(bytes.fromhex(digest))

    def paused(self, index: int) -> bool:
        """Return the stand-in's own state."""
        state = requests.get(f"{self.urls[index]}/stand_in/state", timeout=5).json()
        return bool(state.get("paused") or state.get("session"))


class RealEngines(Engines):
    """Real SGLang on the CPU, each behind a proxy that can hold calls back (``slow.py``)."""

    start_seconds = 240.0

    def __init__(self, folder: Path, port: int, *, staged: bool = False) -> None:
        super().__init__(folder, port, REAL, staged=staged)
        self.trainer_options = ["--model", str(environment.model())]
        self._reference: subprocess.Popen[str] | None = None
        self._asking = threading.Lock()
        self._known: dict[tuple[str, tuple[int, ...]], list[int]] = {}

    def start_beside(self) -> Iterator[subprocess.Popen[str]]:
        """Start a proxy for each engine, and a process that computes the expected tokens."""
        for index, port in enumerate(self.ports):
            proxy = [sys.executable, "-m", "e2e.chaos.slow", str(port), self.processes[index].url]
            with (self.folder / f"slow-{index}.log").open("ab") as log:
                yield start_child(proxy, stdout=log, stderr=log, cwd=REPOSITORY, text=True)
        paths = environment.environment_variables() | {"PYTHONPATH": f"{REPOSITORY}:{REPOSITORY / 'operator'}"}
        command = [str(environment.python(make=False)), "-m", "e2e.chaos.reference", str(environment.model())]
        with (self.folder / "reference.log").open("ab") as log:
            pipe = subprocess.PIPE
            self._reference = start_child(command, stdin=pipe, stdout=pipe, stderr=log, text=True, env=paths)
        yield self._reference

    def make(self, index: int) -> Engine:
        """Return an engine that is not started yet."""
        return make_engine(self.ports[index] + 10, args=self.loader_options, log=self.folder / f"engine-{index}.log")

    def expected(self, label: str, digest: str) -> Expected:
        """Return the tokens that plain transformers generate with the same weights."""
        return lambda before, count: self._generated(label, tuple(before), count)

    def _generated(self, label: str, before: tuple[int, ...], count: int) -> list[int]:
        with self._asking:
            found = self._known.get((label, before), [])
            if len(found) < count:
                found = self._known[label, before] = self._ask(label, before, max(count, MANY - len(before)))
        return found[:count]

    def _ask(self, label: str, before: tuple[int, ...], count: int) -> list[int]:
        process = self._reference
        if process is None or process.stdin is None or process.stdout is None:
            raise RuntimeError("the reference does not run")
        print(json.dumps({"label": label, "before": before, "count": count}), file=process.stdin, flush=True)
        tokens: list[int] = json.loads(process.stdout.readline())
        return tokens

    def paused(self, index: int) -> bool:
        """Return whether the engine leaves a request unanswered, because SGLang does not report a pause. True also if it is stopped."""
        body = {"input_ids": [1], "sampling_params": {"temperature": 0, "max_new_tokens": 1}}
        try:
            requests.post(f"{self.processes[index].url}/generate", json=body, timeout=(ANSWER_SECONDS, ANSWER_SECONDS)).raise_for_status()
        except requests.ReadTimeout:
            return True
        return False
