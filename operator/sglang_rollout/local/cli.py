"""``sglang-rollout local``: run gates, agents, smg, coordinator and front on this machine, in front of running SGLang servers."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import os
import random
import secrets
import shutil
import signal
import socket
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path

import aiohttp
import click

from sglang_rollout.agent.plugin_reports import PluginReports
from sglang_rollout.api.engine_spec import PluginUse
from sglang_rollout.api.limits_spec import Limits
from sglang_rollout.api.weights_spec import ActivationStrategy, Backend, Transport, Weights
from sglang_rollout.bounded import open_session
from sglang_rollout.credentials import CredentialFile
from sglang_rollout.local.plan import EngineArg, Folders, Plan, count_ports, parse_engine
from sglang_rollout.local.plugin import ADVICE
from sglang_rollout.local.sizes import (
    LOADER_OPTION,
    Sizes,
    SizesError,
    check_loaders,
    check_plugins,
    check_sizes,
    read_sizes,
    with_reported_sizes,
)
from sglang_rollout.local.store_python import OPTION, StorePythonError, check_store_python, has_torch
from sglang_rollout.local.supervisor import Supervisor
from sglang_rollout.local.weights import parse_weights
from sglang_rollout.plugin.install import reports_folder
from sglang_rollout.proxy.address import Address
from sglang_rollout.proxy.cli import ADDRESS, NO_HAPROXY, find_haproxy, limits_option, prefix_cache_option
from sglang_rollout.proxy.smg import POLICIES
from sglang_rollout.sglang.api import PauseMode
from sglang_rollout.wire.ports import FLEET, FLEET_HEALTH, METRICS

_START_SECONDS = 300.0
"""Default of ``--start-timeout``. The processes start in seconds on an idle machine, and in minutes on one that is busy."""
_MAX_RUNTIME_PATH = 50
_LOWEST_PORT, _HIGHEST_PORT = 20000, 32767
"""Below Linux's ephemeral ports, so that no outgoing connection takes a port between two starts of a child process."""


class CannotStartError(click.ClickException):
    """The fleet cannot start. The message says why, and what to do."""

    exit_code = 2


class NotReadyError(CannotStartError):
    """The processes of the fleet were started, and the fleet did not become ready. The message names their logs."""


