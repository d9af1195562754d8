"""What ``spec.state`` holds: the whole fleet, whatever trainers do, until the spec lets it go. Pure.

A trainer's pause is another thing (``Fleet.hold``): it has a lease, and its own continue ends it. Both may be there at a
time; engines generate when neither is.
"""

from __future__ import annotations

from sglang_rollout.coordinator.update.engine import Engine
from sglang_rollout.coordinator.update.interruption import Cause
from sglang_rollout.coordinator.update.memory import note_checksums
from sglang_rollout.coordinator.update.model import Fleet
from sglang_rollout.coordinator.update.outcome import abandon
from sglang_rollout.coordinator.update.phases import Phase
from sglang_rollout.coordinator.update.requests import Answer
from sglang_rollout.coordinator.update.steps import failures, resume, same, send, sync
from sglang_rollout.sglang.api import ControlCall
from sglang_rollout.wire.states import FleetState, held_sentence

AGAIN = 10.0
"""Seconds after which an engine that could not be paused is tried again. Its gate is closed, and trainers' calls come in between."""


async def change(fleet: Fleet) -> Answer:
    """Put into effect what the spec asks for now."""
    before = fleet.applied_state
    if fleet.interruptions.desired_state is FleetState.ASLEEP:
        await _before_sleep(fleet)
    fleet.interruptions.apply_state(fleet.interruptions.desired_state)
    if fleet.applied_state is FleetState.PAUSED:
        if fleet.pause is not None and fleet.pause.cause is Cause.TRAINER_LOST:
            fleet.interruptions.end_pause()  # one pause is enough
        await sync(fleet)  # gates first: what comes now is answered, and does not wait in an engine
        return await keep_paused(fleet, _to_pause(fleet))
    if (
        before is FleetState.PAUSED and fleet.applied_state is FleetState.ACTIVE and fleet.pause is None
    ):  # else the trainer's own pause goes on
        fleet.enter(Phase.RESUME)
        await resume(fleet, [name for name in fleet.up() if _says_paused(fleet.engines[name])])
    await sync(fleet)
    return Answer(200, f"The fleet is {fleet.applied_state.value}, as its spec says.")


async def _before_sleep(fleet: Fleet) -> None:
    """Engines fall asleep by themselves when they hear of it, so all that must be known of them is asked before."""
    if fleet.pause is not None and fleet.pause.cause is not Cause.TRAINER_LOST:
        await abandon(fleet, held_sentence(FleetState.ASLEEP))
    fleet.interruptions.end_pause()
    await note_checksums(fleet)


async def keep_paused(fleet: Fleet, names: list[str]) -> Answer:
    """Pause these engines: the spec holds the fleet, and they came up since, or could not be paused before."""
    body = {"mode": fleet.policy.pause_mode.sglang.value}
    failed = failures(await send(ControlCall.PAUSE.path, same(names, body), fleet.policy.deadlines.pause_seconds))
    for name in failed:
        fleet.engines[name].pause_at = fleet.now + AGAIN
    return Answer(500 if failed else 200, f"{len(names) - len(failed)} of {len(names)} engines were paused, as the spec says.")


def unpaused(fleet: Fleet) -> list[str]:
    """Engines that have said since the fleet was last at rest that they are not paused although they should be."""
    if fleet.applied_state is not FleetState.PAUSED:
        return []
    return [name for name in _to_pause(fleet) if fleet.engines[name].heard > fleet.rested]


def _to_pause(fleet: Fleet) -> list[str]:
    """One that is being drained ends what it runs."""
    found = {name: fleet.engines[name] for name in fleet.up()}
    return [name for name, engine in found.items() if engine.member and not _says_paused(engine) and fleet.now >= engine.pause_at]


def _says_paused(engine: Engine) -> bool:
    return engine.status is not None and engine.status.paused
