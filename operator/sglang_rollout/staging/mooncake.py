"""Read pieces with Mooncake Transfer Engine in place of HTTP, and let other pods read the shards of this one.

Only bytes of whole pieces move by Mooncake. Index, tickets, digests and differences, which are small, stay with HTTP, and so does every
piece after an error of Mooncake. The native library runs in child processes: one that shares, and one for each parent from which pieces
are read.
"""

from __future__ import annotations

import asyncio
import ipaddress
import json
import logging
import math
import os
import socket
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

from pydantic import ValidationError

from sglang_rollout.staging.copies import Copies, Copy
from sglang_rollout.staging.files import finish
from sglang_rollout.staging.index import Index, StagedError
from sglang_rollout.staging.piece_reader import BrokenAnswerError, OpenReader, Origin, PieceReader, Received, RefusedPieceError, Target
from sglang_rollout.wire.ports import MOONCAKE_PORTS
from sglang_rollout.wire.reasons import Refusal, RefusalCode, RefusedError, end_sentence
from sglang_rollout.wire.staged import ShardMemory

log = logging.getLogger(__name__)

_MODULE = "sglang_rollout.staging.mooncake_child"
_START_SECONDS = 20.0
_LOCATE_SECONDS = 25.0
"""Deadline of a parent's answer where a shard is; later than that of the start, which the first answer may need."""
_TRANSFER_SECONDS = 15
"""Time after which Mooncake itself gives up one transfer."""
_CALL_SECONDS = 20.0
"""Deadline of one command; later than that of a transfer, whose error is clearer."""
_KILL_SECONDS = 5.0
"""Time for a killed process to end. It lasts as long as a call of a driver, and releases up to all shared memory."""
_COSTLY_SECONDS = 2.0
_RETRY_SECONDS = 600.0
"""Time for which a parent is read over HTTP after a failure that took ``_COSTLY_SECONDS``, because each version would take them again."""
_DEVICES = Path("/dev/infiniband")
_FORCED = {"rdma": "MC_FORCE_HCA", "tcp": "MC_FORCE_TCP"}
"""Variable of Mooncake that leaves it this transport alone."""


class MooncakeError(Exception):
    """Mooncake could not do something. The message is a sentence. The child process has ended."""


def find_transport() -> str:
    """Return ``rdma``, or ``tcp`` if Mooncake's own variable ``MC_FORCE_TCP`` asks for it, because HTTP is faster than Mooncake over TCP.

    Raises:
        MooncakeError: This container has no device for RDMA.
    """
    if os.environ.get("MC_FORCE_TCP"):
        return "tcp"
    if not any(_DEVICES.glob("uverbs*")):
        raise MooncakeError(f"This container has no device for RDMA in {_DEVICES}.")
    return "rdma"


def _environment(host: str, transport: str) -> dict[str, str]:
    """Return the variables of a child.

    Mooncake chooses the transport by them and not by its argument: without a variable it uses TCP where it can use no device for RDMA, for
    example because the library of the device's vendor is missing. With ``MC_FORCE_HCA`` it does not start then.
    """
    first, last = MOONCAKE_PORTS
    ports = {"MC_MIN_RPC_PORT": str(first), "MC_MAX_RPC_PORT": str(last)}
    inherited = {name: value for name, value in os.environ.items() if name not in _FORCED.values()}
    family = {"MC_USE_IPV6": "1"} if ":" in host else {}
    limits = {"MC_LOG_LEVEL": "ERROR", "MC_TRANSFER_TIMEOUT": str(_TRANSFER_SECONDS)}
    return {**ports, **inherited, **limits, **family, _FORCED[transport]: "1"}


