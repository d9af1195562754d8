"""smg's list of workers, which the coordinator keeps equal to the engines that may serve.

smg only routes; the gate of each engine is the fence. smg loses its list of workers when it restarts. So the list is compared about
twice a second, and missing workers are posted again.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import aiohttp

from sglang_rollout.bounded import ERROR_BYTES, MESSAGE_BYTES, open_session, read_answer, read_json
from sglang_rollout.coordinator.update import Machine
from sglang_rollout.wire.states import FleetState

log = logging.getLogger(__name__)

COMPARE_SECONDS = 0.5
REQUEST_SECONDS = 5.0
PENDING_SECONDS = 0.1
"""As COMPARE_SECONDS, while smg probes a worker: until smg lists the worker, its engine gets no requests."""
REPOST_SECONDS = 5.0
"""Seconds until a missing worker is posted again. A posted worker is listed only after smg has probed it."""
READY = "ready"
"""smg's status of a worker to which it sends requests."""
KEEP_SECONDS = 5.0
"""Seconds for which smg keeps an engine that does not serve any more. The gate of the engine is the fence."""
TAKE_UP_SECONDS = 5.0
"""How long an answer waits for smg, which must read an engine's description before it sends requests there."""
PROBLEMS = (TimeoutError, aiohttp.ClientError, OSError, ValueError, KeyError, TypeError)
CONFLICT = 409
NOT_FOUND = 404


@dataclass(frozen=True)
class Changes:
    """Changes that make smg's list the wanted one."""

    add: tuple[str, ...]
    remove: tuple[str, ...]
    """IDs of workers."""


def plan_changes(wanted: frozenset[str], listed: dict[str, str], pending: frozenset[str]) -> Changes:
    """Return the changes to smg's list.

    Args:
        wanted: Base URLs that smg should have.
        listed: URL by worker ID, without workers that drain.
        pending: URLs that were posted a moment ago and are not listed yet.
    """
    workers = {url.rstrip("/"): worker for worker, url in listed.items()}
    add = tuple(sorted(wanted - set(workers) - pending))
    remove = tuple(sorted(worker for url, worker in workers.items() if url not in wanted))
    return Changes(add, remove)


class WantedWorkers:
    """Engines that smg should have: engines that serve or have just served, and engines that take part in the running update.

    A gate or an agent that answers late looks closed for a moment. Requests that reach a closed gate wait at smg, which retries until a
    gate opens; without workers smg refuses them. While an operation runs no engine is removed, because between a commit and the opening
    of the gates no engine serves.
    """

    def __init__(self, url: Callable[[str], str | None], clock: Callable[[], float] = time.monotonic) -> None:
        self._url = url
        self._clock = clock
        self._last: dict[str, float] = {}
        """When each engine last served or took part in an update."""

    def urls(self, machine: Machine | None) -> frozenset[str] | None:
        """Return the wanted base URLs; None if a new coordinator does not know them yet and must not change smg's list."""
        if machine is None or machine.fleet.committed is None:
            return None
        fleet = machine.fleet
        if fleet.applied_state is not FleetState.ACTIVE:  # no gate opens, not even at the end of an update
            self._last = {}
            return frozenset()
        now = self._clock()
        names = {name for name, engine in fleet.engines.items() if engine.serving}
        if fleet.update is not None:
            names |= set(fleet.update.boots)
        self._last |= dict.fromkeys(names, now)
        oldest = -math.inf if machine.changing else now - KEEP_SECONDS
        self._last = {name: at for name, at in self._last.items() if name in fleet.engines and at >= oldest}
        return frozenset(url for url in map(self._url, self._last) if url is not None)


