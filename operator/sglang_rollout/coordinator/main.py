"""``sglang-rollout coordinator``: the coordinator's process."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import socket
import time
from collections.abc import Callable, Coroutine, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import click
import uvloop
from aiohttp import web

from sglang_rollout.coordinator.aborts import Aborts, BatchServer
from sglang_rollout.coordinator.agents import Agents
from sglang_rollout.coordinator.callers.check import CallerCheck
from sglang_rollout.coordinator.callers.keys import SigningKeys, load_keys
from sglang_rollout.coordinator.callers.pods import PodTable
from sglang_rollout.coordinator.callers.tokens import TokenFile
from sglang_rollout.coordinator.callers.watch import follow_callers
from sglang_rollout.coordinator.driver import Driver
from sglang_rollout.coordinator.engine_infos import EngineInfos
from sglang_rollout.coordinator.http.app import Parts, make_app, make_pod_app
from sglang_rollout.coordinator.http.control import routes as control_routes
from sglang_rollout.coordinator.http.info import routes as info_routes
from sglang_rollout.coordinator.http.uploads import routes as upload_routes
from sglang_rollout.coordinator.isolation import IsolationCheck
from sglang_rollout.coordinator.leadership import DeposedError, FileLeadership, Leadership, LeaseLeadership
from sglang_rollout.coordinator.metrics import Metrics
from sglang_rollout.coordinator.record import ConfigMapRecord, FileRecord, HigherTermError, RecordStore
from sglang_rollout.coordinator.smg import SmgWorkers, WantedWorkers
from sglang_rollout.coordinator.wanted_engines import ConfigMapIntent, FileIntent, IntentSource, WantedEngines
from sglang_rollout.credentials import CredentialFile, Credentials
from sglang_rollout.kube.client import Kube
from sglang_rollout.kube.errors import NoCredentials
from sglang_rollout.kube.lease import Lease, find_owners_of
from sglang_rollout.logs import configure_logging, logging_options
from sglang_rollout.proxy.address import Address, Endpoint
from sglang_rollout.proxy.cli import ADDRESS, ENDPOINT
from sglang_rollout.proxy.listen import listen
from sglang_rollout.proxy.smg import POLICIES, engine_labels
from sglang_rollout.wire.ports import BATCHES_PORT, COORDINATOR_PORT

log = logging.getLogger(__name__)

SHUTDOWN_GRACE_SECONDS = 2.0
"""Short, because an update never outlives its coordinator."""


@dataclass(frozen=True)
class Options:
    """Values of the command line."""

    name: str
    namespace: str
    listen: Endpoint
    smg_url: str
    token_file: Path
    public_url: str
    kubernetes: bool
    intent_file: Path | None
    record_file: Path | None
    batches_url: str | None = None
    """Base URL of the batch server; None: there is none."""
    policy: str | None = None
    generate_url: str | None = None
    trainer_token_file: Path | None = None
    pod_listen: Address | None = None
    """Address that answers the questions of the batch server and nothing else; None: ``listen`` answers them."""


def read_credentials(path: Path) -> Credentials:
    """Return the rollout's key from a file. Raises ClickException if the file has none."""
    try:
        return CredentialFile(path)
    except OSError as error:
        raise click.ClickException(f"the rollout's key {path} cannot be read: {error.strerror}") from error
    except ValueError:
        raise click.ClickException(f"the rollout's key {path} is empty") from None


def find_credentials(key: Credentials, pods: PodTable, name: str, engine: str) -> Credentials:
    """Return the credentials of an engine.

    A pod of an earlier release mounts the key itself and accepts nothing else. No other pod ever gets the key.

    Args:
        key: Key of the rollout.
        pods: Live pods.
        name: Name of the rollout.
        engine: Name of the engine.
    """
    own = key.derive(engine)
    return Credentials(*key.lines(), *own.lines()) if pods.mounts(f"{engine}-0", f"{name}-control") else own