class MooncakeProcess:
    """One child process. Create it with :meth:`start`."""

    def __init__(self, process: asyncio.subprocess.Process, host: str, transport: str) -> None:
        self._process = process
        self._is_killed = False
        self.host = host
        self.transport = transport
        self._answers: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._commands = 0
        self._reading = asyncio.create_task(self._read_answers(), name="answers of Mooncake")
        self._port = 0

    @classmethod
    async def start(cls, host: str) -> MooncakeProcess:
        """Start a child that other pods reach at ``host``, an IP address. Raises MooncakeError."""
        transport, pipe = find_transport(), asyncio.subprocess.PIPE
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", _MODULE, str(os.getpid()), host, transport, stdin=pipe, stdout=pipe, env=_environment(host, transport)
        )
        child = cls(process, host, transport)
        child._port = int((await child._wait(0, "start", _START_SECONDS))["port"])
        return child

    @property
    def is_alive(self) -> bool:
        """True while the child runs and was not killed."""
        return self._process.returncode is None and not self._is_killed

    @property
    def segment(self) -> str:
        """Name of the child for the Mooncake of other pods."""
        return f"[{self.host}]:{self._port}" if ":" in self.host else f"{self.host}:{self._port}"

    async def ask(self, action: str, **fields: Any) -> dict[str, Any]:
        """Send a command and return its answer. After an error or a cancellation the child has ended, so that it writes nothing more.

        Raises:
            MooncakeError: The child could not do it, has ended, or is late.
        """
        self._commands += 1
        number = self._commands
        if self._process.stdin is None:
            raise RuntimeError("the child was started without a pipe")
        if not self.is_alive:
            raise MooncakeError("The process of Mooncake has ended.")
        with suppress(OSError, RuntimeError):  # it has ended, which the wait reports; uvloop raises RuntimeError
            self._process.stdin.write((json.dumps({"number": number, "do": action, **fields}) + "\n").encode())
        return await self._wait(number, action, _CALL_SECONDS)

    async def kill(self) -> None:
        """End the child, and return when it has ended. A cancelled caller waits, too.

        A child in a call of a driver may end later. It runs no further code, so it writes nothing more.
        """
        self.end()
        await finish(asyncio.create_task(self._wait_for_end()))

    def end(self) -> None:
        """End the child without a wait."""
        self._is_killed = True
        with suppress(ProcessLookupError):  # it ended first
            self._process.kill()

    async def _wait_for_end(self) -> None:
        try:
            async with asyncio.timeout(_KILL_SECONDS):
                await self._process.wait()
                await asyncio.wait({self._reading})  # then its pipes are closed, too
        except TimeoutError:
            log.warning("Process %d of Mooncake has not ended %g s after it was killed.", self._process.pid, _KILL_SECONDS)

    async def _wait(self, number: int, action: str, seconds: float) -> dict[str, Any]:
        waiting = self._answers.setdefault(number, asyncio.get_running_loop().create_future())
        either: set[asyncio.Future[Any]] = {waiting, self._reading}
        try:
            async with asyncio.timeout(seconds):
                await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
            if not waiting.done():
                raise MooncakeError(f"The process of Mooncake ended when it should {action}.")
            answer = waiting.result()
            if "error" in answer:
                raise MooncakeError(end_sentence(str(answer["error"])))
        except TimeoutError:
            await self.kill()
            raise MooncakeError(f"Mooncake did not {action} within {seconds:g} s.") from None
        except BaseException:
            await self.kill()
            raise
        finally:
            del self._answers[number]
        return answer

    async def _read_answers(self) -> None:
        """Read answers until the child ends."""
        if self._process.stdout is None:
            raise RuntimeError("the child was started without a pipe")
        while line := await self._process.stdout.readline():
            answer = json.loads(line)
            waiting = self._answers.setdefault(int(answer["number"]), asyncio.get_running_loop().create_future())
            if not waiting.done():
                waiting.set_result(answer)


