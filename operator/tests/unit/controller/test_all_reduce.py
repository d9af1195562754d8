"""The all-reduce before SGLang starts, with gloo and with a torch that fails or hangs."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from e2e.engine import LabError, environment

from sglang_rollout.agent.engine import read_all_reduce
from sglang_rollout.api.v1alpha1 import SGLangRollout
from sglang_rollout.controller.decide.status import build_status
from sglang_rollout.controller.render import names
from sglang_rollout.controller.render.engine_arguments import node_variables
from sglang_rollout.controller.render.preflight import FAILED, SECONDS, all_reduce
from sglang_rollout.controller.render.start import start_script
from sglang_rollout.wire.states import BASE
from tests.unit.controller.support.worlds import NOW, cr, crashed, pod, record, row, world


def rollout(**wanted: Any) -> SGLangRollout:
    spec = {"image": "e:1", "gpuResource": "", "parallelism": {"tensor": 2}, "preflight": {"allReduce": {"megabytes": 8, **wanted}}}
    return SGLangRollout.model_validate(cr(engine=spec))


SHARED = {"gpuResource": "", "memorySaver": True, "weightsCpuBackup": True}


@pytest.mark.parametrize(
    ("backend", "mode", "engine", "weights"),
    [
        ("nccl", "Standalone", {}, {}),
        ("nccl", "Standalone", {}, {"backend": "gloo"}),
        ("gloo", "Standalone", {"gpuResource": ""}, {}),
        ("nccl", "Hybrid", SHARED, {}),
        ("nccl", "Colocated", SHARED, {}),
        ("gloo", "Hybrid", SHARED, {"backend": "gloo"}),
        ("gloo", "Colocated", SHARED | {"args": ["--device", "cpu"]}, {}),
        ("gloo", "Colocated", SHARED | {"args": ["--device=cpu"]}, {}),
        ("nccl", "Colocated", SHARED | {"args": ["--device", "cuda"]}, {}),
    ],
)
def test_backend_is_that_of_the_engines_devices(backend: str, mode: str, engine: dict[str, Any], weights: dict[str, Any]) -> None:
    spec = {"image": "e:1", "parallelism": {"tensor": 2}, "preflight": {"allReduce": {"floorGBps": 300}}, **engine}
    shared: dict[str, Any] = {} if mode == "Standalone" else {"sharing": {"resourceClaimName": "gpus-{engine}"}}
    made = SGLangRollout.model_validate(cr(engine=spec, mode=mode, weights=weights, **shared))
    assert f" --backend {backend} --ranks 2 " in all_reduce(made)


class Container:
    """The start script of an engine's container, in a session of its own. Its engine says that it was started."""

    def __init__(self, folder: Path, python: Path, *, seconds: float = SECONDS, **wanted: Any) -> None:
        made = rollout(**wanted)
        self.run = folder / "run"
        self.run.mkdir()
        (self.run / "boot").write_text("of the previous boot")
        programs = folder / "bin"
        programs.mkdir()
        (programs / "python3").write_text(f'#!/bin/sh\nexec {python} "$@"\n')
        (programs / "python3").chmod(0o755)
        checks = all_reduce(made).replace(f"--seconds {SECONDS} ", f"--seconds {seconds} ")
        script = start_script(made, checks).replace(names.RUN_DIR, str(self.run))
        environment = {
            "PATH": f"{programs}:/usr/local/bin:/usr/bin:/bin",
            "PYTHONPATH": str(folder / "played"),
            **{variable["name"]: "node-7" for variable in node_variables(made)},
        }
        self.log = folder / "log"
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                ["/bin/sh", "-c", script, "engine", "sh", "-c", f"touch {self.run}/drain {self.run}/started"],
                env=environment, stdout=log, stderr=log, start_new_session=True,
            )  # fmt: skip

    def end(self) -> int:
        return self.process.wait(200)

    @property
    def started(self) -> bool:
        return (self.run / "started").exists()

    @property
    def last_line(self) -> str:
        return self.log.read_text().splitlines()[-1]

    def close(self) -> None:
        """What it leaves behind ends, too, as it does with a container."""
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait(10)
        try:
            os.killpg(self.process.pid, signal.SIGKILL)
        except ProcessLookupError:
            return


@pytest.fixture
def containers() -> Iterator[list[Container]]:
    made: list[Container] = []
    yield made
    for one in made:
        one.close()


@pytest.fixture
def played(tmp_path: Path) -> Path:
    """A torch whose ranks tell that they are there, and then do what a test writes beside them."""
    folder = tmp_path / "played" / "torch"
    folder.mkdir(parents=True)
    (folder / "__init__.py").touch()
    (folder / "distributed.py").write_text(
        "import os, sys, time\n"
        "from pathlib import Path\n"
        "here = Path(__file__).parent\n"
        "(here / f'rank{sys.argv[-1]}').write_text(str(os.getpid()))\n"
        "while not (here / 'fail').exists() or sys.argv[-1] != '1':\n"
        "    time.sleep(0.05)\n"
        "sys.exit(3)\n"
    )
    return folder


