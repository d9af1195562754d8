"""Client of one gate: commands to haproxy's stats socket."""

from __future__ import annotations

import asyncio
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

from sglang_rollout.proxy.config import (
    ADAPTERS_KEY,
    GENERATES_KEY,
    NO_VERSION,
    TOKENIZER_KEY,
    VERSION_KEY,
    VOCABULARY_KEY,
    encoded,
    listed,
    version_map_of,
)

_SERVER = "engine/e"
_VIEW = "show info; show servers state engine"
_VIEW_BEGINS = "Name:"
"""First line of haproxy's answer to ``show info``. The text before it answers the previous command."""
_MAINTENANCE = 0x01 | 0x02 | 0x20 | 0x40
"""Bits of ``srv_admin_state`` that keep a server out (haproxy's SRV_ADMF_MAINT). 0x04 only tells that it was configured ``disabled``."""

_QUOTED = 500
"""Characters of a command that an error quotes: the path of the map and what is set; a list of adapters has up to 15,000."""
_LACKS = ("Unknown map identifier", "entry not found")
"""haproxy's answers to ``set map`` for an unknown map or key; haproxy has no codes."""


class GateError(Exception):
    """The gate did not carry out a command; the message says why."""


class GateAbsentError(GateError):
    """Nothing listens on the gate's socket: haproxy does not run, so nothing passes."""


class GateLacksError(GateError):
    """The gate has no such map or entry: it is older than the agent."""


@dataclass(frozen=True, slots=True)
class GateView:
    """State of haproxy."""

    pid: int
    ready: bool
    """The agent has opened the gate."""
    up: bool
    """Requests pass: the agent has opened the gate, and haproxy's check of the agent succeeds."""


class Gate:
    """Commands to one haproxy."""

    def __init__(self, socket: Path, *, timeout: float = 1.0) -> None:
        self.socket = socket
        self._timeout = timeout

    async def view(self) -> GateView:
        """Return the current state."""
        return self._view_of(await self._command(_VIEW))

    def _view_of(self, answer: str) -> GateView:
        pid = next((line.partition(":")[2] for line in answer.splitlines() if line.startswith("Pid:")), "")
        row = next((line.split() for line in answer.splitlines() if " engine " in line and line[:1].isdigit()), None)
        if not pid.strip().isdigit() or row is None or len(row) < 7:
            raise GateError(f"haproxy at {self.socket} has no server {_SERVER}: it answered {answer[:200]!r}")
        operation, admin = int(row[5]), int(row[6])
        ready = not admin & _MAINTENANCE
        return GateView(pid=int(pid), ready=ready, up=ready and operation != 0)

    async def set(self, *, is_open: bool) -> GateView:
        """Open the gate, or close it for new requests, and return the state after it. Requests in flight continue."""
        command = f"set server {_SERVER} state {'ready' if is_open else 'maint'}"
        # Both commands share a connection, because an update waits for the gate and each connection costs two context switches.
        said, name, view = (await self._command(f"{command}; {_VIEW}")).partition(_VIEW_BEGINS)
        self._check_silence(command, said)
        return self._view_of(name + view)

    async def name_version(self, label: str) -> None:
        """Set the label in the header of answers to new requests. Empty: no header."""
        path = version_map_of(str(self.socket))
        await self._tell(f"set map {path} {VERSION_KEY} {encoded(label)}")

    async def name_vocabulary(self, size: int) -> None:
        """Let the gate refuse requests with tokens outside of the model's vocabulary."""
        await self._tell(f"set map {version_map_of(str(self.socket))} {VOCABULARY_KEY} {size}")

    async def name_tokenizer(self, *, present: bool) -> None:
        """Let the gate refuse requests that need a tokenizer, unless there is one."""
        await self._tell(f"set map {version_map_of(str(self.socket))} {TOKENIZER_KEY} {'yes' if present else 'no'}")

    async def name_generation(self, *, generates: bool) -> None:
        """Let the gate refuse requests for tokens, unless the engine's model generates."""
        await self._tell(f"set map {version_map_of(str(self.socket))} {GENERATES_KEY} {'yes' if generates else 'no'}")

    async def name_adapters(self, names: Collection[str] | None) -> None:
        """Let the gate refuse requests that name other adapters. None: SGLang decides."""
        value = NO_VERSION if names is None else listed(names)
        await self._tell(f"set map {version_map_of(str(self.socket))} {ADAPTERS_KEY} {value}")

    async def cut(self) -> None:
        """Close every connection from the gate to the engine."""
        await self._tell(f"shutdown sessions server {_SERVER}")

    async def _tell(self, command: str) -> None:
        self._check_silence(command, await self._command(command))

    def _check_silence(self, command: str, answer: str) -> None:
        """Raise GateError if haproxy said anything: a command that works has an empty answer."""
        answer = answer.strip()
        if answer:
            kind = GateLacksError if answer.startswith(_LACKS) else GateError
            raise kind(f"haproxy at {self.socket} refused '{_quoted(command)}': {answer[:200]}")

    async def _command(self, command: str) -> str:
        try:
            async with asyncio.timeout(self._timeout):
                reader, writer = await asyncio.open_unix_connection(str(self.socket))
                try:
                    writer.write(command.encode() + b"\n")
                    await writer.drain()
                    return (await reader.read(-1)).decode(errors="replace")
                finally:
                    writer.close()
        except (FileNotFoundError, ConnectionRefusedError):
            raise GateAbsentError(f"haproxy does not listen on {self.socket}") from None
        except TimeoutError:
            raise GateError(f"haproxy at {self.socket} did not answer '{_quoted(command)}' within {self._timeout:g} s") from None
        except OSError as error:
            raise GateError(f"haproxy at {self.socket} cannot be asked: {error.strerror or error}") from None


def _quoted(command: str) -> str:
    return command if len(command) <= _QUOTED else f"{command[:_QUOTED]}…"
