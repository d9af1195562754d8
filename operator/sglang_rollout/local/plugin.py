"""``sglang-rollout plugin``: install the plug-in for SGLang servers of this machine, and print the variables with which they must start.

``sglang-rollout local`` reads the same variables, so that both belong in one shell.
"""

from __future__ import annotations

import os
import shlex
from pathlib import Path

import click

from sglang_rollout.api.limits_spec import Limits, written_limits
from sglang_rollout.plugin.install import REPORTS_FOLDER, default_folder, install_plugin
from sglang_rollout.plugin.settings import SETTINGS_VARIABLE, dump_settings
from sglang_rollout.proxy.cli import limits_option, prefix_cache_option

ADVICE = 'start it in a shell after: eval "$(sglang-rollout plugin)"'
"""What to do about an engine that runs without the plug-in."""
_CODE = "plugin"


@click.command(name="plugin")
@click.option(
    "--dir",
    "folder",
    type=click.Path(file_okay=False, path_type=Path),
    show_default="~/.local/state/sglang-rollout",
    help="Folder of the plug-in and of its reports. SGLang servers must be able to write it.",
)
@limits_option
@click.option(
    "--custom-logit-processors",
    is_flag=True,
    help="Let requests with custom_logit_processor through: the engines have --enable-custom-logit-processor.",
)
@prefix_cache_option
def command(*, folder: Path | None, limits: Limits, custom_logit_processors: bool, shared_prefix_cache: bool) -> None:
    """Install the plug-in for SGLang servers of this machine, and print the shell variables with which they must start.

    \b
    eval "$(sglang-rollout plugin)"
    python -m sglang.launch_server --model-path MODEL --port 30101 &
    sglang-rollout local --engine http://127.0.0.1:30101
    """  # noqa: D301 - click reads the character \b, which a raw string would not contain
    folder = (folder or default_folder(os.environ)).absolute()
    try:
        code = install_plugin(folder / _CODE)
        (folder / REPORTS_FOLDER).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise click.ClickException(
            f"the plug-in cannot be written into {folder}: {error.strerror or error}; name a writable folder with --dir"
        ) from None
    settings = dump_settings(
        reports=str(folder / REPORTS_FOLDER),
        limits=written_limits(limits),
        cache_key=not shared_prefix_cache,
        custom_logit_processors=custom_logit_processors,
    )
    click.echo(f'export PYTHONPATH={shlex.quote(str(code))}"${{PYTHONPATH:+:$PYTHONPATH}}"')
    click.echo(f"export {SETTINGS_VARIABLE}={shlex.quote(settings)}")
