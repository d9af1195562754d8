"""What ``spec.state`` asks of the whole fleet, whatever trainers do, until the spec changes. Pure.

A trainer's pause is another cause of interruption: it has a lease, and the trainer's own continue ends it. Both may be in effect at a
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
from sglang_rollout.coordinator.update.steps import failures, resume, same_body, send, sync
from sglang_rollout.sglang.api import ControlCall
from sglang_rollout.wire.states import FleetState, describe_state

RETRY_SECONDS = 10.0
"""When an engine that could not be paused is tried again. Its gate is closed, and trainers' calls may come in between."""


async def apply_desired_state(fleet: Fleet) -> Answer:
    """Put into effect what the spec asks for now."""
    before = fleet.applied_state
    if fleet.interruptions.desired_state is FleetState.ASLEEP:
        await _before_sleep(fleet)
    fleet.interruptions.apply_state(fleet.interruptions.desired_state)
    if fleet.applied_state is FleetState.PAUSED:
        if fleet.pause is not None and fleet.pause.cause is Cause.TRAINER_LOST:
            fleet.interruptions.end_pause()  # the spec pauses the fleet from now on
        await sync(fleet)  # gates first: new requests get an answer and do not wait in an engine
        return await keep_paused(fleet, _running_members(fleet))
    if (
        before is FleetState.PAUSED and fleet.applied_state is FleetState.ACTIVE and fleet.pause is None
    ):  # else the trainer's own pause continues
        fleet.enter(Phase.RESUME)
        await resume(fleet, [name for name in fleet.up() if _is_paused(fleet.engines[name])])
    await sync(fleet)
    return Answer(200, f"The fleet is {fleet.applied_state.value}, as its spec says.")


async def _before_sleep(fleet: Fleet) -> None:
    """Do what must precede a sleep: engines fall asleep by themselves when they receive the new state."""
    if fleet.pause is not None and fleet.pause.cause is not Cause.TRAINER_LOST:
        await abandon(fleet, describe_state(FleetState.ASLEEP))
    fleet.interruptions.end_pause()
    await note_checksums(fleet)


async def keep_paused(fleet: Fleet, names: list[str]) -> Answer:
    """Pause these engines for the spec: they came up since, or could not be paused before."""
    body = {"mode": fleet.policy.pause_mode.sglang.value}
    failed = failures(await send(ControlCall.PAUSE.path, same_body(names, body), fleet.policy.deadlines.pause_seconds))
    for name in failed:
        fleet.engines[name].pause_at = fleet.now + RETRY_SECONDS
    return Answer(500 if failed else 200, f"{len(names) - len(failed)} of {len(names)} engines were paused, as the spec says.")


def engines_to_pause(fleet: Fleet) -> list[str]:
    """Return the engines that should be paused and have said since the fleet was last at rest that they are not."""
    if fleet.applied_state is not FleetState.PAUSED:
        return []
    return [name for name in _running_members(fleet) if fleet.engines[name].heard > fleet.rested]


def _running_members(fleet: Fleet) -> list[str]:
    """Return the members that are not paused. A draining engine ends its requests."""
    found = {name: fleet.engines[name] for name in fleet.up()}
    return [name for name, engine in found.items() if engine.member and not _is_paused(engine) and fleet.now >= engine.pause_at]


def _is_paused(engine: Engine) -> bool:
    return engine.status is not None and engine.status.paused
