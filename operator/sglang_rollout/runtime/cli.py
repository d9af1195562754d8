"""``sglang-rollout operator``: run the operator, in a cluster or outside."""

from __future__ import annotations

import asyncio
import signal

import click

from sglang_rollout import __version__
from sglang_rollout.core.settings import Settings
from sglang_rollout.runtime.errors import KubeError
from sglang_rollout.runtime.process import StartupError, run
from sglang_rollout.runtime.settings import OperatorSettings, configure_logging
from sglang_rollout.wire.ports import OPERATOR_HEALTH_PORT, OPERATOR_METRICS_PORT

ENV = "SGLANG_ROLLOUT"


@click.command()
@click.option(
    "--namespace",
    "namespaces",
    multiple=True,
    envvar=f"{ENV}_NAMESPACES",
    help="Namespace to look after; repeat for more. None: all namespaces.",
)
@click.option(
    "--fleet-image",
    default=f"sglang-rollout/fleet:{__version__}",
    envvar=f"{ENV}_FLEET_IMAGE",
    show_default=True,
    help="Image of agent and coordinator.",
)
@click.option(
    "--router-image",
    default=f"sglang-rollout/router:{__version__}",
    envvar=f"{ENV}_ROUTER_IMAGE",
    show_default=True,
    help="Image of gate, front and smg.",
)
@click.option(
    "--image-pull-policy",
    default="IfNotPresent",
    envvar=f"{ENV}_IMAGE_PULL_POLICY",
    show_default=True,
    type=click.Choice(["Always", "IfNotPresent", "Never"]),
    help="Pull policy of these two images.",
)
@click.option(
    "--metrics-port",
    default=OPERATOR_METRICS_PORT,
    envvar=f"{ENV}_METRICS_PORT",
    show_default=True,
    type=click.IntRange(0, 65535),
    help="Port of /metrics; 0: none.",
)
@click.option(
    "--health-port",
    default=OPERATOR_HEALTH_PORT,
    envvar=f"{ENV}_HEALTH_PORT",
    show_default=True,
    type=click.IntRange(0, 65535),
    help="Port of /healthz; 0: none.",
)
@click.option(
    "--kubeconfig",
    type=click.Path(exists=True, dir_okay=False),
    help="Default: the pod's service account, else $KUBECONFIG, else ~/.kube/config.",
)
@click.option(
    "--log-format",
    default="text",
    envvar=f"{ENV}_LOG_FORMAT",
    show_default=True,
    type=click.Choice(["text", "json"]),
    help="Lines for people or for a collector.",
)
@click.option("--verbose", is_flag=True, help="Also log every reconcile and kopf's own lines.")
def command(
    *,
    namespaces: tuple[str, ...],
    fleet_image: str,
    router_image: str,
    image_pull_policy: str,
    metrics_port: int,
    health_port: int,
    kubeconfig: str | None,
    log_format: str,
    verbose: bool,
) -> None:
    """Watch SGLangRollouts and make their engines, router and services."""
    configure_logging(log_format, verbose=verbose)
    settings = OperatorSettings(
        render=Settings(
            fleet_image=fleet_image,
            router_image=router_image,
            image_pull_policy=image_pull_policy,
            version=__version__,
        ),
        namespaces=namespaces,
        kubeconfig=kubeconfig,
        metrics_port=metrics_port,
        health_port=health_port,
    )
    try:
        asyncio.run(_until_stopped(settings))
    except (StartupError, KubeError) as error:
        raise click.ClickException(f"the operator ends: {error}") from error


async def _until_stopped(settings: OperatorSettings) -> None:
    """Run; SIGTERM and SIGINT end it with exit code 0.

    kopf handles both signals once it watches. Until then they are ours: as pid 1 of a container a process without a
    handler ignores SIGTERM, and its pod takes the full grace period to go.
    """
    main = asyncio.ensure_future(run(settings))
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, main.cancel)
    try:
        await main
    except asyncio.CancelledError:
        if not main.cancelled():
            raise
