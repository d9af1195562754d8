"""LoRA adapters of the spec and of trainers, the same on every engine. Pure.

Agents report what their engine has loaded in this boot. The coordinator loads and unloads the difference to the wanted adapters, engine by
engine, also on engines that start later. SGLang loads no name that it holds: new contents under an old name are an unload, then a load.
In the spec new contents have another path. A trainer replaces contents by loading the name again, also from the same path.
"""

from __future__ import annotations

import json
from collections.abc import Mapping

from sglang_rollout.checkpoints.allowed import is_below
from sglang_rollout.coordinator.update.engine import Engine
from sglang_rollout.coordinator.update.events import Result
from sglang_rollout.coordinator.update.membership import describe_none_up, refuse_asleep
from sglang_rollout.coordinator.update.model import Fleet
from sglang_rollout.coordinator.update.named_folders import check_folder, read_adapters
from sglang_rollout.coordinator.update.requests import Answer, Body, LoadAdapter, UnloadAdapter
from sglang_rollout.coordinator.update.steps import Results, failures, results_by_engine, same_body, send
from sglang_rollout.sglang.api import ControlCall
from sglang_rollout.wire.reasons import RefusedError
from sglang_rollout.wire.record import Adapter, AdapterRow
from sglang_rollout.wire.states import FleetState

MAX_ADAPTERS_CHARACTERS = 80_000
"""Room in the record for the adapters that trainers have loaded. The record must fit into a ConfigMap (1 MiB)."""
ROW_CHARACTERS = 110
"""Characters of a row beside name, path and reason."""
MAX_REASONS_CHARACTERS = 20_000
"""Room in the record for the reasons of all rows together. ``GET /fleet`` has the whole reasons."""
FORBIDDEN = "It is loaded on no engine, because its path is not below a folder of security.paths."
"""Message in the row of an adapter that a trainer has loaded before ``security.paths`` changed."""
RETRY_SECONDS = 30.0
"""When an adapter that an engine could not load or unload is tried again: the volume may have the files by then."""


def wanted_adapters(fleet: Fleet) -> dict[str, Adapter]:
    """Return by name the adapters that trainers have loaded and those of the spec, which win. Forbidden adapters are not wanted."""
    return {**_allowed_of_trainers(fleet), **(fleet.adapters.of_spec or {})}


def _allowed_of_trainers(fleet: Fleet) -> dict[str, Adapter]:
    """Return the adapters of trainers without those that ``security.paths`` forbids since it changed."""
    of_trainers = fleet.adapters.of_trainers
    return {name: adapter for name, adapter in of_trainers.items() if not fleet.paths or is_below(adapter.path, fleet.paths)}


def adapter_of(row: Adapter) -> Adapter:
    """Return the adapter of a row of the record."""
    return Adapter(name=row.name, path=row.path, pinned=row.pinned)


def rows(fleet: Fleet, room: int | None = None) -> list[AdapterRow]:
    """Return a row for each adapter: how many engines have loaded it, and the first failure.

    Args:
        fleet: The fleet.
        room: Characters for all messages; None: all.
    """
    wanted, of_spec = wanted_adapters(fleet), fleet.adapters.of_spec or {}
    adapters = {**fleet.adapters.of_trainers, **of_spec}
    each = None if room is None else room // max(1, len(adapters))
    engines = [engine for engine in fleet.engines.values() if engine.up]

    def message(name: str) -> str:
        troubles = (engine.adapter_trouble[name] for engine in engines if name in engine.adapter_trouble)
        return next(troubles, "" if name in wanted else FORBIDDEN)[:each]

    return [
        AdapterRow(
            name=name,
            path=adapter.path,
            pinned=adapter.pinned,
            by_spec=name in of_spec,
            wanted=len(fleet.engines) if name in wanted else 0,
            loaded=sum(engine.adapters.get(name) == adapter.path for engine in engines),
            message=message(name),
        )
        for name, adapter in adapters.items()
    ]


