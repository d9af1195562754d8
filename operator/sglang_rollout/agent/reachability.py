"""Checks of network paths: can a pod open a TCP connection to the trainer's store, or to another pod of its engine?"""

from __future__ import annotations

import asyncio
import errno
import socket
import time

from sglang_rollout.proxy.address import Address
from sglang_rollout.wire.agent import PreflightReply, PreflightRequest
from sglang_rollout.wire.reasons import Refusal, RefusalCode

_ATTEMPT_SECONDS = 2.0
_FIRST_PAUSE_SECONDS = 0.1
_LONGEST_PAUSE_SECONDS = 1.0
_NO_PATH = frozenset({errno.EHOSTUNREACH, errno.ENETUNREACH, errno.EHOSTDOWN, errno.ETIMEDOUT})


async def preflight(request: PreflightRequest) -> PreflightReply:
    """Open a TCP connection to the trainer's store; repeat until it succeeds or the deadline has passed.

    SGLang would wait for an unreachable store for half an hour. Trainers often call before they listen, so the first refusals are normal.
    """
    end = time.monotonic() + request.deadline
    pause = _FIRST_PAUSE_SECONDS
    while True:
        left = end - time.monotonic()
        reason = await _attempt(request.host, request.port, max(0.05, min(_ATTEMPT_SECONDS, left)))
        if reason is None:
            return PreflightReply(refusal=None)
        if time.monotonic() + pause >= end:
            return PreflightReply(refusal=Refusal(RefusalCode.UNAVAILABLE, f"{reason} (tried for {request.deadline:g} s)"))
        await asyncio.sleep(pause)
        pause = min(pause * 2, _LONGEST_PAUSE_SECONDS)


async def _attempt(host: str, port: int, timeout: float) -> str | None:
    """Connect once. Return None, or the error as a clause."""
    try:
        # SGLang accepts an IPv6 address in brackets; asyncio would take them for part of a name.
        await _connect(host.removeprefix("[").removesuffix("]"), port, timeout)
    except TimeoutError:
        return f"{host} port {port} did not answer within {timeout:.1f} s: is a firewall or a NetworkPolicy in between?"
    except socket.gaierror as error:
        return f"the name {host} cannot be resolved here: {error.strerror}"
    except ConnectionRefusedError:
        return f"{host} port {port} takes no connection from here: connection refused, nothing listens there"
    except OSError as error:
        return f"{host} port {port} takes no connection from here: {error.strerror or error}"
    return None


async def is_cut(address: Address) -> bool:
    """Return whether the network path to another pod is cut. ``address`` is an IP, so that no name server is involved.

    Only silence counts: a host that refuses or resets a connection is reachable.
    """
    try:
        await _connect(address.host, address.port, _ATTEMPT_SECONDS)
    except TimeoutError:
        return True
    except OSError as error:
        return error.errno in _NO_PATH
    return False


async def _connect(host: str, port: int, timeout: float) -> None:
    async with asyncio.timeout(timeout):
        _, writer = await asyncio.open_connection(host, port)
    writer.close()
