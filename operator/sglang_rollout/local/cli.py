"""``sglang-rollout local``: gates, agents, smg, coordinator and front on this machine, in front of SGLang servers that already run."""

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
import tempfile
import time
from contextlib import suppress
from pathlib import Path

import aiohttp
import click
from pydantic import ValidationError

from sglang_rollout.local.plan import EngineArg, Folders, Plan, parse_engine, ports_needed
from sglang_rollout.local.sizes import SizesError, check_sizes, read_sizes
from sglang_rollout.local.supervisor import Supervisor
from sglang_rollout.proxy.address import Address
from sglang_rollout.proxy.cli import ADDRESS, find_haproxy
from sglang_rollout.proxy.smg import POLICIES
from sglang_rollout.wire.policy import PauseMode, WeightsPolicy
from sglang_rollout.wire.ports import FLEET, FLEET_HEALTH, METRICS

_START_SECONDS = 60.0
_LONGEST_RUNTIME_PATH = 50
_LOWEST_PORT, _HIGHEST_PORT = 20000, 32767
"""Below the start of Linux's ephemeral range, so that no outgoing connection takes a port between two starts of a child."""


class CannotStartError(click.ClickException):
    """The fleet cannot start; the message says why and what to do."""

    exit_code = 2


@click.command(name="local")
@click.option(
    "--engine",
    "engines",
    multiple=True,
    required=True,
    metavar="URL[,tp=N]",
    help="An SGLang server that runs or will; repeat for more. tp=N: its tensor parallel size must be N [default: as the server reports].",
)
@click.option("--listen", type=ADDRESS, default="127.0.0.1:30000", show_default=True, help="The fleet's one URL.")
@click.option(
    "--backend",
    type=click.Choice(["nccl", "gloo"]),
    default="nccl",
    show_default=True,
    help="Backend of weight groups whose trainer names none.",
)
@click.option("--policy", type=click.Choice(list(POLICIES)), default="CacheAware", show_default=True, help="How smg chooses an engine.")
@click.option(
    "--pause-mode",
    type=click.Choice([mode.value for mode in PauseMode]),
    default="retract",
    show_default=True,
    help="How engines are paused for an update when the trainer does not pause them itself.",
)
@click.option(
    "--weights",
    "weights_json",
    default="{}",
    metavar="JSON",
    help='More of the weights policy, as in the intent: \'{"verify": "always", "min_committed": 1, "catch_up": {"disk": "/ckpt"}}\'.',
)
@click.option("--tensor-size", type=click.IntRange(1), help="tp=N of every engine that has none [default: as the server reports].")
@click.option(
    "--state-dir",
    type=click.Path(path_type=Path),
    show_default="a temporary one, removed at the end",
    help="Folder for records, token and logs; it is kept.",
)
@click.option(
    "--base-port",
    type=click.IntRange(1024, 65000),
    show_default="free ones are looked for",
    help="First of the loopback ports that the parts listen on.",
)
def command(
    *,
    engines: tuple[str, ...],
    listen: Address,
    backend: str,
    policy: str,
    pause_mode: str,
    weights_json: str,
    tensor_size: int | None,
    state_dir: Path | None,
    base_port: int | None,
) -> None:
    """Run a fleet on this machine, without Kubernetes, in front of SGLang servers. Ends with Ctrl-C or SIGTERM; the servers go on.

    \b
    sglang-rollout local --engine http://127.0.0.1:30101 --engine http://127.0.0.1:30102,tp=2

    The sizes of engines that answer are checked at the start. An engine that is not up yet joins when it is, and stays out of the fleet
    if its tensor parallel size is not the given one; GET /fleet says so.
    """
    try:
        parsed = tuple(parse_engine(text, tensor_size) for text in engines)
    except ValueError as error:
        raise click.BadParameter(str(error), param_hint="--engine") from None
    _check_programs()
    _check_engines(parsed)
    _check_free(listen, "--listen")
    try:
        more = WeightsPolicy.model_validate_json(weights_json)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise click.BadParameter(f"{where + ': ' if where else ''}{first['msg']}", param_hint="--weights") from None
    named = {"backend": backend, "pause_mode": PauseMode(pause_mode)}
    weights = more.model_copy(update={key: value for key, value in named.items() if key not in more.model_fields_set})
    silent = asyncio.run(_check_sizes(parsed, weights))
    ports = _ports(ports_needed(len(parsed)), base_port, taken={listen.port, *(engine.address.port for engine in parsed)})
    plan = Plan(listen=listen, engines=parsed, weights=weights, policy=policy, ports=ports)
    runtime = _runtime_folder()
    try:
        folders = Folders(state=state_dir.absolute() if state_dir else runtime / "state", runtime=runtime)
        _prepare(plan, folders)
        asyncio.run(_run(plan, folders, silent))
    finally:
        shutil.rmtree(runtime, ignore_errors=True)


async def _run(plan: Plan, folders: Folders, silent: list[EngineArg]) -> None:
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    supervisor = Supervisor(plan.children(folders), folders.logs, say=lambda line: click.echo(line, err=True))
    supervisor.start()
    try:
        if await _until_serving(supervisor, plan.listen.url, stop):
            _announce(plan, folders, silent)
            await stop.wait()
            click.echo("Ending.")
    finally:
        await supervisor.stop()


