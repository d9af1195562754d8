"""What the coordinator does without a request: give up what has lost its trainer or its engine, and apply ``spec.state``. Pure.

``spec.state`` holds whatever trainers do, until the spec changes. A trainer's pause is another interruption: it has a lease, and the
trainer's own continue ends it. Both may be in effect at a time; engines generate when neither is.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from sglang_rollout.api.weights_spec import OnLoss
from sglang_rollout.coordinator.update import adapters as lora
from sglang_rollout.coordinator.update import memory
from sglang_rollout.coordinator.update.complete_push import find_doubtful, restart_doubtful
from sglang_rollout.coordinator.update.interruption import Cause, Interruption
from sglang_rollout.coordinator.update.knowledge import Knowledge
from sglang_rollout.coordinator.update.membership import engines_without_tensors, name_engines
from sglang_rollout.coordinator.update.model import Fleet
from sglang_rollout.coordinator.update.outcome import abandon, fence_strays
from sglang_rollout.coordinator.update.phases import Phase
from sglang_rollout.coordinator.update.requests import Answer
from sglang_rollout.coordinator.update.staging import holders
from sglang_rollout.coordinator.update.steps import Operation, failures, resume, same_body, send, sync
from sglang_rollout.coordinator.update.store import STORE
from sglang_rollout.coordinator.update.trainer import Trainer
from sglang_rollout.coordinator.update.transaction import pause_by_policy
from sglang_rollout.sglang.api import ControlCall, PauseMode
from sglang_rollout.wire.record import UpdateReason
from sglang_rollout.wire.states import FleetState, describe_state

STRAY_SECONDS = 3.0
"""An engine that is paused or in a session for this long, although nothing is open, is fenced.

Longer than an agent needs between two steps of its own: it restores the memory of an engine first and resumes the engine then.
"""
RETRY_SECONDS = 10.0
"""When an engine that could not be paused is tried again. Its gate is closed, and trainers' calls may come in between."""


@dataclass(frozen=True)
class Task:
    """One thing that may have to be done."""

    name: str
    condition: Callable[[], Any]
    """Returns what ``operation`` works on; None if there is nothing to do."""
    operation: Callable[[Any], Operation[Answer]] | None
    """None: do nothing, and skip all later tasks."""


