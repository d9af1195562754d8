"""Options of the agent's command about compiled kernels."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

from sglang_rollout.agent.kernels.exchange import KernelExchange
from sglang_rollout.agent.kernels.key import kernels_key, read_hardware
from sglang_rollout.internal.options import read_token_file

_Command = TypeVar("_Command", bound=Callable[..., Any])


def kernel_options(command: _Command) -> _Command:
    """Add the options to a command; :func:`make_exchange` takes their values."""
    for option in (
        click.option(
            "--kernels-quiet-seconds",
            type=click.FloatRange(min=0.1),
            default=30.0,
            show_default=True,
            help="With --kernels-dir: compiled kernels are sent when none has changed for so long.",
        ),
        click.option(
            "--kernels-token-file",
            type=click.Path(path_type=Path),
            help="With --kernels-dir: file with the credentials of the kernels, one a line. Read again when it changes.",
        ),
        click.option(
            "--kernels-hash", help="With --kernels-dir: hash of model, image and parallelism. Pods with another hash share nothing."
        ),
        click.option("--kernels-url", help="With --kernels-dir: data port of the weight store, which keeps the kernels."),
        click.option(
            "--kernels-dir",
            type=click.Path(path_type=Path),
            help="For engine.cache.shared: folder of the engine's compiled kernels, which engine and agent write at the same path.",
        ),
    ):
        command = option(command)
    return command


def make_exchange(options: dict[str, Any]) -> KernelExchange | None:
    """Take the values of the options out of ``options``, and return the exchange; None without ``--kernels-dir``."""
    names = ("kernels_dir", "kernels_url", "kernels_hash", "kernels_token_file", "kernels_quiet_seconds")
    folder, url, spec_hash, token_file, quiet_seconds = (options.pop(name) for name in names)
    if folder is None:
        return None
    if url is None or spec_hash is None or token_file is None:
        raise click.UsageError("--kernels-dir needs --kernels-url, --kernels-hash and --kernels-token-file")
    key = kernels_key(spec_hash, read_hardware())
    return KernelExchange(folder, url, read_token_file(token_file), key, options["state_dir"], quiet_seconds=quiet_seconds)
