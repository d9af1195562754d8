"""Write the reference tables that come from the code into ``docs/_generated``. ``make docs`` runs it before Sphinx.

Pages in ``docs/reference`` include these files. The CRD's page is generated elsewhere: ``python -m sglang_rollout.api.crdgen``.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import itertools
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from enum import StrEnum
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import click
from aiohttp.web import RouteDef
from prometheus_client import CollectorRegistry

from sglang_rollout import cli
from sglang_rollout.agent.app import Metrics as AgentMetrics
from sglang_rollout.api.engine_flags import FLAGS, EngineFlags
from sglang_rollout.api.status import ConditionType, Reason
from sglang_rollout.controller.metrics import Metrics as OperatorMetrics
from sglang_rollout.coordinator.generate.routes import routes as data_routes
from sglang_rollout.coordinator.http.control import routes as control_routes
from sglang_rollout.coordinator.http.info import routes as info_routes
from sglang_rollout.coordinator.metrics import Metrics as CoordinatorMetrics
from sglang_rollout.wire import ports
from sglang_rollout.wire.reasons import GateReason, RefusalCode

TARGET = Path(__file__).parent / "_generated"


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a Markdown table. Pipes in cells are escaped."""
    lines = [header, ["---"] * len(header), *rows]
    return "".join(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in line)} |\n" for line in lines)


def code(text: str) -> str:
    """Return a text as inline code; an empty text stays empty."""
    return f"`{text}`" if text else ""


def markdown(docstring: str) -> str:
    """Return a docstring's first paragraph as one line of Markdown."""
    paragraph = inspect.cleandoc(docstring).split("\n\n", maxsplit=1)[0]
    return " ".join(paragraph.replace("``", "`").split())


# --- HTTP routes -------------------------------------------------------------------------------------------------------


def http_routes() -> str:
    """Return the table of all routes of the fleet's URL."""
    listed = [
        *((ports.FLEET_METRICS, "GET", "Prometheus metrics of the coordinator."),),
        *(
            (route.path, route.method, route_summary(route.handler))
            for route in cast("list[RouteDef]", [*info_routes, *control_routes, *data_routes])
        ),
    ]
    merged: dict[tuple[str, str], list[str]] = {}
    for path, method, summary in listed:
        merged.setdefault((path, summary), []).append(method)
    return table(
        ("path", "method", "answer"),
        ((code(path), ", ".join(sorted(methods)), summary) for (path, summary), methods in sorted(merged.items())),
    )


def route_summary(handler: Callable[..., Any]) -> str:
    """Return the docstring of a handler, or of the parser that it wraps."""
    around = inspect.getclosurevars(handler).nonlocals
    wrapped = around.get("parse") or around.get("handler") or handler
    return markdown(wrapped.__doc__ or "")


# --- metrics -----------------------------------------------------------------------------------------------------------


def metrics() -> str:
    """Return a table of metrics for each process of this project."""
    agent = AgentMetrics(cast("Any", SimpleNamespace()))
    registries = {
        "Operator": OperatorMetrics().registry,
        "Coordinator": CoordinatorMetrics().registry,
        "Agent": agent._registry,
    }
    parts = []
    for process, registry in registries.items():
        rows = sorted(metric_rows(registry))
        parts.append(f"## {process}\n\n{table(('metric', 'type', 'labels', 'meaning'), rows)}")
    return "\n".join(parts)


def metric_rows(registry: CollectorRegistry) -> Iterator[tuple[str, str, str, str]]:
    """Yield name, type, labels and help text of each metric in a registry."""
    for family in registry.collect():
        collector = registry._names_to_collectors.get(family.name)
        labels = {name: None for sample in family.samples for name in sample.labels if name != "le"}
        labels |= dict.fromkeys(getattr(collector, "_labelnames", ()))
        name = f"{family.name}_total" if family.type == "counter" else family.name
        text = family.documentation.rstrip(".") + "."
        yield code(name), family.type, ", ".join(code(label) for label in labels), text


# --- codes -------------------------------------------------------------------------------------------------------------


def attribute_docstrings(owner: type) -> dict[str, str]:
    """Return the docstrings below the attributes of a class, by the attribute's name."""
    body = cast("ast.ClassDef", ast.parse(inspect.getsource(owner)).body[0]).body
    found = {}
    for assigned, text in itertools.pairwise(body):
        if isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant) and isinstance(text.value.value, str):
            targets = assigned.targets if isinstance(assigned, ast.Assign) else [getattr(assigned, "target", None)]
            found |= {target.id: markdown(text.value.value) for target in targets if isinstance(target, ast.Name)}
    return found


def codes(owner: type[StrEnum], *, status: bool = False) -> str:
    """Return a table of the values of an enum with their docstrings, and with their HTTP status on request."""
    texts = attribute_docstrings(owner)
    rows = [[code(member.value), *([str(cast("Any", member).status)] if status else []), texts.get(member.name, "")] for member in owner]
    return table(["code", *(["HTTP status"] if status else []), "meaning"], rows)


def condition_reasons() -> str:
    """Return a list of all reasons of conditions and rows of status."""
    return ", ".join(code(reason.value) for reason in sorted(Reason)) + ".\n"


# --- engine settings ---------------------------------------------------------------------------------------------------


def engine_settings() -> str:
    """Return the table of engine settings with a field, and the flag of SGLang that each field stands for."""
    texts = attribute_docstrings(EngineFlags)
    names = {name: field.alias or name for name, field in EngineFlags.model_fields.items()}
    rows = [(code(f"engine.{names[field]}"), code(flag), re.sub(r" \(`--.*?\)", "", texts.get(field, ""))) for field, flag in FLAGS.items()]
    return table(("field", "flag of SGLang", "meaning"), rows)


# --- command line ------------------------------------------------------------------------------------------------------


def command_line() -> str:
    """Return a section for each subcommand."""
    parts = []
    for name, subcommand in cli.SUBCOMMANDS.items():
        module, _, attribute = subcommand.target.partition(":")
        command = getattr(importlib.import_module(module), attribute)
        parts += list(command_sections(command, name))
    return "\n".join(parts)


def command_sections(command: click.Command, name: str) -> Iterator[str]:
    """Yield the section of a command, and those of its own subcommands."""
    context = click.Context(command, info_name=f"sglang-rollout {name}")
    help_text = inspect.cleandoc(command.help or "").replace("\b\n", "").split("\n\n")
    paragraphs = [" ".join(part.split()) for part in help_text]
    yield f"## {name}\n\n" + "\n\n".join(part if not part.startswith("sglang-rollout ") else f"`{part}`" for part in paragraphs) + "\n"
    records = [record for option in command.params if (record := option.get_help_record(context)) and record[0] != "--help"]
    if records:
        yield table(("option", "meaning"), ((code(option), text) for option, text in records))
    if isinstance(command, click.Group):
        for child in command.list_commands(context):
            found = command.get_command(context, child)
            if found is not None:
                yield from command_sections(found, f"{name} {child}")


PAGES: dict[str, Callable[[], str]] = {
    "http-routes.md": http_routes,
    "metrics.md": metrics,
    "condition-types.md": lambda: codes(ConditionType),
    "condition-reasons.md": condition_reasons,
    "gate-reasons.md": lambda: codes(GateReason),
    "refusal-codes.md": lambda: codes(RefusalCode, status=True),
    "engine-settings.md": engine_settings,
    "cli.md": command_line,
}


def main() -> None:
    """Write all generated files."""
    TARGET.mkdir(exist_ok=True)
    for name, page in PAGES.items():
        (TARGET / name).write_text(page())


if __name__ == "__main__":
    main()
