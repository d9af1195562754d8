"""Which engines load a committed version next: all at once, or in turn (``weights.activation``). Pure.

Engines that wait serve an older version that ``weights.maxStaleness`` permits. :mod:`.activation` loads the groups that are chosen here.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from sglang_rollout.api.weights_spec import ActivationStrategy
from sglang_rollout.coordinator.update.model import Fleet
from sglang_rollout.coordinator.update.staging import holders
from sglang_rollout.coordinator.update.versions import order_key
from sglang_rollout.wire.states import EngineState, FleetState, Version


def loads_in_turn(fleet: Fleet) -> bool:
    """Return True if engines load in turn now.

    If no engine generates, or if a call waits that ends generation, engines that wait would save nothing.
    """
    is_rolling = fleet.policy.activation.strategy is ActivationStrategy.ROLLING
    return is_rolling and fleet.pause is None and fleet.applied_state is FleetState.ACTIVE and not fleet.is_pause_waiting


def max_unavailable(fleet: Fleet) -> int:
    """Return how many serving engines may load at a time: a share of the wanted engines is rounded down to at least 1."""
    wanted = fleet.policy.activation.max_unavailable
    return wanted if isinstance(wanted, int) else max(1, int(wanted.rstrip("%")) * len(fleet.engines) // 100)


def serves_older(fleet: Fleet, name: str) -> bool:
    """Return True if an engine serves a version before the committed one that the policy permits."""
    engine = fleet.engines.get(name)
    if engine is None or not engine.reachable or engine.status is None or engine.status.state is not EngineState.CLEAN:
        return False
    permitted = {order_key(version) for version in fleet.tolerated()}
    return engine.status.version is not None and order_key(engine.status.version) in permitted


def next_group(fleet: Fleet, rest: Sequence[str]) -> list[str]:
    """Return the engines that load the committed version next, of those that have not loaded it.

    Engines that do not serve load at once, because their load closes no gate.
    """
    if not loads_in_turn(fleet):
        return list(rest)
    serving = [name for name in rest if serves_older(fleet, name)]
    room = 0 if is_stopped(fleet) else max_unavailable(fleet)
    return [name for name in rest if name not in serving[room:]]


def is_stopped(fleet: Fleet) -> bool:
    """Return True while more engines have failed to load the committed version than hold it.

    Then the version itself may be what engines fail at. It cannot be taken back, so the engines that wait keep serving the version before.
    A few engines that fail for reasons of their own stop nothing, because the engines that have loaded the version outnumber them.
    """
    version = fleet.committed
    if version is None:
        return False
    held = [engine for engine in fleet.engines.values() if engine.holds(version)]
    failed = [engine for engine in fleet.engines.values() if engine.failed_version == version]
    return sum(not engine.holds(version) for engine in failed) > len(held)


def find_waiting(fleet: Fleet) -> list[str]:
    """Return the engines that serve an older version and can load the committed one now."""
    version = fleet.weights.staged
    if version is None or not fleet.tolerated():
        return []
    return [name for name in holders(fleet, version) if _may_load(fleet, name)]


def find_next_load(fleet: Fleet) -> list[str]:
    """Return the engines that load the committed version now, outside an update; empty if there is nothing to load or no time for it."""
    if not fleet.is_at_rest or fleet.pause is not None or fleet.applied_state is FleetState.ASLEEP:
        return []
    return next_group(fleet, find_waiting(fleet))


def _may_load(fleet: Fleet, name: str) -> bool:
    engine = fleet.engines[name]
    if not fleet.is_staged or not engine.member or engine.released or fleet.now < engine.retry_at:
        return False
    return serves_older(fleet, name)


def describe_waiting(names: Iterable[str], version: Version) -> str:
    """Return which engines still serve an older version, as a clause."""
    listed = list(names)
    more = f" and {len(listed) - 8} more" if len(listed) > 8 else ""
    return f"{', '.join(listed[:8])}{more} serve an older version and load version {version} in turn"
