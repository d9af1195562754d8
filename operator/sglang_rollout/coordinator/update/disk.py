"""Weights from a shared volume, as a transaction of the whole fleet.

SGLang dies of truncated files and of wrong shapes, and takes a wrong architecture with equal shapes without a word. So
every engine's pod reads the checkpoint first; only when all of them can is any engine told. There is no collective: an
engine that fails can be fenced alone, if ``weights.minCommitted`` lets the others commit. The answer names what a pod could not compare.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from sglang_rollout.coordinator.update.completeness import note_trust
from sglang_rollout.coordinator.update.events import Result
from sglang_rollout.coordinator.update.interruption import Cause
from sglang_rollout.coordinator.update.membership import present
from sglang_rollout.coordinator.update.model import Fleet
from sglang_rollout.coordinator.update.outcome import close, leave_behind
from sglang_rollout.coordinator.update.phases import Phase
from sglang_rollout.coordinator.update.progress import Update
from sglang_rollout.coordinator.update.ranks import Refusal
from sglang_rollout.coordinator.update.requests import Answer, Body, FromDisk
from sglang_rollout.coordinator.update.rules import take_turn
from sglang_rollout.coordinator.update.steps import failures, same, send, soil, told
from sglang_rollout.coordinator.update.transaction import hold_all, hold_late
from sglang_rollout.sglang.api import ControlCall
from sglang_rollout.wire.agent import ARCHITECTURE, UNCHECKED, CheckpointRequest
from sglang_rollout.wire.ports import AGENT_CHECKPOINT
from sglang_rollout.wire.record import OnDisk

PATIENCE = 60.0
"""How much later than half of the engines another may have loaded, at least: its node may have to read files that theirs had read."""
MARGIN = 5.0
"""What the answer to a check may take longer than the check."""


async def from_disk(fleet: Fleet, ask: FromDisk) -> Answer:
    """Check the checkpoint from every pod, then load it on every engine and commit."""
    boots = present(fleet)
    checked = await _check(fleet, ask.path, boots)
    names = checked.names
    await take_turn(fleet, ask)
    if present(fleet) != boots:
        raise Refusal("The engines of this fleet changed while the checkpoint was read; nothing was loaded. Try again.", status=503)
    released = [name for name in boots if fleet.engines[name].released]
    if released:
        raise Refusal(f"engine {released[0]} has released memory: call resume_memory_occupation first.", status=409, fleet=fleet.advice())
    if fleet.pause is None:
        mode = fleet.policy.pause_mode.sglang.value
        failed = await hold_all(fleet, Cause.UPDATE, mode, {"mode": mode})
    else:
        failed = await hold_late(fleet, boots)
    if failed is not None:
        return failed
    fleet.enter(Phase.TRANSFER)
    update = fleet.transaction.update = Update(dict(boots), fleet.now, ask.label or fleet.transaction.label)
    if checked.is_compared or names is None:
        update.opaque, update.checkpoint = True, names
    else:
        # Nobody could say that it has all tensors of the model: it brings those that it has, as a trainer would.
        note_trust(fleet, update, boots)
        update.tensors[tuple(boots)] = set(names)
    fleet.weights.attempted |= names or frozenset()
    results = await soil(
        fleet, ControlCall.UPDATE_DISK.path, same(boots, _body(ask)), fleet.policy.deadlines.update_seconds, patience=PATIENCE
    )
    broken = failures(results)
    update.fed.update(name for name in boots if name not in broken)
    for name, result in broken.items():
        update.dropped[name] = f"did not load {ask.path}: {result.message}"
    fleet.enter(Phase.VERIFY)
    answer = await close(fleet, update, results, tell=False)
    if answer.success and fleet.committed is not None:
        fleet.weights.disk = OnDisk(version=fleet.committed, path=ask.path, digest=checked.digest)
        answer = _with_unchecked(answer, checked.by_engine)
    return await leave_behind(fleet, answer)


def _with_unchecked(answer: Answer, by_engine: Mapping[str, Result]) -> Answer:
    """Add what no agent could compare with the engine's model, because SGLang loads a checkpoint of another model without an error."""
    lacking = {name: result for name, result in by_engine.items() if not result.compared}
    if not lacking:
        return answer
    first = next(iter(lacking.values()))
    # An agent of the release before this field says nothing.
    what, why = first.unchecked or (ARCHITECTURE, *UNCHECKED), first.why_unchecked or "its agent does not say what it compared"
    sentence = f"Not compared with the model that engine {next(iter(lacking))} runs: {'; '.join(what)}, because {why}."
    more = f" The same on {len(lacking) - 1} more." if len(lacking) > 1 else ""
    unchecked = {"what": list(what), "why": why, "engines": list(lacking)}
    return replace(answer, message=f"{answer.message.rstrip('.')}. {sentence}{more}", fleet={**answer.fleet, "unchecked": unchecked})


def _body(ask: FromDisk) -> Body:
    """What every engine gets. The fleet pauses, flushes and names the version itself."""
    ours = {"model_path": ask.path, "flush_cache": False, "abort_all_requests": False, "is_async": False}
    kept = {key: ask.body[key] for key in ("load_format", "torch_empty_cache", "recapture_cuda_graph") if key in ask.body}
    return {**kept, **ours}


@dataclass(frozen=True)
class _Checked:
    """What the agents found in a checkpoint."""

    digest: str | None
    """What tells its contents from others."""
    names: frozenset[str] | None
    """Its tensors, if they are known."""
    by_engine: Mapping[str, Result]

    @property
    def is_compared(self) -> bool:
        """True if it has all tensors of the engines' model."""
        return all(result.compared for result in self.by_engine.values())


async def _check(fleet: Fleet, path: str, boots: Mapping[str, str]) -> _Checked:
    """Have every pod look at the checkpoint; refuse it if one cannot load it, or if they see different ones."""
    limit = fleet.policy.deadlines.update_seconds
    body = CheckpointRequest(path=path, deadline=limit).model_dump(mode="json")
    bodies, first = same(boots, body), next(iter(boots))
    bodies[first] = {**body, "names": True}
    results = await send(AGENT_CHECKPOINT, bodies, limit + MARGIN, idempotent=True)
    failed = failures(results)
    if failed:
        name, result = next(iter(failed.items()))
        raise Refusal(
            f"engine {name} cannot load {path}: {result.message.rstrip('.')}. No engine was told.",
            fleet={**fleet.advice(), "engine": name, "phase": Phase.PREPARE.value, "engines": told(results)},
        )
    contents = {result.digest for result in results.values()}
    if len(contents) > 1:
        raise Refusal(
            f"{path} holds different checkpoints on the engines' nodes: it must be one shared volume. No engine was told.",
            fleet={**fleet.advice(), "phase": Phase.PREPARE.value, "engines": {name: result.digest for name, result in results.items()}},
        )
    return _Checked(contents.pop(), results[first].names, results)
