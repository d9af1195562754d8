"""Choose the Kubernetes Events for a change of status, which people read with ``kubectl describe``. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal

from sglang_rollout.api.status import ConditionType, EnginePhase, Reason, find
from sglang_rollout.controller.decide.conditions import describe_partial_commit
from sglang_rollout.wire.reasons import end_sentence

Status = Mapping[str, Any]

_SPEC_STATE_MESSAGES: Mapping[str, str] = {
    Reason.PAUSED: "Paused by spec.state: engines stop generating, weight updates are accepted.",
    Reason.ASLEEP: "Asleep by spec.state: engines release their memory.",
}
"""Messages for the start of a pause or sleep; the condition shows its progress. A sleep for the trainer gets no Event, because
every training step has such a sleep."""
_RETURNS_BY_ITSELF = frozenset({EnginePhase.UPDATING, EnginePhase.PAUSED, EnginePhase.ASLEEP})
"""Phases of an engine that serves again without help."""
_STEP_REASONS = frozenset({Reason.UPDATING_WEIGHTS, Reason.ASLEEP_FOR_TRAINER})
"""Reasons of a true ``Ready`` during a training step. Neither their begin nor their end gets an Event."""
_REPORTED_REASONS = frozenset(
    {
        Reason.NOT_ALLOWED,
        Reason.INVALID_CERTIFICATE,
        Reason.APPLY_FAILED,
        Reason.NAME_TAKEN,
        Reason.INVALID_SPEC,
        Reason.INSUFFICIENT_CAPACITY,
        Reason.CLAIM_UNAVAILABLE,
        Reason.QUEUE_NOT_FOUND,
        Reason.GANG_NOT_POSSIBLE,
        Reason.ROUTER_NOT_READY,
        Reason.STORE_NOT_READY,
        Reason.TRAINER_LOST,
    }
)
"""Reasons of a false ``Ready`` that get an Event."""


_REPORTED_DEGRADATIONS = frozenset({Reason.SNAPSHOT_FAILED, Reason.FIELDS_CONTESTED})
"""Reasons of ``Degraded`` that get an Event of the same name."""


@dataclass(frozen=True)
class EventToPost:
    """One Event about the custom resource."""

    type: Literal["Normal", "Warning"]
    reason: str
    message: str
    key: str
    """Events with the same key are one Event object: the newest message replaces earlier messages, and the count grows."""


def find_events(old: Status | None, new: Status) -> list[EventToPost]:
    """Return the Events for the change from ``old`` to ``new``; none for routine changes, for example a training step."""
    if not old:
        return [_first_event(new)]
    return [
        *_engine_events(old, new),
        *_weight_events(old, new),
        *_rolling_update_events(old, new),
        *_node_events(old, new),
        *_network_events(old, new),
        *_degraded_events(old, new),
        *_ready_events(old, new),
    ]


def _first_event(new: Status) -> EventToPost:
    ready = find(new, ConditionType.READY)
    if (reason := ready.get("reason")) in {Reason.INVALID_SPEC, Reason.NOT_ALLOWED}:
        return EventToPost("Warning", str(reason), str(ready.get("message")), str(reason))
    return EventToPost("Normal", "Accepted", f"The fleet is being created; its URL is {new.get('endpoints', {}).get('url')}.", "Accepted")


def _engine_events(old: Status, new: Status) -> Iterator[EventToPost]:
    before = {row["name"]: row for row in old.get("engines", [])}
    for row in new.get("engines", []):
        name, phase = row["name"], row["phase"]
        earlier = before.get(name, {})
        served = _has_served(old, earlier)
        if (phase, _has_served(new, row)) == (earlier.get("phase"), served):
            continue
        if phase == EnginePhase.SERVING:
            if not served:
                version = f" version {row['version']}" if row.get("version") else ""
                yield EventToPost("Normal", "EngineServing", f"Engine {name} serves{version}.", f"EngineServing/{name}")
        elif phase == EnginePhase.FAILED:
            yield EventToPost("Warning", "EngineFailed", f"Engine {name}: {row.get('message', '')}", f"EngineFailed/{name}")
        elif served and phase == EnginePhase.STOPPING:
            yield EventToPost("Normal", "EngineStopping", f"Engine {name}: {row.get('message', '')}", f"EngineStopping/{name}")
        elif served and phase not in _RETURNS_BY_ITSELF and not _waits_for_router(new, row):
            yield EventToPost("Warning", "EngineLost", f"Engine {name} no longer serves: {row.get('message', '')}", f"EngineLost/{name}")


def _waits_for_router(status: Status, row: Mapping[str, Any]) -> bool:
    """Return True if the engine is up and the router is not, so that the engine's state is unknown.

    One Event reports the router. An Event per engine would report all engines as lost.
    """
    return row.get("phase") == EnginePhase.WAITING and find(status, ConditionType.ROUTER_READY).get("status") != "True"


def _has_served(status: Status, row: Mapping[str, Any]) -> bool:
    """Return True if the engine serves, or served until the present interruption: an update, a pause, a sleep, an absent router."""
    if row.get("phase") in _RETURNS_BY_ITSELF:
        return not row.get("lost")
    if not _waits_for_router(status, row):
        return row.get("phase") == EnginePhase.SERVING
    return row.get("weights") == "clean" and row.get("version") == (status.get("weights") or {}).get("committedVersion")


def _weight_events(old: Status, new: Status) -> Iterator[EventToPost]:
    before, after = old.get("weights") or {}, new.get("weights") or {}
    if not after:
        return
    committed = after["committedVersion"]
    moved = (before.get("run"), before.get("step")) != (after["run"], after["step"])
    if before and moved:
        if before["run"] not in {0, after["run"]}:
            message = (
                f"A trainer began a new run: run {after['run']} begins at version {committed};"
                f" run {before['run']} ended at {before['committedVersion']}."
            )
            yield EventToPost("Normal", "NewRun", message, "NewRun")
        message = f"The fleet serves version {committed} (run {after['run']})."
        yield EventToPost("Normal", "WeightsCommitted", message, "WeightsCommitted")
    if (changed := _find_author_change(before, after)) is not None:
        earlier, latest = changed
        message = f"{latest.author} pushed version {latest.version}; {earlier.author} pushed version {earlier.version}."
        yield EventToPost("Normal", "AuthorChanged", message, "AuthorChanged")
    failure = after.get("processGroupFailure")
    if failure and failure != before.get("processGroupFailure"):
        yield EventToPost("Warning", "ProcessGroupFailed", str(failure["message"]), "ProcessGroupFailed")
    last = after.get("lastUpdate")
    if last and last != before.get("lastUpdate"):
        yield from _update_events(last)
        unchecked, earlier_unchecked = last.get("unchecked"), (before.get("lastUpdate") or {}).get("unchecked")
        if unchecked and unchecked != earlier_unchecked and last["outcome"] in {"Committed", "Partial"}:
            yield EventToPost("Warning", "WeightsUnchecked", f"Version {last['version']}: {unchecked}", "WeightsUnchecked")


@dataclass(frozen=True)
class _Commit:
    """A version that was committed, and the known caller that pushed it."""

    author: str
    version: str


def _find_author_change(before: Status, after: Status) -> tuple[_Commit, _Commit] | None:
    """Return the last two commits of different authors, of which the later one is new; None if there are none.

    Several updates may end between two reconciles. Commits of unknown authors are left out.
    """
    listed, last = after.get("recentUpdates") or [], before.get("lastUpdate") or {}
    seen = next((place for place, update in enumerate(listed) if _identity(update) == _identity(last)), len(listed))
    earlier = [*_commits(before.get("recentUpdates") or []), *_current_commit(before)]
    commits = [*earlier[-1:], *_commits(listed[:seen]), *_current_commit(after)]
    changes = [(one, other) for one, other in pairwise(commits) if one.author != other.author]
    return changes[-1] if changes else None


def _identity(update: Status) -> tuple[object, object]:
    return update.get("version"), update.get("finished")


def _commits(updates: Sequence[Status]) -> Iterator[_Commit]:
    """Yield the commits of known authors among updates that are listed newest first, the oldest first."""
    for update in reversed(updates):
        if update["outcome"] in {"Committed", "Partial"} and update.get("author"):
            yield _Commit(update["author"], update["version"])


def _current_commit(weights: Status) -> Iterator[_Commit]:
    if weights.get("author"):
        yield _Commit(weights["author"], weights["committedVersion"])


def _update_events(last: Mapping[str, Any]) -> Iterator[EventToPost]:
    """Yield a Warning for an update that did not commit on all engines."""
    if last["outcome"] == "Partial":
        message = describe_partial_commit(last["version"], last.get("engines", 0), last.get("message", ""))
        yield EventToPost("Warning", "WeightsPartlyCommitted", message, "WeightsPartlyCommitted")
    elif last["outcome"] == "Aborted":
        message = f"The fleet keeps the weights it had: {last.get('message') or 'no reason given'}"
        yield EventToPost("Warning", "WeightUpdateAborted", end_sentence(message), "WeightUpdateAborted")
    elif last["outcome"] != "Committed":
        message = f"Weight update to {last['version']} ended {last['outcome']}: {last.get('message') or 'no reason given'}"
        yield EventToPost("Warning", "WeightUpdateFailed", end_sentence(message), "WeightUpdateFailed")


def _rolling_update_events(old: Status, new: Status) -> Iterator[EventToPost]:
    before, after = find(old, ConditionType.PROGRESSING), find(new, ConditionType.PROGRESSING)
    was_updating, is_updating = before.get("reason") == Reason.UPDATING, after.get("reason") == Reason.UPDATING
    if is_updating and not was_updating:
        yield EventToPost("Normal", "RollingUpdateStarted", str(after.get("message")), "RollingUpdateStarted")
    if was_updating and not is_updating:
        yield EventToPost("Normal", "RollingUpdateFinished", "All engines are made from the current spec.", "RollingUpdateFinished")


def _node_events(old: Status, new: Status) -> Iterator[EventToPost]:
    before, after = ({row["node"]: row for row in status.get("avoidedNodes") or []} for status in (old, new))
    for node in sorted(after.keys() - before.keys()):
        message = f"Node {node} is avoided until {after[node]['until']}: {after[node]['message']}"
        yield EventToPost("Warning", "NodeAvoided", message, f"NodeAvoided/{node}")
    for node in sorted(before.keys() - after.keys()):
        yield EventToPost("Normal", "NodeAllowedAgain", f"Engines may use node {node} again.", f"NodeAllowedAgain/{node}")


def _network_events(old: Status, new: Status) -> Iterator[EventToPost]:
    before, after = find(old, ConditionType.NETWORK_ISOLATED), find(new, ConditionType.NETWORK_ISOLATED)
    if after.get("reason") == Reason.NOT_ENFORCED and before.get("reason") != Reason.NOT_ENFORCED:
        yield EventToPost("Warning", "NotEnforced", str(after.get("message")), "NotEnforced")


def _degraded_events(old: Status, new: Status) -> Iterator[EventToPost]:
    before, after = find(old, ConditionType.DEGRADED), find(new, ConditionType.DEGRADED)
    reason = after.get("reason")
    if reason in _REPORTED_DEGRADATIONS and before.get("reason") != reason:
        yield EventToPost("Warning", str(reason), str(after.get("message")), str(reason))


def _ready_events(old: Status, new: Status) -> Iterator[EventToPost]:
    before, after = find(old, ConditionType.READY), find(new, ConditionType.READY)
    reason = str(after.get("reason"))
    is_same = (before.get("status"), before.get("reason")) == (after.get("status"), reason)
    if is_same or reason == Reason.ASLEEP_FOR_TRAINER:
        return
    if after.get("status") == "True":
        has_stepped = before.get("status") == "True" and not _STEP_REASONS.isdisjoint((before.get("reason"), reason))
        if not has_stepped:
            yield EventToPost("Normal", "Ready", str(after.get("message")), "Ready")
    elif reason in _SPEC_STATE_MESSAGES:
        yield EventToPost("Normal", reason, _SPEC_STATE_MESSAGES[reason], reason)
    elif reason == Reason.ROUTER_NOT_READY and before.get("status") is None:
        return
    elif reason in _REPORTED_REASONS:
        is_starting = reason in {Reason.ROUTER_NOT_READY, Reason.STORE_NOT_READY} and before.get("status") == "False"
        is_expected = is_starting and find(new, ConditionType.DEGRADED).get("reason") != reason  # it needs no person
        yield EventToPost("Normal" if is_expected else "Warning", reason, str(after.get("message")), f"NotReady/{reason}")
