"""Errors for machines that lack something that the lab needs."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections import namedtuple
from pathlib import Path

import pytest

from e2e import promtool
from e2e.cluster import network, nodeconf, preflight, say
from e2e.cluster.say import LabError

Usage = namedtuple("Usage", "total used free")
Uname = namedtuple("Uname", "sysname machine")


@pytest.fixture(autouse=True)
def machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Simulate a machine that has everything."""
    monkeypatch.setenv("SGLANG_ROLLOUT_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr(os, "uname", lambda: Uname("Linux", "x86_64"))
    monkeypatch.setattr(shutil, "disk_usage", lambda _: Usage(10**12, 0, 10**12))
    monkeypatch.setattr(preflight, "_memory_gb", lambda: 64.0)
    monkeypatch.setattr(preflight, "_have", lambda _: True)
    monkeypatch.setattr(nodeconf, "plugin_folder", lambda: Path("/usr/lib/cni"))


def test_complete_machine_gets_no_message(capsys: pytest.CaptureFixture[str]) -> None:
    preflight.check_machine()
    preflight.install()
    assert capsys.readouterr() == ("", "")


def test_error_on_another_system_names_the_alternatives(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "uname", lambda: Uname("Darwin", "arm64"))
    with pytest.raises(LabError, match=r"Linux only.*CLUSTER=current.*CLUSTER=none"):
        preflight.check_machine()


def test_error_without_root_names_the_alternatives(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(LabError, match=r"needs root.*CLUSTER=current.*CLUSTER=none"):
        preflight.check_machine()


def test_messages_about_disk_and_memory_have_numbers(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(preflight, "_memory_gb", lambda: 1.5)
    with pytest.raises(LabError, match=r"needs 2 GB of memory, 1\.5 GB are available"):
        preflight.check_machine()
    monkeypatch.setattr(shutil, "disk_usage", lambda _: Usage(10**12, 0, 4 * 10**9))
    with pytest.raises(LabError, match=r"needs 5 GB of disk at .*/cache, 4\.0 GB are free.*SGLANG_ROLLOUT_CACHE"):
        preflight.check_machine()
    monkeypatch.setattr(shutil, "disk_usage", lambda _: Usage(10**12, 0, 6 * 10**9))
    monkeypatch.setattr(preflight, "_memory_gb", lambda: 4.0)
    capsys.readouterr()
    preflight.check_machine()
    printed = capsys.readouterr().err
    assert "note: 6 GB of disk are free" in printed
    assert "note: 4.0 GB of memory are available" in printed


def test_missing_programs_are_listed_as_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preflight, "_have", lambda program: program not in {"containerd", "ctr", "ip", "shellcheck"})
    monkeypatch.setattr(nodeconf, "plugin_folder", lambda: None)
    assert preflight.missing_packages() == ["containerd", "containernetworking-plugins", "iproute2", "shellcheck"]
    assert preflight.missing_packages(lab=False) == ["shellcheck"]


def test_error_without_root_lists_the_packages_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preflight, "_have", lambda program: program != "tini")
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(LabError, match=r"programs are missing: tini \(names of Debian packages\)"):
        preflight.install()


def test_installation_without_effect_is_an_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(preflight, "_have", lambda program: program != "tini")
    monkeypatch.setattr(Path, "exists", lambda _: True)
    calls: list[tuple[str, ...]] = []

    def apt(*words: str) -> subprocess.CompletedProcess[str]:
        calls.append(words)
        return subprocess.CompletedProcess(words, 0, "", "")

    monkeypatch.setattr(preflight, "_apt", apt)
    with pytest.raises(LabError, match="still not found: tini"):
        preflight.install()
    assert calls == [("install", "-y", "--no-install-recommends", "tini")]


def test_unusable_file_system_and_overlapping_route_are_errors(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    kind = "tmpfs"

    def run(command: list[str], **_: object) -> subprocess.CompletedProcess[str]:
        return subprocess.CompletedProcess(command, 0, kind + "\n", "")

    monkeypatch.setattr(subprocess, "run", run)
    with pytest.raises(LabError, match=r"/cache is on tmpfs.*SGLANG_ROLLOUT_CACHE"):
        preflight.check_storage()
    kind = "ext2/ext3"
    monkeypatch.setattr(network, "taken", lambda: "10.88.0.0/16 dev podman0")
    with pytest.raises(LabError, match=r"route 10\.88\.0\.0/16 dev podman0"):
        preflight.check_storage()


def test_step_prints_its_duration_also_if_it_fails(capsys: pytest.CaptureFixture[str]) -> None:
    with say.step("work"):
        pass
    assert capsys.readouterr().err == "   0.0 s  work\n"
    with pytest.raises(ValueError, match="no"), say.step("work"):
        raise ValueError("no")
    assert capsys.readouterr().err == "  FAILED after 0.0 s: work\n"


def test_wait_that_times_out_raises_the_message() -> None:
    answers = iter([False, False, True])
    say.wait_until(lambda: next(answers), seconds=5, what="it did not come", every=0)
    with pytest.raises(LabError, match=r"it did not come \(waited 0 s\)"):
        say.wait_until(lambda: False, seconds=0, what="it did not come", every=0)


def test_error_without_promtool_names_the_remedy(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(shutil, "which", lambda _: None)
    with pytest.raises(LabError, match=r"promtool is missing\. Run: make preflight"):
        promtool.find()
    promtool.fetch()
    assert "the test of the alert rules is skipped" in capsys.readouterr().err