@click.command(name="local")
@click.option(
    "--engine",
    "engines",
    multiple=True,
    required=True,
    metavar="URL[,tp=N][,pp=N][,dp=N]",
    help="SGLang server, started now or later; repeat for more. tp=N: required tensor parallel size [default: what the server reports]."
    " pp=N: pipeline stages, dp=N: replicas of the model, both for transport Staged [default: what the server reports, or 1 if it is not"
    " up].",
)
@click.option("--listen", type=ADDRESS, default="127.0.0.1:30000", show_default=True, help="Address of the fleet's URL.")
@click.option(
    "--backend",
    type=click.Choice(["nccl", "gloo"]),
    default="nccl",
    show_default=True,
    help="Backend of process groups for trainers that do not name one.",
)
@click.option(
    "--transport",
    type=click.Choice([each.value for each in Transport]),
    default=Transport.DISTRIBUTED.value,
    show_default=True,
    metavar="|".join(Transport),
    help="spec.weights.transport. Staged: with a weight store, and copies of versions below --state-dir, for example in /dev/shm.",
)
@click.option("--staging-size-limit", metavar="SIZE", help="With --transport Staged: maximum bytes of one version, such as 20Gi.")
@click.option(
    "--activation",
    type=click.Choice([each.value for each in ActivationStrategy]),
    show_default=ActivationStrategy.ALL_AT_ONCE.value,
    metavar="|".join(ActivationStrategy),
    help="With --transport Staged: spec.weights.activation.strategy. Rolling: engines load a version in turn, and those that wait serve the"
    " version before (versionPolicy MaxStaleness, with maxStaleness 1 unless --weights sets it).",
)
@click.option(
    "--store-python",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    show_default="this Python",
    help="With --transport Staged: Python that runs the weight store, with torch and sglang-rollout[coordinator]. Trainers with process"
    " groups need it.",
)
@click.option(
    "--snapshots",
    type=click.Path(file_okay=False, path_type=Path),
    metavar="DIR",
    show_default="none are written",
    help="With --transport Staged: folder on a disk for snapshots of committed versions (spec.weights.store.snapshots).",
)
@click.option("--policy", type=click.Choice(list(POLICIES)), default="CacheAware", show_default=True, help="Routing policy of smg.")
@click.option(
    "--pause-mode",
    type=click.Choice([mode.value for mode in PauseMode], case_sensitive=False),
    default=PauseMode.RETRACT.value,
    show_default=True,
    metavar="|".join(PauseMode),  # click would show the values in lower case
    help="spec.weights.pauseMode: how engines are paused for an update when the trainer does not pause them itself.",
)
@click.option(
    "--weights",
    "weights_json",
    default="{}",
    metavar="JSON",
    help='Further settings of spec.weights: \'{"verify": "Always", "minCommitted": 1, "catchUp": {"disk": "/ckpt"}}\'.',
)
@click.option(
    "--token-file",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="File with the token that control calls from other machines send. Programs of this machine need none.",
)
@limits_option
@prefix_cache_option
@click.option(
    "--plugin",
    type=click.Choice([each.value for each in PluginUse]),
    default=PluginUse.REQUIRED.value,
    show_default=True,
    metavar="|".join(PluginUse),
    help="spec.engine.plugin: whether an engine serves only while the plug-in of `sglang-rollout plugin` is active in it.",
)
@click.option("--tensor-size", type=click.IntRange(1), help="tp=N for engines without tp=N [default: what the server reports].")
@click.option(
    "--state-dir",
    type=click.Path(path_type=Path),
    show_default="a temporary folder, removed at the end",
    help="Folder for records, token and logs. It is kept.",
)
@click.option(
    "--base-port",
    type=click.IntRange(1024, 65000),
    show_default="free ports are chosen",
    help="First loopback port of the processes.",
)
@click.option(
    "--start-timeout",
    type=click.FloatRange(min=0, min_open=True),
    default=_START_SECONDS,
    show_default=True,
    metavar="SECONDS",
    help="How long the coordinator may take to answer. Engines may start later.",
)
def command(
    *,
    engines: tuple[str, ...],
    listen: Address,
    backend: str,
    transport: str,
    staging_size_limit: str | None,
    activation: str | None,
    store_python: Path | None,
    snapshots: Path | None,
    policy: str,
    pause_mode: str,
    weights_json: str,
    token_file: Path | None,
    limits: Limits,
    shared_prefix_cache: bool,
    plugin: str,
    tensor_size: int | None,
    state_dir: Path | None,
    base_port: int | None,
    start_timeout: float,
) -> None:
    """Run a fleet on this machine, without Kubernetes, in front of SGLang servers. Ctrl-C or SIGTERM ends the fleet, not the servers.

    \b
    sglang-rollout local --engine http://127.0.0.1:30101 --engine http://127.0.0.1:30102,tp=2

    The parallel sizes of engines that answer are checked at the start. An engine that is not up yet joins later. If its tensor parallel
    size is not the given one, it stays out of the fleet, and GET /fleet says why.
    """  # noqa: D301 - click reads the character \b, which a raw string would not contain
    try:
        parsed = tuple(parse_engine(text, tensor_size) for text in engines)
    except ValueError as error:
        raise click.BadParameter(str(error), param_hint="--engine") from None
    _check_programs()
    _check_engines(parsed)
    _check_can_listen(listen, "--listen")
    defaults = {"backend": Backend(backend), "pause_mode": PauseMode(pause_mode), "transport": Transport(transport)}
    weights = parse_weights(weights_json, defaults, size_limit=staging_size_limit, snapshots=snapshots, activation=activation)
    _check_store_python(store_python, weights)
    reports = reports_folder(os.environ)
    own = PluginReports(reports, cache_key=not shared_prefix_cache)
    found = asyncio.run(_read_sizes(parsed, weights, own, PluginUse(plugin)))
    taken = {listen.port, *(engine.address.port for engine in parsed)}
    plan = Plan(
        listen=listen,
        engines=with_reported_sizes(parsed, found),
        weights=weights,
        store_python=sys.executable if store_python is None else str(store_python.absolute()),
        policy=policy,
        ports=_choose_ports(count_ports(len(parsed), staged=weights.is_staged), base_port, taken=taken),
        reports=reports,
        plugin=PluginUse(plugin),
        token_file=None if token_file is None else str(token_file.absolute()),
        limits=limits,
        shared_prefix_cache=shared_prefix_cache,
    )
    runtime = _make_runtime_folder()
    try:
        folders = Folders(state=state_dir.absolute() if state_dir else runtime / "state", runtime=runtime)
        _write_files(plan, folders)
        asyncio.run(_run(plan, folders, [engine for engine in parsed if engine not in found], start_timeout))
    finally:
        if not isinstance(sys.exception(), NotReadyError):  # the error's message names logs in this folder
            shutil.rmtree(runtime, ignore_errors=True)


