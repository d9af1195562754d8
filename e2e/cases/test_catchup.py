"""An engine whose pod was deleted loads the committed version from a shared volume, without a trainer."""

from __future__ import annotations

import time

from e2e.cases.actions import document
from e2e.cases.stand_in_rollout import StandInRollout
from e2e.chaos.watch import Watch
from e2e.kube import eventually


def test_deleted_engine_catches_up_from_disk_and_reports_the_folder(stand: StandInRollout, watch: Watch) -> None:
    trainer = stand.trainer(snapshots=True)
    label = stand.push(trainer, watch, manner="keep")
    trainer.end()
    boot = stand.row(2)["boot_id"]

    def message() -> str:
        return str(next(row for row in stand.status()["engines"] if row["name"] == stand.engine(2)).get("message"))

    with stand.policy(catchUp={"disk": "/ckpt/elsewhere"}):
        stand.kubectl("delete", "pod", f"{stand.engine(2)}-0", "--grace-period=1", "--wait=false")
        deleted = time.monotonic()
        eventually("the engine has a new boot ID", lambda: stand.row(2)["boot_id"] not in (None, boot))
        # While the agent reads the folder, its message says only that.
        missing = eventually("status reports the missing version", lambda: found if "tries again" in (found := message()) else "")
        assert "/ckpt/elsewhere" in missing
        assert label in missing
        assert document(stand.url)["serving"] == 2
        with stand.policy(catchUp={"disk": "/ckpt"}):
            stand.serve()
            print(f"engine pod deleted: it serves {label} again after {time.monotonic() - deleted:.0f} s, from disk at the second try")
    assert stand.row(2)["version"]["label"] == label
    assert stand.state(2)["weight_version"] == label
    eventually("the rollout is Ready", lambda: stand.condition("Ready")["status"] == "True")
    answers = watch.answers
    eventually("clients get answers", lambda: watch.answers > answers + 10)
