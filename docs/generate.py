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
from e2e.cases.security.attacks import ATTACKS
from prometheus_client import CollectorRegistry
from prometheus_client.metrics import MetricWrapperBase

from sglang_rollout import cli
from sglang_rollout.agent.app import make_metrics as make_agent_metrics
from sglang_rollout.api.engine_flags import FLAGS, EngineFlags
from sglang_rollout.api.flag_families import ENGINE_FAMILIES, ROUTER_FAMILIES, Family, family_rows
from sglang_rollout.api.status import ConditionType, Reason
from sglang_rollout.batches.memory import Budget
from sglang_rollout.batches.metrics import make_metrics as make_batch_metrics
from sglang_rollout.controller.metrics import Metrics as OperatorMetrics
from sglang_rollout.coordinator.metrics import Metrics as CoordinatorMetrics
from sglang_rollout.coordinator.update.phases import TRANSITIONS, Phase
from sglang_rollout.store.app import make_metrics as make_store_metrics
from sglang_rollout.wire import Message
from sglang_rollout.wire.reasons import GateReason
from sglang_rollout.wire.record import UpdateReason
from sglang_rollout.wire.staged import StoreStatus
from sglang_rollout.wire.trainer import FleetDocument, FleetMember

_EMPTY_STORE = SimpleNamespace(status=lambda: StoreStatus(instance=""), uploads=SimpleNamespace(bytes=0))
TARGET = Path(__file__).parent / "_generated"
RUNBOOK = Path(__file__).parent / "operations/conditions.md"


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


# --- metrics -----------------------------------------------------------------------------------------------------------


def metrics() -> str:
    """Return a table of metrics for each process of this project."""
    registries = {
        "Operator": OperatorMetrics().registry,
        "Coordinator": CoordinatorMetrics().registry,
        "Batch server": make_batch_metrics(Budget()),
        "Agent": make_agent_metrics(cast("Any", SimpleNamespace())),
        "Weight store": make_store_metrics(cast("Any", _EMPTY_STORE)),
    }
    parts = []
    for process, registry in registries.items():
        rows = sorted(metric_rows(registry))
        parts.append(f"## {process}\n\n{table(('metric', 'type', 'labels', 'meaning'), rows)}")
    return "\n".join(parts)


def metric_rows(registry: CollectorRegistry) -> Iterator[tuple[str, str, str, str]]:
    """Yield name, type, labels and help text of each metric in a registry."""
    for collector in registry._collector_to_names:
        described = isinstance(collector, MetricWrapperBase)
        for family in collector.describe() if described else collector.collect():
            names = collector._labelnames if described else dict.fromkeys(name for sample in family.samples for name in sample.labels)
            name = f"{family.name}_total" if family.type == "counter" else family.name
            text = family.documentation.rstrip(".") + "."
            yield code(name), family.type, ", ".join(code(label) for label in names), text


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


def codes(owner: type[StrEnum]) -> str:
    """Return a table of the values of an enum with their docstrings."""
    texts = attribute_docstrings(owner)
    return table(("code", "meaning"), ((code(member.value), texts[member.name]) for member in owner))


def condition_reasons() -> str:
    """Return a table of all reasons of conditions and rows of status. A reason links to its section of the runbook, if there is one."""
    texts = attribute_docstrings(Reason)
    described = set(re.findall(r"^### `(\w+)`$", RUNBOOK.read_text(), re.MULTILINE))
    rows = []
    for reason in sorted(Reason):
        name = code(reason.value)
        rows.append((f"[{name}](../operations/conditions.md#{reason.lower()})" if reason.value in described else name, texts[reason.name]))
    return table(("reason", "meaning"), rows)


def update_phases() -> str:
    """Return a table of the phases of an update, and the phases that may follow each."""
    texts = attribute_docstrings(Phase)
    entered = [phase for phase in Phase if phase in TRANSITIONS]
    rows = ((phase.value, texts[phase.name], ", ".join(after.value for after in Phase if after in TRANSITIONS[phase])) for phase in entered)
    return table(("phase", "meaning", "next"), rows)


