"""What is said about one engine: its phase and, if it does not serve, why. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from sglang_rollout.api.conditions import Reason
from sglang_rollout.api.status import EnginePhase, EngineStatus
from sglang_rollout.controller.decide import pods
from sglang_rollout.controller.decide.elastic import comes_later, is_beyond
from sglang_rollout.controller.decide.sentences import sentence
from sglang_rollout.controller.decide.serving import for_trainer, holds_committed, kept_back, lent, router_ready, serves, waits_for_trainer
from sglang_rollout.controller.decide.view import Object, World
from sglang_rollout.controller.decide.waiting import waits
from sglang_rollout.controller.render.hashing import revision, revisions
from sglang_rollout.wire.launch import BUDGET_EXHAUSTED, WITH_THE_OTHERS
from sglang_rollout.wire.ports import GATE_PORT
from sglang_rollout.wire.record import EngineRow
from sglang_rollout.wire.states import FleetState
from sglang_rollout.wire.weights import BASE_LABEL, EngineState, Version

_UNDER_WAY = "A weight update is under way."
_OLD_NEWS = "The engine holds version "
"""How the agent's sentences begin while an update is open, and when it holds a version that was not committed when it spoke."""

_PHASES = (EnginePhase.FAILED, EnginePhase.PENDING, EnginePhase.STARTING)
"""Of the pods of one engine, the one that comes first here is spoken of."""
_LOSES_NOTHING = frozenset({Reason.UPDATING_WEIGHTS, Reason.TRAINER_LOST, Reason.PAUSED, Reason.ASLEEP, Reason.ROUTER_NOT_READY})
"""Reasons for which an engine does not serve that leave open whether it was lost before."""
_TROUBLE_REASONS = {"image": Reason.IMAGE_PULL_FAILED, "crash": Reason.ENGINE_CRASHED, "create": Reason.CREATE_FAILED}


@dataclass(frozen=True)
class EngineView:
    """One engine, with the reason that it adds to the condition ``Ready``."""

    row: EngineStatus
    reason: Reason | None
    """None: it serves."""

    @property
    def sentence(self) -> str:
        """Why it does not serve, naming it."""
        return f"Engine {self.row.name}: {self.row.reason}" if self.row.reason else f"Engine {self.row.name} serves."


def version_text(version: Version) -> str:
    """Return how a version is shown: ``base``, or the trainer's own name for it."""
    return BASE_LABEL if version.is_base else version.label or str(version)


def engine_views(world: World) -> list[EngineView]:
    """Return all engines: those that are wanted, and those that are on their way out."""
    rollout = world.rollout
    if rollout is None:
        return []
    wanted, current = revisions(rollout), revision(rollout)
    leaving = [name for name in world.engines() if name not in wanted]
    return [_wanted(world, name, made_from) for name, made_from in wanted.items()] + [_leaving(world, name, current) for name in leaving]


_TRAINER_LOST = EnginePhase.PAUSED, Reason.TRAINER_LOST, "its trainer is gone (weights.trainerLease.onLoss); it goes on when one calls."


def _wanted(world: World, name: str, current: str) -> EngineView:
    phase, reason, why = _state(world, name)
    lost = _before(world, name).get("lost") if reason in _LOSES_NOTHING else reason is not None or None
    return EngineView(_row(world, name, current, phase, why).model_copy(update={"lost": lost}), reason)


def _leaving(world: World, name: str, current: str) -> EngineView:
    return EngineView(_row(world, name, current, EnginePhase.STOPPING, "it is not wanted any more and goes away."), None)


