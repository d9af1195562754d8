"""A fleet with transport Staged that has lost all processes and volumes but the snapshots of its weight store; the command weights."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from e2e.chaos.tokens import FEW, PROMPT
from e2e.engine import LabError, environment
from e2e.kube import eventually

from sglang_rollout.checkpoints.folder import read_model
from sglang_rollout.checkpoints.snapshots import list_snapshots
from sglang_rollout.local.plan import STORE
from sglang_rollout.staging.copies import shard_file
from sglang_rollout.testing import expected_tokens
from sglang_rollout.testing.policy import read_folder
from tests.contract.fleet.test_staged import SECONDS, check_held, kill, uploader
from tests.contract.support.trainer_dialects import REFERENCE, Fleet, fleet

pytestmark = [pytest.mark.engine, pytest.mark.router, pytest.mark.timeout(600)]

KEPT = ("token", "weights.json")
"""What Kubernetes keeps of a fleet without pods: its key and its record."""


@pytest.fixture(autouse=True)
def needs_torch() -> None:
    try:
        environment.python(make=False)
    except LabError as error:
        pytest.skip(str(error))


def options(folder: Path) -> list[str]:
    return ["--snapshots", str(folder / "snapshots")]


def weights(*words: str, code: int = 0) -> str:
    """Run the command, and return what it prints."""
    command = [sys.executable, "-m", "sglang_rollout.cli", "weights", *words]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == code, done.stderr + done.stdout
    return done.stdout + done.stderr


def rows(lab: Fleet) -> dict[str, dict[str, Any]]:
    """Return the versions that the fleet has, by label."""
    return {row["version"]["label"]: row for row in json.loads(weights("ls", "--url", lab.url, "--output", "json")) if row["version"]}


def wait_for_snapshot(lab: Fleet, label: str) -> None:
    eventually(f"version {label} is written", lambda: "snapshot" in rows(lab).get(label, {}).get("places", []), within=SECONDS)


def power_off(folder: Path) -> None:
    """Delete all volumes of the fleet but that of the snapshots. All processes have ended."""
    for entry in (folder / "state").iterdir():
        if entry.is_dir():
            shutil.rmtree(entry)
        elif entry.name not in KEPT:
            entry.unlink()


def damage(folder: Path, label: str) -> None:
    found = next(each for each in list_snapshots(folder / "snapshots") if each.manifest.label == label)
    with (found.path / shard_file(0)).open("r+b") as file:
        file.seek(-2, os.SEEK_END)
        file.write(b"\x7f\x7f")


def push_again(lab: Fleet, version: str, label: str, *where: str) -> None:
    """Export an earlier version, and push it with another label."""
    exported = lab.folder / f"exported-{label}"
    weights("export", version, *where, "--to", str(exported), "--model", str(environment.model()))
    with uploader(lab, model=exported) as uploads:
        assert uploads.push(1.0, label)["state"] == "committed"


def reference(model: Path, scale: float) -> list[int]:
    """Return the tokens of a model that transformers loads from a folder, with all tensors multiplied by ``scale``."""
    command = [str(environment.python(make=False)), "-c", REFERENCE, str(model), json.dumps(PROMPT), str(FEW), str(scale)]
    return list(json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()[-1])[0])


@pytest.mark.parametrize("kind", ["staged", pytest.param("sglang-staged", marks=pytest.mark.long)])
def test_a_fleet_that_was_powered_off_serves_its_version_again_without_a_push(kind: str, tmp_path: Path) -> None:
    with fleet(kind, tmp_path, options=options(tmp_path)) as lab, uploader(lab) as uploads:
        first, second = lab.others()[:2]
        for scale, version in ((first, "1"), (second, "2")):
            assert uploads.push(scale, version)["state"] == "committed"
            wait_for_snapshot(lab, version)
        check_held(lab, second, "2")
    power_off(tmp_path)
    with fleet(kind, tmp_path, options=options(tmp_path)) as lab:
        check_held(lab, second, "2")
        push_again(lab, "1", "1-again", "--url", lab.url)
        check_held(lab, first, "1-again")
        with uploader(lab) as uploads:
            assert uploads.push(second, "4")["state"] == "committed", "the trainer continues"
        check_held(lab, second, "4")


def test_no_older_version_is_served_unless_a_trainer_pushes_it(tmp_path: Path) -> None:
    with fleet("staged", tmp_path, options=options(tmp_path)) as lab, uploader(lab) as uploads:
        first, second = lab.others()[:2]
        for scale, version in ((first, "1"), (second, "2")):
            assert uploads.push(scale, version)["state"] == "committed"
            wait_for_snapshot(lab, version)
    power_off(tmp_path)
    damage(tmp_path, "2")
    assert "00000.safetensors has changed" in weights("verify", "--snapshots", str(tmp_path / "snapshots"), code=1)
    with fleet("staged", tmp_path, options=options(tmp_path), serves=False) as lab:
        message = "No pod and no usable snapshot has the committed version 1/2"
        eventually("the fleet says why it waits", lambda: message in (lab.document().get("store") or {}).get("message", ""), within=SECONDS)
        assert "is damaged" in lab.document()["store"]["message"]
        assert (lab.document()["serving"], lab.committed()["label"]) == (0, "2")
        eventually("the engines are up", lambda: all(row["boot_id"] for row in lab.document()["members"]), within=SECONDS)
        push_again(lab, "1", "back", "--snapshots", str(tmp_path / "snapshots"))
        check_held(lab, first, "back")


def test_versions_are_listed_verified_and_exported(tmp_path: Path) -> None:
    model, directory = environment.model(), str(tmp_path / "snapshots")
    with fleet("staged", tmp_path, options=options(tmp_path)) as lab, uploader(lab) as uploads:
        scale = lab.others()[0]
        assert uploads.push(scale, "7")["state"] == "committed"
        wait_for_snapshot(lab, "7")
        row = rows(lab)["7"]
        assert row["places"] == ["committed", "store", "snapshot", "2 of 2 engines"]
        assert row["digest"] == lab.document()["store"]["copies"][0]["digest"]
        assert "committed, store, snapshot, 2 of 2 engines" in weights("ls", "--url", lab.url)
        assert weights("verify", "--url", lab.url) == "1/7 (7): OK\n"
        weights("export", "7", "--url", lab.url, "--to", str(tmp_path / "over-url"), "--model", str(model))
        assert "There is no version '8' here" in weights("export", "8", "--url", lab.url, "--to", str(tmp_path / "none"), code=1)
        assert not (tmp_path / "none").exists()
        damage(tmp_path, "7")
        assert "has changed" in weights("verify", "7", "--url", lab.url, code=1)
        assert rows(lab)["7"]["places"][2] == "snapshot (damaged)"
        lost = weights("export", "7", "--snapshots", directory, "--to", str(tmp_path / "lost"), code=1)
        assert "is damaged" in lost
        assert not (tmp_path / "lost").exists()
        assert uploads.push(scale, "8")["state"] == "committed"
        wait_for_snapshot(lab, "8")
        kill(lab, f"store --name {STORE}", signal.SIGSTOP)
        eventually("the store is away", lambda: not lab.document()["store"]["up"], within=SECONDS)
        assert "The weight store does not answer: the list shows what it had" in weights("ls", "--url", lab.url)
        assert "The weight store local-store does not answer" in weights("verify", "--url", lab.url, code=1)
        kill(lab, f"store --name {STORE}", signal.SIGCONT)
    printed = weights("export", "8", "--snapshots", directory, "--to", str(tmp_path / "bare"))
    assert "It has no config and no tokenizer" in printed
    weights("export", "8", "--snapshots", directory, "--to", str(tmp_path / "from-folder"), "--model", str(model))
    for folder in ("over-url", "from-folder"):
        assert set(read_model(tmp_path / folder).files) >= {shard_file(0)}
        assert expected_tokens(read_folder(tmp_path / folder), PROMPT, FEW) == lab.expected[scale]
        assert reference(tmp_path / folder, 1.0) == reference(model, scale)
