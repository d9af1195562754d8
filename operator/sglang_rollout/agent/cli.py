"""``sglang-rollout agent``: run the agent of one engine until SIGTERM."""

from __future__ import annotations

import asyncio
import logging
import signal
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import click
import uvloop
from aiohttp import web

from sglang_rollout.agent import events as ev
from sglang_rollout.agent.access import Relay
from sglang_rollout.agent.agent import Agent
from sglang_rollout.agent.app import make_app
from sglang_rollout.agent.authorities import Authorities
from sglang_rollout.agent.engine import Engine, RunFiles, StartBarrier
from sglang_rollout.agent.gate import Gate
from sglang_rollout.agent.launch.head_pod import HeadPod
from sglang_rollout.agent.launch.member_pod import MemberPod, member_app
from sglang_rollout.agent.launch.rank_lifecycle import START_SECONDS
from sglang_rollout.agent.own_model import OwnModel
from sglang_rollout.agent.plugin import MemberPluginWatch, PluginWatch
from sglang_rollout.agent.plugin_reports import PluginReports
from sglang_rollout.agent.record import RecordFile
from sglang_rollout.agent.staged.member_service import StagedMember, run_staged_member
from sglang_rollout.agent.staged.service import StagedService, run_staged_service
from sglang_rollout.agent.update import Fence
from sglang_rollout.agent.watchdog import HangWatch, SpecStateWatch, watch_drain
from sglang_rollout.credentials import Credentials
from sglang_rollout.internal.options import read_token_file
from sglang_rollout.logs import configure_logging, logging_options
from sglang_rollout.plugin.install import install_plugin
from sglang_rollout.proxy.address import Address, Endpoint
from sglang_rollout.proxy.cli import ADDRESS, ENDPOINT
from sglang_rollout.proxy.listen import listen as listen_at
from sglang_rollout.staging.index import StagedError
from sglang_rollout.wire import ports

log = logging.getLogger("sglang_rollout.agent")

_INTERVAL = 0.5
_TRUST_RECORD_SECONDS = 3.0
"""Time without a coordinator's call after which a restarted agent trusts the committed version of its record. A coordinator calls twice a
second, and may know of a commit that this engine missed."""
_RESOLVE_INTERVAL = 5.0
"""A recreated head pod has another address. Its start takes longer than this interval."""


@dataclass(frozen=True)
class Place:
    """Place of this pod in an engine of several pods."""

    nodes: int
    rank: int
    head: Address
    """Gate of the head pod."""
    own: Address
    """This pod's gate, by its IP."""
    files: RunFiles
    start_seconds: int
    """Time limit for the start of all ranks."""

    def data_address(self, data_listen: Endpoint | None) -> Address | None:
        """Return where other pods copy staged versions from this pod; None without such a port."""
        return Address(self.own.host, data_listen.port) if isinstance(data_listen, Address) else None


@dataclass(frozen=True)
class Settings:
    """Settings of an agent. The options of the command describe them."""

    name: str
    engine_url: str
    listen: Endpoint
    gate_socket: Path
    state_dir: Path
    credentials: Credentials
    boot_file: Path | None = None
    tensor_size: int | None = None
    model_path: str | None = None
    fleet_url: str | None = None
    fleet_ca: Path | None = None
    takes_tensors: bool = False
    staging_volume: Path | None = None
    verdicts_dir: Path | None = None
    plugin_dir: Path | None = None
    reports_dir: Path | None = None
    plugin_optional: bool = False
    shared_prefix_cache: bool = False
    data_listen: Endpoint | None = None
    pipeline_size: int = 1
    data_size: int = 1
    place: Place | None = None


