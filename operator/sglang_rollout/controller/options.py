"""Options that the operator shares with the commands ``plan`` and ``render``, which need none of its libraries."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar, cast

import click

from sglang_rollout import __version__
from sglang_rollout.controller.decide.allowed import Allowed

ENVIRONMENT = "SGLANG_ROLLOUT"
"""Prefix of the environment variables."""
_F = TypeVar("_F", bound=Callable[..., Any])


def setting(name: str, default: str | int, text: str, kind: click.ParamType[Any] | None = None) -> Callable[[_F], _F]:
    """Return an option that can also be set by an environment variable."""
    variable = f"{ENVIRONMENT}_{name.upper().replace('-', '_')}"
    return click.option(f"--{name}", default=default, envvar=variable, show_default=True, type=kind, help=text)


PORT = click.IntRange(0, 65535)


def image_options(function: _F) -> _F:
    """Add the options that name the images of the children."""
    for option in (
        setting("image-pull-policy", "IfNotPresent", "Pull policy of these two images.", click.Choice(["Always", "IfNotPresent", "Never"])),
        setting("router-image", f"sglang-rollout/router:{__version__}", "Image of gate, front and smg."),
        setting("coordinator-image", f"sglang-rollout/coordinator:{__version__}", "Image of agent and coordinator."),
    ):
        function = option(function)
    return function


def allow_options(function: _F) -> _F:
    """Add the options that say what rollouts may ask for, and pass them to ``function`` as ``allowed``."""

    @wraps(function)
    def with_allowed(*, allow_host_path: tuple[str, ...], allow_service_account: tuple[str, ...], **options: Any) -> Any:
        flags = {name: options.pop(f"allow_{name}") for name in ("host_network", "host_ipc", "privileged")}
        return function(allowed=Allowed(allow_host_path, allow_service_account, **flags), **options)

    for option in (
        _allow_flag("privileged", "Pods may have privileged or unconfined containers, and hostPID."),
        _allow_flag("host-ipc", "Pods may use the IPC namespace of their node."),
        _allow_flag("host-network", "Pods may use the network and ports of their node."),
        _allow_list("service-account", "ServiceAccount, NAMESPACE/NAME or NAME in every namespace, that engine pods may have."),
        _allow_list("host-path", "Folder of nodes that pods may mount, with everything below it."),
    ):
        with_allowed = option(with_allowed)
    return cast(_F, with_allowed)


def _allow_flag(name: str, text: str) -> Callable[[_F], _F]:
    return click.option(f"--allow-{name}", is_flag=True, envvar=f"{ENVIRONMENT}_ALLOW_{name.upper().replace('-', '_')}", help=text)


def _allow_list(name: str, text: str) -> Callable[[_F], _F]:
    variable = f"{ENVIRONMENT}_ALLOW_{name.upper().replace('-', '_')}S"
    return click.option(f"--allow-{name}", multiple=True, metavar="NAME", envvar=variable, help=f"{text} Repeat for more.  [default: none]")
