"""What must be done although nobody asked: end what has no trainer or no engine any more. Pure."""

from __future__ import annotations

from sglang_rollout.coordinator.update import adapters as lora
from sglang_rollout.coordinator.update import colocated as sharing
from sglang_rollout.coordinator.update import memory
from sglang_rollout.coordinator.update import spec_state as held
from sglang_rollout.coordinator.update.knowledge import Knowledge
from sglang_rollout.coordinator.update.membership import some, untold
from sglang_rollout.coordinator.update.model import Fleet
from sglang_rollout.coordinator.update.outcome import abandon, tidy
from sglang_rollout.coordinator.update.progress import By, Phase
from sglang_rollout.coordinator.update.requests import Answer
from sglang_rollout.coordinator.update.steps import Operation, resume
from sglang_rollout.coordinator.update.trainer import Trainer
from sglang_rollout.coordinator.update.transaction import hold_all
from sglang_rollout.wire.policy import OnLoss
from sglang_rollout.wire.states import FleetState

STRAY_AFTER = 3.0
"""An engine that says for so many seconds that it is paused or in a session, although nothing is open, is fenced.
Longer than a sync may take, because an answer that was under way tells of the time before."""


class Upkeep:
    """Chooses the next operation of the machine's own."""

    def __init__(self, fleet: Fleet, knowledge: Knowledge, trainer: Trainer) -> None:
        self._fleet = fleet
        self._knowledge = knowledge
        self._trainer = trainer
        self._stray_since: dict[str, float] = {}

    def due(self) -> Operation[Answer] | None:
        """What is to be done now; None: nothing."""
        fleet, trainer = self._fleet, self._trainer
        if fleet.update is not None:
            lost = fleet.changed(fleet.update.boots)
            if lost:
                return abandon(fleet, f"engine {lost[0]} was restarted or lost in the middle of the update")
        elif fleet.wish is not fleet.kept:
            return held.change(fleet)
        if fleet.update is not None or (fleet.hold is not None and fleet.hold.by is not By.LOSS):
            reason = trainer.gone or trainer.overdue(fleet)
            if reason:
                trainer.gone = ""
                rest = untold(fleet)
                return abandon(fleet, f"{reason}, and {some(rest)} had not got all of their tensors" if rest else reason, close_groups=True)
        elif fleet.hold is not None:
            return _go_on(fleet) if trainer.heard > fleet.hold.since else None
        elif trainer.gone:
            trainer.gone = ""  # what it had open has ended by itself meanwhile
            if fleet.policy.trainer_lease.on_loss is OnLoss.PAUSE and fleet.kept is FleetState.ACTIVE and fleet.up():
                return _hold_for_loss(fleet)
        return self._tidy()

    def _tidy(self) -> Operation[Answer] | None:
        """Engines that are not as the rest of the fleet."""
        strays = self._strays()
        if strays:
            return tidy(self._fleet, strays)
        sleepless = sharing.due(self._fleet)
        if sleepless:
            return sharing.put_to_sleep(self._fleet, sleepless)
        awake = memory.woken(self._fleet)
        if awake:
            return memory.prove(self._fleet, awake)
        adapters = lora.due(self._fleet)
        if adapters is not None:
            return lora.reconcile(self._fleet, *adapters)
        unpaused = held.unpaused(self._fleet) if self._fleet.update is None else []
        return held.keep_paused(self._fleet, unpaused) if unpaused else None

    def _strays(self) -> list[str]:
        """Engines that are paused or in a session although nothing is open."""
        fleet = self._fleet
        left = [name for name in self._knowledge.give_up if not self._as_the_spec_says(name)]
        self._knowledge.give_up = []
        if fleet.update is not None or fleet.hold is not None:
            self._stray_since = {}
            return left
        now = fleet.now
        stray = [name for name in self._knowledge.in_the_middle(since=fleet.rested) if not self._as_the_spec_says(name)]
        self._stray_since = {name: self._stray_since.get(name, now) for name in stray}
        late = [name for name, since in self._stray_since.items() if now - since >= STRAY_AFTER]
        for name in late:
            del self._stray_since[name]
        return [*left, *late]

    def _as_the_spec_says(self, name: str) -> bool:
        """Whether the engine is paused, and in no session, because the spec holds the fleet or its memory is released."""
        engine = self._fleet.engines.get(name)
        session = engine is not None and engine.status is not None and engine.status.session
        released = engine is not None and engine.released
        return (released or self._fleet.kept is not FleetState.ACTIVE) and not session


async def _hold_for_loss(fleet: Fleet) -> Answer:
    """Pause an idle fleet whose trainer is lost. Its groups are of no use to anybody else."""
    fleet.groups = {}
    mode = fleet.policy.pause_mode.value
    failed = await hold_all(fleet, By.LOSS, mode, {"mode": mode})
    return failed or Answer(200, "The fleet pauses until a trainer calls.")


async def _go_on(fleet: Fleet) -> Answer:
    """A trainer is there again."""
    names = fleet.hold.engines if fleet.hold is not None else ()
    fleet.enter(Phase.RESUME)
    fleet.hold = None
    await resume(fleet, [name for name in names if name in fleet.engines and fleet.engines[name].up])
    return Answer(200, "A trainer is there again.")