class SharedMemory:
    """Shards of this pod that other pods may read with Mooncake. A shard is shared from the first question for it until it is deleted.

    Args:
        copies: The copies. Snapshots on a volume are not shared.
    """

    def __init__(self, copies: Copies) -> None:
        self._copies = copies
        self._child: MooncakeProcess | None = None
        self._addresses: WeakKeyDictionary[Index, dict[int, int]] = WeakKeyDictionary()
        """Addresses of shards, by the index of their copy: a copy that starts again has another one."""
        self._lock = asyncio.Lock()
        self._problem = ""
        """Why no child starts."""

    async def locate(self, copy: Copy, shard: int, host: str) -> ShardMemory:
        """Return where a shard is; ``host`` is the address of this pod for the caller. Raises RefusedError."""
        async with self._lock:
            index = copy.index
            if self._copies.get(copy.update) is not copy or shard >= len(index.shards):
                raise _absent(copy, shard)
            try:
                child = await self._start(host)
                address = await self._share(child, copy, shard)
            except (MooncakeError, StagedError) as error:
                raise RefusedError(Refusal(RefusalCode.UNAVAILABLE, str(error))) from error
            if not address or copy.is_deleted or copy.index is not index:
                raise _absent(copy, shard)
            return ShardMemory(segment=child.segment, transport=child.transport, address=address)

    async def close(self) -> None:
        """End the child."""
        async with self._lock:
            if self._child is not None:
                await self._child.kill()

    async def _start(self, host: str) -> MooncakeProcess:
        """Return the child that callers of ``host`` reach. If callers over loopback came first, the first other caller gets a new child."""
        if self._problem:
            raise MooncakeError(self._problem)
        child, is_local = self._child, _is_loopback(host)
        if child is not None and child.is_alive:
            if is_local or not _is_loopback(child.host):
                return child
            await child.kill()
        self._addresses.clear()  # what an earlier child shared ended with it
        try:
            child = self._child = await MooncakeProcess.start(host)
        except MooncakeError as error:
            self._problem = str(error)
            log.warning("No versions are shared with Mooncake until this process starts again: %s", error)
            raise
        return child

    async def _share(self, child: MooncakeProcess, copy: Copy, shard: int) -> int:
        """Return the address of a shard; 0 if its file was deleted meanwhile."""
        index = copy.index
        known = self._addresses.get(index)
        if known is None:
            known = self._addresses[index] = {}
            copy.before_removal.append(partial(self._forget, index))
        if shard not in known:
            if child.transport == "rdma" and not copy.is_complete:
                await copy.allocate(shard)  # the device takes the memory of the whole file
            address = int((await child.ask("share", path=str(copy.shard_path(shard))))["address"])
            if not address:
                return 0
            known[shard] = address
        return known[shard]

    async def _forget(self, index: Index) -> None:
        """End the maps of a copy's files."""
        async with self._lock:
            for address in self._addresses.pop(index, {}).values():
                if self._child is None or not self._child.is_alive:
                    return
                try:
                    await self._child.ask("unshare", address=address)
                except MooncakeError as error:  # the maps ended with the child
                    log.warning("Versions are shared with a new process of Mooncake: %s", error)
                    return


def _absent(copy: Copy, shard: int) -> RefusedError:
    return RefusedError(Refusal(RefusalCode.NOT_FOUND, f"Update {copy.update} has no shard {shard} in memory here."))


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        raise MooncakeError("The address at which this pod was called is not known.") from None


@asynccontextmanager
async def share_memory(copies: Copies, *, wanted: bool) -> AsyncIterator[SharedMemory | None]:
    """Yield what shares these copies for the length of the block; None unless ``wanted``."""
    memory = SharedMemory(copies) if wanted else None
    try:
        yield memory
    finally:
        if memory is not None:
            await memory.close()


class FailedParents:
    """Parents whose pieces come over HTTP for some time, because Mooncake has failed."""

    def __init__(self) -> None:
        self._failed_at: dict[str, float] = {}

    def __contains__(self, parent: str) -> bool:
        return time.monotonic() - self._failed_at.get(parent, -math.inf) < _RETRY_SECONDS

    def add(self, parent: str) -> None:
        """Add a parent for some time."""
        self._failed_at = {known: at for known, at in self._failed_at.items() if known in self} | {parent: time.monotonic()}


