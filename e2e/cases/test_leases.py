"""A trainer is killed while every engine waits for it in a collective. As with NCCL, only a restart ends that wait."""

from __future__ import annotations

import time

import requests

from e2e.cases.actions import document, generate
from e2e.cases.stand_in_rollout import StandInRollout
from e2e.chaos.watch import Watch
from e2e.kube import eventually
from e2e.machine_token import HEADERS


def lose_trainer_in_broadcast(stand: StandInRollout, watch: Watch, *, keep: bool) -> tuple[str, list[int], float]:
    """Kill a trainer for which all engines wait. Returns the committed version, the previous restart counts, and the time of the kill."""
    for index in range(stand.engines):
        stand.fault(index, "nccl", "init")
    trainer = stand.trainer(snapshots=True)
    label = stand.push(trainer, watch, manner="keep" if keep else "")
    restarts = [row["restarts"] for row in stand.status()["engines"]]
    lost = stand.label()
    watch.expected[lost] = trainer.begin(lost, "stall")
    trainer.message_with("stalled", 180)
    eventually("every engine waits in the broadcast", lambda: all(stand.state(index)["busy"] for index in range(stand.engines)))
    stand.signal(trainer, "KILL")
    return label, restarts, time.monotonic()


def test_engines_stuck_in_a_collective_are_restarted_and_the_next_trainer_pushes(stand: StandInRollout, watch: Watch) -> None:
    label, restarts, died = lose_trainer_in_broadcast(stand, watch, keep=False)
    eventually("the update is aborted", lambda: document(stand.url)["phase"] == "idle")
    eventually(
        "the kubelet has restarted every engine",
        lambda: [row["restarts"] for row in stand.status()["engines"]] == [count + 1 for count in restarts],
    )
    # A push does not wait for engines that start.
    eventually("all engines are up again", lambda: all(row["state"] == "clean" for row in stand.members()))
    following = stand.trainer()
    first = stand.label()
    watch.expected[first] = following.begin(first)
    answer = following.outcome(180)
    took = time.monotonic() - died
    assert answer["ok"], f"the next trainer's first push: {answer}"
    watch.committed(first)
    print(f"trainer killed in a broadcast of all engines: the next trainer's first push was committed after {took:.0f} s")
    stand.serve()
    failures = [event for event in stand.events() if event.startswith("WeightUpdateFailed")]
    assert "the trainer is gone" in failures[-1], failures
    assert document(stand.url)["committed"]["label"] == first != label


def test_restarted_engines_load_the_snapshot_without_a_trainer(stand: StandInRollout, watch: Watch) -> None:
    with stand.policy(catchUp={"disk": "/ckpt"}):
        label, _, died = lose_trainer_in_broadcast(stand, watch, keep=True)
        eventually("all engines serve again", lambda: document(stand.url)["serving"] == stand.engines)
        print(f"trainer killed in a broadcast of all engines: all serve {label} again after {time.monotonic() - died:.0f} s, from disk")
        assert document(stand.url)["committed"]["label"] == label
        assert {row["version"]["label"] for row in stand.members()} == {label}
        answers = watch.answers
        eventually("clients get answers", lambda: watch.answers > answers + 5)


def test_fleet_of_a_lost_trainer_stays_paused_until_a_trainer_calls(stand: StandInRollout) -> None:
    with stand.policy(trainerLease={"ttlSeconds": 5, "onLoss": "Pause"}):
        trainer = stand.trainer()
        label = stand.push(trainer)
        stand.signal(trainer, "KILL")
        eventually("Ready has reason TrainerLost", lambda: stand.condition("Ready")["reason"] == "TrainerLost")
        message = stand.condition("Ready")["message"]
        assert f"hold version {label}. They resume when a trainer calls" in message
        assert {row["phase"] for row in stand.status()["engines"]} == {"Paused"}
        assert (stand.condition("Degraded")["status"], stand.condition("Available")["status"]) == ("True", "False")
        assert any(event.startswith("TrainerLost") for event in stand.events())
        assert document(stand.url)["phase"] == "pause"
        assert requests.post(f"{stand.url}/continue_generation", json={}, headers=HEADERS, timeout=30).ok
        eventually("all engines serve again", lambda: stand.condition("Ready")["reason"] == "AllServing")
        assert generate(stand.url).json()["meta_info"]["weight_version"] == label
