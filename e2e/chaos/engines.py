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

from e2e.chaos.tokens import MANY, Says, stand_in
from e2e.child import start_child
from e2e.cluster.paths import REPOSITORY
from e2e.engine import Engine, environment, make_engine

STAND_INS, REAL = 3, 2
"""How many; two cores hold no more real ones."""
TOKEN_MS = "20"
"""Slow enough that some answers of stand-ins are under way when an update comes."""
ABOUT_LISTENING = 3.0
"""Seconds without an answer to one token after which a real engine counts as paused."""


class Engines(ABC):
    """Use as a context manager."""

    start_seconds = 0.0
    """How much longer than a stand-in one takes at most to start anew."""
    trainer_options: Sequence[str] = ()
    """What the trainer must be told of them."""

    def __init__(self, folder: Path, port: int, number: int) -> None:
        self.folder = folder
        self.ports = [port + index for index in range(number)]
        """Where the fleet reaches them."""
        self.processes: list[Engine] = []
        self._ends = ExitStack()

    @property
    def urls(self) -> list[str]:
        """Where the fleet reaches them."""
        return [f"http://127.0.0.1:{port}" for port in self.ports]

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
        """Start what engines of this kind need beside them."""
        return iter(())

    @abstractmethod
    def make(self, index: int) -> Engine:
        """An engine that is not started yet."""

    @abstractmethod
    def says(self, label: str, digest: str) -> Says:
        """What an engine says that holds the weights of this label, which have this digest."""

    @abstractmethod
    def paused(self, index: int) -> bool:
        """Whether the engine is paused or in a session. Raises RequestException when it does not run."""

    def slow(self, index: int, phase: str, seconds: float) -> None:
        """Let one call of a phase take longer."""
        fault = {"kind": "slow", "phase": phase, "times": 1, "seconds": seconds}
        requests.post(f"{self.urls[index]}/stand_in/faults", json=fault, timeout=5).raise_for_status()

    def calm(self) -> None:
        """Forget what was to be slow."""
        for url in self.urls:
            with suppress(requests.RequestException):
                requests.delete(f"{url}/stand_in/faults", timeout=3)


class StandIns(Engines):
    """Stand-in engines."""

    def __init__(self, folder: Path, port: int) -> None:
        super().__init__(folder, port, STAND_INS)

    def make(self, index: int) -> Engine:
        """An engine that is not started yet."""
        port = self.ports[index]
        command = [str(environment.python(make=False)), "-m", "sglang_rollout.testing", "--port", str(port), "--token-ms", TOKEN_MS]
        paths = {**os.environ, "PYTHONPATH": str(REPOSITORY / "operator")}
        return Engine(port, command, self.folder / f"engine-{index}.log", paths)

    def says(self, label: str, digest: str) -> Says:
        """What follows from the digest."""
        return stand_in(bytes.fromhex(digest))

    def paused(self, index: int) -> bool:
        """As the stand-in says."""
        state = requests.get(f"{self.urls[index]}/stand_in/state", timeout=5).json()
        return bool(state.get("paused") or state.get("session"))


class RealEngines(Engines):
    """Real SGLang on the CPU, each behind a proxy that can hold calls back (``slow.py``)."""

    start_seconds = 240.0

    def __init__(self, folder: Path, port: int) -> None:
        super().__init__(folder, port, REAL)
        self.trainer_options = ["--model", str(environment.model())]
        self._reference: subprocess.Popen[str] | None = None
        self._asking = threading.Lock()
        self._known: dict[tuple[str, tuple[int, ...]], list[int]] = {}

    def start_beside(self) -> Iterator[subprocess.Popen[str]]:
        """A proxy for each, and somebody who knows what is right."""
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
        """An engine that is not started yet."""
        return make_engine(self.ports[index] + 10, log=self.folder / f"engine-{index}.log")

    def says(self, label: str, digest: str) -> Says:
        """What plain transformers say with the same weights."""
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
        said: list[int] = json.loads(process.stdout.readline())
        return said

    def paused(self, index: int) -> bool:
        """SGLang does not tell; an engine that is paused answers nobody. One that is stopped neither."""
        body = {"input_ids": [1], "sampling_params": {"temperature": 0, "max_new_tokens": 1}}
        try:
            requests.post(f"{self.processes[index].url}/generate", json=body, timeout=(ABOUT_LISTENING, ABOUT_LISTENING)).raise_for_status()
        except requests.ReadTimeout:
            return True
        return False
