"""The processes under fault: engines, a local fleet over them, a trainer. The stack restarts engines as a kubelet would."""

from __future__ import annotations

import json
import math
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from datetime import datetime
from pathlib import Path
from typing import Any

import requests

from e2e.chaos.batch import RunningBatch
from e2e.chaos.engines import STATE, RealEngines, StandIns
from e2e.chaos.floods import Flood
from e2e.chaos.tokens import PROMPT
from e2e.chaos.trainer_process import Trainer, local_trainer
from e2e.child import start_child
from e2e.kube import Refused
from sglang_rollout.wire.ports import BATCHES_METRICS

WEIGHTS = {
    "deadlines": {"groupSeconds": 10, "updateSeconds": 12, "pauseSeconds": 8, "idleSeconds": 10, "totalSeconds": 60, "stuckSeconds": 4},
    "trainerLease": {"ttlSeconds": 3},
}
"""Short deadlines, so that the matrix is quick. The matrix tests that they hold."""
START_WITHIN = 180.0
"""Maximum seconds until all engines of a new fleet serve."""
HUNG_FOR = 20.0
"""Seconds after which the stack restarts an idle engine that hangs."""
PHASE_LINE = " update phase: "
"""The coordinator's log line when a phase begins, after the time and the level."""
PARTS = {
    "agent": ("sglang_rollout.cli", "agent", "--name", "local-engine-{index}"),
    "gate": ("haproxy", "local-engine-{index}"),
    "coordinator": ("sglang_rollout.cli", "coordinator", "--public-url"),
    "batches": ("sglang_rollout.cli", "batches"),
    "smg": ("smg::router",),
    "front": ("haproxy", "front"),
    "store": ("sglang_rollout.cli", "store", "local-store"),
}
"""Words in the command line of each part."""


class FleetUnderFault:
    """The URL and the trainer of a fleet. Subclasses start and stop its parts."""

    headers: Mapping[str, str] = {}
    """Headers of control calls: a token, if the fleet asks for one."""

    def __init__(self, folder: Path, url: str = "") -> None:
        self.folder = folder
        self.url = url
        self.trainer: Trainer | None = None
        self._ends = ExitStack()

    def __exit__(self, *_: object) -> None:
        if self.trainer is not None:
            self.trainer.end()
        self._ends.close()

    def document(self) -> dict[str, Any]:
        """Return ``GET /fleet``; empty while the coordinator does not answer."""
        try:
            reply = requests.get(f"{self.url}/fleet", headers=self.headers, timeout=5)
            return dict(reply.json()) if reply.ok else {}
        except (requests.RequestException, ValueError):
            return {}

    def until(self, what: str, check: Any, within: float) -> float:
        """Wait for a condition and return the seconds it took. Raises AssertionError with the actual state."""
        began = time.monotonic()
        while time.monotonic() - began < within:
            with suppress(requests.RequestException, Refused):
                if check():
                    return time.monotonic() - began
            time.sleep(0.05)
        raise AssertionError(f"not within {within:g} s: {what}. The fleet: {json.dumps(self.document())[:1500]}")


