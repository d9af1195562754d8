"""HTTP servers of the operator for ``/metrics`` and ``/healthz``."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from aiohttp import web

from sglang_rollout.controller.metrics import Metrics

SHUTDOWN_SECONDS = 0.2
"""Short, because the only clients, kubelet and Prometheus, retry."""


def build_metrics_app(metrics: Metrics) -> web.Application:
    """Return an app that serves ``GET /metrics``."""

    async def show(_request: web.Request) -> web.Response:
        return web.Response(body=metrics.render_text(), headers={"Content-Type": "text/plain; version=0.0.4; charset=utf-8"})

    app = web.Application()
    app.router.add_get("/metrics", show)
    return app


def build_health_app(find_problem: Callable[[], str]) -> web.Application:
    """Return an app that serves ``GET /healthz``: 200, or 500 with the message of ``find_problem``.

    The health does not depend on the API server, because a restart of the operator would not repair it.
    """

    async def show(_request: web.Request) -> web.Response:
        problem = find_problem()
        return web.Response(status=500, text=problem + "\n") if problem else web.Response(text="ok\n")

    app = web.Application()
    app.router.add_get("/healthz", show)
    return app


@asynccontextmanager
async def serve(app: web.Application, port: int) -> AsyncIterator[None]:
    """Serve ``app`` on all addresses of the machine; port 0 disables it."""
    if port == 0:
        yield
        return
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=SHUTDOWN_SECONDS)
    await runner.setup()
    try:
        await web.TCPSite(runner, None, port).start()
        yield
    finally:
        await runner.cleanup()