def next_call(fleet: Fleet) -> tuple[str, Mapping[str, Body]] | None:
    """Return the path and bodies of the next call that loads or unloads adapters; None if none is needed. Unloading comes first."""
    adapters = wanted_adapters(fleet)
    goal = {name: adapter.path for name, adapter in adapters.items()}
    fresh = {name: engine for name, engine in fleet.engines.items() if fleet.has_news(name)}
    for engine in fresh.values():
        _forget_troubles(engine, goal)
    if not fleet.is_at_rest or fleet.applied_state is FleetState.ASLEEP:
        return None
    unload: dict[str, Body] = {}
    load: dict[str, Body] = {}
    for name, engine in fresh.items():
        if not engine.member or engine.released:
            continue
        there = engine.adapters
        later = {other for other, at in engine.adapters_at.items() if fleet.now < at}
        # Without a list in the spec, adapters that no trainer loaded through the fleet are left alone.
        by_spec = fleet.adapters.of_spec is not None
        ours = {
            other: path
            for other, path in there.items()
            if by_spec or other in goal or other in fleet.adapters.of_trainers or engine.has_outdated_adapter(other)
        }
        wrong = [other for other, path in ours.items() if goal.get(other) != path or engine.has_outdated_adapter(other)]
        extra = next((other for other in wrong if other not in later), None)
        missing = next((other for other in goal if other not in there and other not in later), None)
        if extra is not None:
            unload[name] = {"lora_name": extra}
        elif missing is not None:
            load[name] = _body(adapters[missing])
    if unload:
        return ControlCall.UNLOAD_ADAPTER.path, unload
    return (ControlCall.LOAD_ADAPTER.path, load) if load else None


async def reconcile(fleet: Fleet, path: str, bodies: Mapping[str, Body]) -> Answer:
    """Make the call of :func:`next_call`. A failure is reported in the row of the adapter, and the call is tried again later."""
    refused = await _refused_folders(fleet, bodies) if path == ControlCall.LOAD_ADAPTER.path else {}
    called = await _call(fleet, path, {name: body for name, body in bodies.items() if name not in refused})
    results = {**refused, **called}
    for name, result in results.items():
        adapter = str(bodies[name]["lora_name"])
        fleet.engines[name].adapter_trouble.pop(adapter, None)
        if not result.ok:
            _retry_later(fleet, name, adapter, result)
    return Answer(200, f"{path} on {len(results)} engines, {len(failures(results))} refused.")


async def _refused_folders(fleet: Fleet, bodies: Mapping[str, Body]) -> Results:
    """Return the engines whose pods refuse the folder of a trainer's adapter, which may have changed since the trainer's call."""
    of_spec = fleet.adapters.of_spec or {}
    paths = {name: str(body["lora_path"]) for name, body in bodies.items() if body["lora_name"] not in of_spec}
    return failures(await read_adapters(fleet, paths)) if fleet.paths else {}


async def check_adapter(fleet: Fleet, ask: LoadAdapter) -> None:
    """With ``security.paths``, have every pod read the adapter.

    Without, SGLang checks it: the path may be a name on the Hugging Face hub, or a folder that only the engine's container has.
    """
    if fleet.paths:
        await check_folder(fleet, ask.path, fleet.up(), adapter=True)


async def load(fleet: Fleet, ask: LoadAdapter, _checked: None = None) -> Answer:
    """Load an adapter on every engine, or on none.

    An adapter of the same name is unloaded first. Meanwhile engines refuse requests for it.
    """
    _refuse_name(fleet, ask.name, "loaded")
    adapter = Adapter(name=ask.name, path=ask.path, pinned=ask.pinned)
    _refuse_too_many(fleet, adapter)
    names = fleet.up()
    held = [name for name in names if ask.name in fleet.engines[name].adapters]
    unloaded = await _call(fleet, ControlCall.UNLOAD_ADAPTER.path, same_body(held, {"lora_name": ask.name}))
    if failures(unloaded):
        return await _undo_load(fleet, ask, unloaded, unloaded, {})
    results = await _call(fleet, ControlCall.LOAD_ADAPTER.path, same_body(names, _body(adapter)))
    if failures(results):
        return await _undo_load(fleet, ask, results, unloaded, results)
    for name, engine in fleet.engines.items():
        engine.adapter_trouble.pop(ask.name, None)
        if name not in names:  # should it come back, it holds what the path held before
            engine.overwritten[ask.name] = engine.boot
    fleet.adapters.of_trainers[ask.name] = adapter
    return Answer(200, "", {"engines": results_by_engine(results)})


async def _undo_load(fleet: Fleet, ask: LoadAdapter, failed: Results, unloaded: Results, loaded: Results) -> Answer:
    """Restore the earlier adapter after a failed load. If it had the same path, no engine holds the adapter afterwards."""
    before = _allowed_of_trainers(fleet).get(ask.name)
    what = "load" if loaded else "unload"
    undone = await _call(fleet, ControlCall.UNLOAD_ADAPTER.path, same_body(_succeeded(loaded), {"lora_name": ask.name}))
    if before is None or before.path == ask.path:
        fleet.adapters.of_trainers.pop(ask.name, None)
        stuck = ", ".join(failures(undone if loaded else unloaded))
        return _failed(failed, what, ask.name, f"Still loaded on: {stuck}." if stuck else "It is loaded on no engine.")
    empty = [name for name in _succeeded(unloaded) if name not in failures(undone)]
    back = failures(await _call(fleet, ControlCall.LOAD_ADAPTER.path, same_body(empty, _body(before))))
    for name, result in back.items():
        _retry_later(fleet, name, ask.name, result)
    lack = ", ".join({**back, **failures(undone)})
    after = (
        f"{before.path} was to be loaded again and is not on: {lack}. The coordinator tries again."
        if lack
        else f"It is {before.path} as before."
    )
    return _failed(failed, what, ask.name, after)