@click.command(name="agent")
@click.option("--name", required=True, help="Name of the engine.")
@click.option("--engine-url", default=f"http://127.0.0.1:{ports.ENGINE_PORT}", show_default=True, help="The SGLang server.")
@click.option(
    "--listen",
    type=ENDPOINT,
    default=f"127.0.0.1:{ports.AGENT_PORT}",
    show_default=True,
    help="Address where the gate finds this agent. The agent believes what the gate says about callers, so no other process may reach it.",
)
@click.option("--gate-socket", required=True, type=click.Path(path_type=Path), help="haproxy's stats socket.")
@click.option(
    "--state-dir",
    required=True,
    type=click.Path(path_type=Path),
    help="Writable folder for the record; must outlive the agent, not the pod.",
)
@click.option(
    "--token-file",
    required=True,
    type=click.Path(path_type=Path),
    help="File with the credentials of the engine, one a line: the first is sent, all are accepted. Read again when it changes.",
)
@click.option(
    "--boot-file",
    type=click.Path(path_type=Path),
    help="File in which the engine's container writes a new boot ID at each start; its folder also holds drain, drained and kill.",
)
@click.option("--tensor-size", type=click.IntRange(1), help="Tensor parallel size of the engine; an engine with another size is not used.")
@click.option("--nodes", type=click.IntRange(1), default=1, show_default=True, help="Number of pods of the engine.")
@click.option("--node-rank", type=click.IntRange(0), default=0, show_default=True, help="Rank of this pod; pod 0 serves.")
@click.option("--leader", "head", type=ADDRESS, help="With --nodes: the gate of pod 0.")
@click.option("--advertise", type=ADDRESS, help="With --nodes: this pod's own gate, by its IP.")
@click.option(
    "--start-seconds",
    type=click.IntRange(1),
    default=int(START_SECONDS),
    show_default=True,
    help="With --nodes: time limit from the start of the ranks until all are up.",
)
@click.option(
    "--model-path", help="Model that the engine was started with; checkpoints are compared with it [default: as the engine reports]."
)
@click.option(
    "--fleet-url", help="For an engine on its trainer's GPUs: URL of the fleet, which receives the trainer's calls without a token."
)
@click.option(
    "--fleet-ca",
    type=click.Path(path_type=Path),
    help="With --fleet-url: file with the certificates of the authorities that are trusted for an https URL; without the file, those of"
    " the system. Read again when it changes.",
)
@click.option("--takes-tensors", is_flag=True, help="For an engine whose trainer sends it handles of tensors on the same GPUs.")
@click.option(
    "--staging-volume",
    type=click.Path(path_type=Path),
    help="For transport Staged: folder for versions, which the engine reads at the same path.",
)
@click.option(
    "--verdicts-dir",
    type=click.Path(path_type=Path),
    help="With --staging-volume: folder in which the engine's loader says what it did, at the same path. Agent and engine write to it.",
)
@click.option(
    "--plugin-dir",
    type=click.Path(path_type=Path),
    help="Folder into which the agent writes the plug-in at its start, for the engine's PYTHONPATH.",
)
@click.option(
    "--reports-dir",
    type=click.Path(path_type=Path),
    help="Folder in which the plug-in inside SGLang reports, at the same path. Without it, nothing is required of the plug-in.",
)
@click.option("--plugin-optional", is_flag=True, help="With --reports-dir: let an engine serve without the plug-in.")
@click.option(
    "--shared-prefix-cache", is_flag=True, help="With --reports-dir: versions share one prefix cache, so the plug-in sets no key."
)
@click.option(
    "--data-listen",
    type=ENDPOINT,
    help=f"With --staging-volume: address where other agents copy versions, with a ticket, usually 0.0.0.0:{ports.STAGING_PORT}.",
)
@click.option(
    "--pipeline-size",
    type=click.IntRange(1),
    default=1,
    show_default=True,
    help="With --staging-volume: pipeline stages of the engine. All its ranks must load a version.",
)
@click.option(
    "--data-size",
    type=click.IntRange(1),
    default=1,
    show_default=True,
    help="With --staging-volume: replicas of the model in the engine. An engine with several loads versions as folders, without a loader.",
)
@logging_options
def command(
    *,
    listen: Endpoint,
    token_file: Path,
    nodes: int,
    node_rank: int,
    head: Address | None,
    advertise: Address | None,
    start_seconds: int,
    log_level: str,
    log_format: str,
    **options: Any,
) -> None:
    """Run the sidecar of one engine."""
    configure_logging(log_level, log_format)
    credentials = read_token_file(token_file)
    place = _parse_place(nodes, node_rank, head, advertise, options["boot_file"], start_seconds=start_seconds)
    settings = Settings(listen=listen, credentials=credentials, place=place, **options)
    if urlsplit(settings.engine_url).scheme != "http" or not urlsplit(settings.engine_url).hostname:
        raise click.BadParameter(f"{settings.engine_url!r} is not an http URL", param_hint="--engine-url")
    if settings.fleet_url is not None:
        _check_fleet_url(settings.fleet_url)
    if settings.staging_volume is not None and (settings.verdicts_dir is None or not isinstance(settings.data_listen, Address)):
        raise click.UsageError("--staging-volume needs --verdicts-dir, and --data-listen with a TCP address")
    if settings.plugin_dir is not None:
        _install_plugin(settings.plugin_dir)
    try:
        uvloop.run(run_member_pod(settings, place) if place is not None and place.rank else run(settings))
    except OSError as error:
        raise click.ClickException(f"the agent cannot listen on {listen}: {error.strerror or error}") from None
    except StagedError as error:
        raise click.ClickException(f"the agent cannot use --staging-volume: {error}") from None