def ranks_there(played: Path) -> list[int]:
    """Processes of both ranks, when they have come."""
    deadline = time.monotonic() + 30
    while True:
        found = [int(file.read_text() or 0) for file in sorted(played.glob("rank*"))]
        if len(found) == 2 and all(found):
            return found
        assert time.monotonic() < deadline, "the ranks were not started"
        time.sleep(0.02)


def gone(pids: list[int]) -> None:
    """Wait until none of them runs: a rank that hangs holds its GPU."""
    deadline = time.monotonic() + 30
    while any(_runs(pid) for pid in pids):
        assert time.monotonic() < deadline, "a rank is left"
        time.sleep(0.02)


def _runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


@pytest.fixture
def sglang_python() -> Path:
    try:
        return environment.python(make=False)
    except LabError as error:
        pytest.skip(str(error))


@pytest.mark.engine
@pytest.mark.timeout(240)
def test_sglang_starts_after_the_measurement(sglang_python: Path, tmp_path: Path, containers: list[Container]) -> None:
    containers.append(Container(tmp_path, sglang_python))
    assert containers[0].end() == 0, containers[0].log.read_text()
    assert containers[0].started
    assert (containers[0].run / "boot").read_text() != "of the previous boot"
    reached = read_all_reduce(containers[0].run / "all-reduce")
    assert reached is not None
    assert f"all-reduce over the 2 ranks of this pod: {reached:g} GB/s" in containers[0].log.read_text()
    assert reached > 0


@pytest.mark.engine
@pytest.mark.timeout(240)
def test_bandwidth_below_the_floor_prevents_the_start_and_avoids_the_node(
    sglang_python: Path, tmp_path: Path, containers: list[Container]
) -> None:
    containers.append(Container(tmp_path, sglang_python, floorGBps=99_999))
    assert containers[0].end() == FAILED, containers[0].log.read_text()
    assert not containers[0].started
    reached = read_all_reduce(containers[0].run / "all-reduce")
    said = f"preflight failed: all-reduce reached {reached:g} GB/s on node node-7, engine.preflight.allReduce.floorGBps asks for 99999"
    assert containers[0].last_line == said

    spec = cr(status={"nodeFailures": []}, scheduling={"avoidNodes": {"failures": 1}})
    status = crashed(code=FAILED, message=containers[0].log.read_text())
    ended = status["containerStatuses"][0]["lastState"]["terminated"] | {"finishedAt": NOW}
    status["containerStatuses"][0]["lastState"] = {"terminated": ended}
    slow = pod(1, ready=False, status=status)
    slow["spec"]["nodeName"] = "node-7"
    shown = build_status(world([pod(0), slow], written=record(row(0), row(1), committed=BASE), custom=spec), NOW)
    (avoided,) = shown["avoidedNodes"]
    assert avoided["node"] == "node-7"
    assert avoided["message"] == f"an engine failed there, demo-engine-1 at {NOW}: exited with code 78: {said}."


def test_failed_rank_ends_the_container(played: Path, tmp_path: Path, containers: list[Container]) -> None:
    containers.append(Container(tmp_path, Path(sys.executable)))
    ranks = ranks_there(played)
    (played / "fail").touch()
    assert containers[0].end() == FAILED
    assert containers[0].last_line == "preflight failed: all-reduce on node node-7 failed: rank 1 of 2 ended with code 3"
    gone(ranks)
    assert not containers[0].started


def test_ranks_that_hang_are_killed(played: Path, tmp_path: Path, containers: list[Container]) -> None:
    containers.append(Container(tmp_path, Path(sys.executable), seconds=3))
    ranks = ranks_there(played)
    assert containers[0].end() == FAILED
    assert containers[0].last_line == "preflight failed: all-reduce on node node-7 did not end within 3 s"
    gone(ranks)
    assert not containers[0].started


def test_deleted_pod_ends_during_the_measurement(played: Path, tmp_path: Path, containers: list[Container]) -> None:
    containers.append(Container(tmp_path, Path(sys.executable)))
    ranks_there(played)
    assert not (containers[0].run / "boot").exists(), "the other pods of the engine wait for this one"
    containers[0].process.terminate()
    assert containers[0].end() == 143
    assert not containers[0].started


def test_status_shows_the_bandwidth() -> None:
    reported = [row(0).model_copy(update={"all_reduce": 0.683}), row(1)]
    rows = build_status(world([pod(0), pod(1)], written=record(*reported, committed=BASE)), NOW)["engines"]
    assert [found.get("allReduceGBps") for found in rows] == [0.683, None]
