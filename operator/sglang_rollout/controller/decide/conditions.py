"""The conditions of a fleet, one function for each, made from a summary of its engines. Pure."""

from __future__ import annotations

from sglang_rollout.api.status import ConditionType, Finding, Reason
from sglang_rollout.api.v1alpha1 import State
from sglang_rollout.controller.decide.contest import describe_contests, find_contests
from sglang_rollout.controller.decide.engine_status import EngineReport, format_version, is_waiting_for_trainer
from sglang_rollout.controller.decide.isolation import evaluate_isolation
from sglang_rollout.controller.decide.store import describe_store_problem, evaluate_store, has_store_failed
from sglang_rollout.controller.decide.summary import INTERRUPTED, NEEDS_ATTENTION, FleetSummary, rank_severity
from sglang_rollout.controller.render import names
from sglang_rollout.wire.reasons import end_sentence
from sglang_rollout.wire.record import UpdateOutcome


def describe_invalid_spec(why: str) -> list[Finding]:
    """Return the conditions of an object that cannot be read."""
    message = f"The spec is invalid: {why} The operator changes nothing until the spec is valid."
    return [
        Finding(ConditionType.READY, "False", Reason.INVALID_SPEC, message),
        Finding(ConditionType.AVAILABLE, "Unknown", Reason.INVALID_SPEC, message),
        Finding(ConditionType.PROGRESSING, "False", Reason.INVALID_SPEC, message),
        Finding(ConditionType.DEGRADED, "True", Reason.INVALID_SPEC, message),
    ]


def describe_partial_commit(version: str, engines: int, reason: str) -> str:
    """Return the message about a version that some engines did not commit."""
    count = f"{engines} engine{'' if engines == 1 else 's'}"
    return end_sentence(f"Version {version} is committed on {count}; the other engines wait for weights: {reason}")


def evaluate_conditions(summary: FleetSummary) -> list[Finding]:
    """Return the status, reason and message of each condition."""
    store = evaluate_store(summary.fleet)
    return [
        _ready(summary),
        _available(summary),
        _progressing(summary),
        _router_ready(summary),
        *([store] if store else []),
        _weights_consistent(summary),
        _waiting_for_weights(summary),
        evaluate_isolation(summary.fleet),
        _degraded(summary),
    ]


def _ready(summary: FleetSummary) -> Finding:
    problem = _why_not_ready(summary)
    return Finding(ConditionType.READY, "False", *problem) if problem else _all_serve(summary)


def _why_not_ready(summary: FleetSummary) -> tuple[Reason, str] | None:
    """Return why the fleet does not work. A training step is no reason, because ``Ready`` would flap with each step."""
    if summary.obstacle:
        return summary.obstacle.reason, summary.obstacle.message
    worst, interruption = summary.worst, summary.interruption
    if worst and worst.reason in NEEDS_ATTENTION:
        return worst.reason, _describe_group(summary, worst)
    if not summary.fleet.is_router_ready:
        return Reason.ROUTER_NOT_READY, summary.router_problem
    if summary.outdated:
        return Reason.UPDATING, _describe_rolling_update(summary)
    if worst and worst.reason and worst.reason not in INTERRUPTED:
        return worst.reason, _describe_group(summary, worst)
    return interruption if interruption and (worst or interruption[0] is not Reason.ASLEEP_FOR_TRAINER) else None


def _all_serve(summary: FleetSummary) -> Finding:
    kind, rollout = ConditionType.READY, summary.fleet.rollout
    if summary.wanted and (problem := describe_store_problem(summary.fleet)):
        return Finding(kind, "False", Reason.STORE_NOT_READY, problem)
    if summary.stepping:
        return Finding(kind, "True", *_describe_step(summary))
    if summary.wanted and not summary.away:
        return Finding(kind, "True", Reason.ALL_SERVING, f"{_describe_all(len(summary.wanted))}{summary.version_suffix}.")
    if summary.wanted:
        return Finding(kind, "True", Reason.BASE_SERVING, _describe_base(summary))
    if rollout is not None and rollout.spec.state is State.SUSPENDED:
        kept = f": no engine runs. Kept:{summary.version_suffix}." if summary.fleet.record else "."
        return Finding(kind, "False", Reason.SUSPENDED, f"Suspended by spec.state{kept}")
    return Finding(kind, "True", Reason.SCALED_TO_ZERO, "No engine is wanted (spec.replicas is 0).")


def _describe_step(summary: FleetSummary) -> tuple[Reason, str]:
    """Return what the training step does with the engines that it keeps from serving."""
    return summary.interruption or (Reason.UPDATING_WEIGHTS, summary.update_progress)


def _describe_all(number: int, which: str = "") -> str:
    return f"The engine{which} serves" if number == 1 else f"All {number} engines{which} serve"


