"""Adapters: those of the spec and those that trainers load, the same on every engine. Pure.

Agents know what their engine has loaded in this life; what differs from what is wanted is loaded and unloaded, engine by engine, also on
those that come later. Other contents under an old name are another path: unload, then load.
"""

from __future__ import annotations

from collections.abc import Mapping

from sglang_rollout.fleet.ranks import Refusal
from sglang_rollout.fleet.update.calls import Results, Script, Turn, failures, same, send, told
from sglang_rollout.fleet.update.engine import Engine
from sglang_rollout.fleet.update.membership import refuse_asleep
from sglang_rollout.fleet.update.requests import Answer, Body, LoadAdapter, UnloadAdapter
from sglang_rollout.fleet.update.state import Fleet
from sglang_rollout.wire.record import AdapterRow
from sglang_rollout.wire.states import FleetState

LOAD = "/load_lora_adapter"
UNLOAD = "/unload_lora_adapter"
AGAIN = 30.0
"""Seconds after which an adapter that an engine could not load or unload is tried again: a volume may yet be filled."""


def wanted(fleet: Fleet) -> dict[str, str]:
    """Path by name: what trainers have loaded, and what the spec says, which counts more."""
    return {**fleet.called, **(fleet.adapters or {})}


def rows(fleet: Fleet) -> list[AdapterRow]:
    """The adapters in the record: on how many of the engines that are up, and what is wrong."""
    engines = [engine for engine in fleet.engines.values() if engine.up]
    return [
        AdapterRow(
            name=name, path=path, by_spec=name in (fleet.adapters or {}), wanted=len(fleet.engines),
            loaded=sum(_loaded(engine).get(name) == path for engine in engines),
            reason=next((engine.adapter_trouble[name] for engine in engines if name in engine.adapter_trouble), ""),
        )
        for name, path in wanted(fleet).items()
    ]  # fmt: skip


def due(fleet: Fleet) -> tuple[str, Mapping[str, Body]] | None:
    """The next call that brings engines nearer to what is wanted, and to which of them; unloading comes first."""
    if fleet.adapters is None or fleet.update is not None or fleet.kept is FleetState.ASLEEP:
        return None
    goal = wanted(fleet)
    unload: dict[str, Body] = {}
    load: dict[str, Body] = {}
    for name, engine in fleet.engines.items():
        if not engine.member or engine.released or engine.heard <= fleet.rested:
            continue
        there = _loaded(engine)
        later = {other for other, at in engine.adapters_at.items() if fleet.now < at}
        extra = next((other for other, path in there.items() if goal.get(other) != path and other not in later), None)
        missing = next((other for other in goal if other not in there and other not in later), None)
        if extra is not None:
            unload[name] = {"lora_name": extra}
        elif missing is not None:
            load[name] = {"lora_name": missing, "lora_path": goal[missing]}
    if unload:
        return UNLOAD, unload
    return (LOAD, load) if load else None


def reconcile(fleet: Fleet, path: str, bodies: Mapping[str, Body]) -> Script[Answer]:
    """Make the call; what fails is said in the adapter's row and tried again later."""
    results = yield from send(path, bodies, fleet.policy.deadlines.update)
    for name, result in results.items():
        engine, adapter = fleet.engines[name], str(bodies[name]["lora_name"])
        engine.adapter_trouble.pop(adapter, None)
        if not result.ok:
            engine.adapters_at[adapter] = fleet.now + AGAIN
            engine.adapter_trouble[adapter] = f"engine {name}: {result.message}"
    return Answer(200, f"{path} on {len(results)} engines, {len(failures(results))} refused.")


def load(fleet: Fleet, ask: LoadAdapter) -> Script[Answer]:
    """Load on every engine, or on none."""
    yield Turn()
    _refuse(fleet, ask.name, "loaded")
    names = [name for name in fleet.up() if _loaded(fleet.engines[name]).get(ask.name) != ask.path]
    results = yield from send(LOAD, same(names, {**ask.body, "lora_name": ask.name, "lora_path": ask.path}), fleet.policy.deadlines.update)
    if failures(results):
        done = [name for name, result in results.items() if result.ok]
        undone = yield from send(UNLOAD, same(done, {"lora_name": ask.name}), fleet.policy.deadlines.update)
        return _failed(results, undone, "load", ask.name)
    fleet.called[ask.name] = ask.path
    return Answer(200, "", {"engines": told(results)})


def unload(fleet: Fleet, ask: UnloadAdapter) -> Script[Answer]:
    """Unload on every engine. One that does not is tried again: nobody wants the adapter any more."""
    yield Turn()
    _refuse(fleet, ask.name, "unloaded")
    names = [name for name in fleet.up() if ask.name in _loaded(fleet.engines[name])]
    if not names and ask.name not in fleet.called:
        raise Refusal(f"LoRA adapter {ask.name} is not loaded. Loaded are: {', '.join(wanted(fleet)) or 'none'}.")
    fleet.called.pop(ask.name, None)
    results = yield from send(UNLOAD, same(names, {"lora_name": ask.name}), fleet.policy.deadlines.update)
    return _failed(results, {}, "unload", ask.name) if failures(results) else Answer(200, "", {"engines": told(results)})


def _refuse(fleet: Fleet, name: str, what: str) -> None:
    refuse_asleep(fleet)
    if fleet.update is not None:
        raise Refusal("a weight update is open: end it before adapters change.", status=409, fleet=fleet.advice())
    if name in (fleet.adapters or {}):
        raise Refusal(
            f"LoRA adapter {name} belongs to the spec (engine.lora.adapters) and is {what} by it alone: change it there, or use"
            " another name.",
            status=409,
        )
    if not fleet.up():
        raise Refusal("No engine of this fleet is up. Try again.", status=503)


def _failed(results: Results, undone: Results, what: str, adapter: str) -> Answer:
    name, result = next(iter(failures(results).items()))
    stuck = ", ".join(failures(undone))
    after = f" Still loaded on: {stuck}." if stuck else " It is loaded on no engine." if what == "load" else " It is tried again."
    return Answer(
        400, f"engine {name} did not {what} {adapter}: {result.message.rstrip('.')}.{after}", {"engine": name, "engines": told(results)}
    )


def _loaded(engine: Engine) -> dict[str, str]:
    return engine.status.adapters if engine.status is not None else {}