class Upkeep:
    """Chooses the next operation without a request: the first task of an ordered chain whose condition holds."""

    def __init__(self, fleet: Fleet, knowledge: Knowledge, trainer: Trainer) -> None:
        self._fleet = fleet
        self._knowledge = knowledge
        self._trainer = trainer
        self._stray_since: dict[str, float] = {}
        self.chain: tuple[Task, ...] = (
            Task("close gates of engines with an outdated version", self._outdated, partial(_close_gates, fleet)),
            Task("abandon an update that lost an engine", self._lost_engine, partial(abandon, fleet, UpdateReason.ENGINE_LOST)),
            Task("abandon an update whose weight store is gone", self._lost_store, partial(abandon, fleet, UpdateReason.STORE_LOST)),
            Task("apply spec.state", self._changed_state, lambda _: apply_desired_state(fleet)),
            Task("abandon what has no trainer", self._abandoned, partial(abandon, fleet, UpdateReason.TRAINER_LOST, close_groups=True)),
            Task("resume for a trainer that is back", self._returned_trainer, lambda _: _resume_for_trainer(fleet)),
            Task("wait for a trainer", self._awaited_trainer, None),
            Task("pause for a lost trainer", self._lost_trainer, lambda _: _pause_for_loss(fleet)),
            Task(
                "restart engines that no push is known to repair",
                lambda: find_doubtful(fleet) or None,
                partial(restart_doubtful, fleet),
            ),
            Task("fence stray engines", lambda: self._strays() or None, partial(fence_strays, fleet)),
            Task(
                "release memory that the trainer has",
                lambda: memory.engines_to_release(fleet) or None,
                partial(memory.release_trainer_memory, fleet),
            ),
            Task("compare engines that woke", lambda: memory.find_woken(fleet) or None, partial(memory.compare_woken, fleet)),
            Task("load and unload adapters", lambda: lora.next_call(fleet), lambda call: lora.reconcile(fleet, *call)),
            Task("pause as spec.state says", self._unpaused, partial(keep_paused, fleet)),
        )

    def next_operation(self) -> Operation[Answer] | None:
        """Return the operation to run now; None if there is nothing to do."""
        for task in self.chain:
            found = task.condition()
            if found is not None:
                return task.operation(found) if task.operation is not None else None
        return None

    def _outdated(self) -> list[str] | None:
        """Return the engines whose gates an earlier coordinator left open. They come before any call.

        A trainer must not hear of a commit while an engine serves the version before.
        """
        found, self._knowledge.outdated = self._knowledge.outdated, []
        return found or None

    def _lost_engine(self) -> str | None:
        update = self._fleet.update
        lost = self._fleet.lost_engines(update.boots) if update is not None else []
        return f"engine {lost[0]} was restarted or lost in the middle of the update" if lost else None

    def _lost_store(self) -> str | None:
        """Return why the tensors of an update are lost. A store that only does not answer may still have them."""
        staged = self._fleet.update.staged if self._fleet.update is not None else None
        if staged is None or self._fleet.store is None or self._fleet.boot(STORE) in (None, staged.instance):
            return None
        return "the weight store was restarted in the middle of the update, and the tensors that it had received are lost"

    def _changed_state(self) -> bool | None:
        fleet = self._fleet
        return True if fleet.update is None and fleet.interruptions.desired_state is not fleet.applied_state else None

    def _abandoned(self) -> str | None:
        """Return why an update, or a pause that must end, is given up."""
        fleet, trainer = self._fleet, self._trainer
        pause = fleet.requested_pause
        if fleet.update is None and (pause is None or pause.cause is Cause.TRAINER_LOST):
            return None
        if fleet.update is not None and fleet.update.staged is not None and fleet.update.staged.is_waiting:
            return None  # its trainer has committed it
        reason = trainer.gone or trainer.why_overdue(fleet)
        if not reason:
            return None
        trainer.gone = ""
        rest = engines_without_tensors(fleet)
        return f"{reason}, and {name_engines(rest)} had not got all of their tensors" if rest else reason

    def _returned_trainer(self) -> bool | None:
        hold = self._paused_for_loss()
        return True if hold is not None and self._trainer.heard > hold.since else None

    def _awaited_trainer(self) -> bool | None:
        return True if self._paused_for_loss() is not None else None

    def _paused_for_loss(self) -> Interruption | None:
        fleet = self._fleet
        return fleet.pause if fleet.update is None and fleet.pause is not None and fleet.pause.cause is Cause.TRAINER_LOST else None

    def _lost_trainer(self) -> bool | None:
        fleet, trainer = self._fleet, self._trainer
        if fleet.update is not None or fleet.requested_pause is not None or not trainer.gone:
            return None
        trainer.gone = ""  # whatever this trainer had open has ended
        pauses = fleet.policy.trainer_lease.on_loss is OnLoss.PAUSE and fleet.applied_state is FleetState.ACTIVE and fleet.up()
        return True if pauses else None

    def _unpaused(self) -> list[str] | None:
        return (engines_to_pause(self._fleet) or None) if self._fleet.is_at_rest else None

    def _strays(self) -> list[str]:
        """Return the engines that are paused or in a session although no pause or update is open."""
        fleet = self._fleet
        left = [name for name in self._knowledge.give_up if not self._as_the_spec_says(name)]
        self._knowledge.give_up = []
        if not fleet.is_at_rest or fleet.pause is not None:
            self._stray_since = {}
            return left
        now = fleet.now
        stray = [name for name in self._knowledge.interrupted_engines() if not self._as_the_spec_says(name)]
        self._stray_since = {name: self._stray_since.get(name, now) for name in stray}
        late = [name for name, since in self._stray_since.items() if now - since >= self._stray_limit(name)]
        for name in late:
            del self._stray_since[name]
        return [*left, *late]

    def _stray_limit(self, name: str) -> float:
        """Return after how many seconds an engine is fenced. Its agent may load the committed version from its own copy."""
        fleet, engine, version = self._fleet, self._fleet.engines[name], self._fleet.weights.staged
        loads = version is not None and fleet.committed is not None and not engine.holds(fleet.committed)
        has_copy = loads and version is not None and name in holders(fleet, version)
        return fleet.policy.deadlines.activate_seconds if has_copy else STRAY_SECONDS

    def _as_the_spec_says(self, name: str) -> bool:
        """Return True if the engine is paused, and in no session, because of ``spec.state`` or released memory."""
        engine = self._fleet.engines.get(name)
        session = engine is not None and engine.status is not None and engine.status.session
        released = engine is not None and engine.released
        return (released or self._fleet.applied_state is not FleetState.ACTIVE) and not session