async def _until_serving(supervisor: Supervisor, url: str, stop: asyncio.Event) -> bool:
    """Wait until the coordinator answers through the front. False if the fleet is to end before that."""
    end = time.monotonic() + _START_SECONDS
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=3)) as session:
        while not stop.is_set():
            with suppress(aiohttp.ClientError, TimeoutError):
                async with session.get(url + FLEET_HEALTH) as answer:
                    if answer.status == 200:
                        return True
            failed = supervisor.failed()
            if failed is not None:
                raise CannotStartError(f"{failed.child.name} does not stay up. The end of its log:\n{failed.tail()}")
            if time.monotonic() > end:
                tail = next((keeper.tail() for keeper in supervisor.keepers if keeper.child.name == "coordinator"), "")
                raise CannotStartError(
                    f"{url}{FLEET_HEALTH} has not answered within {_START_SECONDS:g} s. The end of the coordinator's log:\n{tail}"
                )
            with suppress(TimeoutError):
                async with asyncio.timeout(0.2):
                    await stop.wait()
    return False


def _runtime_folder() -> Path:
    """A folder for sockets, whose paths Linux limits to 107 characters; haproxy needs some of them for itself."""
    folder = Path(tempfile.mkdtemp(prefix="sglang-rollout-"))
    if len(str(folder)) <= _LONGEST_RUNTIME_PATH:
        return folder
    folder.rmdir()
    return Path(tempfile.mkdtemp(prefix="sglang-rollout-", dir="/tmp"))


def _announce(plan: Plan, folders: Folders, silent: list[EngineArg]) -> None:
    """``silent``: engines that did not answer at the start."""
    url = plan.listen.url
    click.echo(f"The fleet answers at {url}; {len(plan.engines)} engine(s) wanted, each joins when it is up.")
    click.echo(f"  generate    POST {url}/generate")
    click.echo(f"  discovery   GET  {url}{FLEET}")
    click.echo(f"  metrics     GET  {plan.metrics.url}{METRICS}; all targets for Prometheus: {folders.targets}")
    click.echo(f"  logs        {folders.logs}")
    for engine in silent:
        size = f"its tensor parallel size must be {engine.tensor_size}" if engine.tensor_size else "the fleet reads its size"
        click.echo(f"  not up yet  {engine.url}: {size} when it is up")
    click.echo("Ctrl-C ends it; the engines go on.")


def _prepare(plan: Plan, folders: Folders) -> None:
    """Write what the children read."""
    try:
        for folder in (folders.logs, folders.runtime):
            folder.mkdir(parents=True, exist_ok=True)
        if not folders.token.exists():
            # Created readable by nobody else from the first moment on.
            with os.fdopen(os.open(folders.token, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as token:
                token.write(secrets.token_urlsafe(32))
        folders.intent.write_text(plan.intent().model_dump_json(indent=2))
        folders.targets.write_text(json.dumps(plan.scrape_targets(), indent=2))
    except OSError as error:
        raise CannotStartError(
            f"the folder {folders.state} cannot be used: {error.strerror}; name a writable one with --state-dir"
        ) from None


def _check_programs() -> None:
    if find_haproxy() is None:
        raise CannotStartError(
            "haproxy is not installed (looked in PATH and the system's sbin folders); install the package 'haproxy', 2.6 or newer"
        )
    if importlib.util.find_spec("smg") is None:
        raise CannotStartError("smg, the SGLang router, is not installed; install sglang-rollout[router]")


def _check_engines(engines: tuple[EngineArg, ...]) -> None:
    """Names must resolve, because haproxy does not start otherwise. That an engine is not up yet is no error."""
    if len({engine.address for engine in engines}) != len(engines):
        raise CannotStartError("an engine is named twice; each --engine must be another server")
    for engine in engines:
        try:
            socket.getaddrinfo(engine.address.host, engine.address.port, type=socket.SOCK_STREAM)
        except socket.gaierror as error:
            raise CannotStartError(f"the host of engine {engine.url} cannot be resolved: {error.strerror}") from None


async def _check_sizes(engines: tuple[EngineArg, ...], weights: WeightsPolicy) -> list[EngineArg]:
    """Refuse engines whose sizes do not fit. Returns those that do not answer yet: their agents check them when they are up."""
    try:
        found = await read_sizes(engines)
        check_sizes(found, weights)
    except SizesError as error:
        raise CannotStartError(str(error)) from None
    return [engine for engine in engines if engine not in found]


def _check_free(address: Address, option: str) -> None:
    reason = _why_taken(address)
    if reason:
        raise CannotStartError(f"{option} {address} cannot be used: {reason}")


def _why_taken(address: Address) -> str:
    """Why nothing can listen there, or nothing."""
    try:
        with socket.socket(socket.AF_INET6 if address.is_v6 else socket.AF_INET) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind((address.host, address.port))
    except OSError as error:  # also of a kernel without IPv6
        return error.strerror or str(error)
    return ""


def _ports(count: int, base: int | None, taken: set[int]) -> tuple[int, ...]:
    """Loopback ports for the parts. ``taken``: where something listens already, or is going to."""
    if base is not None:
        ports = tuple(range(base, base + count))
        for port in ports:
            _check_free(Address("127.0.0.1", port), f"--base-port {base}: port")
        return ports
    candidates = [port for port in random.sample(range(_LOWEST_PORT, _HIGHEST_PORT + 1), 500) if port not in taken]
    free = [port for port in candidates if not _why_taken(Address("127.0.0.1", port))][:count]
    if len(free) < count:
        raise CannotStartError(f"no {count} free ports found between {_LOWEST_PORT} and {_HIGHEST_PORT}; name a first one with --base-port")
    return tuple(free)
