"""A spec change sets ``state: Asleep`` and ``memorySaver``: the engines are recreated, one by one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from sglang_rollout.api.v1alpha1 import SGLangRollout
from sglang_rollout.controller.decide.drift import stamp
from sglang_rollout.controller.decide.plan import Delete, make_plan
from sglang_rollout.controller.decide.view import FleetView
from sglang_rollout.controller.render import render_all
from sglang_rollout.controller.render.hashing import revision
from sglang_rollout.wire.reasons import GateReason, Refusal
from sglang_rollout.wire.record import EngineRow
from sglang_rollout.wire.states import BASE, FleetState
from tests.unit.controller.support.worlds import NOW, SETTINGS, Object, cr, pod, record, row, world

ENGINE = {"image": "example.org/engine:1", "gpuResource": ""}
SAVING = cr(3, state="Asleep", engine={**ENGINE, "memorySaver": True})
CURRENT = revision(SGLangRollout.model_validate(SAVING))
RELEASED = ["weights", "kv_cache"]


def fleet(pods: list[Object], rows: list[EngineRow], state: FleetState = FleetState.ASLEEP) -> FleetView:
    seen = world(pods, written=record(*rows).model_copy(update={"state": state}), custom=SAVING)
    children = dict(seen.children)
    for made in render_all(SGLangRollout.model_validate(SAVING), SETTINGS, token="t0ken"):
        key = (made["kind"], made["metadata"]["name"])
        live = {**seen.children[key], **stamp(made)}
        live["metadata"] = {**live["metadata"], "generation": 1}
        children[key] = {**live, "status": {"readyReplicas": 1, "observedGeneration": 1}}
    return replace(seen, children=children)


def old(index: int, *, saving: bool = False, ready: bool = True) -> Object:
    made = pod(index, current="old", ready=ready)
    made["spec"]["containers"] = [{"name": "engine", "args": ["--enable-memory-saver"] if saving else ["--tp-size", "1"]}]
    return made


def rolled(seen: FleetView) -> list[str]:
    return [one.name for one in make_plan(seen, SETTINGS, NOW).actions if isinstance(one, Delete)]


def awake(index: int) -> EngineRow:
    return row(index, BASE, gate=False, closed=Refusal(GateReason.RELEASE_FAILED, "It was started without --enable-memory-saver."))


def asleep(index: int) -> EngineRow:
    return row(index, BASE, gate=False).model_copy(update={"released": RELEASED})


def test_engines_that_cannot_sleep_are_recreated_one_by_one() -> None:
    assert rolled(fleet([old(0), old(1), old(2)], [awake(0), awake(1), awake(2)])) == ["demo-engine-2-0"]
    coming = fleet([old(0), old(1), pod(2, current=CURRENT, ready=False)], [awake(0), awake(1), row(2, None, gate=False)])
    assert rolled(coming) == [], "it is waited for, as in every rolling update"
    assert rolled(fleet([old(0), old(1), pod(2, current=CURRENT)], [awake(0), awake(1), asleep(2)])) == ["demo-engine-1-0"]


@pytest.mark.parametrize("made", [asleep, lambda index: row(index, gate=False)], ids=["asleep", "going to sleep"])
def test_engines_that_can_sleep_keep_their_weights(made: Callable[[int], EngineRow]) -> None:
    assert rolled(fleet([old(index, saving=True) for index in range(3)], [made(index) for index in range(3)])) == []


def test_fleet_that_is_not_asleep_waits() -> None:
    seen = fleet([old(0), old(1), old(2)], [row(index, gate=False) for index in range(3)], FleetState.ACTIVE)
    assert rolled(seen) == []