def mooncake_readers() -> OpenReader:
    """Return what opens a :class:`MooncakeReader`. All of these readers know which parents have failed."""
    return partial(MooncakeReader, failed=FailedParents())


class MooncakeReader(PieceReader):
    """Reads whole pieces from the memory of one parent. After an error it reads the same piece, and all later ones, over HTTP.

    Args:
        parent: URL of the parent's data port.
        args: Further arguments of :class:`PieceReader`.
        failed: Parents that are read over HTTP. The parent is added after a failure that took some time.
        options: Further arguments of :class:`PieceReader`.
    """

    def __init__(self, parent: str, *args: Any, failed: FailedParents | None = None, **options: Any) -> None:
        super().__init__(parent, *args, **options)
        self._child: MooncakeProcess | None = None
        self._located: dict[int, ShardMemory] = {}
        self._lock = asyncio.Lock()
        self._bytes = 0
        self._failed = failed or FailedParents()
        self._has_failed = parent in self._failed

    async def read(self, path: str, target: Target, origin: Origin | None = None) -> Received:
        """Write a piece to its file, by its difference if the parent has it. Takes and raises what :class:`PieceReader` does."""
        if self._has_failed:
            return await super().read(path, target, origin)
        if origin is not None and (found := await self.read_difference(path, target, origin)) is not None:
            return found
        started = time.monotonic()
        try:
            return Received(await self._read_memory(path, target))
        except (MooncakeError, RefusedPieceError, BrokenAnswerError, ValidationError, OSError) as error:
            if time.monotonic() - started >= _COSTLY_SECONDS:
                self._failed.add(self.parent)
            if not self._has_failed:
                self._has_failed = True
                why = str(error).splitlines()[0]
                log.warning("Pieces come from %s:%d over HTTP and not with Mooncake: %s", self._host, self._port, why)
        if self._child is not None:
            await self._child.kill()  # before another reader writes the same bytes
        return await super().read(path, target)

    def close(self) -> None:
        """Close all connections, and end the child. No call may be in progress."""
        if self._child is not None:
            if self._bytes:
                log.info("%d bytes came from %s:%d with Mooncake over %s.", self._bytes, self._host, self._port, self._child.transport)
            self._child.end()
        super().close()

    async def _read_memory(self, path: str, target: Target) -> str:
        piece = target.piece
        async with self._lock:
            if self._has_failed:
                raise MooncakeError("An earlier piece has failed.")
            located = self._located.get(piece.shard)
            if located is None:
                located = self._located[piece.shard] = await self._locate(path, piece.shard)
            if self._has_failed:  # meanwhile, and its child has ended
                raise MooncakeError("An earlier piece has failed.")
            child = self._child = self._child or await MooncakeProcess.start(await _own_address(located.segment))
        if located.transport != child.transport:
            raise MooncakeError(f"The other pod uses {located.transport}, and this one {child.transport}.")
        where = {"segment": located.segment, "address": located.address + target.offset, "size": target.size}
        digest = str((await child.ask("read", **where, path=str(target.file), offset=target.offset))["digest"])
        if digest != piece.digest:
            raise MooncakeError(f"Piece {piece.piece} of shard {piece.shard} has other bytes than announced.")
        target.on_bytes(target.size)
        self._bytes += target.size
        return digest

    async def _locate(self, path: str, shard: int) -> ShardMemory:
        path = f"{path.partition('/pieces/')[0]}/memory/{shard}"
        return ShardMemory.model_validate_json(await self.fetch(path, _LOCATE_SECONDS))


async def _own_address(segment: str) -> str:
    """Return the address of this pod that routes to a segment. Raises MooncakeError for a segment that has no IP address."""
    host, _, port = segment.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    try:
        family = socket.AF_INET6 if ipaddress.ip_address(host).version == 6 else socket.AF_INET
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect((host, int(port)))  # UDP: chooses a route and sends nothing
            return str(probe.getsockname()[0])
    except ValueError:
        raise MooncakeError(f"The other pod gave {segment[:80]!r} in place of an IP address and a port.") from None
