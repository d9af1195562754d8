"""Verdicts of the loader: what they prove, and what the engine's container may do to their folder."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from sglang_rollout.agent.staged.saved import SavedVersion, SavedVersions
from sglang_rollout.agent.staged.verdicts import Verdict, VerdictFolder, Verdicts, join_pods, parse_verdict
from sglang_rollout.wire.agent import AckRequest
from sglang_rollout.wire.states import Version

LOADED, REFUSED, WROTE = Verdict(ok=True, wrote=True), Verdict(ok=False, wrote=False), Verdict(ok=False, wrote=True)


@pytest.mark.parametrize(
    ("found", "ranks", "loaded", "refused"),
    [
        ((LOADED, LOADED), 2, True, False),
        ((REFUSED, REFUSED), 2, False, True),
        ((), 1, False, False),
        ((), 2, False, False),
        ((LOADED,), 2, False, False),
        ((REFUSED,), 2, False, False),
        ((LOADED, REFUSED), 2, False, False),
        ((REFUSED, WROTE), 2, False, False),
        ((LOADED, WROTE), 2, False, False),
        ((LOADED, LOADED, LOADED), 2, False, False),
        ((REFUSED, REFUSED, REFUSED), 2, False, False),
    ],
)
def test_only_verdicts_of_every_rank_prove_something(found: tuple[Verdict, ...], ranks: int, loaded: bool, refused: bool) -> None:
    verdicts = Verdicts(found, ranks)
    assert (verdicts.is_loaded, verdicts.is_refused) == (loaded, refused)


@pytest.mark.parametrize(
    ("pods", "loaded", "refused"),
    [
        (((LOADED, LOADED), (LOADED, LOADED)), True, False),
        (((REFUSED, REFUSED), (REFUSED, REFUSED)), False, True),
        (((LOADED, LOADED), (REFUSED, REFUSED)), False, False),
        (((LOADED, LOADED), ()), False, False),
        (((LOADED, LOADED, LOADED), (LOADED,)), False, False),
        (((REFUSED, REFUSED, REFUSED), (REFUSED,)), False, False),
    ],
)
def test_every_pod_must_have_the_verdicts_of_its_own_ranks(pods: tuple[tuple[Verdict, ...], ...], loaded: bool, refused: bool) -> None:
    verdicts = join_pods([Verdicts(found, 2) for found in pods])
    assert (verdicts.is_loaded, verdicts.is_refused) == (loaded, refused)


def write(folder: Path, rank: int, *, ok: bool = True, wrote: bool = True, attempt: str | None = None, message: str = "") -> Path:
    path = folder / f"rank-{rank}.json"
    path.write_text(json.dumps({"ok": ok, "wrote": wrote, "message": message, "id": folder.name if attempt is None else attempt}))
    return path


def test_each_attempt_has_a_folder_of_its_own_that_the_engine_can_write(tmp_path: Path) -> None:
    verdicts = VerdictFolder(tmp_path / "verdicts")
    first = verdicts.open_attempt()
    write(verdicts.path(first), 0)
    assert verdicts.read(first, 1).is_loaded
    second = verdicts.open_attempt()
    assert second != first
    assert not verdicts.read(second, 1).found
    assert not verdicts.path(first).exists()
    assert verdicts.path(second).stat().st_mode & 0o777 == 0o777


def test_a_verdict_of_another_attempt_counts_as_a_write(tmp_path: Path) -> None:
    verdicts = VerdictFolder(tmp_path)
    attempt = verdicts.open_attempt()
    write(verdicts.path(attempt), 0, ok=False, wrote=False, attempt="earlier")
    found = verdicts.read(attempt, 1)
    assert (found.is_loaded, found.is_refused) == (False, False)


def test_links_and_pipes_are_not_followed(tmp_path: Path) -> None:
    verdicts = VerdictFolder(tmp_path / "verdicts")
    attempt = verdicts.open_attempt()
    folder = verdicts.path(attempt)
    outside = tmp_path / "outside.json"
    outside.write_text(json.dumps({"ok": True, "wrote": True, "message": "", "id": attempt}))
    (folder / "rank-0.json").symlink_to(outside)
    os.mkfifo(folder / "rank-1.json")
    found = verdicts.read(attempt, 2)
    assert (found.is_loaded, found.is_refused) == (False, False)


def test_the_message_names_the_first_problem_and_the_number_of_ranks() -> None:
    assert Verdicts((LOADED, Verdict(ok=False, wrote=False, message="no file")), 2).message == "no file (1 of 2 ranks)"
    assert "2 ranks, and 1 of them" in Verdicts((LOADED,), 2).message
    assert len(Verdicts((Verdict(ok=False, wrote=False, message="x" * 10_000),), 1).message) < 600


@pytest.mark.parametrize(
    "text", [None, "", "{", "[]", "{}", '{"id": "a", "ok": 1, "wrote": false}', '{"id": "b", "ok": true, "wrote": true}', "[" * 60_000]
)
def test_anything_else_is_no_verdict(text: str | None) -> None:
    assert parse_verdict(text, "a") is None


def test_versions_are_remembered_until_their_copies_are_deleted(tmp_path: Path) -> None:
    saved = SavedVersions(tmp_path / "versions")
    saved.keep(set())
    assert saved.load("a" * 32) is None
    version = SavedVersion(
        ack=AckRequest(version=Version(run=1, step=1, label="1"), boot_id="x", cohort=["e0"]), digest="d", checksums=("c",)
    )
    saved.save("a" * 32, version)
    saved.save("b" * 32, version)
    assert saved.load("a" * 32) == version
    saved.keep({"b" * 32})
    assert saved.load("a" * 32) is None
    (tmp_path / "versions" / f"{'b' * 32}.json").write_text("{")
    assert saved.load("b" * 32) is None