async def unload(fleet: Fleet, ask: UnloadAdapter) -> Answer:
    """Unload an adapter on every engine. A failed unload is tried again, because no adapter of this name is wanted."""
    _refuse_name(fleet, ask.name, "unloaded")
    names = [name for name in fleet.up() if ask.name in fleet.engines[name].adapters]
    if not names and ask.name not in fleet.adapters.of_trainers:
        raise RefusedError(f"LoRA adapter {ask.name} is not loaded. Loaded are: {', '.join(wanted_adapters(fleet)) or 'none'}.")
    fleet.adapters.of_trainers.pop(ask.name, None)
    results = await _call(fleet, ControlCall.UNLOAD_ADAPTER.path, same_body(names, {"lora_name": ask.name}))
    if failures(results):
        return _failed(results, "unload", ask.name, "The coordinator tries again.")
    return Answer(200, "", {"engines": results_by_engine(results)})


def _refuse_name(fleet: Fleet, name: str, what: str) -> None:
    refuse_asleep(fleet)
    if name in (fleet.adapters.of_spec or {}):
        raise RefusedError(
            f"LoRA adapter {name} belongs to the spec (engine.lora.adapters) and is {what} by it alone: change it there, or use"
            " another name.",
            status=409,
        )
    if not fleet.up():
        raise RefusedError(describe_none_up(fleet), status=503)


def _refuse_too_many(fleet: Fleet, adapter: Adapter) -> None:
    """Refuse an adapter without room in the record, which keeps every adapter that trainers have loaded."""
    kept = {**fleet.adapters.of_trainers, adapter.name: adapter}
    characters = sum(len(json.dumps([one.name, one.path])) + ROW_CHARACTERS for one in kept.values())
    if characters > MAX_ADAPTERS_CHARACTERS:
        raise RefusedError(
            f"LoRA adapter {adapter.name} has no room in the fleet's record: with it the {len(kept)} adapters that trainers"
            f" have loaded take {characters} characters, and at most {MAX_ADAPTERS_CHARACTERS} fit. Unload some, or use shorter paths."
        )


def _body(adapter: Adapter) -> Body:
    """Return the body of the call that loads an adapter."""
    return {"lora_name": adapter.name, "lora_path": adapter.path, "pinned": adapter.pinned}


async def _call(fleet: Fleet, path: str, bodies: Mapping[str, Body]) -> Results:
    """Make the call, and note which adapters engines hold before their agents confirm it."""
    results = await send(path, bodies, fleet.policy.deadlines.update_seconds)
    for name in _succeeded(results):
        adapter, engine = str(bodies[name]["lora_name"]), fleet.engines.get(name)
        if engine is not None:
            engine.overwritten.pop(adapter, None)
            engine.note_adapter(
                adapter, str(bodies[name]["lora_path"]) if path == ControlCall.LOAD_ADAPTER.path else None, fleet.next_seq()
            )
    return results


def _retry_later(fleet: Fleet, name: str, adapter: str, result: Result) -> None:
    engine = fleet.engines[name]
    engine.adapters_at[adapter] = fleet.now + RETRY_SECONDS
    engine.adapter_trouble[adapter] = f"engine {name}: {result.message}"


def _forget_troubles(engine: Engine, goal: Mapping[str, str]) -> None:
    """Forget failures that no longer apply: the engine has loaded or unloaded the adapter since, or the wanted adapters changed."""
    there = engine.adapters
    for adapter in [name for name in engine.adapter_trouble if there.get(name) == goal.get(name) and not engine.has_outdated_adapter(name)]:
        del engine.adapter_trouble[adapter]
        engine.adapters_at.pop(adapter, None)


def _succeeded(results: Results) -> list[str]:
    return [name for name, result in results.items() if result.ok]


def _failed(results: Results, what: str, adapter: str, after: str) -> Answer:
    name, result = next(iter(failures(results).items()))
    sentence = f"engine {name} did not {what} {adapter}: {result.message.rstrip('.')}. {after}"
    return Answer(400, sentence, {"engine": name, "engines": results_by_engine(results)})