def _install_plugin(folder: Path) -> None:
    """Write the plug-in before the agent answers, because the kubelet starts the engine then."""
    try:
        install_plugin(folder)
    except OSError as error:
        raise click.ClickException(f"the agent cannot write the plug-in into {folder}: {error.strerror or error}") from None


def _check_fleet_url(url: str) -> None:
    parts = urlsplit(url)
    try:
        is_valid = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # from the port
        is_valid = False
    if not is_valid or parts.path.strip("/") or parts.query or parts.fragment or parts.username is not None:
        raise click.BadParameter(f"{url!r} is not the URL of a fleet: write http://host:port or https://…", param_hint="--fleet-url")


def _parse_place(
    nodes: int, rank: int, head: Address | None, own: Address | None, boot_file: Path | None, *, start_seconds: int
) -> Place | None:
    if nodes == 1:
        return None
    if head is None or own is None or boot_file is None:
        raise click.UsageError("--nodes needs --leader, --advertise and --boot-file: the pods of an engine must find one another")
    if rank >= nodes:
        raise click.BadParameter(f"{rank} is too large for {nodes} pods: they count from 0", param_hint="--node-rank")
    return Place(nodes, rank, head, own, RunFiles(boot_file), start_seconds)


async def run(settings: Settings) -> None:
    """Run the agent of an engine with one pod, or of the head pod of an engine with several."""
    name, url, boot_file, place = settings.name, settings.engine_url, settings.boot_file, settings.place
    files = RunFiles(boot_file) if boot_file is not None else None
    relaying: AbstractAsyncContextManager[Relay | None] = nullcontext()
    if settings.fleet_url is not None:
        relaying = Relay(settings.fleet_url, engine=name, credentials=settings.credentials, authorities=Authorities(settings.fleet_ca))
    async with Engine(url, boot_file=boot_file) as engine, relaying as relay, AsyncExitStack() as stack:
        record_file = RecordFile(settings.state_dir)
        agent = Agent(
            name=name,
            engine=engine,
            gate=Gate(settings.gate_socket),
            record_file=record_file,
            tensor_size=settings.tensor_size,
            requires_plugin=settings.reports_dir is not None and not settings.plugin_optional,
        )
        agent.restarts_engine = files is not None
        head_pod = None
        if place is not None:
            barrier = StartBarrier(place.files)
            head_pod = HeadPod(
                agent,
                barrier,
                size=place.nodes,
                own=place.head,
                folder=settings.state_dir,
                credentials=settings.credentials,
                start_seconds=place.start_seconds,
            )
            agent.explain_down = head_pod.explain_down
        reports = _plugin_reports(settings)
        own_model = OwnModel(engine, settings.model_path, reports)
        staged = await stack.enter_async_context(_run_staged(settings, agent, own_model, head_pod, files.kill if files else None))
        fence = Fence(agent, kill_file=files.kill if files else None)
        app = make_app(
            agent,
            credentials=settings.credentials,
            fence=fence,
            model_path=settings.model_path,
            head_pod=head_pod,
            relay=relay,
            takes_tensors=settings.takes_tensors,
            own_model=own_model,
            staged=staged,
        )
        if staged is not None and settings.data_listen is not None:
            await stack.enter_async_context(_listen(staged.data_app(), settings.data_listen))
        work = [
            *_watches(agent, fence, files, head_pod, staged),
            _follow_gate(agent),
            _trust_record(agent),
            *_watch_plugin(agent, reports, head_pod),
        ]
        await _serve(app, settings.listen, work, f"Agent of {name} at {settings.listen}, engine {url}.")