async def _run(plan: Plan, folders: Folders, silent: list[EngineArg], start_timeout: float) -> None:
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    supervisor = Supervisor(plan.children(folders), folders.logs, report=lambda line: click.echo(line, err=True))
    supervisor.start()
    try:
        if await _wait_for_coordinator(supervisor, plan.listen.url, stop, start_timeout):
            _print_summary(plan, folders, silent)
            await stop.wait()
            click.echo("Ending.")
    finally:
        await supervisor.stop()


async def _wait_for_coordinator(supervisor: Supervisor, url: str, stop: asyncio.Event, seconds: float) -> bool:
    """Wait until the coordinator answers through the front. Return False if ``stop`` is set first.

    Raises:
        NotReadyError: A process exits again and again, or the coordinator has not answered within ``seconds``.
    """
    end = time.monotonic() + seconds
    async with open_session(timeout=aiohttp.ClientTimeout(total=3)) as session:
        while not stop.is_set():
            with suppress(aiohttp.ClientError, TimeoutError):
                async with session.get(url + FLEET_HEALTH) as answer:
                    if answer.status == 200:
                        return True
            crashed = supervisor.find_crash_loop()
            if crashed is not None:
                raise NotReadyError(f"{crashed.child.name} exits again and again. {crashed.describe_log()}")
            if time.monotonic() > end:
                raise NotReadyError(_describe_timeout(supervisor, url, seconds))
            with suppress(TimeoutError):
                async with asyncio.timeout(0.2):
                    await stop.wait()
    return False


def _describe_timeout(supervisor: Supervisor, url: str, seconds: float) -> str:
    """Say what did not answer, what to do, and where the logs of the two processes on the way are."""
    return "\n".join(
        [
            f"{url}{FLEET_HEALTH} has not answered with 200 within {seconds:g} s: the coordinator, or the front before it, is not ready."
            " This does not depend on the engines. On a busy machine, allow more time with --start-timeout SECONDS.",
            *(process.describe_log() for process in supervisor.processes if process.child.name in ("coordinator", "front")),
        ]
    )


def _make_runtime_folder() -> Path:
    """Make a folder for sockets with a short path. Linux limits paths of sockets to 107 characters, and haproxy appends a suffix."""
    folder = Path(tempfile.mkdtemp(prefix="sglang-rollout-"))
    if len(str(folder)) <= _MAX_RUNTIME_PATH:
        return folder
    folder.rmdir()
    return Path(tempfile.mkdtemp(prefix="sglang-rollout-", dir="/tmp"))


def _print_summary(plan: Plan, folders: Folders, silent: list[EngineArg]) -> None:
    """Print the fleet's addresses, and the engines that did not answer at the start (``silent``)."""
    url = plan.listen.url
    click.echo(f"The fleet answers at {url}. Each of the {len(plan.engines)} engine(s) joins when it is up.")
    click.echo(f"  generate    POST {url}/generate")
    click.echo(f"  discovery   GET  {url}{FLEET}")
    click.echo(f"  metrics     GET  {plan.metrics.url}{METRICS}; all targets for Prometheus: {folders.targets}")
    click.echo(f"  logs        {folders.logs}")
    if plan.weights.is_staged:
        click.echo(f"  engines     need the option {LOADER_OPTION}")
        if plan.store_python == sys.executable and not has_torch():
            click.echo(f"  trainers    upload over HTTP: for process groups, name a Python that has torch with {OPTION}")
    if plan.plugin is PluginUse.OPTIONAL:
        click.echo("  plug-in     optional: without it one request can end an engine, and versions can reuse prefixes of older weights")
    else:
        click.echo(f"  plug-in     an engine without it does not serve: {ADVICE}")
    for engine in silent:
        size = f"its tensor parallel size must be {engine.tensor_size}" if engine.tensor_size else "the fleet reads its size"
        click.echo(f"  not up yet  {engine.url}: {size} when it is up")
    click.echo("Ctrl-C ends the fleet; the engines keep running.")


