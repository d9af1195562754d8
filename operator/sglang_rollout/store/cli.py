"""``sglang-rollout store``: run the weight store of one fleet until SIGTERM."""

from __future__ import annotations

import asyncio
import logging
import signal
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import click
from aiohttp import web

from sglang_rollout.bounded import open_connector, open_session
from sglang_rollout.credentials import Credentials
from sglang_rollout.internal.options import read_token_file
from sglang_rollout.logs import configure_logging, logging_options
from sglang_rollout.proxy.address import Address
from sglang_rollout.proxy.listen import listen as listen_at
from sglang_rollout.staging.copies import Copies
from sglang_rollout.staging.index import StagedError
from sglang_rollout.staging.serve import staging_routes
from sglang_rollout.store.app import make_control_app, make_data_app, make_metrics_app
from sglang_rollout.store.receivers import Receivers
from sglang_rollout.store.snapshots import Settings as SnapshotSettings
from sglang_rollout.store.snapshots import Snapshots
from sglang_rollout.store.state import TermFile
from sglang_rollout.store.store import Store
from sglang_rollout.wire import ports

log = logging.getLogger(__name__)

_TIMEOUT = aiohttp.ClientTimeout(total=None, connect=5.0, sock_read=60.0)
"""For calls of agents: seconds to connect, and seconds without a byte after which a connection has failed."""


@dataclass(frozen=True)
class Settings:
    """Settings of a weight store. The options of the command describe them."""

    name: str
    listen: Address
    data_listen: Address
    metrics_listen: Address
    volume: Path
    state_dir: Path
    credentials: Credentials
    snapshots: SnapshotSettings | None = None


def _parse_address(_context: click.Context, _parameter: click.Parameter, text: str) -> Address:
    """Parse an address. The option type of ``proxy.cli`` needs jinja2, which the image of the engines may lack."""
    try:
        return Address.parse(text)
    except ValueError as error:
        raise click.BadParameter(str(error)) from None


@click.command(name="store")
@click.option("--name", required=True, help="Name of the weight store.")
@click.option(
    "--listen",
    callback=_parse_address,
    default=f"127.0.0.1:{ports.STORE_PORT}",
    show_default=True,
    metavar="host:port",
    help="Address for the coordinator.",
)
@click.option(
    "--data-listen",
    callback=_parse_address,
    default=f"127.0.0.1:{ports.STAGING_PORT}",
    show_default=True,
    metavar="host:port",
    help="Address for uploads, and for the agents that copy versions.",
)
@click.option(
    "--metrics-listen",
    callback=_parse_address,
    default=f"127.0.0.1:{ports.METRICS_PORT}",
    show_default=True,
    metavar="host:port",
    help="Address of the metrics.",
)
@click.option("--volume", required=True, type=click.Path(path_type=Path), help="Folder of the versions, usually in memory (tmpfs).")
@click.option(
    "--state-dir",
    required=True,
    type=click.Path(path_type=Path),
    help="Writable folder for terms and tickets; must outlive the process, as the volume does.",
)
@click.option(
    "--token-file",
    required=True,
    type=click.Path(path_type=Path),
    help="File with the credentials of the weight store, one a line. All are accepted. Read again when it changes.",
)
@click.option(
    "--snapshots",
    type=click.Path(path_type=Path),
    metavar="DIR",
    show_default="none are written",
    help="Folder for snapshots of committed versions, on a volume that outlives the machine's memory.",
)
@click.option("--snapshots-every", type=click.IntRange(min=1), default=1, show_default=True, help="Versions between two snapshots.")
@click.option("--snapshots-keep", type=click.IntRange(min=1), default=3, show_default=True, help="Newest snapshots that stay.")
@logging_options
def command(
    *,
    token_file: Path,
    log_level: str,
    log_format: str,
    snapshots: Path | None,
    snapshots_every: int,
    snapshots_keep: int,
    **options: Any,
) -> None:
    """Run the weight store: it receives versions of trainers, and keeps them for the engines' agents."""
    configure_logging(log_level, log_format)
    credentials = read_token_file(token_file)
    try:
        written = SnapshotSettings(snapshots, snapshots_every, snapshots_keep) if snapshots is not None else None
        asyncio.run(run(Settings(credentials=credentials, snapshots=written, **options)))
    except StagedError as error:
        raise click.ClickException(str(error)) from None
    except OSError as error:
        raise click.ClickException(f"the weight store cannot start: {error}") from None


async def run(settings: Settings) -> None:
    """Serve until SIGTERM."""
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    async with open_session(timeout=_TIMEOUT, connector=open_connector(limit=0)) as session:
        await _serve(settings, session, stop)


async def _serve(settings: Settings, session: aiohttp.ClientSession, stop: asyncio.Event) -> None:
    term = TermFile(settings.state_dir)
    copies = Copies(settings.volume, settings.state_dir)
    receivers = Receivers()
    snapshots = Snapshots(settings.snapshots) if settings.snapshots is not None else None
    store = Store(copies, receivers, session, snapshots)
    apps = (
        (make_control_app(store, settings.credentials, term), settings.listen),
        (make_data_app(store, staging_routes(store)), settings.data_listen),
        (make_metrics_app(store), settings.metrics_listen),
    )
    runners: list[web.AppRunner] = []
    try:
        for app, address in apps:
            runners.append(web.AppRunner(app, access_log=None, shutdown_timeout=0.1))
            await runners[-1].setup()
            await listen_at(runners[-1], address)
        receivers.prepare()
        if snapshots is not None:
            snapshots.start()
        log.info(
            "Weight store %s at %s, data at %s, versions in %s.", settings.name, settings.listen, settings.data_listen, settings.volume
        )
        await stop.wait()
    finally:
        await store.close()
        for runner in runners:
            await runner.cleanup()
