"""What a user should know about a fleet, the most severe first: why, and what to do. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from datetime import datetime, timedelta

from sglang_rollout.api.status import Condition, ConditionType, EngineStatus, Reason
from sglang_rollout.overview.advice import advise
from sglang_rollout.overview.observation import Observation

_SHOWN_IF = {
    ConditionType.DEGRADED: "True",
    ConditionType.READY: "False",
    ConditionType.ROUTER_READY: "False",
    ConditionType.STORE_READY: "False",
    ConditionType.NETWORK_ISOLATED: "False",
    ConditionType.WAITING_FOR_WEIGHTS: "True",
    ConditionType.PROGRESSING: "True",
}
"""Conditions that need an explanation with this status, in the order in which a user should read them."""
_WANTED = frozenset({Reason.ALL_SERVING, Reason.UPDATING_WEIGHTS, Reason.HOST_NETWORK, Reason.NETWORK_OPEN})
"""Reasons that need no explanation: the fleet serves, the line of the update says it, or the user asked for it."""
_STATUS_DELAY = timedelta(seconds=30)
"""A running operator writes what the coordinator has recorded within seconds."""
_NO_OPERATOR = "if this stays, look at the operator: kubectl get pods -A -l app.kubernetes.io/name=sglang-rollout-operator."


@dataclass(frozen=True)
class Finding:
    """One thing that a user should know."""

    reason: str
    """Reason of a condition or of an engine, as a CamelCase code; empty for a fact that no condition has."""
    message: str
    """A sentence."""
    advice: str = ""
    """What to do; empty if the message says it."""
    is_problem: bool = False
    """True if a person should look at it."""


def find_findings(seen: Observation, now: datetime) -> list[Finding]:
    """Return what a user should know. Of several findings with one reason, only the first is returned; equal advice is given once."""
    found: list[Finding] = []
    gaps = (Finding("", gap) for gap in seen.gaps)
    for each in (*_of_objects(seen, now), *_of_conditions(seen), *_of_weights(seen), *_of_engines(seen), *gaps):
        if each.reason and any(each.reason == other.reason for other in found):
            continue
        is_said = any(each.advice == other.advice for other in found)
        found.append(replace(each, advice="") if is_said else each)
    return found


def _of_objects(seen: Observation, now: datetime) -> Iterator[Finding]:
    """Yield which writer has not followed yet: the operator, or the coordinator."""
    status, record = seen.status, seen.record
    if status is None:
        yield Finding("", "No operator has written a status for this rollout yet.", _NO_OPERATOR, is_problem=True)
        return
    if (status.observed_generation or 0) < seen.generation:
        message = f"The operator has not seen the newest spec yet: generation {seen.generation}, and the status is of generation "
        yield Finding("", f"{message}{status.observed_generation or 0}.", _NO_OPERATOR)
    last = record.last_update if record is not None else None
    shown = status.weights.last_update if status.weights is not None else None
    is_old = last is not None and (shown is None or shown.finished != last.finished)
    if last is not None and is_old and now - datetime.fromisoformat(last.finished) > _STATUS_DELAY:
        message = "The operator has not reported the last update yet. Conditions and engines below are older than the update."
        yield Finding("", message, _NO_OPERATOR, is_problem=True)
    is_running = any(each.type == ConditionType.ROUTER_READY and each.status == "True" for each in status.conditions)
    if seen.intent is not None and record is not None and is_running and record.intent_generation < seen.intent.generation:
        message = (
            f"The coordinator has not applied generation {seen.intent.generation} of the spec yet (it has {record.intent_generation})."
        )
        yield Finding("", message, f"if this stays: kubectl -n {seen.namespace} logs deploy/{seen.name}-router -c coordinator.")


def _of_conditions(seen: Observation) -> Iterator[Finding]:
    conditions = {each.type: each for each in seen.status.conditions} if seen.status is not None else {}
    for kind, status in _SHOWN_IF.items():
        condition = conditions.get(kind.value)
        if condition is not None and condition.status == status and condition.reason not in _WANTED:
            yield _explain(seen, condition)


def _explain(seen: Observation, condition: Condition) -> Finding:
    is_problem = condition.type in (ConditionType.DEGRADED, ConditionType.NETWORK_ISOLATED)
    return Finding(condition.reason, condition.message, _advise(seen, condition.reason), is_problem=is_problem)


def _of_weights(seen: Observation) -> Iterator[Finding]:
    """Yield failures of process groups and adapters, and engines that must restart."""
    status, record = seen.status, seen.record
    failure = status.weights.process_group_failure if status is not None and status.weights is not None else None
    if failure is not None:
        yield Finding(failure.reason, f"No process group could be opened: {failure.message}", is_problem=True)
    for adapter in status.adapters if status is not None else []:
        if adapter.reason:
            yield Finding(adapter.reason, f"Adapter {adapter.name}: {adapter.message}", is_problem=True)
    if record is not None and record.restarts:
        listed = ", ".join(record.engines[place].name for place in record.restarts if place < len(record.engines))
        message = f"These engines may hold tensors of another update, and their agents restart them: {listed}."
        yield Finding("", message, "push again when they have restarted.")


def _of_engines(seen: Observation) -> Iterator[Finding]:
    """Yield each reason why engines do not serve, with the message of its first engine."""
    ignored = {"", Reason.PODS_NOT_READY, *_WANTED}  # the condition Ready says it, unless there is a worse reason
    rows = [row for row in (seen.status.engines if seen.status is not None else []) if row.reason not in ignored]
    for row in rows:
        others = sum(other.reason == row.reason for other in rows) - 1
        more = f" ({others} more for the same reason.)" if others else ""
        yield Finding(row.reason, f"Engine {row.name}: {row.message}{more}", _advise(seen, row.reason))


def _advise(seen: Observation, reason: str) -> str:
    first: EngineStatus | None = next((row for row in (seen.status.engines if seen.status else []) if row.reason == reason), None)
    return advise(reason, seen.name, seen.namespace, first.name if first is not None else "")
