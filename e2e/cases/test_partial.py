"""``weights.minCommitted``: an engine that fails at the end of an update is left behind, and everybody is told."""

from __future__ import annotations

from e2e.cases.actions import document
from e2e.cases.stand import Stand
from e2e.chaos.watch import Watch
from e2e.kube import eventually


def test_one_engine_dies_and_the_others_commit(stand: Stand, watch: Watch) -> None:
    victim = stand.engine(1)
    with stand.policy(minCommitted=2):
        trainer = stand.trainer()
        stand.fault(1, "die", "end")
        label = stand.label()
        watch.expected[label] = trainer.begin(label)
        answer = trainer.outcome(60)
        assert answer["ok"], answer
        watch.committed(label)
        assert list(answer["fenced"]) == [victim], "the trainer is told which engine it left behind"
        seen = document(stand.url)
        assert (seen["committed"]["label"], seen["last_update"]["outcome"]) == (label, "Partial")

        def told() -> bool:
            weights = stand.status()["weights"]
            return (weights["committedVersion"], weights["lastUpdate"]["outcome"]) == (label, "Partial")

        eventually("the status says so", told, within=15)
        eventually("Degraded names the engine", lambda: victim in stand.condition("Degraded")["message"], within=15)
        said = [event for event in stand.events() if event.startswith("WeightsPartlyCommitted")]
        assert victim in said[-1], said
        assert label in said[-1], said

        eventually("the engine is up again", lambda: stand.row(1)["state"] == "clean", within=60)
        assert not stand.row(1)["gate_open"], "it holds base weights"
        eventually("the column STALE counts it", lambda: stand.status()["weights"]["stale"] == 1, within=15)
        assert stand.status()["ready"] == "2/3"

        stand.push(trainer, watch)
        stand.serve()
        eventually("nothing needs attention", lambda: stand.condition("Degraded")["status"] == "False", within=15)


def test_one_wrong_bit_is_found_before_the_commit(stand: Stand, watch: Watch) -> None:
    victim = stand.engine(0)
    with stand.policy(minCommitted=2, verify="Always"):
        trainer = stand.trainer()
        stand.fault(0, "corrupt", "received")
        label = stand.label()
        watch.expected[label] = trainer.begin(label)
        answer = trainer.outcome(60)
        assert answer["ok"], answer
        watch.committed(label)
        assert list(answer["fenced"]) == [victim]
        assert "other weights" in answer["fenced"][victim], answer
        assert document(stand.url)["serving"] == 2
        eventually("the status names it", lambda: victim in stand.condition("Degraded")["message"], within=15)
        answers = watch.answers
        eventually("the others serve on", lambda: watch.answers > answers + 10, within=20)
        assert stand.state(0)["weight_version"] == label, "by its own words it holds the version"
    stand.push(trainer, watch)
    stand.serve()


def test_without_leave_to_commit_partly_a_wrong_bit_fails_the_update(stand: Stand, watch: Watch) -> None:
    trainer = stand.trainer()
    before = document(stand.url)["committed"]["label"]
    stand.fault(0, "corrupt", "received")
    label = stand.label()
    watch.expected[label] = trainer.begin(label)
    answer = trainer.outcome(60)
    watch.failed(label)
    assert not answer["ok"]
    assert stand.engine(0) in answer["error"], answer
    assert document(stand.url)["committed"]["label"] == before
    stand.push(trainer, watch)
    stand.serve()
