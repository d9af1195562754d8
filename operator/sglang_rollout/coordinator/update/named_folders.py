"""Folders that trainers name: checked by every pod before any engine loads one. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from sglang_rollout.checkpoints.allowed import describe_forbidden, is_below
from sglang_rollout.coordinator.update.model import Fleet
from sglang_rollout.coordinator.update.phases import Phase
from sglang_rollout.coordinator.update.steps import ANSWER_MARGIN_SECONDS, Results, failures, results_by_engine, same_body, send
from sglang_rollout.wire.agent import CheckpointRequest
from sglang_rollout.wire.ports import AGENT_CHECKPOINT
from sglang_rollout.wire.reasons import RefusalCode, RefusedError

NOT_CALLED = "No engine received the call."


async def check_folder(fleet: Fleet, path: str, engines: Iterable[str], *, adapter: bool = False) -> Results:
    """Have the pods of these engines read a folder. The first engine's result has the names of its tensors.

    Args:
        fleet: The fleet.
        path: The folder, as a trainer names it.
        engines: Engines that are to load it.
        adapter: True for a LoRA adapter, False for a model.

    Raises:
        RefusedError: The folder is forbidden, a pod cannot load it, or the pods see different files.
    """
    if fleet.paths and not is_below(path, fleet.paths):
        raise _forbidden(fleet, path)
    limit = fleet.policy.deadlines.update_seconds
    request = CheckpointRequest(path=path, deadline=limit, allowed=list(fleet.paths), adapter=adapter)
    bodies = same_body(engines, request.model_dump(mode="json"))
    for first in list(bodies)[:1]:
        bodies[first] = {**bodies[first], "names": True}
    results = await send(AGENT_CHECKPOINT, bodies, limit + ANSWER_MARGIN_SECONDS, idempotent=True)
    failed = failures(results)
    if any(result.code is RefusalCode.FORBIDDEN for result in failed.values()):
        raise _forbidden(fleet, path)
    if failed:
        name, result = next(iter(failed.items()))
        raise RefusedError(
            f"engine {name} cannot load {path}: {result.message.rstrip('.')}. {NOT_CALLED}",
            fleet={**fleet.advice(), "engine": name, "phase": Phase.PREPARE.value, "engines": results_by_engine(results)},
        )
    if len({result.digest for result in results.values()}) > 1:
        raise RefusedError(
            f"{path} holds different {'adapters' if adapter else 'checkpoints'} on the engines' nodes: it must be one shared volume."
            f" {NOT_CALLED}",
            fleet={**fleet.advice(), "phase": Phase.PREPARE.value, "engines": {name: result.digest for name, result in results.items()}},
        )
    return results


async def read_adapters(fleet: Fleet, paths: Mapping[str, str]) -> Results:
    """Have pods read the adapters that their engines are to load.

    Args:
        fleet: The fleet.
        paths: Folder of the adapter, by engine.
    """
    limit = fleet.policy.deadlines.update_seconds
    request = CheckpointRequest(path="", deadline=limit, allowed=list(fleet.paths), adapter=True).model_dump(mode="json")
    bodies = {name: {**request, "path": path} for name, path in paths.items()}
    return await send(AGENT_CHECKPOINT, bodies, limit + ANSWER_MARGIN_SECONDS, idempotent=True)


def _forbidden(fleet: Fleet, path: str) -> RefusedError:
    return RefusedError(f"{describe_forbidden(path, fleet.paths)} {NOT_CALLED}")
