"""HTTP applications of the weight store: the coordinator's calls, and the data port of uploaders and agents."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Iterator, Sequence
from typing import TypeVar

from aiohttp import web
from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.aiohttp import make_aiohttp_handler
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from sglang_rollout.credentials import Credentials
from sglang_rollout.internal.proven_calls import require_proof, take_proven_calls
from sglang_rollout.internal.reachability import preflight
from sglang_rollout.internal.refusals import REFUSAL_LOG, log_refusals
from sglang_rollout.internal.requests import Handler, check_term, read_message, refuse
from sglang_rollout.staging.index import StagedError
from sglang_rollout.store.state import TermFile
from sglang_rollout.store.store import Store, refusal_of
from sglang_rollout.wire import Message, ports
from sglang_rollout.wire.agent import PreflightRequest
from sglang_rollout.wire.reasons import RefusedError
from sglang_rollout.wire.staged import (
    PIECE_BYTES,
    StageRequest,
    StoreCommitRequest,
    StoreDropRequest,
    StoreGroupRequest,
    StoreOpenRequest,
    StoreReadRequest,
    StoreReceiveRequest,
    StoreSealRequest,
    StoreVerifyRequest,
)

log = logging.getLogger(__name__)

MAX_BODY = 256 * 2**20
"""Largest message of the coordinator: the shards of an upload have all names of the model."""
_M = TypeVar("_M", bound=Message)
PREFIX = "sglang_rollout_store"


class Routes:
    """Handlers of the coordinator's calls."""

    def __init__(self, store: Store, term: TermFile) -> None:
        self._store = store
        self._term = term

    def routes(self) -> list[web.RouteDef]:
        """Return all routes of the coordinator's port."""
        calls: dict[str, Handler] = {
            ports.STORE_STATUS: self.call(Message, self._nothing),
            ports.STORE_PREFLIGHT: self._checked(self.preflight),
            ports.STORE_JOIN: self.call(StoreGroupRequest, self._store.join),
            ports.STORE_LEAVE: self.call(StoreGroupRequest, lambda wanted: self._store.leave(wanted.group_name)),
            ports.STORE_OPEN: self.call(StoreOpenRequest, self._store.open),
            ports.STORE_RECEIVE: self.call(StoreReceiveRequest, self._store.receive),
            ports.STORE_SEAL: self.call(StoreSealRequest, self._store.seal),
            ports.STORE_FETCH: self.call(StageRequest, self._store.fetch),
            ports.STORE_DROP: self.call(StoreDropRequest, lambda wanted: self._store.drop(wanted.keep)),
            ports.STORE_COMMIT: self.call(StoreCommitRequest, self._store.commit),
            ports.STORE_READ: self.ask(StoreReadRequest, self._store.read),
            ports.STORE_VERIFY: self.ask(StoreVerifyRequest, self._store.verify),
        }
        return [
            web.get(ports.STORE_HEALTH, self.health),
            *(web.post(path, handler) for path, handler in calls.items()),
        ]

    async def health(self, _: web.Request) -> web.StreamResponse:
        """Answer that the store runs."""
        return web.json_response({"status": "ok"})

    async def preflight(self, request: web.Request) -> web.StreamResponse:
        """Check that the trainer's store can be reached from here."""
        reply = await preflight(await read_message(request, PreflightRequest))
        return web.json_response(reply.model_dump(mode="json"))

    def call(self, model: type[_M], work: Callable[[_M], Awaitable[None]]) -> Handler:
        """Return the handler of a call that answers with the state of the store."""

        async def handle(request: web.Request) -> web.StreamResponse:
            await work(await read_message(request, model))
            return web.json_response(self._store.status().model_dump(mode="json"))

        return self._checked(handle)

    def ask(self, model: type[_M], work: Callable[[_M], Awaitable[Message]]) -> Handler:
        """Return the handler of a call that answers with a message of its own."""

        async def handle(request: web.Request) -> web.StreamResponse:
            reply = await work(await read_message(request, model))
            return web.Response(text=reply.model_dump_json(), content_type="application/json")

        return self._checked(handle)

    def _checked(self, handler: Handler) -> Handler:
        """Return a handler that refuses every caller but the coordinator with the highest term seen."""

        async def checked(request: web.Request) -> web.StreamResponse:
            require_proof(request, process="weight store")
            self._term.raise_to(check_term(request, self._term.highest))
            return await handler(request)

        return checked

    async def _nothing(self, _: Message) -> None:
        return None


