"""``sglang-rollout coordinator``: the coordinator's process."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import socket
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import uvloop
from aiohttp import web

from sglang_rollout.coordinator.agents import Agents
from sglang_rollout.coordinator.driver import Driver
from sglang_rollout.coordinator.engine_infos import Infos
from sglang_rollout.coordinator.generate.client import Smg
from sglang_rollout.coordinator.generate.smg_workers import Routable, Router
from sglang_rollout.coordinator.http.app import make_app
from sglang_rollout.coordinator.http.parts import Parts
from sglang_rollout.coordinator.leader import DeposedError, FileLeadership, Leadership, LeaseLeadership
from sglang_rollout.coordinator.members import Members
from sglang_rollout.coordinator.metrics import Metrics
from sglang_rollout.coordinator.record_store import (
    ConfigMapIntent,
    ConfigMapRecord,
    FileIntent,
    FileRecord,
    IntentSource,
    LostError,
    RecordStore,
)
from sglang_rollout.kube.client import Kube
from sglang_rollout.kube.errors import NoCredentials
from sglang_rollout.kube.lease import Lease
from sglang_rollout.proxy.smg import POLICIES, engine_labels

log = logging.getLogger("sglang_rollout.coordinator")

SHUTDOWN_GRACE = 2.0
"""Requests are not waited for at the end: an update cannot outlive its coordinator anyway."""


@dataclass(frozen=True)
class Options:
    """The command line."""

    name: str
    namespace: str
    host: str
    port: int
    smg_url: str
    token_file: Path
    public_url: str
    kubernetes: bool
    intent_file: Path | None
    record_file: Path | None
    policy: str | None = None


def read_token(path: Path) -> str:
    """The control token. Read at each start of the process: the operator never rotates it."""
    try:
        token = path.read_text().strip()
    except OSError as error:
        raise click.ClickException(f"the control token {path} cannot be read: {error.strerror}") from error
    if not token:
        raise click.ClickException(f"the control token {path} is empty")
    return token


async def serve(options: Options, token: str) -> None:
    """Run the coordinator until SIGTERM or SIGINT, or until another one leads."""
    async with contextlib.AsyncExitStack() as stack:
        kube: Kube | None = None
        source: IntentSource
        store: RecordStore
        leadership: Leadership
        if options.kubernetes:
            kube = await stack.enter_async_context(await Kube.connect(field_manager="sglang-rollout-coordinator"))
            source = ConfigMapIntent(kube, options.namespace, options.name)
            store = ConfigMapRecord(kube, options.namespace, options.name)
            lease = Lease(
                kube,
                namespace=options.namespace,
                name=f"{options.name}-router",
                identity=socket.gethostname(),
                owners_from=f"{options.name}-weights",
            )
            leadership = LeaseLeadership(lease)
        else:
            source, store, leadership = _files(options)
        metrics = Metrics()
        members = Members(source, kube=kube, namespace=options.namespace, name=options.name)
        agents = Agents(address=members.url, token=lambda: token, term=lambda: driver.term)
        driver = Driver(name=options.name, members=members, agents=agents, store=store, leadership=leadership, metrics=metrics)
        routable = Routable(members.url)
        router = Router(options.smg_url, lambda: routable.urls(driver.machine), engine_labels(options.policy))
        infos = Infos(agents)
        smg = await stack.enter_async_context(Smg(options.smg_url))
        parts = Parts(
            name=options.name, namespace=options.namespace, public_url=options.public_url, driver=driver,
            agents=agents, members=members, router=router, smg=smg, infos=infos, metrics=metrics,
        )  # fmt: skip
        await agents.start()
        stack.push_async_callback(agents.close)
        runner = web.AppRunner(make_app(parts), access_log=None, handler_cancellation=True, shutdown_timeout=SHUTDOWN_GRACE)
        await runner.setup()
        stack.push_async_callback(runner.cleanup)
        await web.TCPSite(runner, options.host, options.port).start()
        log.info("coordinator of %s/%s listens on %s:%d", options.namespace, options.name, options.host, options.port)
        await _until_signal(driver, router, infos)


def _files(options: Options) -> tuple[IntentSource, RecordStore, Leadership]:
    if options.intent_file is None or options.record_file is None:
        raise click.UsageError("without --kubernetes both --intent-file and --record-file are needed")
    return FileIntent(options.intent_file), FileRecord(options.record_file), FileLeadership(options.record_file)


async def _until_signal(driver: Driver, router: Router, infos: Infos) -> None:
    """Run the loops until a signal or the first of them that fails."""
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    loops = {
        asyncio.create_task(driver.run(), name="driver"),
        asyncio.create_task(router.run(), name="router"),
        asyncio.create_task(infos.run(lambda: driver.machine), name="infos"),
    }
    waiter = asyncio.create_task(stop.wait(), name="signal")
    try:
        done, _ = await asyncio.wait({*loops, waiter}, return_when=asyncio.FIRST_COMPLETED)
        for task in done - {waiter}:
            task.result()
    finally:
        for task in {*loops, waiter}:
            task.cancel()
        await asyncio.gather(*loops, waiter, return_exceptions=True)


@click.command(name="fleet")
@click.option("--name", required=True, help="Name of the rollout.")
@click.option("--namespace", default="default", show_default=True, help="Namespace of the rollout.")
@click.option("--listen", default="127.0.0.1:30020", show_default=True, help="HOST:PORT to listen on.")
@click.option("--smg-url", default="http://127.0.0.1:30010", show_default=True, help="Base URL of smg.")
@click.option("--policy", type=click.Choice(list(POLICIES)), default="CacheAware", show_default=True, help="How smg chooses an engine.")
@click.option("--token-file", required=True, type=click.Path(path_type=Path), help="File with the control token.")
@click.option("--public-url", required=True, help="The fleet's one URL, as trainers see it.")
@click.option("--kubernetes", is_flag=True, help="Intent and record in ConfigMaps, engines by EndpointSlices.")
@click.option("--intent-file", type=click.Path(path_type=Path), help="Intent as JSON; read again when it changes.")
@click.option("--record-file", type=click.Path(path_type=Path), help="Where the record is kept.")
@click.option("--log-level", default="INFO", show_default=True, help="DEBUG, INFO, WARNING or ERROR.")
def command(listen: str, log_level: str, **given: Any) -> None:
    """Run the coordinator: one SGLang-compatible control endpoint for all engines of a fleet."""
    logging.basicConfig(level=log_level.upper(), stream=sys.stderr, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    host, _, port = listen.rpartition(":")
    if not host or not port.isdigit():
        raise click.UsageError(f"--listen {listen} is no HOST:PORT")
    options = Options(host=host.strip("[]"), port=int(port), **given)
    if not options.kubernetes:
        _files(options)
    ended = False
    try:
        uvloop.run(serve(options, read_token(options.token_file)))
    except* (DeposedError, LostError, NoCredentials, OSError) as group:
        ended = True
        for error in _flat(group):
            log.error("the coordinator ends: %s", error)  # noqa: TRY400 - a sentence, not a bug
    if ended:
        raise SystemExit(1)


def _flat(group: BaseExceptionGroup[Exception]) -> Iterator[Exception]:
    for error in group.exceptions:
        if isinstance(error, BaseExceptionGroup):
            yield from _flat(error)
        else:
            yield error
