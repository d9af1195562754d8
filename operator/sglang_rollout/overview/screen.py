"""The screen of ``sglang-rollout status``: at most 30 lines about one rollout. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime

from sglang_rollout.api.status import EnginePhase, EngineStatus, RecentUpdate
from sglang_rollout.controller.decide.engine_status import format_version
from sglang_rollout.controller.render import names
from sglang_rollout.overview import text
from sglang_rollout.overview.findings import Finding, find_findings
from sglang_rollout.overview.observation import Observation

MAX_LINES = 30
"""Lines of the whole screen."""
_INDENT = 10
"""Width of the margin with the labels."""
_MAX_FINDING_LINES = 14
_MAX_MESSAGE_LINES = 3
_MAX_ENGINE_ROWS = 8
"""More engines are shown in groups."""
_MAX_UPDATE_ROWS = 5


@dataclass(frozen=True)
class Size:
    """Size of the screen in characters and lines."""

    width: int = 120
    height: int = MAX_LINES


def draw(seen: Observation, now: datetime, size: Size) -> list[str]:
    """Return the lines of the screen."""
    lines = [*_heading(seen, now, size), *_findings(seen, now, size), *_engines(seen, size)]
    lines += _updates(seen.updates, now, size, most=min(_MAX_UPDATE_ROWS, MAX_LINES - len(lines) - 1))
    if len(lines) <= size.height:
        return lines
    hidden = len(lines) - size.height + 1
    return [*lines[: size.height - 1], f"({hidden} more lines: enlarge the window)"]


def _heading(seen: Observation, now: datetime, size: Size) -> list[str]:
    status = seen.status
    rows = [("Rollout", f"{seen.namespace}/{seen.name}: {_describe_state(seen, now)}")]
    rows += [("Version", seen.version)] if seen.version else []
    rows += [("URL", status.endpoints.url)] if status is not None and status.endpoints is not None else []
    rows += [("Update", _describe_update(seen, now))] if seen.record is not None else []
    return [line for label, words in rows for line in text.wrap(label, words, width=size.width, indent=_INDENT, most=1)]


def _describe_state(seen: Observation, now: datetime) -> str:
    state = "being deleted" if seen.rollout["metadata"].get("deletionTimestamp") else seen.state
    if seen.status is None:
        return f"{state}, no status"
    ready = next((each for each in seen.status.conditions if each.type == "Ready"), None)
    if ready is None:
        return f"{state}, no condition Ready"
    age = f"for {text.format_age(ready.last_transition_time, now)}"
    words = f"Ready {age}" if ready.status == "True" else f"not Ready {age} ({ready.reason})"
    return f"{state}, {words}" + (f", {seen.status.ready} engines serve" if seen.status.ready else "")


def _describe_update(seen: Observation, now: datetime) -> str:
    record = seen.record
    if record is None or record.under_way is None:
        return "none in progress"
    since = f", began {text.format_age(record.under_way_since, now)} ago" if record.under_way_since else ""
    author = f", by {record.holder}" if record.holder else ""
    total = len(seen.status.engines) if seen.status is not None else 0
    count = f" (now in {seen.updating_count} of {total} engines)" if seen.updating_count else ""
    return f"version {format_version(record.under_way)} in progress{since}{author}{count}"


def _findings(seen: Observation, now: datetime, size: Size) -> list[str]:
    lines: list[str] = []
    findings = find_findings(seen, now)
    for number, finding in enumerate(findings):
        made = _describe_finding(finding, size)
        is_last = number + 1 == len(findings)
        if len(lines) + len(made) > _MAX_FINDING_LINES - (not is_last):
            more = f"{len(findings) - number} more: kubectl -n {seen.namespace} describe sglr {seen.name}"
            return [*lines, *text.wrap("", more, width=size.width, indent=_INDENT, most=1)]
        lines += made
    return lines


def _describe_finding(finding: Finding, size: Size) -> list[str]:
    label = "Problem" if finding.is_problem else "Note"
    words = f"{finding.reason}: {finding.message}" if finding.reason else finding.message
    advice = text.wrap("  To do", finding.advice, width=size.width, indent=_INDENT, most=2) if finding.advice else []
    return [*text.wrap(label, words, width=size.width, indent=_INDENT, most=_MAX_MESSAGE_LINES), *advice]


def _engines(seen: Observation, size: Size) -> list[str]:
    rows = seen.status.engines if seen.status is not None else []
    if not rows:
        return []
    header = ("ENGINE", "PHASE", "VERSION", "RESTARTS", "NODE", "REASON")
    groups = [[row] for row in rows] if len(rows) <= _MAX_ENGINE_ROWS else _group(rows)
    shown = groups if len(groups) <= _MAX_ENGINE_ROWS else groups[: _MAX_ENGINE_ROWS - 1]
    lines = text.table("Engines", [header, *(_describe_engines(group, seen) for group in shown)], width=size.width, indent=_INDENT)
    rest = max(seen.status.replicas if seen.status is not None else 0, len(rows)) - sum(len(group) for group in shown)
    return [*lines, f"{' ' * _INDENT}and {rest} more engines"] if rest > 0 else lines


def _group(rows: Sequence[EngineStatus]) -> list[list[EngineStatus]]:
    """Return engines in the same state together: first those that serve, then the largest groups."""
    groups: dict[tuple[object, ...], list[EngineStatus]] = {}
    for row in rows:
        groups.setdefault((row.phase, _describe_weights(row), row.updated, row.reason), []).append(row)
    return sorted(groups.values(), key=lambda group: (group[0].phase is not EnginePhase.SERVING, -len(group)))


def _describe_engines(group: Sequence[EngineStatus], seen: Observation) -> Sequence[str]:
    first = group[0]
    nodes = {node for row in group for node in (row.nodes or [row.node or ""]) if node}
    return (
        first.name if len(group) == 1 else _name_group(group, seen),
        first.phase.value,
        _describe_weights(first),
        str(sum(row.restarts for row in group)),
        next(iter(nodes)) if len(nodes) == 1 else f"{len(nodes)} nodes" if nodes else "",
        " ".join(word for word in (first.reason, "" if first.updated or not nodes else "(old spec)") if word),
    )


def _name_group(group: Sequence[EngineStatus], seen: Observation) -> str:
    prefix = names.engine_name(seen.name, 0).removesuffix("0")
    numbers = text.format_ranges([int(row.name.removeprefix(prefix)) for row in group])
    return text.cut(f"{len(group)} engines: {numbers}", 40)


def _describe_weights(row: EngineStatus) -> str:
    return row.version or row.weights or ""


def _updates(updates: Sequence[RecentUpdate], now: datetime, size: Size, *, most: int) -> list[str]:
    if not updates:
        return []
    header = ("VERSION", "OUTCOME", "ENDED", "TOOK", "BYTES", "AUTHOR", "REASON")
    rows = [
        (
            update.version,
            update.outcome,
            f"{text.format_age(update.finished, now)} ago",
            text.format_seconds(update.milliseconds / 1000) if update.milliseconds is not None else "",
            text.format_bytes(update.bytes) if update.bytes is not None else "",
            update.author,
            update.reason,
        )
        for update in updates[:most]
    ]
    return text.table("Updates", [header, *rows], width=size.width, indent=_INDENT)