def message_fields(message: type[Message]) -> str:
    """Return a table of the fields of a message with their docstrings."""
    texts = {
        name: text
        for owner in reversed(message.__mro__)
        if issubclass(owner, Message)
        for name, text in attribute_docstrings(owner).items()
    }
    return table(("field", "meaning"), ((code(name), re.sub(r"\bNone\b", "`null`", texts[name])) for name in message.model_fields))


# --- engine settings ---------------------------------------------------------------------------------------------------


def engine_settings() -> str:
    """Return the table of engine settings with a field, and the flag of SGLang that each field stands for."""
    texts = attribute_docstrings(EngineFlags)
    names = {name: field.alias or name for name, field in EngineFlags.model_fields.items()}
    rows = [(code(f"engine.{names[field]}"), code(flag), re.sub(r" \(`--.*?\)", "", texts.get(field, ""))) for field, flag in FLAGS.items()]
    return table(("field", "flag of SGLang", "meaning"), rows)


def flag_families() -> str:
    """Return the tables of the families of flags that an engine and the router take, and of those that need an entry."""
    return "\n".join(family_tables("engine", ENGINE_FAMILIES) + family_tables("router", ROUTER_FAMILIES))


def family_tables(block: str, families: Iterable[Family]) -> list[str]:
    """Return the two tables of a block of the spec."""
    rows = list(family_rows(families))
    accepted = [(subject, flags) for subject, flags, risk in rows if not risk]
    risky = [row for row in rows if row[2]]
    return [
        f"### Families of `{block}.args`\n",
        "These need no entry. … stands for the rest of a name.\n",
        table(("family", "flags"), accepted),
        f"These need an entry in `{block}.acceptFlags`.\n",
        table(("family", "flags", "reason"), risky),
    ]


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
    paragraphs = inspect.cleandoc(command.help or "").split("\n\n")
    yield f"## {name}\n\n" + "\n\n".join(help_paragraph(text) for text in paragraphs) + "\n"
    records = [record for option in command.params if isinstance(option, click.Option) and (record := option.get_help_record(context))]
    if records:
        yield table(("option", "meaning"), ((code(option.replace("|", " | ")), mark_code(text)) for option, text in records))
    if isinstance(command, click.Group):
        for child in command.list_commands(context):
            found = command.get_command(context, child)
            if found is not None:
                yield from command_sections(found, f"{name} {child}")


def help_paragraph(text: str) -> str:
    """Return a paragraph of a command's help as one line. click does not wrap a paragraph after the character BACKSPACE."""
    line = " ".join(text.removeprefix("\b").split())
    return code(line) if text.startswith("\b") else mark_code(line)


def mark_code(text: str) -> str:
    """Return a text with its flags and environment variables as inline code, and its code as it is."""
    found = re.compile(r"`[^`]*`|(?<![\w-])--(?:[a-z][\w-]*|(?= ))|\b[A-Z]+(?:_[A-Z]+)+\b")
    return found.sub(lambda word: word[0] if word[0].startswith("`") else code(word[0]), text)


# --- attacks -----------------------------------------------------------------------------------------------------------


def attacks() -> str:
    """Return a table of the attacks that the end-to-end cases try."""
    rows = ((attack.source, attack.tried, code(attack.answer) if attack.status else attack.answer, attack.gain) for attack in ATTACKS)
    return table(("from", "tried", "answer", "otherwise the caller"), rows)


PAGES: dict[str, Callable[[], str]] = {
    "metrics.md": metrics,
    "condition-types.md": lambda: codes(ConditionType),
    "condition-reasons.md": condition_reasons,
    "gate-reasons.md": lambda: codes(GateReason),
    "update-reasons.md": lambda: codes(UpdateReason),
    "update-phases.md": update_phases,
    "fleet-document.md": lambda: message_fields(FleetDocument),
    "fleet-member.md": lambda: message_fields(FleetMember),
    "engine-settings.md": engine_settings,
    "flag-families.md": flag_families,
    "cli.md": command_line,
    "attacks.md": attacks,
}


def main() -> None:
    """Write all generated files."""
    TARGET.mkdir(exist_ok=True)
    for name, page in PAGES.items():
        (TARGET / name).write_text(page())


if __name__ == "__main__":
    main()
