"""Pods with staged copies behind a data port on loopback, and pods that send wrong answers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import aiohttp
from aiohttp import web

from sglang_rollout.staging.copies import Copies, Copy
from sglang_rollout.staging.pull import pull
from sglang_rollout.staging.serve import staging_routes
from sglang_rollout.wire.ports import STAGED, TICKET_HEADER
from sglang_rollout.wire.staged import Shard, StageRequest, VersionEnd
from tests.support.staged import LIMIT, PIECE, TICKET, fill, shard, update_id

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
Fault = Callable[[web.Request, Handler], Awaitable[web.StreamResponse]]
SHARDS = [shard(4 * PIECE + 1, 30), shard(PIECE), shard(0), shard(7)]
"""Tensors of a version with seven small pieces."""
SECONDS = 30.0
"""Deadline of waits that end at once unless something is broken."""


@dataclass
class Pod:
    """A data port with copies."""

    copies: Copies
    url: str
    runner: web.AppRunner
    fault: Fault | None = None
    """Answers in place of the routes."""
    asked: list[str] = field(default_factory=list)
    """Paths of all requests."""

    @property
    def copy(self) -> Copy:
        return self.copies.open(update_id(), TICKET, LIMIT)

    @property
    def pieces_given(self) -> int:
        return sum("/pieces/" in path for path in self.asked)

    def hold(self, shards: Sequence[Shard], data: Sequence[bytes]) -> VersionEnd:
        return fill(self.copy, shards, data).seal()

    async def stop(self) -> None:
        """Close the port and all connections."""
        await self.runner.cleanup()


@asynccontextmanager
async def run_pod(folder: Path, fault: Fault | None = None) -> AsyncIterator[Pod]:
    copies = Copies(folder / "volume", folder / "state")
    pods: list[Pod] = []

    @web.middleware
    async def faulty(request: web.Request, handler: Handler) -> web.StreamResponse:
        pods[0].asked.append(request.path)
        return await (handler(request) if pods[0].fault is None else pods[0].fault(request, handler))

    app = web.Application(middlewares=[faulty])
    app.add_routes(staging_routes(copies))
    runner = web.AppRunner(app, shutdown_timeout=0.01)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    port = runner.addresses[0][1]
    pods.append(Pod(copies, f"http://127.0.0.1:{port}", runner, fault))
    try:
        yield pods[0]
    finally:
        await runner.cleanup()


def stage_request(parents: Sequence[Pod | str], *, digest: str = "", deadline: float = SECONDS, ticket: str = TICKET) -> StageRequest:
    urls = [parent if isinstance(parent, str) else parent.url for parent in parents]
    return StageRequest(update=update_id(), parents=urls, ticket=ticket, size_limit=LIMIT, digest=digest, deadline=deadline)


async def pull_into(copy: Copy, request: StageRequest, base: Copy | None = None) -> VersionEnd:
    async with aiohttp.ClientSession() as session:
        return await pull(session, request, copy, base)


async def get(url: str, path: str, ticket: str = TICKET) -> tuple[int, bytes, dict[str, str]]:
    """Return status, body and headers of a request below ``STAGED``."""
    async with aiohttp.ClientSession() as session, session.get(f"{url}{STAGED}{path}", headers={TICKET_HEADER: ticket}) as answer:
        return answer.status, await answer.read(), dict(answer.headers)


async def until(condition: Callable[[], bool]) -> None:
    """Wait until a condition holds."""
    async with asyncio.timeout(SECONDS):
        while not condition():
            await asyncio.sleep(0.005)
