"""The engine of this pod: its HTTP client, the files that its container shares with the agent, and its identity."""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import os
import secrets
from pathlib import Path
from typing import Any

from sglang_rollout.agent.state import EngineFacts
from sglang_rollout.sglang.api import has_external_draft
from sglang_rollout.sglang.client import EngineClient, EngineError, Reply
from sglang_rollout.wire.agent import Nccl, Verdict, termination_message
from sglang_rollout.wire.trainer import ControlReply

log = logging.getLogger(__name__)

_LONGEST_FILE = 65536
"""Bytes of a file of the engine's container that are read."""
RESTART_SECONDS = 120.0
"""Time for the end of an engine whose restart was requested."""
_RESTART_POLL_SECONDS = 0.2
_CUMEM = "NCCL_CUMEM_ENABLE"


class RunFiles:
    """Files in the folder of the boot file. The engine container's start script and hooks write the files about the engine."""

    def __init__(self, boot_file: Path) -> None:
        folder = boot_file.parent
        self.boot = boot_file
        """Boot ID of the engine."""
        self.drain = folder / "drain"
        """The engine is about to stop: its preStop hook touches the file."""
        self.drained = folder / "drained"
        """No request runs: the hook waits for the file."""
        self.go = folder / "go"
        """Boot ID that may start SGLang, in an engine of several pods: the start script waits for the file."""
        self.kill = folder / "kill"
        """The engine has to restart: its liveness probe fails while the file exists."""
        self.nccl = folder / "nccl"
        """NCCL of the container: ``version=…`` and a line for each ``NCCL_…`` variable."""

    def boot_id(self) -> str | None:
        """Return the boot ID of the engine's container; None while it does not run."""
        return read_text(self.boot)

    def is_drain_requested(self) -> bool:
        """Return whether a drain is requested. A request older than the engine's start was for the previous engine."""
        try:
            requested = self.drain.stat().st_mtime_ns
        except FileNotFoundError:
            return False
        try:
            return requested >= self.boot.stat().st_mtime_ns
        except FileNotFoundError:
            return True


class StartBarrier:
    """Carries out verdicts of :mod:`.launch.rank_lifecycle` on the engine's container of this pod: start SGLang, or end its run."""

    def __init__(self, files: RunFiles) -> None:
        self.files = files
        self._ended: str | None = None
        """Boot ID of the run that was ended."""

    def boot_id(self) -> str | None:
        """Return the boot ID of the engine's container; None while it does not run."""
        boot_id = self.files.boot_id()
        if self._ended is not None and boot_id not in (None, self._ended):
            # The start script deletes the kill file, but the agent may have written it again just afterwards.
            self.files.kill.unlink(missing_ok=True)
            self._ended = None
        return boot_id

    def is_started(self, boot_id: str | None) -> bool:
        """Return whether SGLang was started in this run of the container."""
        return boot_id is not None and read_text(self.files.go) == boot_id

    def carry_out(self, verdict: Verdict, boot_id: str | None, reason: str) -> None:
        """Carry out the verdict on the run ``boot_id`` of the container; ``reason`` is a sentence."""
        if boot_id is None:
            return
        if verdict is Verdict.GO and not self.is_started(boot_id):
            log.info("All pods of the engine are ready: starting SGLang.")
            replace_file(self.files.go, boot_id)
        if verdict is Verdict.END and self._ended != boot_id:
            log.warning("Requesting the restart of this pod's engine container: %s", reason)
            replace_file(self.files.kill, termination_message(f"This pod restarts with the other pods of its engine: {reason}"))
            self._ended = boot_id


