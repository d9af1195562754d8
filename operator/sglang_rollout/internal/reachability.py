"""Checks of network paths: does the trainer's store answer a pod, and can the pod reach another pod of its engine?"""

from __future__ import annotations

import asyncio
import errno
import secrets
import socket
import struct
import time

from sglang_rollout.proxy.address import Address
from sglang_rollout.wire.agent import PreflightReply, PreflightRequest
from sglang_rollout.wire.reasons import Refusal, RefusalCode

_ATTEMPT_SECONDS = 2.0
_FIRST_PAUSE_SECONDS = 0.1
_LONGEST_PAUSE_SECONDS = 1.0
_NO_PATH = frozenset({errno.EHOSTUNREACH, errno.ENETUNREACH, errno.EHOSTDOWN, errno.ETIMEDOUT})

# The first two queries of every client of torch's TCPStore since torch 2.5 (torch/csrc/distributed/c10d/TCPStoreBackend.hpp). The engine's
# own torch sends them, too, so a store that does not answer them is of no use to the engine.
_VALIDATE, _PING = 0, 13
_MAGIC_NUMBER = 0x3C85F7CE
_NONCE_BYTES = 4


async def preflight(request: PreflightRequest) -> PreflightReply:
    """Connect to the trainer's store; repeat until it succeeds or the deadline has passed.

    SGLang would wait for an unreachable or silent store for half an hour. Trainers often call before they listen, so the first refusals are
    normal.
    """
    end = time.monotonic() + request.deadline
    pause = _FIRST_PAUSE_SECONDS
    while True:
        left = end - time.monotonic()
        reason = await _attempt(request, max(0.05, min(_ATTEMPT_SECONDS, left)))
        if reason is None:
            return PreflightReply(refusal=None)
        if time.monotonic() + pause >= end:
            return PreflightReply(refusal=Refusal(RefusalCode.UNAVAILABLE, f"{reason} (tried for {request.deadline:g} s)"))
        await asyncio.sleep(pause)
        pause = min(pause * 2, _LONGEST_PAUSE_SECONDS)


async def _attempt(request: PreflightRequest, timeout: float) -> str | None:
    """Connect once. Return None, or the error as a clause."""
    host, port = request.host, request.port
    end = asyncio.get_running_loop().time() + timeout
    try:
        # SGLang accepts an IPv6 address in brackets; asyncio would take them for part of a name.
        reader, writer = await _connect(host.removeprefix("[").removesuffix("]"), port, timeout)
    except TimeoutError:
        return f"{host} port {port} did not answer within {timeout:.1f} s: is a firewall or a NetworkPolicy in between?"
    except socket.gaierror as error:
        return f"the name {host} cannot be resolved here: {error.strerror}"
    except ConnectionRefusedError:
        return f"{host} port {port} takes no connection from here: connection refused, nothing listens there"
    except OSError as error:
        return f"{host} port {port} takes no connection from here: {error.strerror or error}"
    try:
        if not request.handshake or await _is_store(reader, writer, end):
            return None
    finally:
        writer.close()
    return f"{host} port {port} accepts connections, but no TCPStore of torch answers there: is it the port of the trainer's rank 0?"


async def _is_store(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, end: float) -> bool:
    """Return True if the other end answers as torch's TCPStore does, until the time ``end`` of the event loop."""
    nonce = secrets.token_bytes(_NONCE_BYTES)
    writer.write(struct.pack("=BIB", _VALIDATE, _MAGIC_NUMBER, _PING) + nonce)
    try:
        async with asyncio.timeout_at(end):
            return await reader.readexactly(_NONCE_BYTES) == nonce
    except (OSError, asyncio.IncompleteReadError):
        return False


async def is_cut(address: Address) -> bool:
    """Return whether the network path to another pod is cut. ``address`` is an IP, so that no name server is involved.

    Only silence counts: a host that refuses or resets a connection is reachable.
    """
    try:
        _, writer = await _connect(address.host, address.port, _ATTEMPT_SECONDS)
    except TimeoutError:
        return True
    except OSError as error:
        return error.errno in _NO_PATH
    writer.close()
    return False


async def _connect(host: str, port: int, timeout: float) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    async with asyncio.timeout(timeout):
        return await asyncio.open_connection(host, port)
