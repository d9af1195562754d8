"""The command line ``sglang-rollout``: a table of subcommands, each imported only when it is called.

Each image has only the libraries of its own subcommands, so importing all subcommands to show ``--help`` would fail.
"""

from __future__ import annotations

import importlib
import sys
from dataclasses import dataclass

import click

from sglang_rollout import __version__


@dataclass(frozen=True)
class Subcommand:
    """Where a subcommand is defined, and which libraries it needs."""

    target: str
    """``module:attribute`` of a click command."""
    extra: str
    """Extra of the package ``sglang-rollout`` that installs the libraries."""
    help: str
    part: bool = False
    """True for processes of a fleet, which the operator's pods and ``local`` start, rarely a person."""


SUBCOMMANDS = {
    "agent": Subcommand("sglang_rollout.agent.cli:command", "coordinator", "Run the agent: the sidecar of one engine.", part=True),
    "batches": Subcommand("sglang_rollout.batches.main:command", "coordinator", "Run the batch server: it splits batches.", part=True),
    "coordinator": Subcommand(
        "sglang_rollout.coordinator.main:command", "coordinator", "Run the coordinator: the control API of the fleet.", part=True
    ),
    "crd": Subcommand("sglang_rollout.api.crdgen:command", "operator", "Print the CustomResourceDefinition for kubectl apply."),
    "local": Subcommand("sglang_rollout.local.cli:command", "coordinator", "Run a fleet on this machine, in front of SGLang servers."),
    "operator": Subcommand("sglang_rollout.controller.main:command", "operator", "Run the Kubernetes operator."),
    "plan": Subcommand(
        "sglang_rollout.controller.preview:plan_command", "preview", "Print the steps that the operator would take for an SGLangRollout."
    ),
    "plugin": Subcommand(
        "sglang_rollout.local.plugin:command", "coordinator", "Install the plug-in for SGLang servers of this machine, for local."
    ),
    "proxy": Subcommand("sglang_rollout.proxy.cli:command", "coordinator", "Run a proxy: gate or front (haproxy), or smg.", part=True),
    "render": Subcommand(
        "sglang_rollout.controller.preview:render_command",
        "preview",
        "Print the objects that the operator creates for an SGLangRollout.",
    ),
    "status": Subcommand("sglang_rollout.overview.cli:command", "operator", "Show the state of a fleet on one screen."),
    "store": Subcommand("sglang_rollout.store.cli:command", "coordinator", "Run the weight store of transport Staged.", part=True),
    "weights": Subcommand("sglang_rollout.weights.cli:command", "trainer", "List, verify and export the weight versions of a fleet."),
    "stand-in": Subcommand(
        "sglang_rollout.testing.__main__:command", "testing", "Run stand-ins for SGLang servers, for tests without GPUs."
    ),
}


class LazyGroup(click.Group):
    """A click group that imports a subcommand when it is called."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the names of all subcommands, sorted."""
        return sorted({*super().list_commands(ctx), *SUBCOMMANDS})

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import and return one subcommand."""
        found = SUBCOMMANDS.get(cmd_name)
        return super().get_command(ctx, cmd_name) if found is None else load(cmd_name, found)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the table of ``--help`` without importing a subcommand."""
        for title, part in (("Commands", False), ("Processes of a fleet, started by the operator's pods and by local", True)):
            with formatter.section(title):
                formatter.write_dl([(name, SUBCOMMANDS[name].help) for name in self.list_commands(ctx) if SUBCOMMANDS[name].part is part])


def load(name: str, subcommand: Subcommand) -> click.Command:
    """Import a subcommand.

    Raises:
        click.ClickException: A library is not installed. The message says how to install it.
    """
    module, _, attribute = subcommand.target.partition(":")
    try:
        command = getattr(importlib.import_module(module), attribute)
    except ModuleNotFoundError as error:
        # A missing module of this package is a defect: keep the traceback.
        if error.name is None or error.name.partition(".")[0] == __package__:
            raise
        raise click.ClickException(
            f"`sglang-rollout {name}` needs the library {error.name}, which is not installed: install sglang-rollout[{subcommand.extra}]"
        ) from error
    if not isinstance(command, click.Command):
        raise TypeError(f"{subcommand.target} is not a click command")
    return command


# click's default of 80 columns breaks most help texts in two.
@click.group(cls=LazyGroup, context_settings={"max_content_width": 120})
@click.version_option(__version__, prog_name="sglang-rollout")
def main() -> None:
    """Run rollout fleets of SGLang engines: one URL to generate samples and to push policy weights."""


if __name__ == "__main__":
    sys.exit(main())