async def serve(options: Options, key: Credentials) -> None:
    """Run the coordinator until SIGTERM, SIGINT or a failure."""
    async with contextlib.AsyncExitStack() as stack:
        kube: Kube | None = None
        if options.kubernetes:
            kube = await stack.enter_async_context(await Kube.connect(field_manager="sglang-rollout-coordinator"))
        source, store, leadership = _open_files(options) if kube is None else _open_objects(options, kube)
        metrics = Metrics(lambda: driver.machine)
        wanted_engines = WantedEngines(source, kube=kube, namespace=options.namespace, name=options.name)
        pods = PodTable(options.namespace, time.time)
        credentials = partial(find_credentials, key, pods, options.name)
        agents = Agents(
            address=wanted_engines.url,
            credentials=lambda name: credentials(wanted_engines.credential_name(name)),
            term=lambda: driver.term,
            key=key,
            data_url=wanted_engines.data_url,
        )
        batch_server = await stack.enter_async_context(BatchServer(options.batches_url, lambda: driver.label))
        aborts = Aborts(agents, batch_server)
        driver = Driver(
            name=options.name, wanted_engines=wanted_engines, agents=agents, store=store, leadership=leadership, metrics=metrics,
            is_gone=pods.is_gone, aborts=aborts,
        )  # fmt: skip
        wanted = WantedWorkers(wanted_engines.url)
        workers = SmgWorkers(options.smg_url, lambda: wanted.urls(driver.machine), engine_labels(options.policy))
        infos = EngineInfos(agents)
        keys = SigningKeys(partial(load_keys, kube)) if kube is not None else None
        callers = _make_caller_check(options, wanted_engines, driver, pods=pods, credentials=credentials, keys=keys)
        parts = Parts(
            name=options.name, namespace=options.namespace, public_url=options.public_url,
            generate_url=options.generate_url or options.public_url, driver=driver, agents=agents,
            wanted_engines=wanted_engines, workers=workers, infos=infos, metrics=metrics, callers=callers, aborts=aborts,
        )  # fmt: skip
        await agents.start()
        stack.push_async_callback(agents.close)
        await _listen(stack, make_app(parts, [*info_routes, *control_routes, *upload_routes]), options.listen)
        if options.pod_listen is not None:
            await _listen(stack, make_pod_app(parts, info_routes), options.pod_listen)
        log.info("coordinator of %s/%s listens on %s", options.namespace, options.name, options.listen)
        isolation = IsolationCheck(lambda: driver.machine, wanted_engines.url, driver.note_isolation)
        loops = {
            "driver": driver.run(),
            "smg workers": workers.run(),
            "engine infos": infos.run(lambda: driver.machine),
            "isolation": isolation.run(),
        }
        if kube is not None and keys is not None:
            loops |= {"callers": follow_callers(kube, pods, callers.security, driver.note_caller_rights), "keys": keys.run()}
        await _run_until_signal(loops)


def _make_caller_check(
    options: Options,
    wanted_engines: WantedEngines,
    driver: Driver,
    *,
    pods: PodTable,
    credentials: Callable[[str], Credentials],
    keys: SigningKeys | None,
) -> CallerCheck:
    return CallerCheck(
        name=options.name,
        namespace=options.namespace,
        security=lambda: wanted_engines.intent.security if wanted_engines.intent is not None else None,
        credentials=credentials,
        token_file=TokenFile(options.trainer_token_file) if options.trainer_token_file is not None else None,
        keys=keys,
        in_cluster=options.kubernetes,
        url_host=urlsplit(options.public_url).hostname or "",
        pods=pods,
        holder=lambda: driver.machine.fleet.holder if driver.machine is not None else "",
    )


async def _listen(stack: contextlib.AsyncExitStack, app: web.Application, endpoint: Endpoint) -> None:
    runner = web.AppRunner(app, access_log=None, handler_cancellation=True, shutdown_timeout=SHUTDOWN_GRACE_SECONDS)
    await runner.setup()
    stack.push_async_callback(runner.cleanup)
    await listen(runner, endpoint)


