"""smg's list of workers: kept equal to the engines that may be asked.

smg is only routing; the fence is the gate of each engine. smg forgets workers when it restarts, so its list is compared
about twice a second and engines are posted again.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import aiohttp

from sglang_rollout.coordinator.update import Machine
from sglang_rollout.wire.states import FleetState

log = logging.getLogger(__name__)

EVERY = 0.5
DEADLINE = 5.0
CONFLICT = 409
NOT_FOUND = 404
POST_AGAIN = 5.0
"""A worker that was posted shows up in the list only when smg has probed it: seconds until it is posted again."""


@dataclass(frozen=True)
class Plan:
    """What to do so that smg's list becomes the wanted one."""

    add: tuple[str, ...]
    remove: tuple[str, ...]
    """Ids of workers."""


def plan(wanted: frozenset[str], listed: dict[str, str], pending: frozenset[str]) -> Plan:
    """``listed``: URL by worker id, without those that drain; ``pending``: posted a moment ago and not yet listed."""
    there = {url.rstrip("/"): worker for worker, url in listed.items()}
    add = tuple(sorted(wanted - set(there) - pending))
    remove = tuple(sorted(worker for url, worker in there.items() if url not in wanted))
    return Plan(add, remove)


class Routable:
    """Which engines smg should have: those that serve, and those that take part in the running update.

    Their gates are closed then, and requests wait at smg, which tries again until a gate opens. While a change is under
    way nobody is taken out: between a commit and the opening of the gates no engine serves.
    """

    def __init__(self, url: Callable[[str], str | None]) -> None:
        self._url = url
        self._before: frozenset[str] = frozenset()

    def urls(self, machine: Machine | None) -> frozenset[str] | None:
        """Base URLs to have in the list now; None: a new coordinator does not know yet and leaves the list alone."""
        if machine is None or machine.fleet.committed is None:
            return None
        fleet = machine.fleet
        names = {name for name, engine in fleet.engines.items() if engine.serving}
        if fleet.applied_state is not FleetState.ACTIVE:
            names = set()  # no gate opens at the end of an update either
        elif fleet.update is not None:
            names |= set(fleet.update.boots)
        if machine.changing and fleet.applied_state is FleetState.ACTIVE:
            names |= {name for name in self._before if name in fleet.engines}
        self._before = frozenset(names)
        return frozenset(url for url in map(self._url, names) if url is not None)


class Router:
    """Keeps smg's list. ``wanted`` says which base URLs should be in it now."""

    def __init__(self, url: str, wanted: Callable[[], frozenset[str] | None], labels: Mapping[str, str] | None = None) -> None:
        self._url = url.rstrip("/")
        self._labels = dict(labels or {})
        self._wanted = wanted
        self._posted: dict[str, float] = {}
        self._complaint = ""
        self.routed: frozenset[str] = frozenset()
        """URLs that smg has in its list."""
        self.wake = asyncio.Event()
        """Set to look at once."""

    async def run(self) -> None:
        """Compare and correct, for ever."""
        timeout = aiohttp.ClientTimeout(total=DEADLINE)
        async with aiohttp.ClientSession(timeout=timeout) as session:
            while True:
                try:
                    await self._settle(session)
                    self._complain("")
                except (TimeoutError, aiohttp.ClientError, OSError, ValueError, KeyError, TypeError) as error:
                    self.routed = frozenset()
                    self._complain(str(error) or type(error).__name__)
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(EVERY):
                        await self.wake.wait()
                self.wake.clear()

    async def _settle(self, session: aiohttp.ClientSession) -> None:
        listed = await self._listed(session)
        self.routed = frozenset(url.rstrip("/") for url in listed.values())
        now = asyncio.get_running_loop().time()
        wanted = self._wanted()
        if wanted is None:
            return
        self._posted = {url: at for url, at in self._posted.items() if url in wanted - self.routed and now - at < POST_AGAIN}
        todo = plan(wanted, listed, frozenset(self._posted))
        # A worker that is still pending is not listed: one that is not wanted any more must go before it is ready.
        for worker in todo.remove:
            await self._remove(session, worker, listed[worker])
        for url in todo.add:
            await self._add(session, url, now)

    async def _listed(self, session: aiohttp.ClientSession) -> dict[str, str]:
        async with session.get(f"{self._url}/workers") as reply:
            reply.raise_for_status()
            workers = json.loads(await reply.read())["workers"]
        return {str(worker["id"]): str(worker["url"]) for worker in workers if worker.get("status") != "draining"}

    async def _add(self, session: aiohttp.ClientSession, url: str, now: float) -> None:
        # Settle 0: a worker that drains cannot be posted again (409), and the gate has closed it already.
        body = {"url": url, "health": {"drain_settle_secs": 0}, "labels": self._labels}
        async with session.post(f"{self._url}/workers", json=body) as reply:
            text = await reply.text()
            if reply.ok or reply.status == CONFLICT:
                # 409: known already, or draining still; it is posted again when the list says that it is not there.
                if reply.ok:
                    self._posted[url] = now
                    log.info("smg: added %s", url)
                return
            raise ValueError(f"POST /workers {url}: HTTP {reply.status} {text[:200]}")

    async def _remove(self, session: aiohttp.ClientSession, worker: str, url: str) -> None:
        async with session.delete(f"{self._url}/workers/{worker}") as reply:
            if not reply.ok and reply.status not in {NOT_FOUND, CONFLICT}:
                raise ValueError(f"DELETE /workers/{worker}: HTTP {reply.status} {(await reply.text())[:200]}")
        self._posted.pop(url.rstrip("/"), None)
        log.info("smg: removed %s", url)

    def _complain(self, complaint: str) -> None:
        if complaint != self._complaint:
            self._complaint = complaint
            if complaint:
                log.warning("smg's list of workers cannot be kept: %s", complaint)
            else:
                log.info("smg answers again")
