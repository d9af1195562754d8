"""Which engines serve: the one definition that plan and status share."""

from __future__ import annotations

from sglang_rollout.api.engine_knobs import FLAGS
from sglang_rollout.controller.decide import pods
from sglang_rollout.controller.decide.view import Object, World
from sglang_rollout.controller.render import names
from sglang_rollout.wire.states import FleetState
from sglang_rollout.wire.weights import EngineState


def router_ready(world: World) -> bool:
    """Whether the router's Deployment runs as it is wanted now."""
    router = world.child("Deployment", names.router_name(world.cr["metadata"]["name"])) or {}
    status = router.get("status") or {}
    return bool(status.get("readyReplicas")) and status.get("observedGeneration") == router.get("metadata", {}).get("generation")


def router_refused(world: World) -> str:
    """Return the message with which the API server refuses the router's pod; empty if the server accepts it."""
    router = world.child("Deployment", names.router_name(world.cr["metadata"]["name"])) or {}
    conditions = (router.get("status") or {}).get("conditions") or []
    failed: Object = next((one for one in conditions if one.get("type") == "ReplicaFailure" and one.get("status") == "True"), {})
    return str(failed.get("message") or "")


def serves(world: World, engine: str) -> bool:
    """Whether an engine serves: its pods are ready, and the coordinator has recorded that its gate is open.

    The record alone does not suffice: it says how the engine was when the coordinator looked last, maybe in an earlier
    life. So without a router that runs nobody serves.
    """
    row = world.row(engine)
    return row is not None and row.gate_open and world.whole(engine) and router_ready(world)


def kept_back(world: World, engine: str) -> bool:
    """Whether only ``spec.state`` keeps an engine from serving."""
    paused = world.record is not None and world.record.state is FleetState.PAUSED
    return paused and holds_committed(world, engine) and world.whole(engine) and router_ready(world)


def cannot_sleep(world: World, engine: str) -> bool:
    """Whether an engine of a fleet that ``spec.state`` keeps Asleep was made without what sleeping needs. It has its memory and serves
    nobody, until it is made anew."""
    asleep, row = world.record is not None and world.record.state is FleetState.ASLEEP, world.row(engine)
    if not asleep or row is None or row.gate_open or row.released:
        return False
    return not any(pods.started_with(pod, FLAGS["memory_saver"]) for pod in world.pods_of(engine))


def waits_for_trainer(world: World) -> bool:
    """Whether the fleet is paused until a trainer calls, because its own is lost (``weights.trainerLease.onLoss``)."""
    return world.record is not None and world.record.waits_for_trainer


def for_trainer(world: World) -> bool:
    """Whether engines that sleep do so for the trainer that shares their GPUs, and not by ``spec.state``."""
    return world.record is not None and world.record.state is not FleetState.ASLEEP and world.record.lent is not None


def lent(world: World) -> bool:
    """Whether that trainer has their memory. When it does not and engines still sleep, they are waking."""
    return for_trainer(world) and world.record is not None and world.record.lends


def holds_committed(world: World, engine: str) -> bool:
    """Whether the coordinator has recorded that an engine holds the committed version, all of it."""
    row = world.row(engine)
    if world.record is None or row is None or row.state is not EngineState.CLEAN or row.version is None:
        return False
    committed = world.record.committed
    return (row.version.run, row.version.step) == (committed.run, committed.step)
