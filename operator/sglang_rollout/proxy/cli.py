"""``sglang-rollout proxy gate|front|smg``: write the configuration, and become the proxy.

The same commands are the containers' entry points in Kubernetes and the children of ``sglang-rollout local``.
"""

from __future__ import annotations

import os
import resource
import shutil
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from socket import has_dualstack_ipv6
from typing import Any, NoReturn, TypeVar

import click
from pydantic import ValidationError

from sglang_rollout.api.limits_spec import Limits
from sglang_rollout.child_environment import clean_environment
from sglang_rollout.proxy.address import Address, Endpoint, UnixSocket, complete_service_name, parse_endpoint
from sglang_rollout.proxy.config import (
    FRONT_CONNECTIONS,
    FRONT_FILES,
    GATE_CONNECTIONS,
    GATE_FILES,
    TLS_FILES,
    Certificate,
    FrontParams,
    GateParams,
    fit_connections,
    front_config,
    gate_config,
    renewal_text,
)
from sglang_rollout.proxy.gate_map import UNSET, version_map_path
from sglang_rollout.proxy.smg import POLICIES, smg_args
from sglang_rollout.wire import ports

_F = TypeVar("_F", bound=Callable[..., Any])

_SYSTEM_FOLDERS = "/usr/local/sbin:/usr/sbin:/sbin:/usr/local/bin:/usr/bin"
"""Folders in which distributions install haproxy; a user's PATH often lacks the sbin folders."""
NO_HAPROXY = "haproxy is not installed (looked in PATH and the system's sbin folders); install the package 'haproxy', 2.6 or newer"
"""Message of a command that needs haproxy."""


class AddressType(click.ParamType[Address]):
    """``host:port`` as a click parameter."""

    name = "host:port"

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> Address:
        """Parse an address, or fail with the parser's message."""
        if isinstance(value, Address):
            return value
        try:
            return Address.parse(str(value))
        except ValueError as error:
            self.fail(str(error), param, ctx)


class EndpointType(click.ParamType[Endpoint]):
    """``host:port`` or ``unix@/path`` as a click parameter."""

    name = "host:port|unix@/path"

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> Endpoint:
        """Parse an endpoint, or fail with the parser's message."""
        if isinstance(value, Address | UnixSocket):
            return value
        try:
            return parse_endpoint(str(value))
        except ValueError as error:
            self.fail(str(error), param, ctx)


ADDRESS = AddressType()
ENDPOINT = EndpointType()


class LimitsType(click.ParamType[Limits]):
    """``spec.engine.limits`` as JSON, as a click parameter."""

    name = "JSON"

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> Limits:
        """Parse the limits, or fail with the first problem."""
        if isinstance(value, Limits):
            return value
        try:
            return Limits.model_validate_json(str(value))
        except ValidationError as error:
            first = error.errors()[0]
            where = ".".join(map(str, first["loc"]))
            self.fail(f"{where + ': ' if where else ''}{first['msg']}", param, ctx)


limits_option = click.option(
    "--limits",
    type=LimitsType(),
    default=Limits(),
    show_default="those of spec.engine.limits",
    help="Largest requests, as in spec.engine.limits: '{\"samplesPerPrompt\": 2048}'.",
)
prefix_cache_option = click.option(
    "--shared-prefix-cache", is_flag=True, help="Let versions share one prefix cache (spec.engine.prefixCache: Shared)."
)


def _address(flag: str, default: str, text: str, kind: click.ParamType[Any] = ADDRESS) -> Callable[[_F], _F]:
    return click.option(flag, type=kind, default=default, show_default=True, help=text)


_print = click.option("--print", "only_print", is_flag=True, help="Print the configuration or command, and exit.")


def _maxconn(default: int) -> Callable[[_F], _F]:
    text = "Most connections at once; lowered to fit the limit on open files."
    return click.option("--maxconn", type=click.IntRange(64), default=default, show_default=True, help=text)


def _runtime_dir(default: str) -> Callable[[_F], _F]:
    text = "Writable folder for haproxy's configuration."
    return click.option("--runtime-dir", type=click.Path(path_type=Path), show_default=default, help=text)


_metrics_listen = click.option(
    "--metrics-listen", type=ADDRESS, show_default="nowhere", help="Address of the metrics of all processes of the pod."
)
_probes_listen = click.option("--probes-listen", type=ADDRESS, show_default="nowhere", help="Address of the kubelet's probes.")


@click.group(name="proxy")
def command() -> None:
    """Run a proxy of the fleet: gate or front (both haproxy), or smg (the SGLang router).

    Each command writes the configuration and becomes the proxy; --print shows the configuration.
    """


