"""The names of the tensors of an update: compared with the model, noted before engines receive them, and complete at the commit. Pure.

:mod:`.completeness` has the rule. This module collects what the rule needs, and asks engines for the rest.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from itertools import zip_longest

from sglang_rollout.coordinator.update.completeness import Held, Lacking, Model, Rule, find_foreign, find_lacking, find_misshapen
from sglang_rollout.coordinator.update.engine import Engine
from sglang_rollout.coordinator.update.events import Result
from sglang_rollout.coordinator.update.model import Fleet, KnownModel
from sglang_rollout.coordinator.update.phases import Update
from sglang_rollout.coordinator.update.requests import Answer, Body
from sglang_rollout.coordinator.update.steps import ANSWER_MARGIN_SECONDS, PATIENCE_SECONDS, fence, same_body, send, write
from sglang_rollout.coordinator.update.tensor_names import TensorNames
from sglang_rollout.wire.agent import CheckpointRequest
from sglang_rollout.wire.ports import AGENT_CHECKPOINT, FLEET_RUN
from sglang_rollout.wire.states import BASE, EngineState, Version

WAY_OUT_STAGED = f"push all of them in one update, or open a run without them (POST {FLEET_RUN})"
WAY_OUT = f"{WAY_OUT_STAGED}, or load a checkpoint with update_weights_from_disk"
RESTARTING = "The engine restarts now, so that nothing of an earlier update is left in it"
RESTART_IT = "Restart the engine, which its agent cannot do here, so that nothing of an earlier update is left in it"
Tensors = Collection[tuple[str, Collection[int] | None]]
"""Names and shapes; a shape that is not known is None."""
MAX_NAMED = 8
"""Tensors that a sentence names."""
RESTART_SECONDS = 60.0
"""When the restart of an engine is requested again."""
UNREAD_SECONDS = 60.0
"""When an engine whose agent could not list the tensors of its model is asked again."""


# --- the model --------------------------------------------------------------------------------------------------------


async def read_model(fleet: Fleet) -> Model:
    """Return the tensors of the model that the engines run, as one agent reports them. Asks once for each run of that engine."""
    known, members = fleet.membership.model, fleet.members()
    if known is not None and fleet.boot(known.engine) == known.boot and fleet.now < known.until:
        return known.model
    name = next(iter(members), None)
    if name is None:
        return Model(why_unchecked="no engine is up")
    boot, result = members[name].boot or "", await read_model_tensors(fleet, name)
    model = _model_of(result)
    until = float("inf") if result.ok else fleet.now + UNREAD_SECONDS
    fleet.membership.model = KnownModel(name, boot, until, model)
    return model


def _model_of(result: Result) -> Model:
    if result.shapes is None:
        why = result.why_unchecked or result.message.rstrip(".") or "its agent lists no tensors"
        return Model(why_unchecked=why, is_random=result.is_random)
    return Model(dict(result.shapes), frozenset(result.names or ()), is_random=result.is_random)


async def read_model_tensors(fleet: Fleet, name: str) -> Result:
    """Return names and shapes of the tensors of the model that an engine runs, as its agent reports them."""
    limit = fleet.policy.deadlines.pause_seconds
    body = CheckpointRequest(path="", names=True, deadline=limit).model_dump(mode="json")
    bodies = same_body([name], body)
    results = await send(AGENT_CHECKPOINT, bodies, limit + ANSWER_MARGIN_SECONDS, patience=PATIENCE_SECONDS, idempotent=True)
    return results[name]


def describe_misfits(model: Model, tensors: Tensors) -> str:
    """Return which tensors do not fit the model, as a sentence; empty if all do, or if the model's tensors are not known."""
    foreign = find_foreign((name for name, _ in tensors), model)
    problems = [f"{name} is not in the model" for name in foreign] + find_misshapen(tensors, model)
    if not problems:
        return ""
    more = f"; and {len(problems) - MAX_NAMED} more" if len(problems) > MAX_NAMED else ""
    return f"{len(problems)} of {len(tensors)} tensors do not fit the engines' model: {'; '.join(problems[:MAX_NAMED])}{more}."


