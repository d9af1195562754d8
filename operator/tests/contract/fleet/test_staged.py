"""Transport Staged from a trainer to the tokens: uploads and process groups, and what happens if an engine or the weight store is killed.

All parts are processes: `sglang-rollout local` with its weight store, the engines, and a trainer with torch.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import requests
from e2e.child import start_child
from e2e.engine import LabError, environment
from e2e.kube import eventually

from sglang_rollout.local.plan import STORE
from sglang_rollout.testing import Fault
from sglang_rollout.testing.app import FAULTS
from tests.contract.fleet.test_dialects import close_groups, session, slime, torchrl
from tests.contract.support.trainer_dialects import Fleet, Trainer, fleet, trainer
from tests.support.paths import TRAINERS, package_variables

pytestmark = [pytest.mark.engine, pytest.mark.router, pytest.mark.timeout(600)]

SECONDS = 90


@dataclass
class Uploader:
    """A trainer that uploads with the client library."""

    process: subprocess.Popen[str]

    def push(self, scale: float, version: str, **more: Any) -> dict[str, Any]:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(json.dumps({"scale": scale, "version": version, **more}) + "\n")
        self.process.stdin.flush()
        line = self.process.stdout.readline()
        assert line, "the trainer has ended"
        return dict(json.loads(line))


@contextmanager
def uploader(lab: Fleet, *options: str, model: Path | None = None) -> Iterator[Uploader]:
    program, folder = str(TRAINERS / "upload_on_request.py"), str(model or environment.model())
    command = [str(environment.python(make=False)), program, lab.url, folder, *options]
    with (lab.folder / "uploader.log").open("ab") as log:
        process = start_child(command, env=package_variables(), stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True)
    try:
        yield Uploader(process)
    finally:
        process.kill()
        process.communicate(timeout=10)


@pytest.fixture(scope="module", params=["staged", "sglang-staged"])
def lab(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    try:
        environment.python(make=False)
    except LabError as error:
        pytest.skip(str(error))
    with fleet(request.param, tmp_path_factory.mktemp("staged")) as made:
        yield made


stand_ins = pytest.mark.parametrize("lab", ["staged"], indirect=True)
"""Tests of the fleet's own parts, for which SGLang adds nothing."""


@pytest.fixture
def uploads(lab: Fleet) -> Iterator[Uploader]:
    with uploader(lab) as made:
        yield made


def next_version(lab: Fleet) -> str:
    return str(lab.committed()["step"] + 1)


def copies(row: dict[str, Any]) -> dict[int, str]:
    """Return the digest of each complete version of a pod by its step."""
    rows = row["copies" if "copies" in row else "staged"]
    return {copy["version"]["step"]: copy["digest"] for copy in rows if copy["digest"] and copy["version"]}


def check_held(lab: Fleet, scale: float, version: str) -> None:
    """Assert that all engines serve a version, and that their pods and the weight store hold it."""
    lab.serving(2, SECONDS)
    assert lab.everywhere() == [(lab.expected[scale], version)] * 3
    assert lab.committed()["label"] == version
    document, step = lab.document(), lab.committed()["step"]
    digests = {copies(row)[step] for row in (*document["members"], document["store"])}
    assert len(digests) == 1
    assert document["update"] is None


def kill(lab: Fleet, part: str, number: int = signal.SIGKILL) -> None:
    """Send a signal to one process of the fleet, such as ``store --name local-store``. ``sglang-rollout local`` restarts it if it ends."""
    listed = subprocess.run(["ps", "-eo", "pid=,args=", "-ww"], capture_output=True, text=True, check=True).stdout
    lines = [line for line in listed.splitlines() if f" {part} " in line and str(lab.folder) in line]
    os.kill(int(lines[0].split()[0]), number)


def kill_store(lab: Fleet) -> None:
    """Kill the weight store, and wait until its successor answers."""
    before = lab.document()["store"]["instance"]
    kill(lab, f"store --name {STORE}")
    eventually("the store is back", lambda: lab.document()["store"]["instance"] not in (before, None), within=SECONDS)


def test_an_upload_reaches_all_engines_and_the_samples(lab: Fleet, uploads: Uploader) -> None:
    assert (lab.document()["world_size"], lab.document()["transport"]) == (2, "Staged")
    for scale in lab.others():
        version = next_version(lab)
        assert uploads.push(scale, version) == {"version": version, "state": "committed", "world_size": 1, "fenced": {}}
        check_held(lab, scale, version)


def test_a_push_can_return_when_the_version_is_staged(lab: Fleet, uploads: Uploader) -> None:
    scale, version = lab.others()[0], next_version(lab)
    assert uploads.push(scale, version, wait="staged")["state"] == "staged"
    eventually("the version is committed", lambda: lab.committed()["label"] == version, within=SECONDS)
    check_held(lab, scale, version)


@pytest.mark.parametrize(("push", "processes"), [(torchrl, 1), (slime, 2), (session, 1)], ids=["torchrl", "slime", "session"])
def test_a_push_through_a_process_group_reaches_all_engines(
    lab: Fleet, push: Callable[[Trainer, float, str], None], processes: int
) -> None:
    with trainer(lab, processes) as made:
        for scale in lab.others():
            version = next_version(lab)
            push(made, scale, version)
            check_held(lab, scale, version)
        close_groups(lab)


def test_a_restarted_engine_serves_the_committed_version_without_a_push(lab: Fleet, uploads: Uploader) -> None:
    scale, version = lab.others()[0], next_version(lab)
    assert uploads.push(scale, version)["state"] == "committed"
    engine = lab.engines[1]
    engine.kill()
    eventually("one engine serves", lambda: lab.document().get("serving") == 1, within=SECONDS)
    engine.start()
    engine.wait()
    check_held(lab, scale, version)


