"""``sglang-rollout batches``: the batch server's process."""

from __future__ import annotations

import asyncio
import logging
import resource
import signal
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from typing import Any

import click
import uvloop
from aiohttp import web
from prometheus_client.aiohttp import make_aiohttp_handler

from sglang_rollout.api.limits_spec import Limits
from sglang_rollout.batches.callers import CallerCheck
from sglang_rollout.batches.client import GenerateClient
from sglang_rollout.batches.memory import DEFAULT_LIMIT_BYTES, Budget
from sglang_rollout.batches.metrics import make_metrics
from sglang_rollout.batches.parts import PARTS, Parts
from sglang_rollout.batches.routes import MAX_BODY_BYTES, abort_held, handle_errors, routes
from sglang_rollout.batches.serving import ServingView
from sglang_rollout.logs import configure_logging, logging_options
from sglang_rollout.proxy.address import Address
from sglang_rollout.proxy.cli import ADDRESS, limits_option
from sglang_rollout.proxy.listen import listen
from sglang_rollout.wire.ports import (
    BATCHES_ABORT,
    BATCHES_HEALTH,
    BATCHES_METRICS,
    BATCHES_PORT,
    COORDINATOR_PORT,
    MEMORY_VARIABLE,
    SMG_PORT,
)

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Options:
    """Values of the command line."""

    listen: Address
    smg_url: str
    coordinator_url: str
    memory: int = DEFAULT_LIMIT_BYTES
    """Memory limit of the process in bytes."""
    limits: Limits = field(default_factory=Limits)
    """Largest requests that engines get."""
    check_data_callers: bool = False
    """True: ask the coordinator about the caller of each request."""
    shutdown_seconds: float = 180.0
    """Time for running batches to end after SIGTERM; the same as smg's."""


async def health(request: web.Request) -> web.Response:
    """Return 200: the batch server runs. The answer says nothing about engines."""
    return web.json_response({"status": "ok"})


async def serve(options: Options) -> None:
    """Serve batches until the task is cancelled."""
    async with AsyncExitStack() as stack:
        client = await stack.enter_async_context(GenerateClient(options.smg_url))
        view = await stack.enter_async_context(ServingView(options.coordinator_url))
        callers = await stack.enter_async_context(CallerCheck(options.coordinator_url)) if options.check_data_callers else None
        parts = Parts(client, view, Budget(options.memory), options.limits, callers)
        app = web.Application(middlewares=[handle_errors], client_max_size=MAX_BODY_BYTES)
        app[PARTS] = parts
        metrics = make_aiohttp_handler(make_metrics(parts.budget))
        own = [web.get(BATCHES_HEALTH, health), web.get(BATCHES_METRICS, metrics), web.post(BATCHES_ABORT, abort_held)]
        app.add_routes([*routes, *own])
        runner = web.AppRunner(app, access_log=None, handler_cancellation=True, shutdown_timeout=options.shutdown_seconds)
        await runner.setup()
        stack.push_async_callback(runner.cleanup)
        await listen(runner, options.listen)
        log.info("the batch server listens on %s; bodies and answers may take %d MiB of memory", options.listen, parts.budget.total >> 20)
        await asyncio.Event().wait()


async def _serve_until_signal(options: Options) -> None:
    """Serve until SIGTERM or SIGINT."""
    task = asyncio.current_task()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, task.cancel if task is not None else loop.stop)
    try:
        await serve(options)
    except asyncio.CancelledError:
        return


@click.command(name="batches")
@click.option("--listen", type=ADDRESS, default=f"127.0.0.1:{BATCHES_PORT}", show_default=True, help="Address to listen on.")
@click.option("--smg-url", default=f"http://127.0.0.1:{SMG_PORT}", show_default=True, help="Base URL of smg.")
@click.option("--coordinator-url", default=f"http://127.0.0.1:{COORDINATOR_PORT}", show_default=True, help="Base URL of the coordinator.")
@click.option(
    "--memory",
    type=click.IntRange(min=1),
    default=DEFAULT_LIMIT_BYTES,
    show_default=True,
    envvar=MEMORY_VARIABLE,
    help="Memory limit of this process in bytes. Bodies and answers take at most a sixth of it.",
)
@limits_option
@click.option("--check-data-callers", is_flag=True, help="Ask the coordinator who may send requests.")
@logging_options
def command(log_level: str, log_format: str, **given: Any) -> None:
    """Run the batch server: it splits batches, and forwards requests that smg would refuse or change to an engine."""
    configure_logging(log_level, log_format)
    # Each connection is an open file, and many container runtimes start processes with a soft limit of 1024.
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    uvloop.run(_serve_until_signal(Options(**given)))
