"""``weights.minCommitted``: an update commits without an engine that failed. The trainer, status and an Event name the engine."""

from __future__ import annotations

from e2e.cases.actions import document
from e2e.cases.stand_in_rollout import StandInRollout
from e2e.chaos.watch import Watch
from e2e.kube import eventually


def test_update_commits_without_an_engine_that_died(stand: StandInRollout, watch: Watch) -> None:
    victim = stand.engine(1)
    with stand.policy(minCommitted=2):
        trainer = stand.trainer()
        stand.fault(1, "die", "end")
        label = stand.label()
        watch.expected[label] = trainer.begin(label)
        answer = trainer.outcome(180)
        assert answer["ok"], answer
        watch.committed(label)
        assert list(answer["fenced"]) == [victim], "the trainer learns which engine is fenced"
        seen = document(stand.url)
        assert (seen["committed"]["label"], seen["last_update"]["outcome"]) == (label, "Partial")

        def is_partial() -> bool:
            weights = stand.status()["weights"]
            return (weights["committedVersion"], weights["lastUpdate"]["outcome"]) == (label, "Partial")

        eventually("status reports the partial update", is_partial)
        eventually("Degraded names the engine", lambda: victim in stand.condition("Degraded")["message"])
        events = [event for event in stand.events() if event.startswith("WeightsPartlyCommitted")]
        assert victim in events[-1], events
        assert label in events[-1], events

        eventually("the engine is up again", lambda: stand.row(1)["state"] == "clean")
        assert not stand.row(1)["gate_open"], "the engine holds base weights"
        eventually("the column STALE counts the engine", lambda: stand.status()["weights"]["stale"] == 1)
        assert stand.status()["ready"] == "2/3"

        stand.push(trainer, watch)
        stand.serve()
        eventually("the rollout is not degraded", lambda: stand.condition("Degraded")["status"] == "False")


def test_engine_with_a_wrong_bit_is_fenced_before_the_commit(stand: StandInRollout, watch: Watch) -> None:
    victim = stand.engine(0)
    with stand.policy(minCommitted=2, verify="Always"):
        trainer = stand.trainer()
        stand.fault(0, "corrupt", "received")
        label = stand.label()
        watch.expected[label] = trainer.begin(label)
        answer = trainer.outcome(180)
        assert answer["ok"], answer
        watch.committed(label)
        assert list(answer["fenced"]) == [victim]
        assert "other weights" in answer["fenced"][victim], answer
        assert document(stand.url)["serving"] == 2
        eventually("Degraded names the engine", lambda: victim in stand.condition("Degraded")["message"])
        answers = watch.answers
        eventually("the other engines serve", lambda: watch.answers > answers + 10)
        assert stand.state(0)["weight_version"] == label, "the engine itself reports the version"
    stand.push(trainer, watch)
    stand.serve()


def test_wrong_bit_fails_the_update_without_min_committed(stand: StandInRollout, watch: Watch) -> None:
    trainer = stand.trainer()
    before = document(stand.url)["committed"]["label"]
    stand.fault(0, "corrupt", "received")
    label = stand.label()
    watch.expected[label] = trainer.begin(label)
    answer = trainer.outcome(180)
    watch.failed(label)
    assert not answer["ok"]
    assert stand.engine(0) in answer["error"], answer
    assert document(stand.url)["committed"]["label"] == before
    stand.push(trainer, watch)
    stand.serve()
