"""Control a trainer process: on this machine, or in a pod."""

from __future__ import annotations

import json
import os
import queue
import subprocess
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

from e2e.chaos.tokens import BASE, Expected, stand_in
from e2e.child import start_child
from e2e.cluster.paths import REPOSITORY
from e2e.engine import environment
from sglang_rollout.trainer.credentials import TOKEN_VARIABLE

MODULE = "e2e.chaos.trainer"
ExpectedOf = Callable[[str, str], Expected]
"""Returns the expected tokens for the weights of a label, which have this digest."""


def _stand_in(label: str, digest: str) -> Expected:
    return stand_in(bytes.fromhex(digest))


class Trainer:
    """A process that runs ``e2e.chaos.trainer``."""

    def __init__(self, command: Sequence[str], log: Path, env: dict[str, str] | None = None, expected: ExpectedOf = _stand_in) -> None:
        with log.open("ab") as errors:
            self.process = start_child(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, text=True, env={**os.environ, **(env or {})}
            )
        self._lines: queue.Queue[dict[str, Any]] = queue.Queue()
        threading.Thread(target=self._read, args=(self.process.stdout,), daemon=True).start()
        ready = self.message_with("ready", 120)
        self.pid = int(ready["pid"])
        """PID of the trainer in its own PID namespace."""
        self._expected = expected
        self.base = expected(BASE, ready["policy"])
        """Expected tokens of an engine that was never updated."""

    def begin(self, label: str, manner: str = "") -> Expected:
        """Start a push and return the expected tokens of its weights. For ``manner`` see ``trainer.py``."""
        if self.process.stdin is None:
            raise RuntimeError("the trainer has no input")
        print(f"{manner} {label}".strip(), file=self.process.stdin, flush=True)
        return self._expected(label, self.message_with("policy", 30)["policy"])

    def outcome(self, within: float) -> dict[str, Any]:
        """Return the outcome of the push. Raises TimeoutError if it has not ended."""
        return self.message_with("ok", within)

    def message_with(self, key: str, within: float) -> dict[str, Any]:
        """Return the trainer's next message that has ``key``. Raises TimeoutError."""
        end = time.monotonic() + within
        while time.monotonic() < end:
            with suppress(queue.Empty):
                line = self._lines.get(timeout=0.2)
                if key in line:
                    return line
        raise TimeoutError(f"the trainer printed no {key!r} within {within:g} s")

    def end(self) -> None:
        """Kill the trainer in any state."""
        self.process.kill()
        self.process.wait()

    def _read(self, lines: IO[str]) -> None:
        for line in lines:
            if line.endswith("\n"):  # an incomplete line means that the trainer was killed
                self._lines.put(json.loads(line))


def local_trainer(
    url: str, log: Path, options: Sequence[str] = (), expected: ExpectedOf = _stand_in, *, token: str | None = None
) -> Trainer:
    """Start a trainer on this machine, with the Python that has torch. For ``options`` see ``trainer.py``."""
    paths = os.pathsep.join([str(REPOSITORY), str(REPOSITORY / "operator")])
    env = {"PYTHONPATH": paths, **({TOKEN_VARIABLE: token} if token is not None else {})}
    return Trainer([str(environment.python(make=False)), "-m", MODULE, url, *options], log, env, expected)
