"""The environment of processes that a process of the fleet starts or becomes."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from sglang_rollout.local.plan import Child
from sglang_rollout.local.supervisor import ChildProcess
from sglang_rollout.proxy import cli

PROXIES = ["HTTP_PROXY", "http_proxy", "HTTPS_PROXY", "https_proxy", "ALL_PROXY", "all_proxy"]


@pytest.fixture(autouse=True)
def proxies(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in PROXIES:
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    monkeypatch.setenv("KEPT", "yes")


async def test_children_of_a_local_fleet_get_no_proxies(tmp_path: Path) -> None:
    show = "import os, json; print(json.dumps(dict(os.environ)))"
    process = ChildProcess(Child("child", (sys.executable, "-c", show), environment={"OWN": "1"}), tmp_path, lambda _: None)
    assert await process._run_once() == 0
    text = process.log.read_text()
    assert ('"KEPT": "yes"' in text, '"OWN": "1"' in text, [name for name in PROXIES if name in text]) == (True, True, [])


@pytest.mark.parametrize("line", [["smg"], ["front"], ["gate", "--socket", "SOCKET"]], ids=lambda line: line[0])
def test_a_command_becomes_a_proxy_of_the_fleet_without_the_proxies_of_the_user(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, line: list[str]
) -> None:
    became: list[dict[str, str]] = []
    monkeypatch.setattr(os, "execve", lambda _program, _line, environ: became.append(environ))
    monkeypatch.setattr(os, "execv", lambda _program, _line: became.append(dict(os.environ)))
    monkeypatch.setattr(cli, "find_haproxy", lambda: "/usr/sbin/haproxy")
    folder = [] if line == ["smg"] else ["--runtime-dir", str(tmp_path)]
    result = CliRunner().invoke(cli.command, [*(str(tmp_path / "gate.sock") if each == "SOCKET" else each for each in line), *folder])
    assert result.exit_code == 0, result.output
    assert [name for name in PROXIES if name in became[0]] == []
    assert became[0]["KEPT"] == "yes"