@command.command(short_help="In front of one engine (haproxy); closed until the agent opens it.")
@_address("--listen", f"[::]:{ports.GATE_PORT}", "Address at which the engine is reached.")
@_address("--engine", f"127.0.0.1:{ports.ENGINE_PORT}", "The SGLang server.")
@_address("--agent", f"127.0.0.1:{ports.AGENT_PORT}", "The engine's agent.", ENDPOINT)
@click.option("--socket", required=True, metavar="PATH", help="haproxy's stats socket, through which the agent opens and closes the gate.")
@limits_option
@_metrics_listen
@_probes_listen
@_runtime_dir("the socket's folder")
@_maxconn(GATE_CONNECTIONS)
@_print
def gate(
    *,
    listen: Address,
    engine: Address,
    agent: Endpoint,
    socket: str,
    limits: Limits,
    metrics_listen: Address | None,
    probes_listen: Address | None,
    runtime_dir: Path | None,
    maxconn: int,
    only_print: bool,
) -> None:
    """Run the gate: haproxy in front of one engine.

    Requests for tokens pass only while the engine's agent keeps the gate open. Every other call goes to the agent.
    """
    params = GateParams(
        listen=_listen_address(listen, only_print),
        engine=engine,
        agent=agent,
        socket=socket,
        request_bytes=limits.request_bytes,
        maxconn=_connection_limit(maxconn, GATE_FILES, only_print),
        metrics=_optional(metrics_listen, only_print),
        probes=_optional(probes_listen, only_print),
    )
    try:
        text = gate_config(params)
    except ValueError as error:
        raise click.UsageError(str(error)) from None
    files = {version_map_path(socket): UNSET}
    _print_or_become("gate", text, runtime_dir or Path(socket).parent, only_print, files)


@command.command(short_help="The fleet's URL (haproxy): generation goes to smg, other calls to the coordinator.")
@_address("--listen", f"[::]:{ports.FRONT_PORT}", "Address of the fleet's URL.")
@_address("--smg", f"127.0.0.1:{ports.SMG_PORT}", "The SGLang router.")
@_address("--coordinator", f"127.0.0.1:{ports.COORDINATOR_PORT}", "The coordinator.", ENDPOINT)
@_address("--batches", f"127.0.0.1:{ports.BATCHES_PORT}", "The batch server.")
@click.option("--store", type=ADDRESS, show_default="nowhere", help="Data port of the weight store, which gets uploads of versions.")
@click.option(
    "--generate-listen", type=ADDRESS, show_default="nowhere", help="Address that serves data paths only, and refuses control calls."
)
@limits_option
@_metrics_listen
@_probes_listen
@_address("--smg-metrics", f"127.0.0.1:{ports.SMG_METRICS_PORT}", "The SGLang router's metrics.")
@_runtime_dir("the system's folder for temporary files")
@click.option(
    "--certificate",
    type=click.Path(path_type=Path),
    help="Serve HTTPS with this certificate and its chain; FILE.key has the private key. Changed files are read again.",
)
@_maxconn(FRONT_CONNECTIONS)
@click.option("--check-data-callers", is_flag=True, help="Send requests for tokens to the batch server, which checks their callers.")
@click.option("--threads", type=click.IntRange(1, 64), default=2, show_default=True, help="Threads of haproxy.")
@_print
def front(
    *,
    listen: Address,
    smg: Address,
    coordinator: Endpoint,
    batches: Address,
    store: Address | None,
    generate_listen: Address | None,
    limits: Limits,
    metrics_listen: Address | None,
    probes_listen: Address | None,
    smg_metrics: Address,
    runtime_dir: Path | None,
    certificate: Path | None,
    maxconn: int,
    check_data_callers: bool,
    threads: int,
    only_print: bool,
) -> None:
    """Run the front: haproxy at the fleet's URL. Requests for tokens go to smg, every other call to the coordinator."""
    folder = runtime_dir or Path(tempfile.gettempdir())
    served = Certificate(str(certificate), str(folder)) if certificate is not None else None
    params = FrontParams(
        listen=_listen_address(listen, only_print),
        smg=smg,
        coordinator=coordinator,
        batches=batches,
        store=store if store is None or only_print else _full_name(store),
        generate=_optional(generate_listen, only_print),
        request_bytes=limits.request_bytes,
        maxconn=_connection_limit(maxconn, FRONT_FILES + (TLS_FILES if served is not None else 0), only_print),
        threads=threads,
        certificate=served,
        checks_data_callers=check_data_callers,
        metrics=_optional(metrics_listen, only_print),
        probes=_optional(probes_listen, only_print),
        smg_metrics=smg_metrics,
    )
    try:
        text = front_config(params)
    except ValueError as error:
        raise click.UsageError(str(error)) from None
    files = {served.renewal: renewal_text(served)} if served is not None else {}
    _print_or_become("front", text, folder, only_print, files)


