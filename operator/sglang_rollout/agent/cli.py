"""``sglang-rollout agent``: run the agent of one engine until SIGTERM."""

from __future__ import annotations

import asyncio
import logging
import signal
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import click
import uvloop
from aiohttp import web

from sglang_rollout.agent import events as ev
from sglang_rollout.agent.agent import Agent
from sglang_rollout.agent.app import make_app
from sglang_rollout.agent.engine import Engine
from sglang_rollout.agent.gate import Gate
from sglang_rollout.agent.launch.barrier import Barrier
from sglang_rollout.agent.launch.head_pod import Leader
from sglang_rollout.agent.launch.member_pod import Follower, follower_app
from sglang_rollout.agent.record import RecordFile
from sglang_rollout.agent.relay import Relay
from sglang_rollout.agent.run_files import RunFiles
from sglang_rollout.agent.update import Fence
from sglang_rollout.agent.watchdog import Hang, Lease, SpecState, watch_drain
from sglang_rollout.logs import configure_logging, logging_options
from sglang_rollout.proxy.address import Address
from sglang_rollout.proxy.cli import ADDRESS
from sglang_rollout.wire import ports

log = logging.getLogger("sglang_rollout.agent")

_INTERVAL = 0.5
_TRUST_RECORD_AFTER = 3.0
"""A restarted agent believes its record's committed version when no coordinator has spoken for so long. One that lives speaks twice a
second, and may know of a commit that this engine missed."""


_RESOLVE_INTERVAL = 5.0
"""Pod 0 has another address when it was made anew, which takes longer than this."""


@dataclass(frozen=True)
class _Place:
    """Where this pod stands in an engine that has several."""

    nodes: int
    rank: int
    leader: Address
    own: Address
    files: RunFiles


@click.command(name="agent")
@click.option("--name", required=True, help="Name of the engine.")
@click.option("--engine-url", default=f"http://127.0.0.1:{ports.ENGINE_PORT}", show_default=True, help="The SGLang server.")
@click.option("--listen", default=f"127.0.0.1:{ports.AGENT_PORT}", show_default=True, help="Where the gate finds this agent.")
@click.option("--gate-socket", required=True, type=click.Path(path_type=Path), help="haproxy's stats socket.")
@click.option(
    "--state-dir",
    required=True,
    type=click.Path(path_type=Path),
    help="Writable folder for the record; must outlive the agent, not the pod.",
)
@click.option("--token-file", required=True, type=click.Path(path_type=Path), help="File with the rollout's control token.")
@click.option(
    "--boot-file",
    type=click.Path(path_type=Path),
    help="File in which the engine's container writes a new id at each start; its folder also holds drain, drained and kill.",
)
@click.option(
    "--tensor-size", type=click.IntRange(1), help="Tensor parallel size of the engine; an engine with another size stays out of the fleet."
)
@click.option("--nodes", type=click.IntRange(1), default=1, show_default=True, help="Pods of the engine.")
@click.option("--node-rank", type=click.IntRange(0), default=0, show_default=True, help="Place of this pod among them; pod 0 serves.")
@click.option("--leader", type=ADDRESS, help="With --nodes: the gate of pod 0.")
@click.option("--advertise", type=ADDRESS, help="With --nodes: this pod's own gate, by its IP.")
@click.option("--model-path", help="What the engine was started with; checkpoints are compared with it [default: what the engine says].")
@click.option(
    "--fleet-url", help="Of an engine on its trainer's GPUs: where calls without a token that the trainer makes here are decided."
)
@logging_options
def command(
    *,
    name: str,
    engine_url: str,
    listen: str,
    gate_socket: Path,
    state_dir: Path,
    token_file: Path,
    boot_file: Path | None,
    tensor_size: int | None,
    nodes: int,
    node_rank: int,
    leader: Address | None,
    advertise: Address | None,
    model_path: str | None,
    fleet_url: str | None,
    log_level: str,
    log_format: str,
) -> None:
    """Run the sidecar of one engine."""
    configure_logging(log_level, log_format)
    try:
        address, token = Address.parse(listen), token_file.read_text().strip()
    except ValueError as error:
        raise click.BadParameter(str(error), param_hint="--listen") from None
    except OSError as error:
        raise click.UsageError(f"the token file {token_file} cannot be read: {error.strerror}") from None
    if not token:
        raise click.UsageError(f"the token file {token_file} is empty: anybody could call")
    if urlsplit(engine_url).scheme != "http" or not urlsplit(engine_url).hostname:
        raise click.BadParameter(f"{engine_url!r} is not an http URL", param_hint="--engine-url")
    if fleet_url is not None:
        _check_fleet_url(fleet_url)
    place = _place(nodes, node_rank, leader, advertise, boot_file)
    try:
        if place is not None and place.rank:
            uvloop.run(_run_follower(place, name=name, url=engine_url, listen=address, token=token, model_path=model_path))
            return
        uvloop.run(
            _run(
                name=name,
                url=engine_url,
                listen=address,
                socket=gate_socket,
                folder=state_dir,
                token=token,
                boot_file=boot_file,
                tensor_size=tensor_size,
                model_path=model_path,
                place=place,
                fleet_url=fleet_url,
            )
        )
    except OSError as error:
        raise click.ClickException(f"the agent cannot listen on {address}: {error.strerror or error}") from None


