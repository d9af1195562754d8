"""Check by connections whether the cluster enforces the fleet's NetworkPolicies.

The policies let the router's pod connect to the gate of an engine and to no other port. The gate's process also listens on the port of
probes, which only the node of the pod may reach. If the gate accepts a connection and the port of probes accepts another, nothing
enforces the policies. The operator turns the result into the condition ``NetworkIsolated``.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from sglang_rollout.coordinator.update.machine import Machine
from sglang_rollout.proxy.address import Address
from sglang_rollout.wire.ports import PROBES_PORT
from sglang_rollout.wire.record import MAX_REACHED, Isolation

CONNECT_SECONDS = 3.0
"""Wait for a connection. Most network plugins drop forbidden packets without an answer."""
FIRST_SECONDS = 5.0
"""Interval of checks until one has a result."""
RETRY_SECONDS = 30.0
"""Interval of checks while an engine is reached. Plugins need some seconds until they know a new pod."""
CHECK_SECONDS = 300.0
"""Interval of checks while the policies are enforced. A new engine may run on another node, which may enforce nothing."""
CONCURRENT_CHECKS = 16


@dataclass(frozen=True)
class Attempt:
    """Connections to one engine."""

    gate: bool
    """The gate accepted a connection, so the engine's pod can be reached and its gate listens."""
    forbidden: bool
    """The port of probes accepted a connection."""


def judge_attempts(attempts: Mapping[str, Attempt]) -> Isolation | None:
    """Return the result of a check; None if no gate accepted a connection, because then a failure proves nothing.

    A plugin may drop packets or refuse connections. So every failure at the port of probes counts as enforced.
    """
    checked = {name: attempt for name, attempt in attempts.items() if attempt.gate}
    if not checked:
        return None
    reached = [name for name, attempt in checked.items() if attempt.forbidden]
    return Isolation(checked=len(checked), reached=reached[:MAX_REACHED], reached_count=len(reached))


def next_delay(result: Isolation | None) -> float:
    """Return the seconds until the next check."""
    if result is None:
        return FIRST_SECONDS
    return RETRY_SECONDS if result.reached_count else CHECK_SECONDS


class IsolationCheck:
    """Checks the engines that are up, and reports each result."""

    def __init__(
        self,
        machine: Callable[[], Machine | None],
        url: Callable[[str], str | None],
        report: Callable[[Isolation | None], None],
    ) -> None:
        self._machine = machine
        self._url = url
        self._report = report
        self._limit = asyncio.Semaphore(CONCURRENT_CHECKS)

    async def run(self) -> None:
        """Check forever. Without NetworkPolicies there is nothing to check."""
        while True:
            result = None
            machine = self._machine()
            if machine is not None and machine.fleet.is_isolated:
                result = judge_attempts(await self._attempt_all(machine))
                self._report(result)
            await asyncio.sleep(next_delay(result))

    async def _attempt_all(self, machine: Machine) -> dict[str, Attempt]:
        urls = {name: url for name in machine.fleet.up() if _has_probes_port(machine, name) and (url := self._url(name)) is not None}
        attempts = await asyncio.gather(*(self._attempt(url) for url in urls.values()))
        return dict(zip(urls, attempts, strict=True))

    async def _attempt(self, url: str) -> Attempt:
        gate = Address.parse(url.partition("://")[2])
        async with self._limit:
            # The gate last: a pod that ends meanwhile must not look isolated.
            forbidden = await can_connect(gate.host, PROBES_PORT)
            return Attempt(gate=await can_connect(gate.host, gate.port), forbidden=forbidden)


def _has_probes_port(machine: Machine, name: str) -> bool:
    """Return True if a connection to the port of probes can prove something. Pods of earlier releases do not listen on it."""
    status = machine.fleet.engines[name].status
    return status is not None and status.probes_port


async def can_connect(host: str, port: int) -> bool:
    """Return whether a TCP connection is accepted within ``CONNECT_SECONDS``."""
    try:
        async with asyncio.timeout(CONNECT_SECONDS):
            _, writer = await asyncio.open_connection(host, port)
    except OSError:  # also TimeoutError
        return False
    writer.close()
    return True
