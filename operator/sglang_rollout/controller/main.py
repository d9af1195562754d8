"""The operator process: connect, check the CRD, start the workers, and watch until a signal."""

from __future__ import annotations

import asyncio
import datetime
import logging
import os
import socket
import time
from contextlib import AsyncExitStack

from sglang_rollout.api.v1alpha1 import API_VERSION, PLURAL
from sglang_rollout.controller import triggers
from sglang_rollout.controller.events import EventPoster
from sglang_rollout.controller.metrics import Key, Metrics
from sglang_rollout.controller.reconcile import Reconciler
from sglang_rollout.controller.render.names import FIELD_MANAGER
from sglang_rollout.controller.settings import OperatorSettings
from sglang_rollout.controller.web import build_health_app, build_metrics_app, serve
from sglang_rollout.controller.workers import Workers, relist_periodically
from sglang_rollout.controller.workqueue import WorkQueue
from sglang_rollout.kube.client import Kube
from sglang_rollout.kube.errors import ApiUnavailable, KubeError, NotFound

log = logging.getLogger(__name__)

# At start, the API server may lag (a node that boots, a CRD that is being established). After these times the process ends with a
# message, because a crash loop is easier to notice than an operator that waits silently.
API_TIMEOUT_SECONDS = 60.0
CRD_TIMEOUT_SECONDS = 5.0
POLL_SECONDS = 0.5


class StartupError(Exception):
    """The operator cannot start. ``str()`` says why and what to do."""


def utc_now() -> str:
    """Return the time in Kubernetes' format."""
    return datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


async def require_crd(kube: Kube, *, api_timeout: float = API_TIMEOUT_SECONDS, crd_timeout: float = CRD_TIMEOUT_SECONDS) -> None:
    """Wait for the API server and for the CRD.

    Raises:
        StartupError: One of them did not appear in time, or the API server refuses access.
    """
    started = time.monotonic()
    while True:
        try:
            found = await kube.get_path(f"/apis/{API_VERSION}")
        except NotFound:
            problem, timeout = _describe_missing_crd(kube), crd_timeout
        except ApiUnavailable as error:
            problem, timeout = f"the API server does not answer: {error}", api_timeout
        except KubeError as error:
            raise StartupError(f"the API server refuses the operator: {error}") from error
        else:
            if any(resource.get("name") == PLURAL for resource in found.get("resources") or []):
                return
            problem, timeout = _describe_missing_crd(kube), crd_timeout
        if time.monotonic() - started >= timeout:
            raise StartupError(problem)
        await asyncio.sleep(POLL_SECONDS)


def _describe_missing_crd(kube: Kube) -> str:
    return (
        f"the custom resource {PLURAL} ({API_VERSION}) is not installed at {kube.server}: "
        "install the chart's CRDs, or run `sglang-rollout crd | kubectl apply --server-side -f -`"
    )


async def run(settings: OperatorSettings) -> None:
    """Run the operator until SIGTERM or SIGINT."""
    metrics = Metrics(settings.render.version)
    async with AsyncExitStack() as stack:
        kube = await stack.enter_async_context(
            await Kube.connect(field_manager=FIELD_MANAGER, kubeconfig=settings.kubeconfig, on_call=metrics.count_request)
        )
        queue: WorkQueue[Key] = WorkQueue()
        events = EventPoster(kube, component=FIELD_MANAGER, instance=_reporting_instance(), now=utc_now)
        reconciler = Reconciler(kube, settings.render, events=events, metrics=metrics, now=utc_now)
        workers = Workers(queue, reconciler.reconcile, metrics=metrics)
        metrics.follow_queue(queue)
        stack.callback(queue.close)
        # Health comes before anything that waits: the kubelet must not kill the operator while the API server is slow.
        await _serve(stack, settings, metrics, workers)
        await require_crd(kube)
        log.info("watching %s of %s", ", ".join(settings.namespaces) or "all namespaces", kube.server)
        workers.start(settings.workers)
        stack.push_async_callback(workers.stop)
        relisting = asyncio.create_task(
            relist_periodically(kube, queue, settings.namespaces, seconds=settings.relist_seconds, metrics=metrics)
        )
        stack.callback(relisting.cancel)
        await triggers.watch_rollouts(queue.add, kube.log_in, settings.namespaces)
    log.info("stopped")


async def _serve(stack: AsyncExitStack, settings: OperatorSettings, metrics: Metrics, workers: Workers) -> None:
    for app, port, what in (
        (build_metrics_app(metrics), settings.metrics_port, "metrics"),
        (build_health_app(workers.find_dead_worker), settings.health_port, "health"),
    ):
        try:
            await stack.enter_async_context(serve(app, port))
        except OSError as error:
            raise StartupError(f"port {port} for {what} cannot be used: {error}; choose another --{what}-port") from error


def _reporting_instance() -> str:
    """Return the name that Events report: the pod, or the machine of a developer."""
    return os.environ.get("HOSTNAME") or socket.gethostname()
