"""Contents of the calls about staged versions: who copies from whom, what is kept, and whether the tensors fit the model. Pure.

Bodies name agents and the weight store by their names, and hold no tickets. The client of the agents fills in URLs and tickets
(:mod:`sglang_rollout.coordinator.tickets`).
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence

from sglang_rollout.api.weights_spec import Staging
from sglang_rollout.checkpoints.format import DTYPE_OF_TORCH, ITEM_BITS
from sglang_rollout.coordinator.update.model import Fleet
from sglang_rollout.coordinator.update.requests import Body
from sglang_rollout.coordinator.update.store import STORE
from sglang_rollout.wire.arguments import is_shape
from sglang_rollout.wire.reasons import RefusedError, quote_value
from sglang_rollout.wire.staged import Shard, StagedTensor, StageRequest
from sglang_rollout.wire.states import StagedVersion, Version

MAX_PEERS = 3
"""Agents from which a single engine, or the store, copies a committed version, before the store."""
_SIZE = re.compile(r"(\d+(?:\.\d+)?)(m|k|M|G|T|P|Ki|Mi|Gi|Ti|Pi)?")
_FACTORS = {"m": 1e-3, "": 1, "k": 10**3, "M": 10**6, "G": 10**9, "T": 10**12, "P": 10**15} | {
    f"{prefix}i": 1024**power for power, prefix in enumerate("KMGTP", 1)
}


def require_staging(fleet: Fleet) -> Staging:
    """Return ``weights.staging``. Raises RefusedError if it is missing, which the API server does not accept."""
    if fleet.policy.staging is None:
        raise RefusedError(
            "weights.staging is missing in the spec, and weights.transport is Staged: set weights.staging.sizeLimit.", status=409
        )
    return fleet.policy.staging


def size_limit(fleet: Fleet) -> int:
    """Return the most bytes of one version."""
    text = require_staging(fleet).size_limit
    found = _SIZE.fullmatch(text.strip())
    if found is None:
        raise RefusedError(
            f"weights.staging.sizeLimit {quote_value(text)} is not a quantity: use a number of bytes such as 20Gi.", status=409
        )
    return max(1, int(float(found[1]) * _FACTORS[found[2] or ""]))


def kept_updates(fleet: Fleet) -> list[str]:
    """Return the updates whose copies stay at agents and store: of the committed version, and of the open update.

    With ``copies: 1`` there is room for one version, so the committed one makes room for the next.
    """
    staging, update, committed = fleet.policy.staging, fleet.update, fleet.weights.staged
    opened = [update.staged.id] if update is not None and update.staged is not None else []
    if opened and (staging is None or staging.copies == 1):
        return opened
    return list(dict.fromkeys([*([committed.update] if committed is not None else []), *opened]))


def parents_in_tree(names: Sequence[str], fanout: int) -> dict[str, list[str]]:
    """Return for each pod the peers to copy from: its ancestors in a tree over all pods, and last the store.

    At most ``fanout`` pods copy from the store, and from each pod. If a pod is gone, its children turn to the pod above it.
    """
    found: dict[str, list[str]] = {}
    for place, name in enumerate(names):
        above = place // fanout - 1
        found[name] = [names[above], *found[names[above]]] if above >= 0 else [STORE]
    return found


def holders(fleet: Fleet, version: StagedVersion, *, besides: str = "") -> list[str]:
    """Return the engines whose pods report a complete copy of a version, without the engine ``besides``."""
    return [
        name
        for name, engine in fleet.engines.items()
        if name != besides
        and engine.reachable
        and engine.status is not None
        and any(copy.update == version.update and copy.digest == version.digest for copy in engine.status.staged)
    ]


def count_copies(fleet: Fleet) -> int | None:
    """Return how many pods, also that of the weight store, have a copy of the committed version; None if none should have one."""
    store, version = fleet.store, fleet.weights.staged
    if not fleet.is_staged or version is None or store is None or version.update not in kept_updates(fleet):
        return None
    return len(holders(fleet, version)) + store.holds(version)


def parents_of_one(fleet: Fleet, version: StagedVersion, name: str) -> list[str]:
    """Return the peers from which one engine copies the committed version: a few that hold it, and last the store.

    Engines that rejoin at the same time begin with different peers.
    """
    peers = holders(fleet, version, besides=name)
    first = (list(fleet.engines).index(name) if name in fleet.engines else 0) % max(1, len(peers))
    return [*[*peers[first:], *peers[:first]][:MAX_PEERS], STORE]


def stage_body(
    fleet: Fleet, update: str, parents: list[str], *, digest: str = "", version: Version | None = None, deadline: float | None = None
) -> Body:
    """Return the body of a call that copies a version.

    Args:
        fleet: The fleet.
        update: ID of the update.
        parents: Names of the peers to copy from.
        digest: Digest that the copy must have; empty: the copy begins, and the answer comes at once.
        version: The version, if it is committed. No copy has the number of a version that may still fail.
        deadline: Seconds until the copy must be complete; None: the policy's.
    """
    request = StageRequest(
        update=update, version=version, parents=parents, ticket="", keep=kept_updates(fleet), size_limit=size_limit(fleet),
        digest=digest, deadline=deadline or fleet.policy.deadlines.stage_seconds,
    )  # fmt: skip
    return request.model_dump(mode="json")


# --- tensors ---------------------------------------------------------------------------------------------------------


def shard_of(body: Body) -> Shard:
    """Return the tensors that an update call announces. Raises RefusedError for a type or a shape that no file can hold."""
    tensors = []
    for name, dtype, shape in zip(body["names"], body.get("dtypes", []), body.get("shapes", []), strict=True):
        known = DTYPE_OF_TORCH.get(str(dtype))
        if not isinstance(name, str) or not 0 < len(name) <= 1024:
            raise RefusedError(f"names: {quote_value(name)} is not the name of a tensor: use 1 to 1024 characters.")
        if known is None:
            raise RefusedError(f"tensor {name}: type {quote_value(dtype)} cannot be staged: use one of {', '.join(DTYPE_OF_TORCH)}.")
        if not is_shape(shape):
            raise RefusedError(f"tensor {name}: shape {quote_value(shape)} is not a list of sizes.")
        tensors.append(StagedTensor(name=name, dtype=known, shape=shape))
    return Shard(tensors=tensors)


def count_bytes(shards: Iterable[Shard]) -> int:
    """Return the bytes of all tensors. Raises RefusedError for a type or a shape that no file can hold."""
    total = 0
    for shard in shards:
        for tensor in shard.tensors:
            bits = ITEM_BITS.get(tensor.dtype)
            if bits is None:
                raise RefusedError(f"tensor {tensor.name}: type {quote_value(tensor.dtype)} is no type of safetensors.")
            if not is_shape(tensor.shape):
                raise RefusedError(f"tensor {tensor.name}: shape {quote_value(tensor.shape)} is not a list of sizes.")
            total += math.prod(tensor.shape) * bits // 8
    return total


def refuse_large(total: int, limit: int) -> None:
    """Raise RefusedError with both numbers if a version is larger than the limit."""
    if total > limit:
        raise RefusedError(describe_large(total, limit), status=413)


def describe_large(total: int, limit: int) -> str:
    """Return that a version is larger than the limit, as a sentence with both numbers."""
    return f"This version has {total} bytes, and weights.staging.sizeLimit allows {limit}. Raise the limit in the spec."


def find_repeated(shards: Iterable[Shard]) -> str:
    """Return a tensor that comes twice; empty if none does."""
    seen: set[str] = set()
    for tensor in (tensor for shard in shards for tensor in shard.tensors):
        if tensor.name in seen:
            return tensor.name
        seen.add(tensor.name)
    return ""
