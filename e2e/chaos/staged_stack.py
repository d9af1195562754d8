"""The processes under fault with transport Staged: a weight store, staged copies, and small volumes that can be filled."""

from __future__ import annotations

import errno
import os
import subprocess
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import requests

from e2e.chaos.engines import STATE, RealEngines, StandIns
from e2e.chaos.stack import Stack
from e2e.chaos.tokens import FEW, PROMPT
from e2e.engine import environment
from sglang_rollout.local.plan import STORE

VOLUME_MIB = 32
"""Size of each volume for staged versions, in MiB."""
SERVED_SECONDS = 10.0
"""Timeout of a request to one engine."""
FILLER = "filler"
Served = tuple[str, tuple[int, ...]]
"""Label and tokens of an answer."""


class StagedStack(Stack):
    """A fleet with transport Staged. Its volumes are small file systems if this process may mount them."""

    staged = True
    phase = "idle"
    """The phase of the current cell."""
    can_mount = os.geteuid() == 0
    """True if the volumes for staged versions are file systems of their own."""

    def __init__(self, folder: Path, port: int = 26100, kind: type[StandIns | RealEngines] = StandIns) -> None:
        super().__init__(folder, port, kind)
        self._mounts = ExitStack()
        self._right: dict[Path, bytes] = {}
        """Contents of the files that are spoiled."""

    @property
    def victim(self) -> int:
        """The engine that a fault strikes: the engine that loads the version in this phase. Engine 0 loads first."""
        return 1 if self.phase == "activate" else 0

    def weights(self) -> dict[str, Any]:
        """Return ``spec.weights`` of the fleet. Each pod copies from the pod before, so that a fault of a pod reaches its children."""
        weights = super().weights()
        deadlines = {**weights["deadlines"], "stageSeconds": 15, "activateSeconds": 12}
        staging = {"sizeLimit": f"{VOLUME_MIB // 3}Mi", "fanout": 1}
        more = {"transport": "Staged", "staging": staging, "minCommitted": self.number - 1, "deadlines": deadlines}
        return {**weights, **more}

    def __enter__(self) -> StagedStack:
        with ExitStack() as ends:
            for name in (STORE, *self.engine_names) if self.can_mount else ():
                self.volume(name).mkdir(parents=True)
                _run("mount", "-t", "tmpfs", "-o", f"size={VOLUME_MIB}m", "staged", str(self.volume(name)))
                ends.callback(_run, "umount", "--lazy", str(self.volume(name)))
            super().__enter__()
            self._mounts = ends.pop_all()
        return self

    def __exit__(self, *error: object) -> None:
        try:
            super().__exit__(*error)
        finally:
            self._mounts.close()

    def command(self) -> list[str]:
        """Return the command line of the fleet."""
        return [*super().command(), "--store-python", str(environment.python(make=False))]

    @property
    def engine_names(self) -> list[str]:
        """Names of the engines in the fleet."""
        return [f"local-engine-{index}" for index in range(self.number)]

    def volume(self, name: str) -> Path:
        """Return the folder with the staged versions of an engine, or of the weight store."""
        return self.folder / STATE / "staged" / name

    def remount(self, name: str, mode: str) -> None:
        """Make a volume read-only (``ro``) or writable (``rw``). Raises AssertionError if that fails."""

        def is_done() -> bool:
            try:
                _run("mount", "-o", f"remount,{mode}", str(self.volume(name)))
            except subprocess.CalledProcessError:
                return False  # a file that is being written keeps the volume writable for a moment
            return True

        self.until(f"the volume of {name} is mounted {mode}", is_done, 15)

    def fill(self, name: str) -> None:
        """Fill a volume until nothing more can be written."""
        with (self.volume(name) / FILLER).open("wb") as file:
            step = 1 << 20
            while step:
                try:
                    os.posix_fallocate(file.fileno(), file.tell(), step)
                    file.seek(step, os.SEEK_CUR)
                except OSError as error:
                    if error.errno != errno.ENOSPC:
                        raise
                    step = step // 2 if step > 4096 else 0

    def empty(self, name: str) -> None:
        """Undo :meth:`fill`."""
        (self.volume(name) / FILLER).unlink(missing_ok=True)

    def shards(self, name: str, update: str) -> list[Path]:
        """Return the files of a version in a volume."""
        return sorted((self.volume(name) / update).glob("*.safetensors"))

    def agent_log(self, index: int) -> Path:
        """Return the log of an agent."""
        return self.folder / STATE / "logs" / f"local-engine-{index}-agent.log"

    def spoil(self, file: Path, data: bytes) -> None:
        """Change the contents of a file in place."""
        self._right[file] = file.read_bytes()
        _overwrite(file, data)

    def repair(self) -> None:
        """Undo :meth:`spoil` for all files that still exist."""
        for file, right in self._right.items():
            with suppress(FileNotFoundError):  # another version has replaced it
                _overwrite(file, right)
        self._right = {}

    def open_update(self) -> str:
        """Return the ID of the open update; empty if there is none."""
        return self.document().get("update") or ""

    def served(self) -> dict[str, Served | None]:
        """Return the answer of each engine at its gate; None for an engine that does not answer."""
        body = {"input_ids": PROMPT, "sampling_params": {"temperature": 0, "max_new_tokens": FEW}}
        found: dict[str, Served | None] = {}
        for member in self.document().get("members", []):
            found[member["name"]] = None
            with suppress(requests.RequestException):
                reply = requests.post(f"{member['url']}/generate", json=body, timeout=SERVED_SECONDS)
                if reply.ok:
                    answer = reply.json()
                    found[member["name"]] = (answer["meta_info"]["weight_version"], tuple(answer["output_ids"]))
        return found


def _overwrite(file: Path, data: bytes) -> None:
    """Replace the contents of a file that other processes may have mapped."""
    with file.open("r+b") as opened:
        opened.write(data)
        opened.truncate()


def _run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True, timeout=10)
