"""``sglang-rollout operator``: the operator process.

The process connects to the API server, checks the CRD, starts the workers, and watches until SIGTERM or SIGINT.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import time
from contextlib import AsyncExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import click

from sglang_rollout import __version__
from sglang_rollout.api.v1alpha1 import API_VERSION, PLURAL
from sglang_rollout.controller.clock import utc_now
from sglang_rollout.controller.decide.allowed import NOTHING, Allowed
from sglang_rollout.controller.events import EventPoster
from sglang_rollout.controller.metrics import Key, Metrics, build_health_app, build_metrics_app, serve
from sglang_rollout.controller.options import ENVIRONMENT, PORT, allow_options, image_options, setting
from sglang_rollout.controller.reconcile import Reconciler
from sglang_rollout.controller.render.common import Settings
from sglang_rollout.controller.render.names import FIELD_MANAGER
from sglang_rollout.controller.standing import Standing
from sglang_rollout.controller.triggers import OutageFilter, relist_periodically, watch_rollouts
from sglang_rollout.controller.workers import Workers
from sglang_rollout.controller.workqueue import WorkQueue
from sglang_rollout.kube.client import Kube
from sglang_rollout.kube.credentials import read_credentials
from sglang_rollout.kube.errors import ApiUnavailable, KubeError, NotFound
from sglang_rollout.logs import FORMATS, configure_logging
from sglang_rollout.wire.ports import OPERATOR_HEALTH_PORT, OPERATOR_METRICS_PORT

log = logging.getLogger(__name__)

# At start, the API server may lag (a node that boots, a CRD that is being established). After these times the process ends with a
# message, because a crash loop is easier to notice than an operator that waits silently.
API_TIMEOUT_SECONDS = 60.0
CRD_TIMEOUT_SECONDS = 5.0
POLL_SECONDS = 0.5

WORKERS = 4
"""Concurrent reconciles. A reconcile takes a dozen small reads, so four workers suffice for hundreds of rollouts."""
RELIST_SECONDS = 300.0
"""Period after which every rollout is reconciled without an event, so that correctness never depends on a watch."""

POD_NAMESPACE_FILE = Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace")
"""The kubelet writes it into pods with a ServiceAccount's token."""


class StartupError(Exception):
    """The operator cannot start. ``str()`` says why and what to do."""


@dataclass(frozen=True)
class OperatorSettings:
    """Settings from the command line."""

    render: Settings
    """Settings of the rendered objects: images and their pull policy."""
    allowed: Allowed = NOTHING
    """What rollouts may ask for beyond ordinary pods."""
    namespaces: tuple[str, ...] = ()
    """Namespaces to watch; empty: all."""
    kubeconfig: str | None = None
    metrics_port: int = OPERATOR_METRICS_PORT
    """Port of ``/metrics``; 0: no metrics server."""
    health_port: int = OPERATOR_HEALTH_PORT
    """Port of ``/healthz``; 0: no health server."""


@click.command()
@click.option(
    "--namespace",
    "namespaces",
    multiple=True,
    metavar="NAME",
    envvar=f"{ENVIRONMENT}_NAMESPACES",
    help="Namespace to watch; repeat for more.  [default: all namespaces]",
)
@image_options
@allow_options
@setting("metrics-port", OPERATOR_METRICS_PORT, "Port of /metrics; 0: none.", PORT)
@setting("health-port", OPERATOR_HEALTH_PORT, "Port of /healthz; 0: none.", PORT)
@click.option(
    "--kubeconfig",
    type=click.Path(exists=True, dir_okay=False),
    help="How to reach the cluster.  [default: the pod's service account, else $KUBECONFIG, else ~/.kube/config]",
)
@setting("log-format", "text", "Format of log lines: for people or for a collector.", click.Choice(FORMATS))
@click.option("--verbose", is_flag=True, help="Also log every reconcile and kopf's own lines.")
def command(
    *,
    namespaces: tuple[str, ...],
    allowed: Allowed,
    coordinator_image: str,
    router_image: str,
    image_pull_policy: str,
    metrics_port: int,
    health_port: int,
    kubeconfig: str | None,
    log_format: str,
    verbose: bool,
) -> None:
    """Watch SGLangRollouts and create their engines, router and services.

    The Helm chart installs the operator in a cluster. Outside a cluster, it uses your kubeconfig. An option with a default is also
    read from the environment: --coordinator-image from SGLANG_ROLLOUT_COORDINATOR_IMAGE, and so on; the namespaces from
    SGLANG_ROLLOUT_NAMESPACES.
    """
    _configure_logging(log_format, verbose=verbose)
    settings = OperatorSettings(
        render=Settings(coordinator_image=coordinator_image, router_image=router_image, image_pull_policy=image_pull_policy),
        allowed=allowed,
        namespaces=namespaces,
        kubeconfig=kubeconfig,
        metrics_port=metrics_port,
        health_port=health_port,
    )
    try:
        asyncio.run(_until_stopped(settings))
    except (StartupError, KubeError) as error:
        raise click.ClickException(f"the operator stops: {error}") from error


