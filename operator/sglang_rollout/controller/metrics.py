"""Prometheus metrics of the operator, and its HTTP servers for ``/metrics`` and ``/healthz``."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sized
from contextlib import asynccontextmanager

from aiohttp import web
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.aiohttp import make_aiohttp_handler

from sglang_rollout.proxy.address import Address
from sglang_rollout.proxy.listen import listen

PREFIX = "sglang_rollout_operator"
READ_VERBS = ("get", "list", "watch")
WRITE_VERBS = ("apply", "patch", "create", "delete")
OUTCOMES = ("ok", "error")
RESULTS = ("ok", "gone", "standby", "refused", "unavailable", "conflict", "error")
# A reconcile of a healthy fleet is a dozen reads and takes milliseconds. An API server in trouble takes up to its deadline of 30 s.
BUCKETS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
SHUTDOWN_SECONDS = 0.2
"""Short, because the only clients, kubelet and Prometheus, retry."""

Key = tuple[str, str]
"""Namespace and name of an SGLangRollout."""


class Metrics:
    """Counters and gauges of one operator process.

    Series with known labels start at 0, because ``increase()`` misses a first error that creates its own series.
    """

    def __init__(self, version: str = "") -> None:
        self.registry = CollectorRegistry()
        self._reconciles = Counter(f"{PREFIX}_reconcile", "Reconciles by result.", ["result"], registry=self.registry)
        self._seconds = Histogram(f"{PREFIX}_reconcile_seconds", "Duration of a reconcile.", buckets=BUCKETS, registry=self.registry)
        self._writes = Counter(f"{PREFIX}_writes", "Accepted write requests.", ["verb"], registry=self.registry)
        self._requests = Counter(f"{PREFIX}_api_requests", "Requests to the API server.", ["verb", "outcome"], registry=self.registry)
        self._depth = Gauge(f"{PREFIX}_queue_depth", "Rollouts waiting for a worker.", registry=self.registry)
        self._retries = Counter(f"{PREFIX}_retries", "Reconciles retried after a failure.", registry=self.registry)
        self._rollouts = Gauge(
            f"{PREFIX}_rollouts",
            "1 for each rollout, with its Ready condition: True, False or Unknown.",
            ["namespace", "rollout", "ready"],
            registry=self.registry,
        )
        self._listed = Gauge(f"{PREFIX}_last_list_timestamp_seconds", "Time of the last list of all rollouts.", registry=self.registry)
        Gauge(f"{PREFIX}_build_info", "Version of the operator.", ["version"], registry=self.registry).labels(version=version).set(1)
        self._ready: dict[Key, str] = {}
        for result in RESULTS:
            self._reconciles.labels(result=result)
        for verb in WRITE_VERBS:
            self._writes.labels(verb=verb)
        for verb in (*READ_VERBS, *WRITE_VERBS):
            for outcome in OUTCOMES:
                self._requests.labels(verb=verb, outcome=outcome)

    def count_request(self, verb: str, plural: str, outcome: str) -> None:
        """Count one API request; the ``on_call`` hook of :class:`~sglang_rollout.kube.client.Kube`."""
        self._requests.labels(verb=verb, outcome=outcome).inc()
        # Events and Leases are excluded: the promise that a steady state writes nothing concerns objects and status.
        if verb in WRITE_VERBS and outcome == "ok" and plural not in {"events", "leases"}:
            self._writes.labels(verb=verb).inc()

    def count_reconcile(self, result: str, seconds: float) -> None:
        """Count one reconcile: ``ok``, ``gone``, ``standby``, ``refused``, ``unavailable``, ``conflict`` or ``error``."""
        self._reconciles.labels(result=result).inc()
        self._seconds.observe(seconds)

    def count_retry(self) -> None:
        """Count one reconcile that is retried later."""
        self._retries.inc()

    def follow_queue(self, queue: Sized) -> None:
        """Report the length of ``queue`` at each scrape."""
        self._depth.set_function(lambda: float(len(queue)))

    def set_ready(self, key: Key, status: str | None) -> None:
        """Record the Ready condition of a rollout (True, False or Unknown); None if the rollout is gone."""
        before = self._ready.pop(key, None)
        if before is not None:
            self._rollouts.remove(*key, before)
        if status is not None:
            self._ready[key] = status
            self._rollouts.labels(*key, status).set(1)

    def mark_relisted(self) -> None:
        """Record that all rollouts have just been listed."""
        self._listed.set_to_current_time()


def build_metrics_app(metrics: Metrics) -> web.Application:
    """Return an app that serves ``GET /metrics``."""
    app = web.Application()
    app.router.add_get("/metrics", make_aiohttp_handler(metrics.registry))
    return app


def build_health_app(find_problem: Callable[[], str]) -> web.Application:
    """Return an app that serves ``GET /healthz``: 200, or 500 with the message of ``find_problem``.

    The health does not depend on the API server, because a restart of the operator would not repair the API server.
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
        await listen(runner, Address("::", port))
        yield
    finally:
        await runner.cleanup()
