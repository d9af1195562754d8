"""Checks that try to open TCP connections: to the trainer's store before a group is opened, and to another pod of the engine."""

from __future__ import annotations

import asyncio
import errno
import socket
import time

from sglang_rollout.proxy.address import Address
from sglang_rollout.wire.agent import PreflightReply, PreflightRequest
from sglang_rollout.wire.reasons import Refusal, RefusalCode

_ATTEMPT = 2.0
_FIRST_PAUSE = 0.1
_LONGEST_PAUSE = 1.0


async def preflight(request: PreflightRequest) -> PreflightReply:
    """Open a TCP connection to the trainer's store; repeat until it succeeds or the deadline has passed.

    SGLang would wait for an unreachable store for half an hour. Trainers often call before they listen, so the first refusals are normal.
    """
    end = time.monotonic() + request.deadline
    pause = _FIRST_PAUSE
    while True:
        left = end - time.monotonic()
        reason = await _attempt(request.host, request.port, max(0.05, min(_ATTEMPT, left)))
        if reason is None:
            return PreflightReply(refusal=None)
        if time.monotonic() + pause >= end:
            return PreflightReply(refusal=Refusal(RefusalCode.UNAVAILABLE, f"{reason} (tried for {request.deadline:g} s)"))
        await asyncio.sleep(pause)
        pause = min(pause * 2, _LONGEST_PAUSE)


async def _attempt(host: str, port: int, timeout: float) -> str | None:
    """Connect once. Return None, or the error as a clause."""
    try:
        async with asyncio.timeout(timeout):
            # SGLang accepts an IPv6 address in brackets; asyncio would take them for part of a name.
            _, writer = await asyncio.open_connection(host.removeprefix("[").removesuffix("]"), port)
    except TimeoutError:
        return f"{host} port {port} did not answer within {timeout:.1f} s: is a firewall or a NetworkPolicy in between?"
    except socket.gaierror as error:
        return f"the name {host} cannot be resolved here: {error.strerror}"
    except OSError as error:
        return f"{host} port {port} takes no connection from here: {_plain(error)}"
    writer.close()
    return None


def _plain(error: OSError) -> str:
    """Return the system's error text without the address that asyncio repeats."""
    if isinstance(error, ConnectionRefusedError):
        return "connection refused, nothing listens there"
    return error.strerror or str(error)


_SECONDS = 2.0
_NO_WAY = frozenset({errno.EHOSTUNREACH, errno.ENETUNREACH, errno.EHOSTDOWN, errno.ETIMEDOUT})


async def is_cut(address: Address) -> bool:
    """Return whether the network path to another pod is cut. ``address`` is an IP, so that no name server is involved.

    Only silence counts: a host that refuses or resets a connection is reachable."""
    try:
        async with asyncio.timeout(_SECONDS):
            _, writer = await asyncio.open_connection(address.host, address.port)
    except TimeoutError:
        return True
    except OSError as error:
        return error.errno in _NO_WAY
    writer.close()
    return False
