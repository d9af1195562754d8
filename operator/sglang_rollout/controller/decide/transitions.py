"""Which Kubernetes Events a change of status is worth: what a person wants to read in ``kubectl describe``. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from sglang_rollout.api.conditions import ConditionType, Reason, find
from sglang_rollout.api.status import EnginePhase
from sglang_rollout.controller.decide.sentences import LENT, partly, sentence

Status = Mapping[str, Any]

_HELD: Mapping[str, str] = {
    Reason.PAUSED: "Paused by spec.state: engines stop generating, weight updates are taken.",
    Reason.ASLEEP: "Asleep by spec.state: engines release their memory.",
}
"""Said when it begins; how far it has come is in the condition. A sleep for the trainer is in the condition only: each step of a
training brings one."""
_WOULD_SERVE = frozenset({EnginePhase.UPDATING, EnginePhase.PAUSED, EnginePhase.ASLEEP})
"""Phases of an engine that serves again by itself; nothing was lost."""


_BESIDE_UPDATES = (ConditionType.PROGRESSING, ConditionType.ROUTER_READY, ConditionType.WAITING_FOR_WEIGHTS, ConditionType.DEGRADED)
"""Aspects that a weight update leaves alone, if nothing else happens."""


@dataclass(frozen=True)
class EventToPost:
    """One Event about the custom resource."""

    type: Literal["Normal", "Warning"]
    reason: str
    message: str
    key: str
    """Two events with one key are one Event object over time: the newer message replaces the older, and the count
    grows."""


def transitions(old: Status | None, new: Status) -> list[EventToPost]:
    """Return the Events for the change from ``old`` to ``new``; none if nothing changed that anybody would want to
    know."""
    if not old:
        return [_conditions_first(new)]
    return [*_engines(old, new), *_weights(old, new), *_rolling(old, new), *_nodes(old, new), *_ready(old, new)]


def _conditions_first(new: Status) -> EventToPost:
    ready = find(new, ConditionType.READY)
    if ready.get("reason") == Reason.INVALID_SPEC:
        return EventToPost("Warning", "InvalidSpec", str(ready.get("message")), "InvalidSpec")
    return EventToPost("Normal", "Accepted", f"The fleet is being made; its URL is {new.get('endpoints', {}).get('url')}.", "Accepted")


def _engines(old: Status, new: Status) -> Iterator[EventToPost]:
    before = {row["name"]: row for row in old.get("engines", [])}
    for row in new.get("engines", []):
        name, phase = row["name"], row["phase"]
        earlier = before.get(name, {})
        served = _served(old, earlier)
        if (phase, _served(new, row)) == (earlier.get("phase"), served):
            continue
        if phase == EnginePhase.SERVING:
            if not served:
                version = f" version {row['version']}" if row.get("version") else ""
                yield EventToPost("Normal", "EngineServing", f"Engine {name} serves{version}.", f"EngineServing/{name}")
        elif phase == EnginePhase.FAILED:
            yield EventToPost("Warning", "EngineFailed", f"Engine {name}: {row.get('reason', '')}", f"EngineFailed/{name}")
        elif served and phase == EnginePhase.STOPPING:
            yield EventToPost("Normal", "EngineStopping", f"Engine {name}: {row.get('reason', '')}", f"EngineStopping/{name}")
        elif served and phase not in _WOULD_SERVE and not _waits_for_router(new, row):
            yield EventToPost("Warning", "EngineLost", f"Engine {name} serves no more: {row.get('reason', '')}", f"EngineLost/{name}")


def _waits_for_router(status: Status, row: Mapping[str, Any]) -> bool:
    """Whether the engine is up and only the router is not, so that nobody can say how it is. One Event tells of the
    router; one for each engine would call all of them lost."""
    return row.get("phase") == EnginePhase.WAITING and find(status, ConditionType.ROUTER_READY).get("status") != "True"


def _served(status: Status, row: Mapping[str, Any]) -> bool:
    """Whether the engine served, or did when the router was last there to say so, or before the update or the pause that is under
    way: what every step of a training brings is no news."""
    if row.get("phase") in _WOULD_SERVE:
        return not row.get("lost")
    if not _waits_for_router(status, row):
        return row.get("phase") == EnginePhase.SERVING
    return row.get("weights") == "clean" and row.get("version") == (status.get("weights") or {}).get("committedVersion")


def _weights(old: Status, new: Status) -> Iterator[EventToPost]:
    before, after = old.get("weights") or {}, new.get("weights") or {}
    if not after:
        return
    committed = after["committedVersion"]
    moved = (before.get("run"), before.get("step")) != (after["run"], after["step"])
    if before and moved:
        if before["run"] not in {0, after["run"]}:
            message = (
                f"A trainer started anew: run {after['run']} begins at version {committed};"
                f" run {before['run']} ended at {before['committedVersion']}."
            )
            yield EventToPost("Normal", "NewRun", message, "NewRun")
        yield EventToPost(
            "Normal",
            "WeightsCommitted",
            f"The fleet serves version {committed} (run {after['run']}).",
            "WeightsCommitted",
        )
    last = after.get("lastUpdate")
    if not last or last == before.get("lastUpdate"):
        return
    if last["outcome"] == "Partial":
        message = partly(last["version"], last.get("engines", 0), last.get("reason", ""))
        yield EventToPost("Warning", "WeightsPartlyCommitted", message, "WeightsPartlyCommitted")
    elif last["outcome"] == "Aborted":
        message = f"The fleet keeps the weights it had: {last.get('reason') or 'no reason given'}"
        yield EventToPost("Warning", "WeightUpdateAborted", sentence(message), "WeightUpdateAborted")
    elif last["outcome"] != "Committed":
        message = f"Weight update to {last['version']} ended {last['outcome']}: {last.get('reason') or 'no reason given'}"
        yield EventToPost("Warning", "WeightUpdateFailed", sentence(message), "WeightUpdateFailed")


def _rolling(old: Status, new: Status) -> Iterator[EventToPost]:
    before, after = find(old, ConditionType.PROGRESSING), find(new, ConditionType.PROGRESSING)
    was, now = before.get("reason") == Reason.UPDATING, after.get("reason") == Reason.UPDATING
    if now and not was:
        yield EventToPost("Normal", "RollingUpdateStarted", str(after.get("message")), "RollingUpdateStarted")
    if was and not now:
        yield EventToPost("Normal", "RollingUpdateFinished", "All engines are made from the current spec.", "RollingUpdateFinished")


def _nodes(old: Status, new: Status) -> Iterator[EventToPost]:
    before, after = ({row["node"]: row for row in status.get("avoidedNodes") or []} for status in (old, new))
    for node in sorted(after.keys() - before.keys()):
        message = f"Node {node} is avoided until {after[node]['until']}: {after[node]['reason']}"
        yield EventToPost("Warning", "NodeAvoided", message, f"NodeAvoided/{node}")
    for node in sorted(before.keys() - after.keys()):
        yield EventToPost("Normal", "NodeAllowedAgain", f"Node {node} may be used by engines again.", f"NodeAllowedAgain/{node}")


def _ready(old: Status, new: Status) -> Iterator[EventToPost]:
    before, after = find(old, ConditionType.READY), find(new, ConditionType.READY)
    same = (before.get("status"), before.get("reason")) == (after.get("status"), after.get("reason"))
    if (same and _lent(before) == _lent(after)) or _lent(after):
        return
    if after.get("status") == "True":
        if not _only_stepped(old):
            yield EventToPost("Normal", "Ready", str(after.get("message")), "Ready")
    elif held := _HELD.get(str(after.get("reason"))):
        yield EventToPost("Normal", str(after["reason"]), held, str(after["reason"]))
    elif after.get("reason") in {
        Reason.APPLY_FAILED,
        Reason.NAME_TAKEN,
        Reason.INVALID_SPEC,
        Reason.INSUFFICIENT_CAPACITY,
        Reason.QUEUE_NOT_FOUND,
        Reason.GANG_NOT_POSSIBLE,
        Reason.ROUTER_NOT_READY,
        Reason.TRAINER_LOST,
    }:
        if before.get("status") is None and after.get("reason") == Reason.ROUTER_NOT_READY:
            return
        kind: Literal["Normal", "Warning"] = (
            "Normal" if after.get("reason") == Reason.ROUTER_NOT_READY and before.get("status") == "False" else "Warning"
        )
        yield EventToPost(kind, str(after["reason"]), str(after.get("message")), f"NotReady/{after['reason']}")


def _lent(ready: Status) -> bool:
    """Whether the fleet sleeps for its trainer."""
    return ready.get("reason") == Reason.ASLEEP and str(ready.get("message")).startswith(LENT)


def _only_stepped(status: Status) -> bool:
    """Whether nothing but what every step of a training brings has kept the fleet from being Ready: a weight update, or a sleep for the
    trainer. An update also takes in engines that were lost before it: then another aspect has changed since."""
    ready = find(status, ConditionType.READY)
    if ready.get("reason") != Reason.UPDATING_WEIGHTS and not _lent(ready):
        return False
    return all(find(status, kind).get("lastTransitionTime", "") < ready["lastTransitionTime"] for kind in _BESIDE_UPDATES)