def _watches(
    agent: Agent, fence: Fence, files: RunFiles | None, head_pod: HeadPod | None, staged: StagedService | None
) -> Iterator[Coroutine[Any, Any, None]]:
    """Yield the loops that watch the engine, its pods and the copies of versions."""
    yield _repeat(_INTERVAL, "polling the engine", agent.observe)
    yield _repeat(_INTERVAL, "watching the engine's connection", agent.watch_connection)
    yield _repeat(_INTERVAL, "checking the lease", fence.watch_lease)
    yield _repeat(_INTERVAL, "following spec.state", SpecStateWatch(agent).watch)
    if staged is not None:
        yield _repeat(_INTERVAL, "checking whether the pod's own copy is needed", staged.own_copy.watch)
    if staged is not None and staged.members is not None:
        yield _repeat(_INTERVAL, "checking the copies of the engine's other pods", staged.members.watch)
    if head_pod is not None:
        yield _repeat(_INTERVAL, "watching the pods of the engine", head_pod.watch)
        yield _repeat(_RESOLVE_INTERVAL, "questioning silent pods", head_pod.question_silent_pods)
    if files is not None:
        is_other_pod_draining = head_pod.is_other_pod_draining if head_pod is not None else _never
        yield _repeat(_INTERVAL, "watching for a drain", lambda: watch_drain(agent, files, is_other_pod_draining))
        yield _repeat(_INTERVAL, "watching for a hang", HangWatch(agent, files.kill).watch)


def _watch_plugin(agent: Agent, reports: PluginReports | None, head_pod: HeadPod | None) -> Iterator[Coroutine[Any, Any, None]]:
    """Yield the loop that reads the reports of the plug-in; none without a folder of reports."""
    if reports is not None:
        elsewhere = head_pod.count_proved_schedulers if head_pod is not None else _none_elsewhere
        yield _repeat(_INTERVAL, "reading the plug-in's reports", PluginWatch(agent, reports, elsewhere).watch)


def _none_elsewhere() -> int:
    return 0


def _plugin_reports(settings: Settings) -> PluginReports | None:
    """Return the reports of the plug-in; None without a folder of reports."""
    folder = settings.reports_dir
    return PluginReports(folder, cache_key=not settings.shared_prefix_cache) if folder is not None else None


def _watch_member_plugin(member: MemberPod, reports: PluginReports | None) -> Iterator[Coroutine[Any, Any, None]]:
    """Yield the loop that reads the reports of the plug-in in a member pod; none without a folder of reports."""
    if reports is not None:
        yield _repeat(_INTERVAL, "reading the plug-in's reports", MemberPluginWatch(member, reports).watch)


def _run_staged(
    settings: Settings, agent: Agent, model: OwnModel, head_pod: HeadPod | None, kill_file: Path | None
) -> AbstractAsyncContextManager[StagedService | None]:
    """Return the context of transport Staged; it yields None if the fleet has another transport."""
    volume, verdicts, place = settings.staging_volume, settings.verdicts_dir, settings.place
    if volume is None or verdicts is None:
        return nullcontext()
    return run_staged_service(
        agent,
        volume=volume,
        verdicts=verdicts,
        state=settings.state_dir,
        pipeline_size=settings.pipeline_size,
        data_size=settings.data_size,
        model=model,
        head_pod=head_pod,
        data_address=place.data_address(settings.data_listen) if place is not None else None,
        kill_file=kill_file,
    )


