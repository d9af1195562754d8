"""``/metrics`` and ``/healthz`` of the operator."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from aiohttp import web

from sglang_rollout.controller.metrics import Metrics

# The only clients are the kubelet and Prometheus; both come again.
SHUTDOWN_SECONDS = 0.2


def metrics_app(metrics: Metrics) -> web.Application:
    """``GET /metrics``."""

    async def show(_request: web.Request) -> web.Response:
        return web.Response(body=metrics.text(), headers={"Content-Type": "text/plain; version=0.0.4; charset=utf-8"})

    app = web.Application()
    app.router.add_get("/metrics", show)
    return app


def health_app(problem: Callable[[], str]) -> web.Application:
    """``GET /healthz``: 200, or 500 with the sentence of ``problem``.

    It does not ask whether the API server is there: restarting the operator would not bring it back.
    """

    async def show(_request: web.Request) -> web.Response:
        sentence = problem()
        return web.Response(status=500, text=sentence + "\n") if sentence else web.Response(text="ok\n")

    app = web.Application()
    app.router.add_get("/healthz", show)
    return app


@asynccontextmanager
async def serve(app: web.Application, port: int) -> AsyncIterator[None]:
    """Serve ``app`` on all addresses of the machine; port 0 means not at all."""
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