def _describe_base(summary: FleetSummary) -> str:
    base, surplus = summary.base_count, len(summary.wanted) - summary.base_count
    of_surplus = f"{summary.working_count - base} of {surplus} surplus engines"
    serving = f"{_describe_all(base, ' of the base')}{summary.version_suffix}, and {of_surplus}."
    return f"{serving} {_and_more(summary.away[0].sentence, len(summary.away), 'not serving either')}"


def _available(summary: FleetSummary) -> Finding:
    kind = ConditionType.AVAILABLE
    if summary.serving_count:
        message = f"{summary.serving_count} of {len(summary.wanted)} engines serve{summary.version_suffix}."
        return Finding(kind, "True", Reason.ENGINES_SERVING, message)
    if summary.stepping:
        return Finding(kind, "True", *_describe_step(summary))
    message = "No engine serves: requests for tokens are answered with 503 and the reason."
    if not summary.fleet.is_router_ready:
        message = summary.router_problem
    elif is_waiting_for_trainer(summary.fleet):
        message = "No engine generates until a trainer calls: requests for tokens wait."
    return Finding(kind, "False", Reason.NO_ENGINE_SERVING, message)


def _progressing(summary: FleetSummary) -> Finding:
    kind, waiting, wanted = ConditionType.PROGRESSING, summary.waiting, len(summary.wanted)
    if summary.outdated:
        return Finding(kind, "True", Reason.UPDATING, _describe_rolling_update(summary))
    starting = len(summary.coming) - len(waiting)
    if starting or summary.leaving_count:
        parts = [
            f"{starting} of {wanted} engines are starting" if starting else "",
            f"{summary.leaving_count} engines are being removed" if summary.leaving_count else "",
            f"{len(waiting)} waiting" if waiting else "",
        ]
        return Finding(kind, "True", Reason.SCALING, "; ".join(part for part in parts if part) + ".")
    if summary.update_progress:
        return Finding(kind, "True", Reason.UPDATING_WEIGHTS, summary.update_progress)
    if waiting and summary.obstacle:
        return Finding(kind, "False", summary.obstacle.reason, summary.obstacle.message)
    if waiting:
        reason = waiting[0].reason or Reason.PODS_NOT_READY
        return Finding(kind, "False", reason, f"Waiting: {len(waiting)} of {wanted} engines. {_describe_group(summary, waiting[0])}")
    return Finding(kind, "False", Reason.SETTLED, "All objects are as the spec says.")


def _router_ready(summary: FleetSummary) -> Finding:
    if summary.fleet.is_router_ready:
        message = f"Deployment {names.router_name(summary.fleet.name)} runs."
        return Finding(ConditionType.ROUTER_READY, "True", Reason.ROUTER_RUNNING, message)
    return Finding(ConditionType.ROUTER_READY, "False", Reason.ROUTER_NOT_READY, summary.router_problem)


def _waiting_for_weights(summary: FleetSummary) -> Finding:
    kind, behind = ConditionType.WAITING_FOR_WEIGHTS, summary.behind
    if summary.fleet.record is None:
        return _not_reported(summary, kind)
    if not behind:
        return Finding(kind, "False", Reason.ALL_AT_COMMITTED, "No engine waits for weights.")
    return Finding(kind, "True", behind[0].reason or Reason.WAITING_FOR_WEIGHTS, _and_more(behind[0].sentence, len(behind)))


def _weights_consistent(summary: FleetSummary) -> Finding:
    kind, record = ConditionType.WEIGHTS_CONSISTENT, summary.fleet.record
    if record is None:
        return _not_reported(summary, kind)
    updating = [report for report in summary.wanted if report.is_updating]
    behind = [*summary.behind, *(report for report in updating if report not in summary.stepping)]
    if behind:
        worst = min(behind, key=rank_severity)
        return Finding(kind, "False", worst.reason or Reason.WAITING_FOR_WEIGHTS, _and_more(worst.sentence, len(behind)))
    if updating:
        return Finding(kind, "True", Reason.UPDATING_WEIGHTS, summary.update_progress)
    message = f"Every engine that is up holds version {format_version(record.committed)}."
    return Finding(kind, "True", Reason.ALL_AT_COMMITTED, message)


def _not_reported(summary: FleetSummary, kind: ConditionType) -> Finding:
    return Finding(kind, "Unknown", Reason.NOT_REPORTED, summary.fleet.record_problem or "The coordinator has not reported yet.")