@command.command(
    context_settings={"ignore_unknown_options": True}, short_help="The SGLang router, with the settings that weight updates need."
)
@_address("--listen", f"127.0.0.1:{ports.SMG_PORT}", "Address at which smg accepts requests.")
@_address("--metrics-listen", f"127.0.0.1:{ports.SMG_METRICS_PORT}", "Address of smg's metrics.")
@click.option(
    "--policy", type=click.Choice(list(POLICIES)), default="CacheAware", show_default=True, help="Policy by which smg chooses an engine."
)
@click.option("--served-name", metavar="NAME", help="Name of the model, also for requests for the model 'default'.")
@limits_option
@_print
@click.argument("extra", nargs=-1, type=click.UNPROCESSED, metavar="[-- SMG_OPTIONS...]")
def smg(
    *,
    listen: Address,
    metrics_listen: Address,
    policy: str,
    served_name: str | None,
    limits: Limits,
    only_print: bool,
    extra: tuple[str, ...],
) -> None:
    """Run smg, the SGLang router, with the settings that weight updates need. Arguments after -- are passed to smg unchanged."""
    args = smg_args(
        listen=listen,
        metrics_listen=metrics_listen,
        policy=policy,
        served_name=served_name,
        request_bytes=limits.request_bytes,
        extra=extra,
    )
    line = [sys.executable, "-m", "smg.launch_router", *args]
    if only_print:
        click.echo(" ".join(line))
        return
    os.execve(line[0], line, clean_environment(os.environ))  # noqa: S606 - no shell wanted


def find_haproxy() -> str | None:
    """Return the path of haproxy, also in folders that only root's PATH contains."""
    return shutil.which("haproxy") or shutil.which("haproxy", path=_SYSTEM_FOLDERS)


def _listen_address(wanted: Address, only_print: bool) -> Address:
    """Return ``0.0.0.0`` for ``::`` if the kernel has no IPv6, because haproxy would not start.

    With ``only_print`` the address does not change, because the text may be for another machine.
    """
    if wanted.host != "::" or only_print or has_dualstack_ipv6():
        return wanted
    return Address("0.0.0.0", wanted.port)  # noqa: S104 - the caller asked for all addresses


def _full_name(address: Address) -> Address:
    """Return the address with the full name of a Service, because haproxy knows no search list."""
    try:
        settings = Path("/etc/resolv.conf").read_text()
    except OSError:
        return address
    return Address(complete_service_name(address.host, settings), address.port)


def _optional(wanted: Address | None, only_print: bool) -> Address | None:
    return None if wanted is None else _listen_address(wanted, only_print)


def _connection_limit(wanted: int, files: int, only_print: bool) -> int:
    """Return the number of connections that fits this process's limit on open files; unchanged with ``only_print``."""
    if only_print:
        return wanted
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    return wanted if hard == resource.RLIM_INFINITY else fit_connections(wanted, hard, files=files)


def _print_or_become(name: str, text: str, folder: Path, only_print: bool, files: Mapping[str, str] | None = None) -> None:
    """Write the configuration and the files that it names, and become haproxy; or print the configuration."""
    if only_print:
        click.echo(text, nl=False)
        return
    path = folder / f"{name}.cfg"
    try:
        for file, content in {**(files or {}), str(path): text}.items():
            Path(file).parent.mkdir(parents=True, exist_ok=True)
            Path(file).write_text(content)
    except OSError as error:
        raise click.ClickException(
            f"cannot write the {name}'s configuration to {path}: {error.strerror}; name a writable folder with --runtime-dir"
        ) from None
    _become_haproxy(path)


def _become_haproxy(path: Path) -> NoReturn:
    program = find_haproxy()
    if program is None:
        raise click.ClickException(NO_HAPROXY)
    # -db: stay in the foreground. -W: start a master process that handles SIGTERM. Without a master, haproxy has no handler. The
    # kernel then ignores the signal for a container's first process, and the pod ends only after its grace period.
    line = [program, "-W", "-db", "-f", str(path)]
    os.execve(program, line, clean_environment(os.environ))  # noqa: S606 - no shell wanted
