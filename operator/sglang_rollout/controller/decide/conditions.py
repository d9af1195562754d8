"""The conditions of a fleet, one function for each. Pure."""

from __future__ import annotations

from sglang_rollout.api.conditions import ConditionType, Finding, Reason, find
from sglang_rollout.api.spec import State
from sglang_rollout.controller.decide import pods
from sglang_rollout.controller.decide.engine_status import EngineView, version_text
from sglang_rollout.controller.decide.facts import SEVERITY, Facts
from sglang_rollout.controller.decide.prefetch import prefetch_status
from sglang_rollout.controller.decide.sentences import LENT, partly, sentence
from sglang_rollout.controller.decide.serving import for_trainer, lent, router_refused, waits_for_trainer
from sglang_rollout.controller.render import names
from sglang_rollout.wire.record import UpdateOutcome
from sglang_rollout.wire.states import FleetState

_NEEDS_A_PERSON = frozenset(
    {
        Reason.IMAGE_PULL_FAILED,
        Reason.CREATE_FAILED,
        Reason.ENGINE_CRASHED,
        Reason.RESTART_BUDGET_EXHAUSTED,
        Reason.INSUFFICIENT_CAPACITY,
    }
)
_HELD = frozenset({Reason.TRAINER_LOST, Reason.PAUSED, Reason.ASLEEP})
"""By ``spec.state``, or by the trainer, or because there is none any more."""
_BY_SPEC = ("Asleep by spec.state", "spec.state is Active again")
"""How ``Ready`` begins from a sleep by ``spec.state`` until engines serve again."""


def invalid_findings(why: str) -> list[Finding]:
    """Return the conditions of an object that cannot be read."""
    message = f"The spec cannot be acted on: {why} Nothing is changed until then."
    return [
        Finding(ConditionType.READY, "False", Reason.INVALID_SPEC, message),
        Finding(ConditionType.AVAILABLE, "Unknown", Reason.INVALID_SPEC, message),
        Finding(ConditionType.PROGRESSING, "False", Reason.INVALID_SPEC, message),
        Finding(ConditionType.DEGRADED, "True", Reason.INVALID_SPEC, message),
    ]


def findings(facts: Facts) -> list[Finding]:
    """Return what is to be said about every aspect."""
    return [_ready(facts), _available(facts), _progressing(facts), _router(facts), _weights(facts), _waiting(facts), _degraded(facts)]


def _ready(facts: Facts) -> Finding:
    def no(reason: Reason, message: str) -> Finding:
        return Finding(ConditionType.READY, "False", reason, message)

    if facts.obstacle:
        return no(facts.obstacle.reason, facts.obstacle.sentence)
    worst = facts.worst
    if worst and worst.reason in _NEEDS_A_PERSON:
        return no(worst.reason, _sentence(facts, worst))
    if not facts.router:
        return no(Reason.ROUTER_NOT_READY, facts.router_why)
    if facts.outdated:
        return no(Reason.UPDATING, _rolling(facts))
    if worst and worst.reason and worst.reason not in _HELD:
        return no(worst.reason, _sentence(facts, worst))
    return _held(facts) or _all_serve(facts)


def _held(facts: Facts) -> Finding | None:
    """What ``spec.state`` keeps from serving, or has just let go."""
    rollout = facts.world.rollout
    state = rollout.spec.state if rollout is not None and facts.wanted else State.ACTIVE
    held = sum(view.reason in _HELD for view in facts.wanted)
    many = f"{held} of {len(facts.wanted)} engines"
    if state is State.ASLEEP:
        reason, message = Reason.ASLEEP, f"Asleep by spec.state: {many} have released their memory. Kept:{_version(facts)}."
    elif state is State.PAUSED:
        reason, message = Reason.PAUSED, f"Paused by spec.state: {many} are paused and hold{_version(facts)}. Weight updates are taken."
    elif held and waits_for_trainer(facts.world):
        reason, message = Reason.TRAINER_LOST, _lost(facts, many)
    elif held and lent(facts.world):
        reason, message = Reason.ASLEEP, f"{LENT}has the memory of {many}. It wakes them by resume_memory_occupation."
    elif held and for_trainer(facts.world):
        reason, message = Reason.ASLEEP, f"{LENT}wakes the engines: {many} have not got all of their memory back yet."
    elif held and not _spec_lets_go(facts):
        reason, message = Reason.ASLEEP, f"{LENT}has had memory of {many} released, and they serve when it is back."
    elif held:
        reason = next(view.reason for view in facts.wanted if view.reason in _HELD) or Reason.PAUSED
        message = f"spec.state is Active again: {many} have not gone on yet."
    else:
        return None
    return Finding(ConditionType.READY, "False", reason, message)