def _degraded(summary: FleetSummary) -> Finding:
    kind, worst, fleet = ConditionType.DEGRADED, summary.worst, summary.fleet
    if summary.obstacle:
        return Finding(kind, "True", summary.obstacle.reason, summary.obstacle.message)
    if worst and worst.reason in NEEDS_ATTENTION:
        return Finding(kind, "True", worst.reason, _describe_group(summary, worst))
    if not fleet.is_router_ready and (fleet.router_creation_error or any(pod.find_trouble() for pod in fleet.router_pods)):
        return Finding(kind, "True", Reason.ROUTER_NOT_READY, summary.router_problem)
    interruption = summary.interruption
    if interruption is not None and interruption[0] is Reason.TRAINER_LOST:
        return Finding(kind, "True", *interruption)
    checks = (
        *(_check_contests, _check_pause, _check_certificate, _check_callers, _check_updates),
        *(_check_store, _check_last_update, _check_nodes, _check_snapshots),
    )
    if found := next(filter(None, (check(summary) for check in checks)), None):
        return Finding(kind, "True", *found)
    return Finding(kind, "False", Reason.AS_EXPECTED, "Nothing needs attention.")


def _check_contests(summary: FleetSummary) -> tuple[Reason, str] | None:
    contests = find_contests(summary.fleet.restores, summary.now)
    return (Reason.FIELDS_CONTESTED, describe_contests(contests)) if contests else None


def _check_pause(summary: FleetSummary) -> tuple[Reason, str] | None:
    if not summary.fleet.is_router_paused:
        return None
    router = names.router_name(summary.fleet.name)
    message = f"Deployment {router} is paused (kubectl rollout pause), so that changes of the spec do not reach the router's pods."
    return Reason.ROUTER_PAUSED, f"{message} Run kubectl rollout resume deployment/{router}."


def _check_certificate(summary: FleetSummary) -> tuple[Reason, str] | None:
    problem = summary.fleet.cluster.tls_problem
    return (Reason.INVALID_CERTIFICATE, f"The running router keeps its certificate. {problem}") if problem else None


def _check_callers(summary: FleetSummary) -> tuple[Reason, str] | None:
    record = summary.fleet.record
    if record is None or not record.callers_forbidden:
        return None
    message = (
        "spec.security selects callers of other namespaces, and the coordinator may not watch their pods, so that they are refused:"
        f" bind the chart's ClusterRole for callers to ServiceAccount {names.router_name(summary.fleet.name)}, or select callers of this"
        " namespace only."
    )
    return Reason.NOT_ALLOWED, message


def _check_updates(summary: FleetSummary) -> tuple[Reason, str] | None:
    problem = summary.fleet.record.updates_refused if summary.fleet.record else ""
    return (Reason.UPDATES_REFUSED, problem) if problem else None


def _check_store(summary: FleetSummary) -> tuple[Reason, str] | None:
    fleet = summary.fleet
    return (Reason.STORE_NOT_READY, describe_store_problem(fleet)) if has_store_failed(fleet) else None


def _check_snapshots(summary: FleetSummary) -> tuple[Reason, str] | None:
    problem = summary.fleet.record.snapshot_problem if summary.fleet.record else ""
    return (Reason.SNAPSHOT_FAILED, problem) if problem else None


def _check_last_update(summary: FleetSummary) -> tuple[Reason, str] | None:
    last = summary.fleet.record.last_update if summary.fleet.record else None
    if last and last.outcome is UpdateOutcome.PARTIAL and summary.away:
        message = describe_partial_commit(format_version(last.version), len(last.engines), last.message)
        return Reason.PARTLY_COMMITTED, message
    if last and last.outcome is UpdateOutcome.FAILED:
        message = (
            f"The last weight update (to {format_version(last.version)}) ended {last.outcome.value}: {last.message or 'no reason given'}"
        )
        return Reason.UPDATE_FAILED, end_sentence(message)
    return None


def _check_nodes(summary: FleetSummary) -> tuple[Reason, str] | None:
    """Report avoided nodes, which may need repair even if the fleet runs without them."""
    message = " ".join(f"Node {row.node} is avoided until {row.until}: {row.message}" for row in summary.avoided)
    return (Reason.NODES_AVOIDED, message) if message else None


def _describe_group(summary: FleetSummary, worst: EngineReport) -> str:
    return _and_more(worst.sentence, sum(report.reason == worst.reason for report in summary.wanted))


def _and_more(text: str, count: int, what: str = "for the same reason") -> str:
    others = count - 1
    return text if others < 1 else f"{text} ({others} more engine{'s' if others > 1 else ''} {what}.)"


def _describe_rolling_update(summary: FleetSummary) -> str:
    updated = len(summary.wanted) - len(summary.outdated)
    progress = f"Rolling update: {updated} of {len(summary.wanted)} engines are made from the current spec."
    waiting = next((report for report in summary.wanted if report.status.updated and report.reason is not None), None)
    return f"{progress} The next engine waits for this: {waiting.sentence}" if waiting else progress
