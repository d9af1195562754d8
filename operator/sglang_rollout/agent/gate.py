"""Open and close the gate (haproxy) of this pod, with commands to its stats socket. ``state`` decides whether it may be open."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from sglang_rollout.proxy.gate_map import VERSION_KEY, version_map_path

log = logging.getLogger(__name__)

_SERVER = "engine/e"
_VIEW = "show info; show servers state engine"
_VIEW_BEGINS = "Name:"
"""First line of haproxy's answer to ``show info``. The text before this line answers the previous command."""
_MAINTENANCE = 0x01 | 0x02 | 0x20 | 0x40
"""Bits of ``srv_admin_state`` that keep a server out (SRV_ADMF_MAINT). 0x04 only shows that the configuration says ``disabled``."""

_QUOTED = 500
"""Characters of a command that an error quotes."""
_LACKS = ("Unknown map identifier", "entry not found")
"""haproxy's answers to ``set map`` for an unknown map or key; haproxy has no codes."""
_MAX_ANSWER_BYTES = 2**20
"""haproxy's answers have some kilobytes."""
_CHECK_CLOSES_SECONDS = 2.0
"""Time until haproxy's check of the agent closes the gate, if the agent's command was lost."""


class GateError(Exception):
    """The gate did not carry out a command; the message says why."""


class GateAbsentError(GateError):
    """Nothing listens on the gate's socket: haproxy does not run, so no request passes."""


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
        """Open the gate, or close it for new requests. Return the new state. Requests in flight continue."""
        command = f"set server {_SERVER} state {'ready' if is_open else 'maint'}"
        # Both commands share a connection, because an update waits for the gate and each connection costs two context switches.
        answer, name, view = (await self._command(f"{command}; {_VIEW}")).partition(_VIEW_BEGINS)
        self._check_empty(command, answer)
        return self._view_of(name + view)

    async def set_entry(self, key: str, value: str) -> None:
        """Set one entry of the map that the gate reads for each request."""
        await self._send(f"set map {version_map_path(str(self.socket))} {key} {value}")

    async def cut(self) -> None:
        """Close every connection from the gate to the engine."""
        await self._send(f"shutdown sessions server {_SERVER}")

    async def _send(self, command: str) -> None:
        self._check_empty(command, await self._command(command))

    def _check_empty(self, command: str, answer: str) -> None:
        """Raise GateError unless the answer is empty, as it is after a successful command."""
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
                    return (await _read_all(reader)).decode(errors="replace")
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


class GateKeeper:
    """Keeps a gate as the agent's state requires.

    Args:
        client: Client of the gate.
        may_open: Returns whether the gate may be open.
        entries: Returns :func:`~sglang_rollout.proxy.gate_map.gate_entries` of the engine.
    """

    def __init__(self, client: Gate, *, may_open: Callable[[], bool], entries: Callable[[], dict[str, str]]) -> None:
        self.client = client
        self.view: GateView | None = None
        """Last state reported by the gate; None while the gate does not answer."""
        self.due = asyncio.Event()
        """Set when the gate has to open or close."""
        self._may_open = may_open
        self._entries = entries
        self._written: tuple[int, dict[str, str]] | None = None
        """Process ID of the haproxy and the entries that it holds; None if entries may be missing."""
        self._lock = asyncio.Lock()

    async def settle(self) -> None:
        """Read the gate's state and open or close it as required. This reopens the gate of a restarted haproxy."""
        async with self._lock:
            self.due.clear()
            try:
                self.view = await self._settled_view()
            except GateError as error:
                if self.view is not None:
                    log.warning("%s.", error)
                self.view = None

    async def _settled_view(self) -> GateView:
        # Close an open gate without reading its state first, because an update waits for it.
        must_close = self.view is not None and self.view.ready and not self._may_open()
        view = self.view if must_close and self.view is not None else await self.client.view()
        wanted = self._may_open()
        if wanted:
            await self._write_entries(view.pid)
        if view.ready != wanted:
            view = await self.client.set(is_open=wanted)
            log.info("The gate (haproxy, pid %d) is %s.", view.pid, "open" if wanted else "closed for new requests")
        return view

    async def settle_if_due(self) -> None:
        """Call :meth:`settle` unless the last known state of the gate is the required one.

        Used before answers that an update waits for. The next settling, within half a second, notices a restarted haproxy.
        """
        async with self._lock:  # a concurrent settling may suffice
            if self._is_settled():
                return
        await self.settle()

    def _is_settled(self) -> bool:
        view, wanted = self.view, self._may_open()
        if view is None or self.due.is_set() or (view.ready, view.up) != (wanted, wanted):
            return False
        return not wanted or (self._written is not None and self._written[1][VERSION_KEY] == self._entries()[VERSION_KEY])

    async def _write_entries(self, pid: int) -> None:
        """Write changed entries before the gate opens.

        An entry that an older gate does not know is left out. After any other error the gate stays closed, and the next attempt writes
        all entries again.
        """
        entries = self._entries()
        before = self._written[1] if self._written is not None and self._written[0] == pid else {}
        self._written = None
        try:
            for key, value in entries.items():
                if before.get(key) != value:
                    await self.client.set_entry(key, value)
        except GateLacksError as error:
            log.warning("Answers will not name their version, or wrong paths are not refused: %s.", error)
        self._written = (pid, entries)

    async def close(self) -> None:
        """Return when no new request can reach the engine. The agent's state must already require a closed gate."""
        async with self._lock:  # sees the result of a concurrent settling
            if self.view is not None and not self.view.ready:
                return
            try:
                self.view = await self.client.set(is_open=False)
            except GateAbsentError:
                return  # without haproxy no request passes, and haproxy starts closed
            except GateError as error:
                log.warning("%s; waiting until the gate closes because of its check.", error)
                await asyncio.sleep(_CHECK_CLOSES_SECONDS)

    async def cut_connections(self) -> None:
        """Close the gate's connections to the engine."""
        try:
            await self.client.cut()
        except GateError as error:
            log.warning("Connections to the engine could not be cut: %s.", error)


async def _read_all(reader: asyncio.StreamReader) -> bytes:
    """Return what haproxy answers until it closes the connection. Raises GateError if that has no end."""
    answer = bytearray()
    while part := await reader.read(2**16):
        answer += part
        if len(answer) > _MAX_ANSWER_BYTES:
            raise GateError(f"haproxy's answer has more than {_MAX_ANSWER_BYTES} bytes")
    return bytes(answer)