def _write_files(plan: Plan, folders: Folders) -> None:
    """Write the files that the child processes and Prometheus read."""
    try:
        intent = plan.intent()
        for folder in (folders.logs, folders.runtime, folders.state / "credentials"):
            folder.mkdir(parents=True, exist_ok=True)
        if not folders.token.exists():
            _write_private(folders.token, secrets.token_urlsafe(32))
        key = CredentialFile(folders.token)
        for name in [engine.name for engine in intent.engines] + ([intent.store.name] if intent.store else []):
            _write_private(folders.credential(name), "\n".join(key.derive(name).lines()))
        folders.intent.write_text(intent.model_dump_json(indent=2))
        folders.targets.write_text(json.dumps(plan.scrape_targets(), indent=2))
    except OSError as error:
        raise CannotStartError(
            f"the folder {folders.state} cannot be used: {error.strerror}; pass a writable folder with --state-dir"
        ) from None
    except ValueError as error:
        raise CannotStartError(str(error)) from None


def _write_private(path: Path, text: str) -> None:
    """Write a file that other users can never read."""
    path.unlink(missing_ok=True)
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        file.write(text)


def _check_programs() -> None:
    if find_haproxy() is None:
        raise CannotStartError(NO_HAPROXY)
    if importlib.util.find_spec("smg") is None:
        raise CannotStartError("smg, the SGLang router, is not installed; install sglang-rollout[router]")


def _check_store_python(python: Path | None, weights: Weights) -> None:
    """Refuse a Python that cannot run the weight store. Without the option, only a weight store with a GPU is sure to need torch."""
    if python is not None and not weights.is_staged:
        raise click.UsageError(f"{OPTION} belongs to --transport Staged: set the transport, or leave it out")
    try:
        if python is not None:
            check_store_python(python.absolute())
    except StorePythonError as error:
        raise CannotStartError(str(error)) from None
    has_gpu = weights.store is not None and weights.store.gpu is not None
    if python is None and has_gpu and not has_torch():
        lacks = f"weights.store.gpu needs a weight store with torch, which {sys.executable} lacks"
        raise CannotStartError(f"{lacks}: name a Python that has it with {OPTION}")


def _check_engines(engines: tuple[EngineArg, ...]) -> None:
    """Refuse duplicates, and host names that do not resolve, with which haproxy does not start. Engines need not be up."""
    if len({engine.address for engine in engines}) != len(engines):
        raise CannotStartError("an engine is named twice; each --engine must be a different server")
    for engine in engines:
        try:
            socket.getaddrinfo(engine.address.host, engine.address.port, type=socket.SOCK_STREAM)
        except socket.gaierror as error:
            raise CannotStartError(f"the host of engine {engine.url} cannot be resolved: {error.strerror}") from None


async def _read_sizes(
    engines: tuple[EngineArg, ...], weights: Weights, reports: PluginReports, plugin: PluginUse
) -> dict[EngineArg, Sizes]:
    """Return what the engines that answer report. Agents check the others later.

    Raises:
        CannotStartError: An engine cannot be part of this fleet.
    """
    try:
        found = await read_sizes(engines, reports)
        check_sizes(found, weights)
        if weights.is_staged:
            check_loaders(found)
        if plugin is PluginUse.REQUIRED:
            check_plugins(found)
    except SizesError as error:
        raise CannotStartError(str(error)) from None
    return found


def _check_can_listen(address: Address, option: str) -> None:
    reason = _find_listen_error(address)
    if reason is not None:
        raise CannotStartError(f"{option} {address} cannot be used: {reason}")


def _find_listen_error(address: Address) -> str | None:
    """Return why no process can listen on an address; None if a process can."""
    try:
        with socket.socket(socket.AF_INET6 if address.is_v6 else socket.AF_INET) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind((address.host, address.port))
    except OSError as error:  # a kernel without IPv6 fails here, too
        return error.strerror or str(error)
    return None


def _choose_ports(count: int, base: int | None, taken: set[int]) -> tuple[int, ...]:
    """Return free loopback ports: consecutive from ``base``, or else random ports that are not in ``taken``."""
    if base is not None:
        ports = tuple(range(base, base + count))
        for port in ports:
            _check_can_listen(Address("127.0.0.1", port), f"--base-port {base}: port")
        return ports
    candidates = [port for port in random.sample(range(_LOWEST_PORT, _HIGHEST_PORT + 1), 500) if port not in taken]
    free = [port for port in candidates if _find_listen_error(Address("127.0.0.1", port)) is None][:count]
    if len(free) < count:
        raise CannotStartError(f"no {count} free ports between {_LOWEST_PORT} and {_HIGHEST_PORT}; pass the first one with --base-port")
    return tuple(free)