class Engine(EngineClient):
    """Client of the engine that also reads the files of its container. ``boot_file`` is None without a container."""

    def __init__(self, url: str, *, boot_file: Path | None = None) -> None:
        super().__init__(url)
        self._files = RunFiles(boot_file) if boot_file is not None else None
        self._check_ended = asyncio.Event()
        self._check_ended.set()

    async def check_alive(self, *, timeout: float) -> None:
        """See :meth:`.EngineClient.check_alive`. SGLang refuses to flush its cache while the check's token is computed."""
        self._check_ended.clear()
        try:
            await super().check_alive(timeout=timeout)
        finally:
            self._check_ended.set()

    async def wait_for_check(self) -> bool:
        """Return True after a running :meth:`check_alive` has ended, and False at once if none runs."""
        if self._check_ended.is_set():
            return False
        await self._check_ended.wait()
        return True

    def container_boot_id(self) -> str | None:
        """Return the boot ID that the container wrote at its start; None without a boot file."""
        return self._files.boot_id() if self._files is not None else None

    async def read_boot_id(self) -> str:
        """Return the boot ID of the process that answers now. Raise EngineError if there is no answer."""
        return self._boot_id({} if self._files is not None else await self.read_info())

    def _boot_id(self, info: dict[str, Any]) -> str:
        boot_id = self.container_boot_id()
        if boot_id is None and self._files is not None:
            raise EngineError(f"its container has not written {self._files.boot} yet")
        return boot_id or fingerprint(info)

    async def identify(self, label: str, known_boot_id: str | None) -> EngineFacts:
        """Return the facts that the engine reports. Raise EngineError while it warms up.

        Args:
            label: Weight version that the engine reports now.
            known_boot_id: Boot ID of an engine process that has finished its warm-up before.
        """
        info = await self.read_info()
        boot_id = self._boot_id(info)
        version, tensor_size = info.get("version"), info.get("tp_size")
        await self.prepare(version, is_warm=boot_id == known_boot_id)
        return EngineFacts(
            boot_id=boot_id,
            live_label=label,
            launch_label=str(info.get("weight_version")),
            sglang_version=str(version) if version is not None else None,
            tensor_size=tensor_size if isinstance(tensor_size, int) else None,
            served_name=str(info["served_model_name"]) if info.get("served_model_name") else None,
            nccl=read_nccl(self._files.nccl, info) if self._files is not None else None,
            has_external_draft=has_external_draft(info),
        )


def refusal_reply(status: int, message: str) -> Reply:
    """Return a refusal of the agent in SGLang's shape."""
    return Reply.json(status, ControlReply(success=False, message=message).model_dump(exclude_none=True))


def fingerprint(info: dict[str, Any]) -> str:
    """Return a boot ID made of values that differ at every start of a server: start-up times, seed and ports."""
    distinct = {key: info.get(key) for key in ("startup_time", "random_seed", "nccl_port", "launch_command")}
    return hashlib.sha256(json.dumps(distinct, sort_keys=True, default=str).encode()).hexdigest()[:32]


def read_nccl(file: Path, info: dict[str, Any]) -> Nccl | None:
    """Return the NCCL of the engine's container, not of the agent's; None without the file.

    SGLang sets one more variable at its start, depending on its options ``info``.
    """
    text = read_text(file)
    if text is None:
        return None
    found = dict(line.split("=", 1) for line in text.splitlines() if "=" in line)
    version = found.pop("version", "").strip() or None
    settings = {key: value for key, value in found.items() if key.startswith("NCCL_")}
    # SGLang 0.5.23, entrypoints/engine.py, _set_envs_and_config. With these two options the value depends on the hardware, too.
    if info.get("enable_symm_mem"):
        settings[_CUMEM] = "1"
    elif _CUMEM not in settings and info.get("nnodes", 1) == 1 and not info.get("enable_kv_cache_sharding"):
        settings[_CUMEM] = "0"
    return Nccl(version=version, settings=settings)


def read_text(file: Path) -> str | None:
    """Return a file's text without surrounding blanks; None if it is empty or cannot be read.

    Model code can write anything into the folder: a link to a secret is not followed, and a pipe does not block.
    """
    try:
        descriptor = os.open(file, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return None
    try:
        return os.read(descriptor, _LONGEST_FILE).decode(errors="replace").strip() or None
    except OSError:
        return None
    finally:
        os.close(descriptor)


async def request_restart(engine: Engine, kill_file: Path) -> None:
    """Let the kubelet restart the engine's container, and wait until the running process has ended.

    After RESTART_SECONDS the request is withdrawn, and the caller may repeat it.
    """
    boot_id = engine.container_boot_id()
    await asyncio.to_thread(replace_file, kill_file)
    for _ in range(int(RESTART_SECONDS / _RESTART_POLL_SECONDS)):
        if engine.container_boot_id() != boot_id:
            break
        await asyncio.sleep(_RESTART_POLL_SECONDS)
    await asyncio.to_thread(kill_file.unlink, missing_ok=True)


def replace_file(file: Path, text: str = "") -> None:
    """Write a file for the engine's container. A link of that name is replaced, not followed. Raises OSError."""
    new = file.with_name(f".{file.name}.{secrets.token_hex(8)}")
    with new.open("x") as opened:
        opened.write(text)
    os.replace(new, file)
