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