async def _until_stopped(settings: OperatorSettings) -> None:
    """Run until SIGTERM or SIGINT, which end the process with exit code 0.

    kopf handles both signals while it watches. Before that, this function handles them. Without a handler, PID 1 of a container
    ignores SIGTERM, and the pod takes the full grace period to stop.
    """
    main = asyncio.ensure_future(run(settings))
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, main.cancel)
    try:
        await main
    except asyncio.CancelledError:
        if not main.cancelled():
            raise


def _configure_logging(log_format: str, *, verbose: bool) -> None:
    configure_logging("DEBUG" if verbose else "INFO", log_format)
    for handler in logging.getLogger().handlers:
        handler.addFilter(OutageFilter())
    # kopf logs "Handler … succeeded" for every event at INFO. The operator logs changes itself.
    logging.getLogger("kopf").setLevel(logging.DEBUG if verbose else logging.WARNING)


async def _require_crd(kube: Kube) -> None:
    """Wait for the API server and for the CRD.

    Raises:
        StartupError: The API server or the CRD did not appear in time, or the API server refuses access.
    """
    started = time.monotonic()
    while True:
        try:
            found = await kube.get_path(f"/apis/{API_VERSION}")
        except NotFound:
            problem, timeout = _describe_missing_crd(kube), CRD_TIMEOUT_SECONDS
        except ApiUnavailable as error:
            problem, timeout = f"the API server does not answer: {error}", API_TIMEOUT_SECONDS
        except KubeError as error:
            raise StartupError(f"the API server refuses the operator: {error}") from error
        else:
            if any(resource.get("name") == PLURAL for resource in found.get("resources") or []):
                return
            problem, timeout = _describe_missing_crd(kube), CRD_TIMEOUT_SECONDS
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
    metrics = Metrics(__version__)
    async with AsyncExitStack() as stack:
        kube = await stack.enter_async_context(
            await Kube.connect(field_manager=FIELD_MANAGER, kubeconfig=settings.kubeconfig, on_call=metrics.count_request)
        )
        queue: WorkQueue[Key] = WorkQueue()
        events = EventPoster(kube, component=FIELD_MANAGER, instance=_reporting_instance(), now=utc_now)
        reconciler = Reconciler(kube, settings.render, settings.allowed, events=events, metrics=metrics, now=utc_now)
        standing = Standing(kube, reconciler.reconcile, identity=_identity(), wake=queue.add, events=events, metrics=metrics)
        stack.push_async_callback(standing.close)
        workers = Workers(queue, standing.reconcile, metrics=metrics)
        metrics.follow_queue(queue)
        stack.callback(queue.close)
        # The health server starts before anything that waits: the kubelet must not kill the operator while the API server is slow.
        await _serve(stack, settings, metrics, workers)
        await _require_crd(kube)
        log.info("watching %s of %s", ", ".join(settings.namespaces) or "all namespaces", kube.server)
        workers.start(WORKERS)
        stack.push_async_callback(workers.stop)
        relisting = asyncio.create_task(relist_periodically(kube, queue.add, settings.namespaces, seconds=RELIST_SECONDS, metrics=metrics))
        stack.callback(relisting.cancel)
        await watch_rollouts(queue.add, partial(read_credentials, settings.kubeconfig), settings.namespaces)
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


def _identity() -> str:
    """Return the name that the Leases have. A pod keeps it when its container restarts; a process of a developer has its own."""
    if POD_NAMESPACE_FILE.is_file():
        return f"{POD_NAMESPACE_FILE.read_text().strip()}/{_reporting_instance()}"
    return f"{_reporting_instance()}/{os.getpid()}"


def _reporting_instance() -> str:
    """Return the name that Events report: the pod, or the machine of a developer."""
    return os.environ.get("HOSTNAME") or socket.gethostname()