def _check_fleet_url(url: str) -> None:
    parts = urlsplit(url)
    try:
        good = parts.scheme == "http" and bool(parts.hostname) and parts.port != 0
    except ValueError:  # of the port
        good = False
    if not good or parts.path.strip("/") or parts.query or parts.fragment or parts.username is not None:
        raise click.BadParameter(f"{url!r} is not the URL of a fleet: write http://host:port", param_hint="--fleet-url")


def _place(nodes: int, rank: int, leader: Address | None, own: Address | None, boot_file: Path | None) -> _Place | None:
    if nodes == 1:
        return None
    if leader is None or own is None or boot_file is None:
        raise click.UsageError("--nodes needs --leader, --advertise and --boot-file: the pods of an engine must find one another")
    if rank >= nodes:
        raise click.BadParameter(f"{rank} is too large for {nodes} pods: they count from 0", param_hint="--node-rank")
    return _Place(nodes, rank, leader, own, RunFiles(boot_file))


async def _run(
    *,
    name: str,
    url: str,
    listen: Address,
    socket: Path,
    folder: Path,
    token: str,
    boot_file: Path | None,
    tensor_size: int | None,
    model_path: str | None,
    place: _Place | None = None,
    fleet_url: str | None = None,
) -> None:
    files = RunFiles(boot_file) if boot_file is not None else None
    relaying = Relay(fleet_url, engine=name) if fleet_url is not None else nullcontext()
    async with Engine(url, boot_file=boot_file) as engine, relaying as relay:
        agent = Agent(name=name, engine=engine, gate=Gate(socket), record_file=RecordFile(folder), tensor_size=tensor_size)
        fence = Fence(agent, kill_file=files.kill if files else None)
        work = [
            _every(_INTERVAL, "watching the engine", agent.observe),
            _every(_INTERVAL, "watching the engine's connection", agent.watch_connection),
            _every(_INTERVAL, "watching the lease", Lease(agent, fence).watch),
            _every(_INTERVAL, "following spec.state", SpecState(agent).watch),
            _follow_gate(agent),
            _trust_record(agent),
        ]
        leader, draining = None, _nobody
        if place is not None:
            leader = Leader(agent, Barrier(place.files), size=place.nodes, own=place.leader, folder=folder, token=token)
            agent.why_down, draining = leader.why_down, leader.draining
            work.append(_every(_INTERVAL, "watching the pods of the engine", leader.watch))
            work.append(_every(_RESOLVE_INTERVAL, "asking the pods that are silent", leader.inquire))
        if files is not None:
            work.append(_every(_INTERVAL, "watching for a drain", lambda: watch_drain(agent, files, draining)))
            work.append(_every(_INTERVAL, "watching for a hang", Hang(agent, files.kill).watch))
        app = make_app(agent, token=token, fence=fence, model_path=model_path, leader=leader, relay=relay)
        await _serve(app, listen, work, f"Agent of {name} at {listen}, engine {url}.")


async def _run_follower(place: _Place, *, name: str, url: str, listen: Address, token: str, model_path: str | None) -> None:
    async with Engine(url) as engine:
        follower = Follower(engine, Barrier(place.files), rank=place.rank, leader=place.leader, own=place.own, token=token)
        work = [
            _every(_INTERVAL, "watching SGLang", follower.observe),
            _every(_INTERVAL, "speaking to pod 0", follower.report),
            _every(_RESOLVE_INTERVAL, "resolving the name of pod 0", follower.resolve),
        ]
        app = follower_app(follower, name=name, token=token, model_path=model_path)
        await _serve(app, listen, work, f"Agent of {name}, rank {place.rank} of {place.nodes}, at {listen}; pod 0 is at {place.leader}.")


async def _serve(app: web.Application, listen: Address, work: list[Coroutine[Any, Any, None]], hello: str) -> None:
    """Until SIGTERM."""
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
    await runner.setup()
    tasks = [asyncio.create_task(one) for one in work]
    try:
        await web.TCPSite(runner, listen.host, listen.port).start()
        log.info("%s", hello)
        await stop.wait()
    finally:
        # The engine goes on with what it was told, and the record says so: nothing has to be waited for.
        for task in tasks:
            task.cancel()
        await runner.cleanup()


def _nobody() -> bool:
    return False


async def _every(seconds: float, what: str, work: Callable[[], Awaitable[None]]) -> None:
    """Do something again and again. A defect in one round must not end the watch: the gate would stay as it is."""
    while True:
        try:
            await work()
        except Exception:
            log.exception("A defect while %s; going on.", what)
        await asyncio.sleep(seconds)


async def _follow_gate(agent: Agent) -> None:
    """Set the gate at once when it is due, and look after it twice a second: a restarted haproxy is closed."""
    while True:
        try:
            await agent.settle_gate()
        except Exception:
            log.exception("A defect while setting the gate; going on.")
        with suppress(TimeoutError):
            async with asyncio.timeout(_INTERVAL):
                await agent.gate_due.wait()


async def _trust_record(agent: Agent) -> None:
    await asyncio.sleep(_TRUST_RECORD_AFTER)
    agent.dispatch(ev.RecordTrusted())
