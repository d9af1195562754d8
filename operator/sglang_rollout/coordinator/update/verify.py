"""Checksums before a commit: do all engines hold the same bytes? Pure.

SGLang computes them (``/weights_checker``, action ``checksum``): one per rank, over the model's own tensors, fused and sharded as the
engine holds them. So they are comparable only among engines of equal shape.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import replace

from sglang_rollout.api.weights_spec import Verify
from sglang_rollout.coordinator.update.events import Result
from sglang_rollout.coordinator.update.model import Fleet
from sglang_rollout.coordinator.update.steps import PATIENCE_SECONDS, same_body, send, sync
from sglang_rollout.sglang.api import ControlCall
from sglang_rollout.sglang.checksums import CHECKSUM, Checksums, find_difference
from sglang_rollout.wire.states import EngineState, FleetMode, Version


def should_verify(fleet: Fleet) -> bool:
    """Return True if the update that ends now is verified.

    Always if the trainer says what its weights are, and where nothing else tells that the tensors of all engines were one push.
    """
    policy, update = fleet.policy, fleet.update
    if update is not None and (update.checksums or (fleet.mode is FleetMode.HYBRID and update.label is None)):
        return True
    if policy.verify is Verify.EVERY_N:
        return fleet.weights.commits % policy.verify_every == 0
    return policy.verify is Verify.ALWAYS


async def verify(fleet: Fleet, names: list[str]) -> dict[str, str]:
    """Compare these engines. Returns those that differ or could not be asked, and why.

    Every supported SGLang knows the call. A custom build without it is not trusted.
    """
    expected = fleet.update.checksums if fleet.update is not None else {}
    results = await send(
        ControlCall.CHECK_WEIGHTS.path, same_body(names, CHECKSUM), fleet.policy.deadlines.update_seconds, patience=PATIENCE_SECONDS
    )
    wrong = {
        name: f"could not be verified: {result.message or 'no checksum in its answer'} (weights.verify Off commits without)"
        for name, result in results.items()
        if result.checksums is None
    }
    by_shape: dict[int, dict[str, Checksums]] = {}
    for name, checksums in _known_checksums(results).items():
        by_shape.setdefault(_tensor_size(fleet, name), {})[name] = checksums
    for size, alike in by_shape.items():
        wrong |= _find_unexpected(alike, expected[size]) if size in expected else find_differing(alike)
    return wrong


async def checksums_of_holders(fleet: Fleet, names: Iterable[str], version: Version) -> dict[str, Result]:
    """Return the checksums of a version, from engines that hold it.

    Syncs their agents afterwards: an engine that restarted meanwhile would return the checksums of its initial weights.
    """
    boots = {name: fleet.boot(name) for name in names}
    results = await send(ControlCall.CHECK_WEIGHTS.path, same_body(boots, CHECKSUM), fleet.policy.deadlines.update_seconds)
    heard = await sync(fleet, [name for name in boots if results[name].checksums is not None])
    found = {}
    for name, result in results.items():
        agent = heard[name].agent if name in heard else None
        same_boot = agent is not None and agent.boot_id == boots[name]
        holds = same_boot and agent is not None and agent.state is EngineState.CLEAN and agent.version == version
        found[name] = (
            result if holds else replace(result, checksums=None, message=result.message or "it does not hold that version any more")
        )
    return found


def _tensor_size(fleet: Fleet, name: str) -> int:
    return fleet.engines[name].tensor_size


def _find_unexpected(alike: Mapping[str, Checksums], right: Checksums) -> dict[str, str]:
    """Return the engines whose checksums differ from the trainer's, and why."""
    return {
        name: f"holds other weights than the trainer says ({find_difference(right, sums)})" for name, sums in alike.items() if sums != right
    }


def find_differing(alike: Mapping[str, Checksums]) -> dict[str, str]:
    """Return the engines that differ from most engines of their shape; all of them if no majority agrees."""
    if not alike:
        return {}
    (right, count), *_ = Counter(alike.values()).most_common()
    if count == len(alike):
        return {}
    if 2 * count <= len(alike):
        others = f"{len(set(alike.values()))} different contents among {len(alike)} engines"
        return dict.fromkeys(alike, f"cannot be trusted: {others}, and no majority tells which is right")
    return {
        name: f"holds other weights than {count} engines of its shape (rank {_first_difference(right, sums)})"
        for name, sums in alike.items()
        if sums != right
    }


def _first_difference(right: Checksums, sums: Checksums) -> str:
    ranks = [str(rank) for rank, (a, b) in enumerate(zip(right, sums, strict=False)) if a != b]
    return ranks[0] if ranks else f"count {len(sums)} instead of {len(right)}"


def _known_checksums(results: Mapping[str, Result]) -> dict[str, Checksums]:
    return {name: result.checksums for name, result in results.items() if result.checksums is not None}