@stand_ins
def test_a_new_pod_copies_the_version_while_its_engine_boots(lab: Fleet, uploads: Uploader) -> None:
    scale, version = lab.others()[0], next_version(lab)
    assert uploads.push(scale, version)["state"] == "committed"
    name, engine = "local-engine-1", lab.engines[1]
    volume = lab.folder / "state" / "staged" / name
    engine.kill()
    eventually("one engine serves", lambda: lab.document().get("serving") == 1, within=SECONDS)
    for folder in volume.iterdir():  # as with a new pod
        shutil.rmtree(folder)
    kill(lab, f"agent --name {name}")
    eventually("its pod has a complete version", lambda: list(volume.glob("*/manifest.json")), within=SECONDS)
    assert lab.document()["serving"] == 1
    engine.start()
    engine.wait()
    check_held(lab, scale, version)


@stand_ins
def test_a_trainer_pushes_while_all_engines_restart(lab: Fleet) -> None:
    first, second = lab.others()
    with trainer(lab, 2) as made:
        slime(made, first, next_version(lab))
        for engine in lab.engines:
            engine.kill()
        eventually("no engine serves", lambda: lab.document().get("serving") == 0, within=SECONDS)
        version, sent = next_version(lab), len(made.answers)
        push = made.pool.submit(slime, made, second, version)
        paths = ["/pause_generation", "/flush_cache", *["/update_weights_from_distributed"] * 4]
        eventually("the commit waits", lambda: [path for path, _ in made.answers[sent:]] == paths, within=SECONDS)
        for engine in lab.engines:
            engine.start()
            engine.wait()
        push.result(SECONDS)
        eventually("the version is committed", lambda: lab.committed()["label"] == version, within=SECONDS)
        check_held(lab, second, version)
        close_groups(lab)


@stand_ins
@pytest.mark.parametrize("loses", ["process", "volume"])
def test_a_killed_store_loses_no_version(lab: Fleet, uploads: Uploader, loses: str) -> None:
    first, second = lab.others()
    version = next_version(lab)
    assert uploads.push(first, version)["state"] == "committed"
    if loses == "volume":  # as with a new pod
        for folder in (lab.folder / "state" / "staged" / STORE).iterdir():
            shutil.rmtree(folder)
    kill_store(lab)
    step = lab.committed()["step"]
    eventually("the store has the version", lambda: step in copies(lab.document()["store"]), within=SECONDS)
    check_held(lab, first, version)
    assert uploads.push(second, next_version(lab))["state"] == "committed"
    check_held(lab, second, str(int(version) + 1))


@stand_ins
def test_a_trainer_whose_store_was_restarted_is_asked_for_a_new_process_group(lab: Fleet) -> None:
    first, second = lab.others()
    with trainer(lab) as made:
        session(made, first, next_version(lab))
        kill_store(lab)
        refused = made.call("POST", "/begin_weight_update", {})
        assert refused.status_code == 400, refused.text
        assert "init_weights_update_group" in refused.text or "Open a new process group" in refused.text
        lab.serving(2, SECONDS)
        made.commits.clear()
        version = next_version(lab)
        session(made, second, version)
        check_held(lab, second, version)
        close_groups(lab)


@stand_ins
def test_a_version_that_all_engines_refuse_changes_nothing(lab: Fleet, uploads: Uploader) -> None:
    first, second = lab.others()
    version = next_version(lab)
    assert uploads.push(first, version)["state"] == "committed"
    for engine in lab.engines:
        assert requests.post(f"{engine.url}{FAULTS}", data=Fault(kind="refuse", phase="load").model_dump_json(), timeout=10).ok
    failed = uploads.push(second, "refused")
    assert failed["phase"] == "end", failed
    assert "refused on purpose" in failed["message"], failed
    check_held(lab, first, version)
    for engine in lab.engines:
        assert requests.delete(f"{engine.url}{FAULTS}", timeout=10).ok
    later = next_version(lab)
    assert uploads.push(second, later)["state"] == "committed"
    check_held(lab, second, later)


@stand_ins
def test_an_engine_that_ends_in_the_loader_loads_its_copy_later(lab: Fleet, uploads: Uploader) -> None:
    scale, version, engine = lab.others()[0], next_version(lab), lab.engines[1]
    assert requests.post(f"{engine.url}{FAULTS}", data=Fault(kind="raise", phase="write").model_dump_json(), timeout=10).ok
    pushed = uploads.push(scale, version)
    assert (pushed["state"], list(pushed["fenced"])) == ("committed", ["local-engine-1"])
    assert lab.generate() == (lab.expected[scale], version)
    engine.kill()
    engine.start()
    engine.wait()
    check_held(lab, scale, version)


@stand_ins
def test_a_restarted_coordinator_knows_what_the_copies_are(lab: Fleet, uploads: Uploader) -> None:
    first, second = lab.others()
    version = next_version(lab)
    assert uploads.push(first, version)["state"] == "committed"
    term = lab.document()["term"]
    kill(lab, "coordinator --name local")
    eventually("the coordinator is back", lambda: lab.document().get("term", term) > term, within=SECONDS)
    lab.engines[0].kill()
    lab.engines[0].start()
    lab.engines[0].wait()
    check_held(lab, first, version)
    assert uploads.push(second, next_version(lab))["state"] == "committed"
    check_held(lab, second, str(int(version) + 1))
