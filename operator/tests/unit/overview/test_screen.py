"""What the screen of a fleet says, by the state of the fleet. The statuses are those that the operator builds."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest

from sglang_rollout.api.status import Reason
from sglang_rollout.controller.decide.plan import Failure
from sglang_rollout.overview.observation import Observation, UnreadableError, build_observation
from sglang_rollout.overview.screen import MAX_LINES, Size, draw
from sglang_rollout.wire.reasons import GateReason, Refusal
from sglang_rollout.wire.record import AdapterRow, EngineRow, GroupFailure, UpdateOutcome, UpdateReason
from sglang_rollout.wire.states import EngineState
from tests.unit.controller.support.worlds import cr, crashed, pod, row, under_way
from tests.unit.overview.scenes import NOW, TRAINER, based, ended, observe, recorded, version


@dataclass(frozen=True)
class Scene:
    seen: Observation
    shown: tuple[str, ...]
    """Parts of lines, in this order."""
    hidden: tuple[str, ...] = ()
    """Texts that must not be there."""


def holds(index: int, step: int = 12) -> EngineRow:
    return row(index, version(step))


def closed(index: int, code: GateReason, message: str, **more: Any) -> EngineRow:
    return row(index, gate=False, closed=Refusal(code, message), **more)


PODS = [pod(0), pod(1)]
DIRTY = closed(1, GateReason.DIRTY, "a trainer left", state=EngineState.DIRTY, version=None)
BEHIND = closed(1, GateReason.NOT_COMMITTED, "it holds another version", version=version(11))
WITHOUT_PLUGIN = [closed(index, GateReason.PLUGIN_MISSING, "the plug-in is not active in this engine: no hook.") for index in (0, 1)]

SCENES: dict[str, Scene] = {
    "it serves": Scene(
        observe(
            PODS,
            recorded(
                holds(0),
                holds(1),
                earlier_updates=[
                    ended(11, 130),
                    ended(10, 7300, UpdateOutcome.FAILED, reason=UpdateReason.TAKEN_OVER, author="ml/Job/eval", bytes=None),
                ],
            ),
        ),
        (
            "Rollout   default/demo: Active, Ready for 30 s, 2/2 engines serve",
            f"Version   step-12 (run 2, step 12), pushed by {TRAINER}",
            "URL       http://demo-router.default.svc:30000",
            "Update    none in progress",
            "Engines   ENGINE         PHASE    VERSION  RESTARTS  NODE",
            "demo-engine-0  Serving  step-12  0         node-1",
            "demo-engine-1  Serving  step-12",
            "Updates   VERSION  OUTCOME    ENDED      TOOK   BYTES    AUTHOR                 REASON",
            "step-12  Committed  60 s ago   2.1 s  15.2 GB  ml/RayCluster/grpo-7b",
            "step-11  Committed  2 min ago",
            "step-10  Failed     2 h ago    2.1 s           ml/Job/eval            TakenOver",
        ),
        ("Problem", "Note", "To do"),
    ),
    "it starts": Scene(
        observe([pod(0, ready=False), pod(1, ready=False)], based()),
        (
            "not Ready for 30 s (PodsNotReady), 0/2 engines serve",
            "Version   base, the weights at /models/tiny",
            "Note      PodsNotReady: Engine demo-engine-0: it is starting. (1 more engine for the same reason.)",
            "  To do   wait; a large model loads for minutes.",
            "demo-engine-0  Starting",
        ),
        ("Problem", "Updates"),
    ),
    "the router starts": Scene(
        observe([pod(0, ready=False)], router=False),
        ("Note      RouterNotReady: The router is starting.", "demo-engine-1  Pending"),
        ("Version", "Update ", "old spec", "Problem"),
    ),
    "an update is in progress": Scene(
        observe(PODS, recorded(under_way(0), holds(1), under_way=version(13), under_way_since="2026-11-21T03:00:18Z")),
        (
            f"Update    version step-13 in progress, began 12 s ago, by {TRAINER} (now in 1 of 2 engines)",
            "demo-engine-0  Updating  dirty    0         node-1  UpdatingWeights",
            "demo-engine-1  Serving   step-12",
        ),
        ("Problem", "Note"),
    ),
    "an engine is dirty and must restart": Scene(
        observe(
            PODS,
            recorded(
                holds(0),
                DIRTY,
                last_update=ended(13, 5, UpdateOutcome.FAILED, message="the trainer is gone", reason=UpdateReason.TRAINER_LOST),
                restarts=[1],
            ),
        ),
        (
            "Problem   UpdateFailed: The last weight update (to step-13) ended Failed: the trainer is gone.",
            "  To do   push again; if the message says that the push lacks tensors, push with these tensors.",
            "Note      WeightsDiverged: Engine demo-engine-1: it holds part of an unfinished weight update",
            "Note      These engines may hold tensors of another update, and their agents restart them: demo-engine-1.",
            "  To do   push again when they have restarted.",
            "demo-engine-1  Waiting  dirty",
            "step-13  Failed   5 s ago",
        ),
    ),
    "an update was committed in part": Scene(
        observe(
            PODS,
            recorded(
                holds(0),
                BEHIND,
                last_update=ended(
                    12, outcome=UpdateOutcome.PARTIAL, engines=["demo-engine-0"], message="demo-engine-1 did not answer",
                    reason=UpdateReason.ENGINE_LOST,
                ),
            ),
        ),
        (
            "Problem   PartlyCommitted: Version step-12 is committed on 1 engine; the other engines wait for weights: demo-engine-1",
            "  To do   nothing; the next complete push includes them",
            "Note      WaitingForWeights: Engine demo-engine-1: it holds version step-11, the fleet serves step-12",
            "demo-engine-1  Waiting  step-11",
            "step-12  Partial  60 s ago  2.1 s  15.2 GB  ml/RayCluster/grpo-7b  EngineLost",
        ),
    ),
    "it is suspended": Scene(
        observe([], recorded(), state="Suspended"),
        (
            "default/demo: Suspended, not Ready for 30 s (Suspended), 0/0 engines serve",
            "Note      Suspended: Suspended by spec.state: no engine runs. Kept: version step-12.",
            "  To do   kubectl -n default patch sglr demo --type merge -p '{\"spec\":{\"state\":\"Active\"}}'.",
        ),
        ("Problem", "Engines"),
    ),
    "a name is taken": Scene(
        observe([], failure=Failure(Reason.NAME_TAKEN, "ServiceAccount demo-engine exists and belongs to another owner.")),
        (
            "not Ready for 30 s (NameTaken)",
            "Problem   NameTaken: ServiceAccount demo-engine exists and belongs to another owner.",
            "  To do   delete that object, or rename the rollout.",
        ),
        ("wait",),
    ),
    "the plug-in is missing": Scene(
        observe(PODS, based(*WITHOUT_PLUGIN)),
        (
            "Problem   PluginMissing: Engine demo-engine-0: the plug-in is not active in this engine: no hook. (1 more engine for the",
            "  To do   use a release of SGLang that the project supports",
            "demo-engine-0  Failed  base",
        ),
    ),
    "of 64 engines one crashes and one is behind": Scene(
        observe(
            [pod(index) for index in range(64) if index != 7] + [pod(7, ready=False, status=crashed(message="no memory"))],
            recorded(*(holds(index) for index in range(64) if index not in (5, 7)), BEHIND.model_copy(update={"name": "demo-engine-5"})),
            replicas=64,
        ),
        (
            "62/64 engines serve",
            "Problem   EngineCrashed: Engine demo-engine-7:",
            "  To do   kubectl -n default logs demo-engine-7-0 -c engine --previous has the whole log",
            "Note      WaitingForWeights: Engine demo-engine-5:",
            "62 engines: 0-4, 6, 8-63  Serving  step-12",
            "demo-engine-5             Waiting  step-11",
            "demo-engine-7             Failed            3",
        ),
    ),
    "of 100 engines the status lists 64": Scene(
        observe([pod(index) for index in range(100)], recorded(*(holds(index) for index in range(100))), replicas=100),
        ("100/100 engines serve", "64 engines: 0-63", "and 36 more engines"),
    ),
    "the user may not read ConfigMaps": Scene(
        observe(PODS, recorded(holds(0), holds(1)), hidden=True, gaps=("Not known: the update in progress. You may not get it.",)),
        (
            "Ready for 30 s, 2/2 engines serve",
            f"Version   step-12 (run 2, step 12), pushed by {TRAINER}",
            "Note      Not known: the update in progress. You may not get it.",
            "step-12  Committed  60 s ago",
        ),
        ("Update ",),
    ),
    "no process group opened": Scene(
        observe(PODS, recorded(holds(0), holds(1), group_failure=GroupFailure(code="WorldSizeMismatch", message="Use world_size=3."))),
        ("Problem   WorldSizeMismatch: No process group could be opened: Use world_size=3.",),
    ),
    "an adapter does not load": Scene(
        observe(PODS, recorded(holds(0), adapters=[AdapterRow(name="a", path="/a", by_spec=True, loaded=0, wanted=2, message="no file.")])),
        ("Problem   AdapterFailed: Adapter a: no file.",),
    ),
    "the operator has not reported an update": Scene(
        observe(PODS, recorded(holds(0), holds(1), last_update=ended(12, 40)), seen_before=based(row(0), row(1))),
        (
            "Version   step-12",
            "Problem   The operator has not reported the last update yet. Conditions and engines below are older than the update.",
            "  To do   if this stays, look at the operator: kubectl get pods -A -l app.kubernetes.io/name=sglang-rollout-operator.",
        ),
    ),
    "the operator reports an update in a moment": Scene(
        observe(PODS, recorded(holds(0), holds(1), last_update=ended(12, 2)), seen_before=based(row(0), row(1))),
        ("Version   step-12",),
        ("Problem", "Note"),
    ),
    "the coordinator has not applied the spec": Scene(
        observe(PODS, recorded(holds(0), holds(1)).model_copy(update={"intent_generation": 3})),
        (
            "Note      The coordinator has not applied generation 4 of the spec yet (it has 3).",
            "  To do   if this stays: kubectl -n default logs deploy/demo-router -c coordinator.",
        ),
    ),
    "no operator runs": Scene(
        build_observation(cr(), None, None),
        (
            "default/demo: Active, no status",
            "Problem   No operator has written a status for this rollout yet.",
            "app.kubernetes.io/name=sglang-rollout-operator",
        ),
    ),
}  # fmt: skip


@pytest.mark.parametrize("scene", SCENES.values(), ids=list(SCENES))
def test_screen_says_what_is_so_and_what_to_do(scene: Scene) -> None:
    text = "\n".join(draw(scene.seen, NOW, Size()))
    at = 0
    for part in scene.shown:
        found = text.find(part, at)
        assert found >= 0, f"{part!r} is not in, or not at this place of:\n{text}"
        at = found + len(part)
    for part in scene.hidden:
        assert part not in text, text


@pytest.mark.parametrize("size", [Size(), Size(80, 23), Size(40, 10)], ids=str)
@pytest.mark.parametrize("scene", SCENES.values(), ids=list(SCENES))
def test_screen_fits(scene: Scene, size: Size) -> None:
    lines = draw(scene.seen, NOW, size)
    assert len(lines) <= size.height
    assert [line for line in lines if len(line) > size.width] == []


def test_worst_fleet_takes_30_lines() -> None:
    """Long messages, many reasons and many groups: each part gives way, and none is lost."""
    long = "it cannot be opened because " + "of the network between the two nodes " * 60
    adapters = [AdapterRow(name=f"a{index}", path="/a", by_spec=True, loaded=0, wanted=2, message=long) for index in range(5)]
    updates = [ended(index, outcome=UpdateOutcome.FAILED, message=long, author="x" * 700) for index in range(9)]
    rows = [row(index, version(index), gate=False, closed=Refusal(GateReason.NOT_COMMITTED, long)) for index in range(100)]
    record = recorded(
        *rows, last_update=updates[0], earlier_updates=updates[1:], adapters=adapters, restarts=list(range(100)),
        group_failure=GroupFailure(code="MasterUnreachable", message=long), under_way=version(101), under_way_since="2026-11-21T03:00:18Z",
    )  # fmt: skip
    seen = observe([pod(index) for index in range(100)], record, replicas=100, gaps=(long,))
    lines = draw(seen, NOW, Size())
    assert len(lines) == MAX_LINES, "\n".join(lines)
    assert [line for line in lines if len(line) > 120] == []
    labels = {line[:9].strip() for line in lines} - {""}
    assert labels >= {"Rollout", "Version", "URL", "Update", "Problem", "Engines", "Updates"}
    assert any("more: kubectl -n default describe sglr demo" in line for line in lines)


def test_text_of_others_cannot_control_the_terminal() -> None:
    """Labels and messages come from trainers and engines."""
    evil = "\x1b[2Jall is well\n\x07\u202e"
    last = ended(12, author=evil, message=evil, outcome=UpdateOutcome.FAILED)
    record = recorded(
        holds(0), closed(1, GateReason.NOT_COMMITTED, evil), author=evil, holder=evil, under_way=version(13), last_update=last
    )
    lines = draw(observe(PODS, record), NOW, Size())
    assert [line for line in lines if not line.isprintable()] == []


def test_status_of_a_newer_release_is_named() -> None:
    seen = observe(PODS, recorded(holds(0), holds(1)))
    status = {**seen.rollout["status"], "engines": [{"name": "demo-engine-0", "phase": "Dreaming", "updated": True}]}
    with pytest.raises(UnreadableError, match=r"status.engines.0.phase has a form that this command does not know"):
        build_observation({**seen.rollout, "status": status}, None, None)


def test_record_of_another_release_is_a_gap() -> None:
    seen = observe(PODS, recorded(holds(0), holds(1)))
    newer = build_observation(seen.rollout, None, {"data": {"weights.json": '{"term": "many"}'}})
    assert newer.record is None
    assert "weights.json has a form that this command does not know" in "\n".join(draw(newer, NOW, Size()))
    assert draw(replace(newer, gaps=()), NOW, Size())