class Stack(FleetUnderFault):
    """Use as a context manager."""

    trainer_host = "127.0.0.1"
    staged = False
    """True for transport Staged."""

    def __init__(self, folder: Path, port: int = 26100, kind: type[StandIns | RealEngines] = StandIns) -> None:
        super().__init__(folder, f"http://127.0.0.1:{port}")
        self.engines = kind(folder, port + 1, staged=self.staged)
        self.number = len(self.engines.ports)
        self.start_seconds = self.engines.start_seconds
        self._local: subprocess.Popen[bytes] | None = None
        self.hung_since: dict[int, float] = {}
        """Times when engines were stopped, by their numbers. The fleet does not restart an idle engine that hangs."""
        self.batch: RunningBatch | None = None
        """The batch that runs when the batch server is killed."""
        self.flood: Flood | None = None
        """The newest flood."""
        self._ended = threading.Event()

    def __enter__(self) -> Stack:
        with ExitStack() as ends:
            ends.enter_context(self.engines)
            with (self.folder / "local.log").open("ab") as log:
                self._local = start_child(self.command(), stdout=log, stderr=log)
            ends.callback(self._stop_local)
            kubelet = threading.Thread(target=self.be_kubelet, daemon=True)
            kubelet.start()
            ends.callback(kubelet.join, 30)
            ends.callback(self._ended.set)  # before engines are stopped, so that none starts again
            self.until("all engines serve", lambda: self.document().get("serving") == self.number, START_WITHIN)
            self._ends = ends.pop_all()
        return self

    def weights(self) -> dict[str, Any]:
        """Return ``spec.weights`` of the fleet."""
        return {"backend": "gloo", "verify": "Always", **WEIGHTS}

    def command(self) -> list[str]:
        """Return the command line of the fleet."""
        line = [sys.executable, "-m", "sglang_rollout.cli", "local", "--listen", self.url.removeprefix("http://")]
        line += ["--state-dir", str(self.folder / STATE), "--weights", json.dumps(self.weights())]
        return line + [part for url in self.engines.urls for part in ("--engine", url)]

    def new_trainer(self) -> Trainer:
        """End the current trainer and start another."""
        if self.trainer is not None:
            self.trainer.end()
        self.trainer = local_trainer(self.url, self.folder / "trainer.log", self.engines.trainer_options, self.engines.expected)
        return self.trainer

    def phases(self) -> list[tuple[float, str]]:
        """Return the phases that the coordinator's log names, oldest first, each with the Unix time at which it began."""
        found = []
        for line in (self.folder / STATE / "logs" / "coordinator.log").read_text(errors="replace").splitlines():
            stamp, _, phase = line.partition(PHASE_LINE)
            if phase:
                # The log has local time.
                found.append((datetime.strptime(stamp[:23], "%Y-%m-%d %H:%M:%S,%f").timestamp(), phase))
        return found

    def slow(self, phase: str, seconds: float, engines: list[int]) -> None:
        """Slow down one call of a phase on some engines."""
        for index in engines:
            self.engines.slow(index, phase, seconds)

    def calm(self) -> None:
        """Disarm the faults that did not hit."""
        self.engines.calm()

    def paused(self) -> list[int]:
        """Return the engines that are paused or in a session."""
        return [index for index in range(self.number) if self.engines.paused(index)]

    def rest(self) -> None:
        """Return at once: no effect of a cell lasts here."""

    def is_status_current(self) -> bool:
        """Return whether each gate is as ``GET /fleet`` reports it, and answers name the version that it reports."""
        body = {"input_ids": PROMPT, "sampling_params": {"max_new_tokens": 1}}
        for member in self.document()["members"]:
            reply = requests.post(f"{member['url']}/generate", json=body, timeout=5)
            if reply.ok is not member["gate_open"]:
                return False
            if reply.ok and reply.json()["meta_info"]["weight_version"] != member["version"]["label"]:
                return False
        return True

    def pids(self, part: str, index: int = 0) -> list[int]:
        """Return the processes of a part below the fleet's supervisor. ``index`` selects the engine."""
        words, found = [word.format(index=index) for word in PARTS[part]], []
        for entry in Path("/proc").iterdir():
            with suppress(OSError, ValueError):
                pid = int(entry.name)
                command = (entry / "cmdline").read_bytes().decode(errors="replace")
                if all(word in command for word in words) and self._below(pid):
                    found.append(pid)
        return found

    def processes(self) -> dict[str, list[int]]:
        """Return the process IDs of all parts and engines, by name. Parts of an engine have its number in their names."""
        words = {part: "{index}" in "".join(command) for part, command in PARTS.items()}
        found = {part: self.pids(part) for part, is_of_engine in words.items() if not is_of_engine}
        for index in range(self.number):
            found |= {f"{part} {index}": self.pids(part, index) for part, is_of_engine in words.items() if is_of_engine}
            process = self.engines.processes[index].process
            found[f"engine {index}"] = [process.pid] if process is not None else []
        return {part: sorted(pids) for part, pids in found.items()}

    def has_batch(self) -> bool:
        """Return whether the batch server holds the body of a batch."""
        command = Path(f"/proc/{self.pids('batches')[0]}/cmdline").read_text().split("\0")
        listen = command[command.index("--listen") + 1]
        return "sglang_rollout_batches_memory_bytes 0.0" not in requests.get(f"http://{listen}{BATCHES_METRICS}", timeout=5).text

    def be_kubelet(self) -> None:
        """Restart engines that ended or whose agents ask for a restart, until the stack ends."""
        logs = [self.folder / STATE / "logs" / f"local-engine-{index}-agent.log" for index in range(self.number)]
        read = [0] * self.number
        while not self._ended.wait(0.3):
            for index, log in enumerate(logs):
                with suppress(FileNotFoundError):
                    text = log.read_text(errors="replace")
                    must_restart, read[index] = "it has to be restarted" in text[read[index] :], len(text)
                    hung = time.monotonic() - self.hung_since.get(index, math.inf) > HUNG_FOR
                    if must_restart or hung or self._has_ended(index):
                        self._restart_engine(index)

    def _restart_engine(self, index: int) -> None:
        self.hung_since.pop(index, None)
        self.engines.processes[index].kill()
        self.engines.processes[index].start()

    def _has_ended(self, index: int) -> bool:
        process = self.engines.processes[index].process
        return process is not None and process.poll() is not None

    @property
    def local_pid(self) -> int:
        """The process of `sglang-rollout local`; -1 before it starts."""
        return self._local.pid if self._local is not None else -1

    def _below(self, pid: int) -> bool:
        top = self.local_pid
        while pid > 1:
            if pid == top:
                return True
            status = Path(f"/proc/{pid}/status").read_text()
            pid = int(status.split("PPid:")[1].split()[0])
        return False

    def _stop_local(self) -> None:
        if self._local is not None:
            self._local.terminate()
            self._local.wait(30)