# --- while tensors arrive ---------------------------------------------------------------------------------------------


def announced_names(body: Body) -> frozenset[str]:
    """Return the tensors that an update call brings. The names are the same whether they come one by one or as a flat bucket."""
    return frozenset(str(name) for name in body["names"])


def announced_tensors(body: Body) -> Tensors:
    """Return names and shapes that an update call announces. A shape that is no list is left to the engines."""
    shapes = [shape if isinstance(shape, list) else None for shape in body.get("shapes", [])]
    return list(zip_longest(map(str, body["names"]), shapes))


def note_held_weights(fleet: Fleet, update: Update, names: Iterable[str]) -> None:
    """Note what engines hold before they join an update. From now on they may receive its tensors."""
    for name in names:
        boot = fleet.boot(name)
        update.held[name] = read_held(fleet, name)
        if boot is not None and update.staged is None:
            fleet.weights.doubt.begin(name, boot)


def read_held(fleet: Fleet, name: str) -> Held:
    """Return what an engine holds now."""
    engine = fleet.engines[name]
    committed = fleet.committed is not None and engine.holds(fleet.committed)
    return Held(committed, engine.holds(BASE), fleet.weights.doubt.has(name, fleet.boot(name)), engine.blank)


async def note_names(fleet: Fleet, names: Iterable[str]) -> bool:
    """Note names before engines receive their tensors. Returns False if the record with new names cannot be written.

    A coordinator that restarts in the middle of the update reads them there.
    """
    doubt = fleet.weights.doubt
    new = TensorNames(doubt.names.add(names)) - fleet.weights.names
    record = fleet.record() if len(new) else None
    return record is None or (await write(record))["record"].ok


def note_checked(update: Update, model: Model, tensors: Tensors) -> None:
    """Note in an update what was not compared with the model."""
    if not model.is_known:
        update.unchecked = f"The names and shapes of the tensors were not compared with the engines' model, because {model.why_unchecked}."
        return
    misfits = describe_misfits(model, tensors)
    if misfits and not update.unchecked:
        update.unchecked = f"{misfits} The trainer sent them unchecked (check_model=False)."


# --- at the end -------------------------------------------------------------------------------------------------------


def rule_of(fleet: Fleet, update: Update, model: Model) -> Rule:
    """Return the rule for the engines of an update."""
    return make_rule(fleet, TensorNames(sent_tensors(update)), model, from_base=starts_from_base(fleet, update))


def make_rule(fleet: Fleet, sent: TensorNames, model: Model, *, from_base: bool) -> Rule:
    """Return the rule for a push of these names. ``from_base``: a new run begins on engines that hold ``model.path``."""
    weights, before = fleet.weights, fleet.committed
    at_base = before is None or before.is_base
    committed = TensorNames() if from_base else weights.names
    return Rule(sent, committed, weights.doubt.names, model, starts_at_base=at_base, opens_run=weights.opens_run)


def find_unequal(update: Update) -> dict[str, str]:
    """Return the engines that did not receive every tensor that other engines received in the update, and why."""
    sent = sent_tensors(update)
    found: dict[str, str] = {}
    for name in update.remaining():
        missing = sorted(sent - received_tensors(update, name))
        if missing:
            found[name] = (
                f"lacks {len(missing)} of {len(sent)} tensors that other engines got in this update, the first is {missing[0]}: {WAY_OUT}"
            )
    return found


def find_incomplete(fleet: Fleet, update: Update, model: Model) -> dict[str, Lacking]:
    """Return the engines whose commit would leave a mixture of versions, and what they lack. Handles have no names."""
    if update.names_unknown:
        return {}
    held = {name: update.held.get(name, Held()) for name in update.remaining()}
    return find_lacking(rule_of(fleet, update, model), held)


def describe_lacking(fleet: Fleet, name: str, lacking: Lacking) -> str:
    """Return why an engine is not complete, as a clause, and what to do."""
    if not lacking.is_committed:
        way_out = RESTARTING if fleet.engines[name].restarts else RESTART_IT
        return f"may hold tensors of another update, and lacks {lacking}. {way_out}"
    return describe_fewer(fleet, lacking, WAY_OUT)