def _lost(facts: Facts, many: str) -> str:
    return (
        f"The trainer is gone, and weights.trainerLease.onLoss is Pause: {many} are paused and hold{_version(facts)}."
        " They go on when a trainer calls the fleet's URL; by hand: POST /continue_generation there."
    )


def _spec_lets_go(facts: Facts) -> bool:
    """Whether engines come out of what ``spec.state`` held, and not out of a sleep that the trainer of a fleet with GPUs of its own asked
    for: the record does not tell these apart, what was said last does."""
    record, said = facts.world.record, find(facts.world.cr.get("status"), ConditionType.READY).get("message") or ""
    return (record is not None and record.state is not FleetState.ACTIVE) or said.startswith(_BY_SPEC)


def _all_serve(facts: Facts) -> Finding:
    if not facts.wanted:
        rollout = facts.world.rollout
        if rollout is not None and rollout.spec.state is State.SUSPENDED:
            kept = f"Suspended by spec.state: no engine runs. Kept:{_version(facts)}." if facts.world.record else "Suspended by spec.state."
            return Finding(ConditionType.READY, "False", Reason.SUSPENDED, kept)
        return Finding(ConditionType.READY, "True", Reason.SCALED_TO_ZERO, "No engine is wanted (spec.replicas is 0).")
    if facts.away:
        return Finding(ConditionType.READY, "True", Reason.BASE_SERVING, _base_serves(facts))
    return Finding(ConditionType.READY, "True", Reason.ALL_SERVING, f"All {len(facts.wanted)} engines serve{_version(facts)}.")


def _base_serves(facts: Facts) -> str:
    base, others = len(facts.base), len(facts.wanted) - len(facts.base)
    made = f"All {base} engines of the base serve{_version(facts)}, and {facts.serving - base} of {others} beyond it."
    return f"{made} {_and_more(facts.away[0].sentence, len(facts.away), 'not serving either')}"


def _available(facts: Facts) -> Finding:
    if facts.serving:
        message = f"{facts.serving} of {len(facts.wanted)} engines serve{_version(facts)}."
        return Finding(ConditionType.AVAILABLE, "True", Reason.ENGINES_SERVING, message)
    message = "No engine serves: requests for tokens are answered with 503 and the reason." if facts.router else facts.router_why
    if facts.router and waits_for_trainer(facts.world):
        message = "No engine generates until a trainer calls: requests for tokens wait."
    return Finding(ConditionType.AVAILABLE, "False", Reason.NO_ENGINE_SERVING, message)


def _progressing(facts: Facts) -> Finding:
    kind = ConditionType.PROGRESSING
    if facts.outdated:
        return Finding(kind, "True", Reason.UPDATING, _rolling(facts))
    waiting, up = facts.waiting, len(facts.coming) - len(facts.waiting)
    wanted = len(facts.wanted)
    if up or facts.leaving:
        parts = [
            f"{up} of {wanted} engines are on their way up" if up else "",
            f"{len(facts.leaving)} engines are going away" if facts.leaving else "",
            f"{len(waiting)} waiting" if waiting else "",
        ]
        return Finding(kind, "True", Reason.SCALING, "; ".join(part for part in parts if part) + ".")
    if waiting and facts.obstacle:
        return Finding(kind, "False", facts.obstacle.reason, facts.obstacle.sentence)
    if waiting:
        reason = waiting[0].reason or Reason.PODS_NOT_READY
        return Finding(kind, "False", reason, f"Waiting: {len(waiting)} of {wanted} engines. {_sentence(facts, waiting[0])}")
    return Finding(kind, "False", Reason.SETTLED, "All objects are as the spec says.")


def _router(facts: Facts) -> Finding:
    if facts.router:
        name = names.router_name(facts.world.cr["metadata"]["name"])
        return Finding(ConditionType.ROUTER_READY, "True", Reason.ROUTER_RUNNING, f"Deployment {name} runs.")
    return Finding(ConditionType.ROUTER_READY, "False", Reason.ROUTER_NOT_READY, facts.router_why)


def _behind(facts: Facts) -> list[EngineView]:
    return [view for view in facts.wanted if view.reason in {Reason.WEIGHTS_DIVERGED, Reason.WAITING_FOR_WEIGHTS}]