class SmgWorkers:
    """Keeps smg's list equal to the base URLs that ``wanted`` returns."""

    def __init__(self, url: str, wanted: Callable[[], frozenset[str] | None], labels: Mapping[str, str] | None = None) -> None:
        self._url = url.rstrip("/")
        self._labels = dict(labels or {})
        self._wanted = wanted
        self._posted: dict[str, float] = {}
        self._last_problem = ""
        self.routed: frozenset[str] = frozenset()
        """URLs to which smg sends requests."""
        self._missed: set[str] = set()
        """URLs that were posted and not listed in time."""
        self.wake = asyncio.Event()
        """Set it to compare at once."""
        self._begun = self._ended = 0
        """Numbers of the comparisons that began and ended last."""
        self._end = asyncio.Condition()

    async def run(self) -> None:
        """Compare and correct the list forever."""
        timeout = aiohttp.ClientTimeout(total=REQUEST_SECONDS)
        async with open_session(timeout=timeout) as session:
            while True:
                self._begun += 1
                self._log_problem(await self._compare(session))
                async with self._end:
                    self._ended = self._begun
                    self._end.notify_all()
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(PENDING_SECONDS if self._posted else COMPARE_SECONDS):
                        await self.wake.wait()
                self.wake.clear()

    async def take_up(self, urls: frozenset[str]) -> None:
        """Wait until smg sends requests to these engines. Give up after a few seconds, and at once without an smg.

        Only a list that smg was asked for after this call counts: an older one may show engines that are being removed.
        """
        begun = self._begun
        self.wake.set()
        try:
            async with asyncio.timeout(TAKE_UP_SECONDS), self._end:
                await self._end.wait_for(lambda: self._ended > begun and bool(self._last_problem or urls <= self.routed | self._missed))
        except TimeoutError:
            log.warning("smg sends no requests to %s after %g s.", ", ".join(sorted(urls - self.routed)), TAKE_UP_SECONDS)

    async def _compare(self, session: aiohttp.ClientSession) -> str:
        """Compare and correct the list once. Return the problem, or an empty string."""
        try:
            workers = await self._listed(session)
        except PROBLEMS as error:
            self.routed = frozenset()
            return str(error) or type(error).__name__
        self._note_routed(frozenset(str(worker["url"]).rstrip("/") for worker in workers if worker.get("status") == READY))
        try:
            await self._correct(session, workers)
        except PROBLEMS as error:
            return str(error) or type(error).__name__
        return ""

    async def _correct(self, session: aiohttp.ClientSession, workers: list[dict[str, Any]]) -> None:
        listed = {str(worker["id"]): str(worker["url"]) for worker in workers}
        now = asyncio.get_running_loop().time()
        wanted = self._wanted()
        if wanted is None:
            return
        missing = wanted - {url.rstrip("/") for url in listed.values()}
        self._note_missed({url for url, at in self._posted.items() if url in missing and now - at >= REPOST_SECONDS}, missing)
        self._posted = {url: at for url, at in self._posted.items() if url in missing and now - at < REPOST_SECONDS}
        changes = plan_changes(wanted, listed, frozenset(self._posted))
        # A pending worker is not listed yet. If it is no longer wanted, it is removed as soon as smg lists it.
        for worker in changes.remove:
            await self._remove(session, worker, listed[worker])
        for url in changes.add:
            await self._add(session, url, now)

    def _note_routed(self, routed: frozenset[str]) -> None:
        for url in sorted(routed - self.routed):
            log.info("smg sends requests to %s", url)
        for url in sorted(self.routed - routed):
            log.info("smg sends no more requests to %s", url)
        self.routed = routed

    def _note_missed(self, late: set[str], missing: frozenset[str]) -> None:
        """Warn once of each worker that smg has accepted and does not list."""
        for url in sorted(late - self._missed):
            log.warning("smg sends no requests to %s: it cannot read the engine's description there. smg's own log has the reason.", url)
        self._missed = (self._missed | late) & missing

    async def _listed(self, session: aiohttp.ClientSession) -> list[dict[str, Any]]:
        async with session.get(f"{self._url}/workers") as reply:
            reply.raise_for_status()
            workers = (await read_json(reply, MESSAGE_BYTES))["workers"]
        return [worker for worker in workers if worker.get("status") != "draining"]

    async def _add(self, session: aiohttp.ClientSession, url: str, now: float) -> None:
        # No settle time: a draining worker cannot be posted again (409), and its gate is closed already.
        body = {"url": url, "health": {"drain_settle_secs": 0}, "labels": self._labels}
        async with session.post(f"{self._url}/workers", json=body) as reply:
            text = (await read_answer(reply, ERROR_BYTES)).decode(errors="replace")
            if reply.ok or reply.status == CONFLICT:
                # 409: smg has the worker already or still drains it. If the worker is missing from the list later, it is posted again.
                if reply.ok:
                    self._posted[url] = now
                return
            raise ValueError(f"POST /workers {url}: HTTP {reply.status} {text[:200]}")

    async def _remove(self, session: aiohttp.ClientSession, worker: str, url: str) -> None:
        async with session.delete(f"{self._url}/workers/{worker}") as reply:
            if not reply.ok and reply.status not in {NOT_FOUND, CONFLICT}:
                text = (await read_answer(reply, ERROR_BYTES)).decode(errors="replace")
                raise ValueError(f"DELETE /workers/{worker}: HTTP {reply.status} {text[:200]}")
        self._posted.pop(url.rstrip("/"), None)

    def _log_problem(self, problem: str) -> None:
        if problem != self._last_problem:
            self._last_problem = problem
            if problem:
                log.warning("smg's list of workers cannot be updated: %s", problem)
            else:
                log.info("smg answers again")