async def _close_gates(fleet: Fleet, names: list[str]) -> Answer:
    """Send the committed version to agents whose engine holds another one. This closes their gates."""
    await sync(fleet, names)
    return Answer(200, f"The agents of {len(names)} engines know the committed version.")


async def _pause_for_loss(fleet: Fleet) -> Answer:
    """Pause an idle fleet whose trainer is lost. Its process groups are of no use to another trainer."""
    fleet.membership.groups = {}
    failed = await pause_by_policy(fleet, Cause.TRAINER_LOST)
    return failed or Answer(200, "The fleet is paused until a trainer calls.")


async def _resume_for_trainer(fleet: Fleet) -> Answer:
    """Resume a fleet that was paused because its trainer was lost."""
    names = fleet.pause.engines if fleet.pause is not None else ()
    fleet.enter(Phase.RESUME)
    fleet.interruptions.end_pause()
    await resume(fleet, [name for name in names if name in fleet.engines and fleet.engines[name].up])
    return Answer(200, "A trainer called, so the fleet generates again.")


# --- spec.state -----------------------------------------------------------------------------------------------------


async def apply_desired_state(fleet: Fleet) -> Answer:
    """Apply the desired state: release, pause or resume the engines as ``spec.state`` asks."""
    before = fleet.applied_state
    if fleet.interruptions.desired_state is FleetState.ASLEEP:
        await _before_sleep(fleet)
    fleet.interruptions.apply_state(fleet.interruptions.desired_state)
    if fleet.applied_state is FleetState.PAUSED:
        if fleet.pause is not None and fleet.pause.cause is Cause.TRAINER_LOST:
            fleet.interruptions.end_pause()  # the spec pauses the fleet from now on
        await sync(fleet)  # gates first: new requests get an answer and do not wait in an engine
        return await keep_paused(fleet, _running_members(fleet), begins=True)
    if (
        before is FleetState.PAUSED and fleet.applied_state is FleetState.ACTIVE and fleet.pause is None
    ):  # else the trainer's own pause continues
        fleet.enter(Phase.RESUME)
        await resume(fleet, [name for name in fleet.up() if fleet.engines[name].paused])
    await sync(fleet)
    return Answer(200, f"The fleet is {fleet.applied_state.value}, as its spec says.")


async def _before_sleep(fleet: Fleet) -> None:
    """Abandon the trainer's pause and note checksums. Agents release the memory when they receive the new state."""
    if fleet.requested_pause is not None and fleet.requested_pause.cause is not Cause.TRAINER_LOST:
        await abandon(fleet, UpdateReason.ASLEEP, describe_state(FleetState.ASLEEP))
    fleet.interruptions.end_pause()
    await memory.note_checksums(fleet)


async def keep_paused(fleet: Fleet, names: list[str], *, begins: bool = False) -> Answer:
    """Pause these engines for ``spec.state``: all when the pause begins, later those that have started since, or whose pause failed."""
    mode, limit = fleet.policy.pause_mode, fleet.policy.deadlines.pause_seconds
    bodies = same_body(names, {"mode": mode.sglang})
    failed = failures(await send(ControlCall.PAUSE.path, bodies, limit, ends_held=begins and mode is PauseMode.ABORT))
    for name in failed:
        fleet.engines[name].pause_at = fleet.now + RETRY_SECONDS
    return Answer(500 if failed else 200, f"{len(names) - len(failed)} of {len(names)} engines were paused, as the spec says.")


def engines_to_pause(fleet: Fleet) -> list[str]:
    """Return the engines that ``spec.state`` pauses and that run since the last operation ended."""
    if fleet.applied_state is not FleetState.PAUSED:
        return []
    return [name for name in _running_members(fleet) if fleet.has_news(name)]


def _running_members(fleet: Fleet) -> list[str]:
    """Return the members that are not paused. A draining engine ends its requests."""
    found = {name: fleet.engines[name] for name in fleet.up()}
    return [name for name, engine in found.items() if engine.member and not engine.paused and fleet.now >= engine.pause_at]
