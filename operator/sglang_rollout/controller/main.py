"""The operator process: connect, check the CRD, start the workers, watch, end."""

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
from sglang_rollout.controller.web import health_app, metrics_app, serve
from sglang_rollout.controller.workers import Workers, relist
from sglang_rollout.controller.workqueue import WorkQueue
from sglang_rollout.kube.client import Kube
from sglang_rollout.kube.errors import ApiUnavailable, KubeError, NotFound

log = logging.getLogger(__name__)

# At start the API server may be a few seconds behind us (a node that boots, a CRD that is just being established).
# After this the process ends with a sentence: a crash loop is easier to see than an operator that waits in silence.
API_PATIENCE = 60.0
CRD_PATIENCE = 5.0
POLL = 0.5


class StartupError(Exception):
    """The operator cannot start; ``str()`` says why and what to do."""


def utc_now() -> str:
    """The time as Kubernetes writes it."""
    return datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


async def require_crd(kube: Kube, *, api_patience: float = API_PATIENCE, crd_patience: float = CRD_PATIENCE) -> None:
    """Wait a moment for the API server and for our CRD; raises StartupError when one of them does not come."""
    started = time.monotonic()
    while True:
        try:
            found = await kube.get_path(f"/apis/{API_VERSION}")
        except NotFound:
            problem, patience = _no_crd(kube), crd_patience
        except ApiUnavailable as error:
            problem, patience = f"the API server does not answer: {error}", api_patience
        except KubeError as error:
            raise StartupError(f"the API server refuses us: {error}") from error
        else:
            if any(resource.get("name") == PLURAL for resource in found.get("resources") or []):
                return
            problem, patience = _no_crd(kube), crd_patience
        if time.monotonic() - started >= patience:
            raise StartupError(problem)
        await asyncio.sleep(POLL)


def _no_crd(kube: Kube) -> str:
    return (
        f"the custom resource {PLURAL} ({API_VERSION}) is not installed at {kube.server}: "
        "install the chart's CRDs, or run `sglang-rollout crd | kubectl apply --server-side -f -`"
    )


async def run(settings: OperatorSettings) -> None:
    """Run until SIGTERM or SIGINT."""
    metrics = Metrics(settings.render.version)
    async with AsyncExitStack() as stack:
        kube = await stack.enter_async_context(
            await Kube.connect(field_manager=FIELD_MANAGER, kubeconfig=settings.kubeconfig, on_call=metrics.request)
        )
        queue: WorkQueue[Key] = WorkQueue()
        events = EventPoster(kube, component=FIELD_MANAGER, instance=_instance(), now=utc_now)
        reconciler = Reconciler(kube, settings.render, events=events, metrics=metrics, now=utc_now)
        workers = Workers(queue, reconciler.reconcile, metrics=metrics)
        metrics.follow_queue(queue)
        stack.callback(queue.close)
        # Health before anything that waits: the kubelet must not kill us while the API server is slow.
        await _serve(stack, settings, metrics, workers)
        await require_crd(kube)
        log.info("watching %s of %s", ", ".join(settings.namespaces) or "all namespaces", kube.server)
        workers.start(settings.workers)
        stack.push_async_callback(workers.stop)
        relisting = asyncio.create_task(relist(kube, queue, settings.namespaces, seconds=settings.relist_seconds, metrics=metrics))
        stack.callback(relisting.cancel)
        await triggers.watch(queue.add, kube.log_in, settings.namespaces)
    log.info("stopped")


async def _serve(stack: AsyncExitStack, settings: OperatorSettings, metrics: Metrics, workers: Workers) -> None:
    for app, port, what in (
        (metrics_app(metrics), settings.metrics_port, "metrics"),
        (health_app(workers.dead), settings.health_port, "health"),
    ):
        try:
            await stack.enter_async_context(serve(app, port))
        except OSError as error:
            raise StartupError(f"port {port} for {what} cannot be used: {error}; choose another --{what}-port") from error


def _instance() -> str:
    """Who posts an Event: the pod, or a person's machine."""
    return os.environ.get("HOSTNAME") or socket.gethostname()