def describe_fewer(fleet: Fleet, lacking: Lacking, way_out: str) -> str:
    """Return why the names of a push do not make an engine complete, as a clause, and what to do."""
    return f"did not hold version {fleet.committed} before and lacks {lacking}: {way_out}"


def request_restarts(fleet: Fleet, names: Iterable[str]) -> None:
    """Let engines restart when their update is given up. An engine that is clean by then, or has restarted, does not."""
    doubt = fleet.weights.doubt
    doubt.restarts |= {name for name in names if doubt.has(name, fleet.boot(name))}


def find_doubtful(fleet: Fleet) -> list[str]:
    """Return the dirty engines that may hold tensors of names which no version of this run needs, and that no update uses now.

    If no list of the model tells that the names belong to it, no later push may ever bring them.
    """
    doubt = fleet.weights.doubt
    if not fleet.is_at_rest or not len(doubt.names - fleet.weights.names) or fleet.now < doubt.asked_at + RESTART_SECONDS:
        return []
    known = fleet.membership.model
    is_listed = known is not None and known.model.is_known
    found = [name for name in doubt.engines if name in fleet.engines and _may_restart(fleet, fleet.engines[name])]
    return [name for name in found if not is_listed or doubt.must_restart(name, fleet.boot(name))]


def _may_restart(fleet: Fleet, engine: Engine) -> bool:
    seen = engine.status
    is_dirty = engine.up and seen is not None and seen.state is EngineState.DIRTY and not seen.giving_up
    return is_dirty and fleet.weights.doubt.has(engine.wanted.name, engine.boot) and not engine.is_catching_up


async def restart_doubtful(fleet: Fleet, names: list[str]) -> Answer:
    """Let engines restart, unless the names that they may hold are tensors of the model."""
    fleet.weights.doubt.asked_at = fleet.now
    if not (await read_model(fleet)).is_known:
        request_restarts(fleet, names)
    due = [name for name in names if fleet.weights.doubt.must_restart(name, fleet.boot(name))]
    await fence(fleet, due, "the engine may hold tensors that no later push is known to replace")
    return Answer(200, f"{len(due)} engines restart.")


def received_tensors(update: Update, name: str) -> frozenset[str]:
    """Return the tensors that this engine has received in the update."""
    return frozenset[str]().union(*(names for engines, names in update.tensors.items() if name in engines))


def sent_tensors(update: Update) -> frozenset[str]:
    """Return the tensors that came in the update, at any engine."""
    return frozenset[str]().union(*update.tensors.values())


def starts_from_base(fleet: Fleet, update: Update) -> bool:
    """Return True if a new run begins on engines that all hold what ``model.path`` holds, so that earlier tensors are gone.

    While one engine still holds tensors of the run before, an update without these would be a mixture of both runs.
    """
    return _opens_run(fleet, fleet.target()) and all(name in update.held and update.held[name].base for name in fleet.engines)


def may_open_run(fleet: Fleet, label: str | None) -> bool:
    """Return True if an update with this label begins a new run, or if a trainer that has given no label may do so later."""
    named = label or fleet.transaction.label
    return named is None or _opens_run(fleet, fleet.weights.next_version(named))


def _opens_run(fleet: Fleet, version: Version) -> bool:
    before = fleet.committed
    return before is None or before.is_base or version.run > before.run


def replace_names(fleet: Fleet, names: TensorNames, besides: Mapping[str, str]) -> None:
    """Replace the names of the run. Engines without the version may hold tensors of names that are dropped.

    Args:
        fleet: The fleet.
        names: All names that an engine needs from now on, if it starts from ``model.path``.
        besides: Engines that hold the new version.
    """
    weights = fleet.weights
    dropped = weights.names - names
    if len(dropped):
        others = {name: engine.boot for name, engine in fleet.engines.items() if name not in besides and not engine.holds(BASE)}
        for name, boot in others.items():
            if boot is not None:
                weights.doubt.begin(name, boot)
        if weights.doubt.engines:
            weights.doubt.names |= dropped
    weights.names = names
