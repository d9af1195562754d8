"""A trainer that dies while every engine waits for it in a collective, as with NCCL: nothing but a restart ends that wait."""

from __future__ import annotations

import time

import requests

from e2e.cases.actions import document, generate
from e2e.cases.stand import Stand
from e2e.chaos.watch import Watch
from e2e.kube import eventually

CONTROLLABLE_WITHIN = 60.0
"""Seconds from the trainer's death to the first push of the next one, with deadlines of 10 s."""


def lose_trainer_in_broadcast(stand: Stand, watch: Watch, *, keep: bool) -> tuple[str, list[int], float]:
    """Kill a trainer for which all engines wait; the committed version, the restart counts from before, and when it was."""
    for index in range(stand.engines):
        stand.fault(index, "nccl", "init")
    trainer = stand.trainer(snapshots=True)
    label = stand.push(trainer, watch, manner="keep" if keep else "")
    restarts = [row["restarts"] for row in stand.status()["engines"]]
    lost = stand.label()
    watch.expected[lost] = trainer.begin(lost, "stall")
    trainer.said("stalled", 30)
    eventually("every engine waits in the broadcast", lambda: all(stand.state(index)["busy"] for index in range(stand.engines)), within=20)
    stand.signal(trainer, "KILL")
    return label, restarts, time.monotonic()


def test_engines_stuck_in_a_collective_are_restarted_and_the_next_trainer_pushes(stand: Stand, watch: Watch) -> None:
    label, restarts, died = lose_trainer_in_broadcast(stand, watch, keep=False)
    eventually("the update is given up", lambda: document(stand.url)["phase"] == "idle", within=30)
    eventually(
        "the kubelet has restarted every engine",
        lambda: [row["restarts"] for row in stand.status()["engines"]] == [count + 1 for count in restarts],
        within=CONTROLLABLE_WITHIN,
    )
    # A push would not wait for them: engines that start take part in the next one.
    eventually("all engines are up again", lambda: all(row["state"] == "clean" for row in stand.members()), within=CONTROLLABLE_WITHIN)
    following = stand.trainer()
    first = stand.label()
    watch.expected[first] = following.begin(first)
    answer = following.outcome(60)
    took = time.monotonic() - died
    assert answer["ok"], f"the next trainer's first push: {answer}"
    watch.committed(first)
    print(f"trainer killed in a broadcast of all engines: the next trainer's first push was committed {took:.0f} s later")
    assert took < CONTROLLABLE_WITHIN
    stand.serve()
    said = [event for event in stand.events() if event.startswith("WeightUpdateFailed")]
    assert "the trainer is gone" in said[-1], said
    assert document(stand.url)["committed"]["label"] == first != label


def test_with_a_snapshot_the_fleet_serves_its_version_again_without_any_trainer(stand: Stand, watch: Watch) -> None:
    with stand.policy(catchUp={"disk": "/ckpt"}):
        label, _, died = lose_trainer_in_broadcast(stand, watch, keep=True)
        eventually("all engines serve again", lambda: document(stand.url)["serving"] == stand.engines, within=90)
        print(f"trainer killed in a broadcast of all engines: all serve {label} again {time.monotonic() - died:.0f} s later, from disk")
        assert document(stand.url)["committed"]["label"] == label
        assert {row["version"]["label"] for row in stand.members()} == {label}
        answers = watch.answers
        eventually("clients get answers of it", lambda: watch.answers > answers + 5, within=20)


def test_a_fleet_that_pauses_because_its_trainer_is_lost_says_so_until_somebody_calls(stand: Stand) -> None:
    with stand.policy(trainerLease={"ttlSeconds": 5, "onLoss": "Pause"}):
        trainer = stand.trainer()
        label = stand.push(trainer)
        stand.signal(trainer, "KILL")
        eventually("status says that the trainer is lost", lambda: stand.condition("Ready")["reason"] == "TrainerLost", within=40)
        told = stand.condition("Ready")["message"]
        assert f"hold version {label}. They resume when a trainer calls" in told
        assert {row["phase"] for row in stand.status()["engines"]} == {"Paused"}
        assert (stand.condition("Degraded")["status"], stand.condition("Available")["status"]) == ("True", "False")
        assert any(event.startswith("TrainerLost") for event in stand.events())
        assert document(stand.url)["phase"] == "pause"
        assert requests.post(f"{stand.url}/continue_generation", json={}, timeout=30).ok
        eventually("all engines serve again", lambda: stand.condition("Ready")["reason"] == "AllServing", within=20)
        assert generate(stand.url).json()["meta_info"]["weight_version"] == label