def _waiting(facts: Facts) -> Finding:
    kind, behind = ConditionType.WAITING_FOR_WEIGHTS, _behind(facts)
    if facts.world.record is None:
        return Finding(kind, "Unknown", Reason.NOT_REPORTED, facts.world.record_problem or "The coordinator has not reported yet.")
    if not behind:
        return Finding(kind, "False", Reason.ALL_AT_COMMITTED, "No engine waits for weights.")
    first = behind[0]
    return Finding(kind, "True", first.reason or Reason.WAITING_FOR_WEIGHTS, _and_more(first.sentence, len(behind)))


def _weights(facts: Facts) -> Finding:
    kind, record = ConditionType.WEIGHTS_CONSISTENT, facts.world.record
    if record is None:
        return Finding(kind, "Unknown", Reason.NOT_REPORTED, facts.world.record_problem or "The coordinator has not reported yet.")
    behind = [*_behind(facts), *(view for view in facts.wanted if view.reason is Reason.UPDATING_WEIGHTS)]
    if behind:
        worst = min(behind, key=lambda view: SEVERITY.index(view.reason) if view.reason else 99)
        return Finding(kind, "False", worst.reason or Reason.WAITING_FOR_WEIGHTS, _and_more(worst.sentence, len(behind)))
    message = f"Every engine that is up holds version {version_text(record.committed)}."
    return Finding(kind, "True", Reason.ALL_AT_COMMITTED, message)


def _degraded(facts: Facts) -> Finding:
    kind, worst = ConditionType.DEGRADED, facts.worst
    if facts.obstacle:
        return Finding(kind, "True", facts.obstacle.reason, facts.obstacle.sentence)
    if worst and worst.reason in _NEEDS_A_PERSON:
        return Finding(kind, "True", worst.reason, _sentence(facts, worst))
    if not facts.router and (router_refused(facts.world) or any(map(pods.trouble, facts.world.router_pods()))):
        return Finding(kind, "True", Reason.ROUTER_NOT_READY, facts.router_why)
    held = _held(facts)
    if held is not None and held.reason is Reason.TRAINER_LOST:
        return Finding(kind, "True", held.reason, held.message)
    found = _last_update(facts) or _avoided(facts) or _prefetch(facts)
    return found or Finding(kind, "False", Reason.AS_EXPECTED, "Nothing needs attention.")


def _last_update(facts: Facts) -> Finding | None:
    kind, record = ConditionType.DEGRADED, facts.world.record
    last = record.last_update if record else None
    if last and last.outcome is UpdateOutcome.PARTIAL and facts.away:
        return Finding(kind, "True", Reason.PARTLY_COMMITTED, partly(version_text(last.version), len(last.engines), last.reason))
    if last and last.outcome is UpdateOutcome.FAILED:
        message = f"The last weight update (to {version_text(last.version)}) ended {last.outcome.value}: {last.reason or 'no reason given'}"
        return Finding(kind, "True", Reason.UPDATE_FAILED, sentence(message))
    return None


def _avoided(facts: Facts) -> Finding | None:
    """A node may need a person also while the fleet does without it."""
    message = " ".join(f"Node {row.node} is avoided until {row.until}: {row.reason}" for row in facts.avoided)
    return Finding(ConditionType.DEGRADED, "True", Reason.NODES_AVOIDED, message) if message else None


def _prefetch(facts: Facts) -> Finding | None:
    """Engines that run do not need it, and one that starts fetches for itself; but it would fail there, too."""
    found = prefetch_status(facts.world)
    if found is None or not found.reason:
        return None
    message = f"{found.ready} of {found.wanted} nodes have the model: {found.reason}"
    return Finding(ConditionType.DEGRADED, "True", Reason.PREFETCH_FAILED, message)


def _sentence(facts: Facts, worst: EngineView) -> str:
    return _and_more(worst.sentence, sum(view.reason == worst.reason for view in facts.wanted))


def _and_more(text: str, count: int, what: str = "for the same reason") -> str:
    others = count - 1
    return text if others < 1 else f"{text} ({others} more engine{'s' if others > 1 else ''} {what}.)"


def _rolling(facts: Facts) -> str:
    updated = len(facts.wanted) - len(facts.outdated)
    made = f"Rolling update: {updated} of {len(facts.wanted)} engines are made from the current spec."
    waiting = [view for view in facts.wanted if view.row.updated and view.reason is not None]
    return f"{made} The next one waits for this: {waiting[0].sentence}" if waiting else made


def _version(facts: Facts) -> str:
    return f" version {version_text(facts.world.record.committed)}" if facts.world.record else ""