def _run_staged_member(settings: Settings) -> AbstractAsyncContextManager[StagedMember | None]:
    """Return the context of transport Staged in a member pod; it yields None if the fleet has another transport."""
    volume, verdicts = settings.staging_volume, settings.verdicts_dir
    if volume is None or verdicts is None:
        return nullcontext()
    return run_staged_member(
        volume=volume,
        verdicts=verdicts,
        state=settings.state_dir,
    )


@asynccontextmanager
async def _listen(app: web.Application, endpoint: Endpoint) -> AsyncIterator[None]:
    """Serve ``app`` for the length of the block. Raises OSError if the address is taken."""
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
    await runner.setup()
    try:
        await listen_at(runner, endpoint)
        yield
    finally:
        await runner.cleanup()


async def run_member_pod(settings: Settings, place: Place) -> None:
    """Run the agent of a member pod of an engine with several pods."""
    async with Engine(settings.engine_url) as engine, _run_staged_member(settings) as staged, AsyncExitStack() as stack:
        barrier = StartBarrier(place.files)
        member = MemberPod(engine, barrier, rank=place.rank, head=place.head, own=place.own, credentials=settings.credentials)
        work = [
            _repeat(_INTERVAL, "polling SGLang", member.observe),
            _repeat(_INTERVAL, "reporting to pod 0", member.report),
            _repeat(_RESOLVE_INTERVAL, "resolving the name of pod 0", member.resolve),
            *_watch_member_plugin(member, _plugin_reports(settings)),
        ]
        routes: list[web.RouteDef] = []
        if staged is not None and settings.data_listen is not None:
            member.list_copies, member.data_address = staged.list_copies, place.data_address(settings.data_listen)
            routes = staged.routes()
            await stack.enter_async_context(_listen(staged.data_app(), settings.data_listen))
        app = member_app(member, name=settings.name, credentials=settings.credentials, model_path=settings.model_path, more_routes=routes)
        start = f"Agent of {settings.name}, rank {place.rank} of {place.nodes}, at {settings.listen}; pod 0 is at {place.head}."
        await _serve(app, settings.listen, work, start)


async def _serve(app: web.Application, listen: Endpoint, work: list[Coroutine[Any, Any, None]], start: str) -> None:
    """Serve ``app`` and run ``work`` until SIGTERM. Log ``start`` when the agent listens."""
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    tasks = [asyncio.create_task(loop) for loop in work]
    try:
        async with _listen(app, listen):
            log.info("%s", start)
            await stop.wait()
    finally:
        # The engine completes its current call, which the record names, so the agent need not wait for it.
        for task in tasks:
            task.cancel()


def _never() -> bool:
    return False


async def _repeat(seconds: float, what: str, work: Callable[[], Awaitable[None]]) -> None:
    """Repeat the work at this interval. A defect in one round must not end the loop, or the gate would never move again."""
    while True:
        try:
            await work()
        except Exception:
            log.exception("A defect while %s; continuing.", what)
        await asyncio.sleep(seconds)


async def _follow_gate(agent: Agent) -> None:
    """Set the gate when a change is due, and check it twice a second, because a restarted haproxy is closed."""
    while True:
        try:
            await agent.gate.settle()
        except Exception:
            log.exception("A defect while setting the gate; continuing.")
        with suppress(TimeoutError):
            async with asyncio.timeout(_INTERVAL):
                await agent.gate.due.wait()


async def _trust_record(agent: Agent) -> None:
    """Trust the record's committed version if no coordinator has contradicted it for some seconds."""
    await asyncio.sleep(_TRUST_RECORD_SECONDS)
    agent.dispatch(ev.RecordTrusted())
