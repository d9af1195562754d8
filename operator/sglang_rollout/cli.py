"""The command line ``sglang-rollout``: a table of subcommands, each imported only when it is called.

The engine's image has no kopf, the operator's no jinja2: importing all subcommands to show ``--help`` would fail there.
"""

from __future__ import annotations

import importlib
import sys
from dataclasses import dataclass

import click

from sglang_rollout import __version__


@dataclass(frozen=True)
class Subcommand:
    """Where a subcommand lives and what must be installed for it."""

    target: str
    """``module:attribute`` of a click command."""
    extra: str
    """Extra of the package that brings its libraries; empty: the base install is enough."""
    help: str


SUBCOMMANDS = {
    "agent": Subcommand("sglang_rollout.agent.cli:command", "fleet", "The sidecar of one engine."),
    "crd": Subcommand("sglang_rollout.api.crdgen:command", "operator", "Print the CustomResourceDefinition."),
    "fleet": Subcommand("sglang_rollout.fleet.cli:command", "fleet", "The coordinator of one fleet."),
    "local": Subcommand("sglang_rollout.local.cli:command", "fleet", "A fleet on this machine, without Kubernetes."),
    "operator": Subcommand("sglang_rollout.runtime.cli:command", "operator", "The Kubernetes operator."),
    "proxy": Subcommand("sglang_rollout.proxy.cli:command", "fleet", "Configuration of gate and front."),
    "stand-in": Subcommand("sglang_rollout.trainer.testing.cli:command", "testing", "SGLang's wire without a model, for tests."),
}


class LazyGroup(click.Group):
    """A group that knows its subcommands by name only."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the names, in order."""
        return sorted({*super().list_commands(ctx), *SUBCOMMANDS})

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import and return one subcommand."""
        found = SUBCOMMANDS.get(cmd_name)
        return super().get_command(ctx, cmd_name) if found is None else load(cmd_name, found)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the table of ``--help`` without importing anything."""
        with formatter.section("Commands"):
            formatter.write_dl([(name, SUBCOMMANDS[name].help) for name in self.list_commands(ctx)])


def load(name: str, subcommand: Subcommand) -> click.Command:
    """Import a subcommand; a library that is not installed becomes a sentence that says how to get it."""
    module, _, attribute = subcommand.target.partition(":")
    try:
        command = getattr(importlib.import_module(module), attribute)
    except ModuleNotFoundError as error:
        # A missing module of our own is a defect of ours: the traceback is wanted then.
        if error.name is None or error.name.partition(".")[0] == __package__:
            raise
        raise click.ClickException(
            f"`sglang-rollout {name}` needs the library {error.name}, which is not installed: install sglang-rollout[{subcommand.extra}]"
        ) from error
    if not isinstance(command, click.Command):
        raise TypeError(f"{subcommand.target} is no click command")
    return command


@click.group(cls=LazyGroup)
@click.version_option(__version__, prog_name="sglang-rollout")
def main() -> None:
    """SGLang rollout fleets: one URL to generate and to push policy weights."""


if __name__ == "__main__":
    sys.exit(main())
