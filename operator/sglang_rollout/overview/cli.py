"""``sglang-rollout status``."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import sys
from datetime import UTC, datetime

import click

from sglang_rollout.kube.client import Kube
from sglang_rollout.kube.credentials import find_namespace
from sglang_rollout.kube.errors import KubeError
from sglang_rollout.overview.observation import Observation, UnreadableError
from sglang_rollout.overview.observe import AbsentError, observe
from sglang_rollout.overview.screen import MAX_LINES, Size, draw
from sglang_rollout.overview.watch import LostError, watch

_DEADLINE_SECONDS = 10.0
"""Limit of one request: a person waits."""
_TOP, _TO_LINE_END, _TO_SCREEN_END = "\x1b[H", "\x1b[K", "\x1b[J"


@click.command()
@click.argument("name")
@click.option("-n", "--namespace", metavar="NAMESPACE", help="Namespace of the rollout.  [default: that of your kubectl context]")
@click.option("-w", "--watch", "is_watched", is_flag=True, help="Show it again after every change, until Ctrl-C.")
@click.option(
    "--kubeconfig",
    type=click.Path(exists=True, dir_okay=False),
    help="How to reach the cluster.  [default: the pod's service account, else $KUBECONFIG, else ~/.kube/config]",
)
def command(*, name: str, namespace: str | None, is_watched: bool, kubeconfig: str | None) -> None:
    """Show the state of the fleet NAME in at most 30 lines: what is wrong, engines, the update in progress, and the last updates.

    It reads the SGLangRollout and two ConfigMaps from the API server with your rights, and needs no token of the fleet. The ClusterRole
    view of Kubernetes is enough.
    """
    try:
        # Ctrl-C is how a watch ends.
        with contextlib.suppress(KeyboardInterrupt):
            asyncio.run(_show(name, namespace or find_namespace(kubeconfig), kubeconfig, is_watched=is_watched))
    except (KubeError, AbsentError, LostError, UnreadableError) as error:
        raise click.ClickException(str(error)) from error


async def _show(name: str, namespace: str, kubeconfig: str | None, *, is_watched: bool) -> None:
    async with await Kube.connect(field_manager="sglang-rollout-status", kubeconfig=kubeconfig, deadline=_DEADLINE_SECONDS) as kube:
        if is_watched:
            await watch(kube, namespace, name, Painter().paint)
        else:
            click.echo("\n".join(_draw(await observe(kube, namespace, name), MAX_LINES)))


class Painter:
    """Paints one observation after the other: over each other on a terminal, below each other in a file."""

    def __init__(self) -> None:
        self._last: Observation | None = None

    def paint(self, seen: Observation) -> None:
        """Paint an observation. In a file, an unchanged one is left out."""
        if sys.stdout.isatty():
            lines = _draw(seen, min(MAX_LINES, shutil.get_terminal_size().lines - 1))
            if self._last is None:
                click.clear()
            click.echo(_TOP + "".join(f"{line}{_TO_LINE_END}\n" for line in lines) + _TO_SCREEN_END, nl=False)
        elif seen != self._last:
            click.echo("\n".join([*([""] if self._last else []), *_draw(seen, MAX_LINES)]))
        self._last = seen


def _draw(seen: Observation, height: int) -> list[str]:
    return draw(seen, datetime.now(UTC), Size(shutil.get_terminal_size((120, MAX_LINES)).columns, height))
