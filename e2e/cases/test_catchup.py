"""An engine whose pod was deleted gets the committed version from a shared volume, without a trainer."""

from __future__ import annotations

import time

from e2e.cases.actions import document
from e2e.cases.stand import Stand
from e2e.chaos.watch import Watch
from e2e.kube import eventually


def test_an_engine_comes_back_with_the_version_from_disk_and_says_from_where(stand: Stand, watch: Watch) -> None:
    trainer = stand.trainer(snapshots=True)
    label = stand.push(trainer, watch, manner="keep")
    trainer.end()
    boot = stand.row(2)["boot_id"]

    def said() -> str:
        return str(next(row for row in stand.status()["engines"] if row["name"] == stand.engine(2)).get("message"))

    with stand.policy(catchUp={"disk": "/ckpt/elsewhere"}):
        stand.kubectl("delete", "pod", f"{stand.engine(2)}-0", "--grace-period=1", "--wait=false")
        deleted = time.monotonic()
        eventually("it is up in a new life", lambda: stand.row(2)["boot_id"] not in (None, boot), within=90)
        # While it reads the folder, it says only that it does.
        told = eventually("it says that it found nothing", lambda: found if "tries again" in (found := said()) else "", within=30)
        assert "/ckpt/elsewhere" in told
        assert label in told
        assert document(stand.url)["serving"] == 2
        with stand.policy(catchUp={"disk": "/ckpt"}):
            stand.serve(within=90)
            print(f"engine pod deleted: it serves {label} again {time.monotonic() - deleted:.0f} s later, from disk at the second try")
    assert stand.row(2)["version"]["label"] == label
    assert stand.state(2)["weight_version"] == label
    eventually("the status is at rest", lambda: stand.condition("Ready")["status"] == "True", within=15)
    answers = watch.answers
    eventually("clients get answers", lambda: watch.answers > answers + 10, within=20)