def _row(world: World, name: str, current: str, phase: EnginePhase, why: str) -> EngineStatus:
    found, row = world.pods_of(name), world.row(name)
    several = len(found) > 1
    port = pods.gate_port_of(world.pod_of(name))
    return EngineStatus(
        name=name,
        phase=phase,
        updated=bool(found) and all(pods.revision_of(pod) == current for pod in found),
        version=version_text(row.version) if row and row.version else None,
        weights=row.state.value if row else None,
        restarts=sum(map(pods.restarts_of, found)),
        node=pods.node_of(world.pod_of(name)),
        port=None if port == GATE_PORT else port,
        nodes=[pods.node_of(pod) or "" for pod in found] if several else None,
        all_reduce=row.all_reduce if row else None,
        reason=why,
    )


def _state(world: World, name: str) -> tuple[EnginePhase, Reason | None, str]:  # noqa: PLR0911 - one line per case
    if serves(world, name):
        return _TRAINER_LOST if waits_for_trainer(world) else (EnginePhase.SERVING, None, "")
    if refused := _uncreated(world, name):
        return refused
    if world.size_of(name) > 1:
        return _state_of_several(world, name)
    pod = world.pod_of(name)
    if pod is None:
        why = "it comes when every engine of the base has a node." if comes_later(world, name) else "it has no pod yet."
        return EnginePhase.PENDING, Reason.PODS_NOT_READY, why
    if pods.is_terminating(pod):
        return EnginePhase.STOPPING, Reason.PODS_NOT_READY, "its pod is going away and will be made anew."
    if not pods.is_ready(pod):
        return _not_ready(world, pod, _failed_before(world, name))
    return _closed(world, name)


def _uncreated(world: World, name: str) -> tuple[EnginePhase, Reason, str] | None:
    """What its controller says of an engine whose pods it cannot make."""
    said = world.cluster.uncreated.get(name, "") if world.lacks_pods(name) else ""
    if not said:
        return None
    why = sentence(f"its pods cannot be made: {said}")
    if "exceeded quota" in said and is_beyond(world, name):
        return EnginePhase.PENDING, Reason.INSUFFICIENT_CAPACITY, why
    return EnginePhase.FAILED, Reason.CREATE_FAILED, why


def _state_of_several(world: World, name: str) -> tuple[EnginePhase, Reason, str]:
    """Of an engine with several pods: what its agents say, or the pod that is worst off, with its node."""
    found, row = world.pods_of(name), world.row(name)
    said = sentence(row.reason) if row is not None and row.reason else ""
    if BUDGET_EXHAUSTED in said:
        return EnginePhase.FAILED, Reason.RESTART_BUDGET_EXHAUSTED, said
    if going := next((pod for pod in found if pods.is_terminating(pod)), None):
        return EnginePhase.STOPPING, Reason.PODS_NOT_READY, f"its {pods.place(going)} is going away; it starts again with all its pods."
    if len(found) < world.size_of(name):
        return EnginePhase.PENDING, Reason.PODS_NOT_READY, f"it has {len(found)} of {world.size_of(name)} pods yet."
    away = [(pod, _not_ready(world, pod, _failed_before(world, name))) for pod in found if not pods.is_ready(pod)]
    if not away:
        return _closed(world, name)
    pod, (phase, reason, why) = min(away, key=lambda one: (_PHASES.index(one[1][0]), WITH_THE_OTHERS in one[1][2]))
    if phase is EnginePhase.STARTING:
        why = f"{why} {said}".rstrip()
    return phase, reason, f"{pods.place(pod)}: {why}"


def _failed_before(world: World, name: str) -> bool:
    return bool(_before(world, name).get("phase") == EnginePhase.FAILED)


def _before(world: World, name: str) -> Object:
    """What status says of an engine so far."""
    rows: list[Object] = (world.cr.get("status") or {}).get("engines") or []
    return next((row for row in rows if row.get("name") == name), {})