def make_control_app(store: Store, credentials: Credentials, term: TermFile) -> web.Application:
    """Return the application for the coordinator.

    Args:
        store: The weight store.
        credentials: Credentials of the coordinator.
        term: The highest term seen.
    """
    app = web.Application(client_max_size=MAX_BODY, middlewares=[_answer_errors])
    log_refusals(app)
    take_proven_calls(app, credentials, "weight store")
    app.add_routes(Routes(store, term).routes())
    return app


def make_metrics_app(store: Store) -> web.Application:
    """Return the application of the metrics port, which has nothing else and needs no credential."""
    app = web.Application()
    app.router.add_get(ports.METRICS, make_aiohttp_handler(make_metrics(store)))
    return app


def make_data_app(store: Store, routes: Sequence[web.RouteDef]) -> web.Application:
    """Return the application of the data port.

    Args:
        store: The weight store, which receives uploads.
        routes: Routes of the agents' reads.
    """
    app = web.Application(client_max_size=PIECE_BYTES, middlewares=[_answer_errors])
    log_refusals(app)
    app.add_routes([*store.uploads.routes(), *routes])
    return app


@web.middleware
async def _answer_errors(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Answer every refusal with its code, and a message in SGLang's shape. Log a refused credential or ticket."""
    try:
        return await handler(request)
    except StagedError as error:
        refusal = refusal_of(error)
    except RefusedError as error:
        refusal = error
    except web.HTTPNotFound:
        refusal = RefusedError(f"The weight store offers no {request.path} here.", status=404)
    except web.HTTPRequestEntityTooLarge as error:
        return refuse(413, f"{request.path}: the body is too large: {error.text}.")
    except web.HTTPMethodNotAllowed as error:
        return refuse(405, f"{request.path} does not take {request.method}, only {', '.join(sorted(error.allowed_methods))}.")
    except OSError as error:
        log.exception("%s failed.", request.path)
        refusal = RefusedError(f"{request.path}: {error.strerror or error}.", status=500)
    request.app[REFUSAL_LOG].note(request, refusal.status)
    return refuse(refusal.status, str(refusal), refusal.headers, code=refusal.refusal.code)


def make_metrics(store: Store) -> CollectorRegistry:
    """Return the metrics of the store."""
    registry = CollectorRegistry()
    registry.register(_StateCollector(store))
    received = Counter(f"{PREFIX}_received_bytes", "Bytes received through process groups.", registry=registry)
    seconds = Histogram(
        f"{PREFIX}_receive_seconds",
        "Seconds until a bucket from a process group had arrived.",
        buckets=(0.05, 0.25, 1, 5, 30, 120, 600),
        registry=registry,
    )

    def count(size: int, duration: float) -> None:
        received.inc(size)
        seconds.observe(duration)

    store.on_received = count
    return registry


class _StateCollector(Collector):
    """Reads the store at each scrape."""

    def __init__(self, store: Store) -> None:
        self._store = store

    def collect(self) -> Iterator[Metric]:
        """Yield the metrics."""
        status = self._store.status()
        held = sum(copy.bytes for copy in status.copies)
        yield GaugeMetricFamily(f"{PREFIX}_versions", "Versions in the store, also unfinished ones.", value=len(status.copies))
        yield GaugeMetricFamily(f"{PREFIX}_version_bytes", "Bytes of all versions in the store.", value=held)
        yield GaugeMetricFamily(f"{PREFIX}_process_groups", "Open process groups.", value=len(status.groups))
        yield CounterMetricFamily(f"{PREFIX}_uploaded_bytes", "Bytes of uploaded pieces and differences.", value=self._store.uploads.bytes)
        # Without snapshots these have no value.
        usable = GaugeMetricFamily(f"{PREFIX}_snapshots", "Usable snapshots on the volume.")
        failures = CounterMetricFamily(f"{PREFIX}_snapshot_failures", "Failed attempts to write a snapshot.")
        if status.snapshots is not None:
            usable.add_metric([], sum(not each.problem for each in status.snapshots.snapshots))
            failures.add_metric([], status.snapshots.failures)
        yield usable
        yield failures
