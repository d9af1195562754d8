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
    part: bool = False
    """It is a part of a fleet: started by the operator's pods and by ``local``, hardly ever by a person."""


SUBCOMMANDS = {
    "agent": Subcommand("sglang_rollout.agent.cli:command", "coordinator", "The sidecar of one engine.", part=True),
    "coordinator": Subcommand(
        "sglang_rollout.coordinator.cli:command", "coordinator", "The coordinator: the control API of all engines.", part=True
    ),
    "crd": Subcommand("sglang_rollout.api.crdgen:command", "operator", "Print the CustomResourceDefinition, for kubectl apply."),
    "local": Subcommand("sglang_rollout.local.cli:command", "coordinator", "Run a fleet on this machine, in front of SGLang servers."),
    "operator": Subcommand("sglang_rollout.controller.cli:command", "operator", "Run the Kubernetes operator."),
    "proxy": Subcommand("sglang_rollout.proxy.cli:command", "coordinator", "The proxies: gate and front (haproxy), smg.", part=True),
    "stand-in": Subcommand("sglang_rollout.testing.cli:command", "testing", "SGLang's wire without a model, for tests."),
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
        for title, part in (("Commands", False), ("Parts of a fleet, started by the operator's pods and by local", True)):
            with formatter.section(title):
                formatter.write_dl([(name, SUBCOMMANDS[name].help) for name in self.list_commands(ctx) if SUBCOMMANDS[name].part is part])


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


# click stops at 80 columns by itself, where most sentences of an option break in two.
@click.group(cls=LazyGroup, context_settings={"max_content_width": 120})
@click.version_option(__version__, prog_name="sglang-rollout")
def main() -> None:
    """SGLang rollout fleets: one URL to generate and to push policy weights."""


if __name__ == "__main__":
    sys.exit(main())