def _not_ready(world: World, pod: Object, failed_before: bool) -> tuple[EnginePhase, Reason, str]:
    found = pods.trouble(pod, failed_before=failed_before)
    if found and found.kind in _TROUBLE_REASONS:
        return EnginePhase.FAILED, _TROUBLE_REASONS[found.kind], sentence(found.text)
    held = waits(pod, world.cluster, world.rollout) if world.rollout else None
    if held:
        return EnginePhase.PENDING, *held
    nowhere = pods.unschedulable(pod)
    if nowhere:
        return EnginePhase.PENDING, Reason.INSUFFICIENT_CAPACITY, sentence(f"no node can take its pod: {nowhere}") + _kept_off(world)
    if found:
        return EnginePhase.STARTING, Reason.PODS_NOT_READY, f"{found.text}; it is starting again."
    if pods.node_of(pod) is None:
        return EnginePhase.PENDING, Reason.PODS_NOT_READY, "its pod waits for the scheduler."
    return EnginePhase.STARTING, Reason.PODS_NOT_READY, "it is starting."


def _kept_off(world: World) -> str:
    """Said beside the scheduler's sentence, which speaks of an affinity that the user did not write."""
    return f" Avoided for their failures (status.avoidedNodes): {', '.join(world.avoided)}." if world.avoided else ""


def _closed(world: World, name: str) -> tuple[EnginePhase, Reason, str]:  # noqa: PLR0911 - one line per case
    """The process is up; its gate is closed, or nobody can say."""
    row = world.row(name)
    if not router_ready(world):
        return EnginePhase.WAITING, Reason.ROUTER_NOT_READY, "it is up; the router is not."
    if row is None:
        return EnginePhase.WAITING, Reason.WAITING_FOR_WEIGHTS, "it is up; the coordinator has not reported on it yet."
    told = f" {sentence(row.reason)}" if row.reason else ""
    if row.catch_up:
        return EnginePhase.WAITING, Reason.WAITING_FOR_WEIGHTS, row.catch_up
    if updating := _updating(world, row):
        return EnginePhase.UPDATING, Reason.UPDATING_WEIGHTS, updating
    if row.released or row.comparing:
        return EnginePhase.ASLEEP, Reason.ASLEEP, _asleep(world, row)
    if kept_back(world, name):
        return EnginePhase.PAUSED, Reason.PAUSED, "spec.state is Paused; it holds the committed version."
    if row.state is EngineState.DIRTY:
        why = f"it holds part of an unfinished weight update and waits for a complete one.{told}"
        return EnginePhase.WAITING, Reason.WEIGHTS_DIVERGED, why
    why = f"its gate is closed.{told}"
    if row.state is EngineState.CLEAN and row.version and world.record and not holds_committed(world, name):
        held, committed = version_text(row.version), version_text(world.record.committed)
        why = f"it holds version {held}, the fleet serves {committed}: {_way_back(world, name)}"
    return EnginePhase.WAITING, Reason.WAITING_FOR_WEIGHTS, why


def _updating(world: World, row: EngineRow) -> str:
    """What an engine does in an update that goes as it should; empty if it is in none."""
    if row.state is EngineState.DIRTY and row.reason == _UNDER_WAY:
        return "a weight update is under way; it serves again when that is committed."
    if holds_committed(world, row.name) and row.reason.startswith(_OLD_NEWS):
        return "it holds the version that was just committed; its gate is opening."
    return ""


def _asleep(world: World, row: EngineRow) -> str:
    """Who has an engine's memory, or how far it has woken."""
    if not row.released:
        return "it has woken, and its weights are being compared with those that it held."
    if world.record is not None and world.record.state is FleetState.ASLEEP:
        why = "spec.state is Asleep"
    elif for_trainer(world):
        why = "the trainer has its memory" if lent(world) else "the trainer wakes it"
    else:
        why = "it serves when it has its memory back"
    return f"{why}; released: {', '.join(row.released)}."


def _way_back(world: World, name: str) -> str:
    """How an engine with older weights comes to serve again."""
    record = world.record
    if record and record.joined and not any(row.name == name for group in record.joined for row in record.members(group)):
        return "it joined after the trainer's group was opened; it needs a new group, or a snapshot on disk (weights.catchUp.disk)."
    return "it waits for the trainer's next weight update."
