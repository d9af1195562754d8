"""``sglang-rollout operator``: run the operator, in a cluster or outside."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable
from typing import Any, TypeVar

import click

from sglang_rollout import __version__
from sglang_rollout.controller.main import StartupError, run
from sglang_rollout.controller.render.common import Settings
from sglang_rollout.controller.settings import OperatorSettings, configure_logging
from sglang_rollout.kube.errors import KubeError
from sglang_rollout.wire.ports import OPERATOR_HEALTH_PORT, OPERATOR_METRICS_PORT

ENV = "SGLANG_ROLLOUT"
_F = TypeVar("_F", bound=Callable[..., Any])


def setting(name: str, default: str | int, text: str, kind: click.ParamType[Any] | None = None) -> Callable[[_F], _F]:
    """Return an option that can also be set by an environment variable."""
    variable = f"{ENV}_{name.upper().replace('-', '_')}"
    return click.option(f"--{name}", default=default, envvar=variable, show_default=True, type=kind, help=text)


PORT = click.IntRange(0, 65535)


def image_options(function: _F) -> _F:
    """Add the options that name the images of the children."""
    for option in (
        setting("image-pull-policy", "IfNotPresent", "Pull policy of these two images.", click.Choice(["Always", "IfNotPresent", "Never"])),
        setting("router-image", f"sglang-rollout/router:{__version__}", "Image of gate, front and smg."),
        setting("coordinator-image", f"sglang-rollout/coordinator:{__version__}", "Image of agent and coordinator."),
    ):
        function = option(function)
    return function


@click.command()
@click.option(
    "--namespace",
    "namespaces",
    multiple=True,
    metavar="NAME",
    envvar=f"{ENV}_NAMESPACES",
    help="Namespace to watch; repeat for more.  [default: all namespaces]",
)
@image_options
@setting("metrics-port", OPERATOR_METRICS_PORT, "Port of /metrics; 0: none.", PORT)
@setting("health-port", OPERATOR_HEALTH_PORT, "Port of /healthz; 0: none.", PORT)
@click.option(
    "--kubeconfig",
    type=click.Path(exists=True, dir_okay=False),
    help="How to reach the cluster.  [default: the pod's service account, else $KUBECONFIG, else ~/.kube/config]",
)
@setting("log-format", "text", "Format of log lines: for people or for a collector.", click.Choice(["text", "json"]))
@click.option("--verbose", is_flag=True, help="Also log every reconcile and kopf's own lines.")
def command(
    *,
    namespaces: tuple[str, ...],
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
    configure_logging(log_format, verbose=verbose)
    settings = OperatorSettings(
        render=Settings(
            coordinator_image=coordinator_image,
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
        raise click.ClickException(f"the operator stops: {error}") from error


async def _until_stopped(settings: OperatorSettings) -> None:
    """Run until SIGTERM or SIGINT, which end the process with exit code 0.

    kopf handles both signals while it watches. Before that, this function does: PID 1 of a container ignores SIGTERM without a
    handler, and its pod would take the full grace period to stop.
    """
    main = asyncio.ensure_future(run(settings))
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, main.cancel)
    try:
        await main
    except asyncio.CancelledError:
        if not main.cancelled():
            raise