def _open_objects(options: Options, kube: Kube) -> tuple[IntentSource, RecordStore, Leadership]:
    name, namespace = options.name, options.namespace
    owners = partial(find_owners_of, kube, namespace, f"{name}-weights")
    lease = Lease(kube, namespace=namespace, name=f"{name}-router", identity=socket.gethostname(), find_owners=owners)
    return ConfigMapIntent(kube, namespace, name), ConfigMapRecord(kube, namespace, name), LeaseLeadership(lease)


def _open_files(options: Options) -> tuple[IntentSource, RecordStore, Leadership]:
    if options.intent_file is None or options.record_file is None:
        raise click.UsageError("without --kubernetes both --intent-file and --record-file are needed")
    return FileIntent(options.intent_file), FileRecord(options.record_file), FileLeadership(options.record_file)


async def _run_until_signal(coroutines: Mapping[str, Coroutine[Any, Any, None]]) -> None:
    """Run the loops, by name, until a signal, or until the first loop fails."""
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    loops = {asyncio.create_task(coroutine, name=name) for name, coroutine in coroutines.items()}
    waiter = asyncio.create_task(stop.wait(), name="signal")
    try:
        done, _ = await asyncio.wait({*loops, waiter}, return_when=asyncio.FIRST_COMPLETED)
        for task in done - {waiter}:
            task.result()
    finally:
        for task in {*loops, waiter}:
            task.cancel()
        await asyncio.gather(*loops, waiter, return_exceptions=True)


@click.command(name="coordinator")
@click.option("--name", required=True, help="Name of the rollout.")
@click.option("--namespace", default="default", show_default=True, help="Namespace of the rollout.")
@click.option(
    "--listen",
    type=ENDPOINT,
    default=f"127.0.0.1:{COORDINATOR_PORT}",
    show_default=True,
    help="Address to listen on. The coordinator believes what the front says about callers, so no other process may reach it.",
)
@click.option(
    "--pod-listen",
    type=ADDRESS,
    show_default="the value of --listen",
    help="Address that answers the questions of the batch server, and no control call.",
)
@click.option("--smg-url", default="http://127.0.0.1:30010", show_default=True, help="Base URL of smg.")
@click.option("--batches-url", default=f"http://127.0.0.1:{BATCHES_PORT}", show_default=True, help="Base URL of the batch server.")
@click.option("--policy", type=click.Choice(list(POLICIES)), default="CacheAware", show_default=True, help="How smg chooses an engine.")
@click.option(
    "--token-file",
    required=True,
    type=click.Path(path_type=Path),
    help="File with the rollout's key, one a line: credentials of the first are sent, those of all are accepted.",
)
@click.option(
    "--trainer-token-file", type=click.Path(path_type=Path), help="File with a token that trainers send; read again when it changes."
)
@click.option("--public-url", required=True, help="URL of the fleet, as trainers use it.")
@click.option("--generate-url", show_default="the value of --public-url", help="URL that serves data paths only.")
@click.option("--kubernetes", is_flag=True, help="Read intent and record from ConfigMaps, and addresses from EndpointSlices.")
@click.option("--intent-file", type=click.Path(path_type=Path), help="Intent as JSON; read again when it changes.")
@click.option("--record-file", type=click.Path(path_type=Path), help="File in which the record is stored.")
@logging_options
def command(log_level: str, log_format: str, **given: Any) -> None:
    """Run the coordinator: SGLang's control API for all engines of a fleet."""
    configure_logging(log_level, log_format)
    options = Options(**given)
    if not options.kubernetes:
        _open_files(options)
    failed = False
    try:
        uvloop.run(serve(options, read_credentials(options.token_file)))
    except* (DeposedError, HigherTermError, NoCredentials, OSError) as group:
        failed = True
        for error in _flatten(group):
            log.error("the coordinator ends: %s", error)  # noqa: TRY400 - an expected end, not a bug
    if failed:
        raise SystemExit(1)


def _flatten(group: BaseExceptionGroup[Exception]) -> Iterator[Exception]:
    for error in group.exceptions:
        if isinstance(error, BaseExceptionGroup):
            yield from _flatten(error)
        else:
            yield error
