"""The command line, and the HTTP servers for metrics and health."""

from __future__ import annotations

import importlib
import subprocess
import sys
from pathlib import Path

import click
import pytest
from aiohttp.test_utils import TestClient, TestServer
from click.testing import CliRunner

from sglang_rollout import __version__, cli
from sglang_rollout.cli import SUBCOMMANDS, Subcommand, load, main
from sglang_rollout.controller.metrics import Metrics, build_health_app, build_metrics_app


def test_help_and_version_import_no_subcommand() -> None:
    code = (
        "import sys; from click.testing import CliRunner; from sglang_rollout.cli import main;"
        "print(CliRunner().invoke(main, ['--help']).output); print(CliRunner().invoke(main, ['--version']).output);"
        "print({'kopf', 'kubernetes', 'aiohttp', 'torch', 'pydantic'} & set(sys.modules))"
    )
    output = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert all(name in output for name in SUBCOMMANDS)
    assert f"sglang-rollout, version {__version__}" in output
    assert output.strip().endswith("set()")


def test_help_separates_commands_from_processes_of_a_fleet() -> None:
    commands, parts = CliRunner().invoke(main, ["--help"]).output.split("Commands:")[1].split("Processes of a fleet")
    expected = ["crd", "local", "operator", "plan", "plugin", "render", "stand-in", "status", "weights"]
    assert [line.split()[0] for line in commands.strip().splitlines()] == expected
    assert [line.split()[0] for line in parts.splitlines()[1:]] == ["agent", "batches", "coordinator", "proxy", "store"]


@pytest.mark.parametrize("line", [*([name] for name in SUBCOMMANDS), ["proxy", "gate"], ["proxy", "front"], ["proxy", "smg"]], ids=" ".join)
def test_every_option_is_explained_by_a_sentence(line: list[str]) -> None:
    command: click.Command = main
    for name in line:
        assert isinstance(command, click.Group)
        found = command.get_command(click.Context(command), name)
        assert found
        command = found
    assert (command.help or "").strip()
    unexplained = [
        option.name
        for option in command.params
        if isinstance(option, click.Option) and not (option.help or "").split("  [")[0].endswith(".")
    ]
    assert unexplained == []
    assert "..." not in CliRunner().invoke(main, [*line, "--help"]).output.replace("ARGS]...", "").replace("OPTIONS...]", "")


def test_missing_library_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(_module: str) -> None:
        raise ModuleNotFoundError("No module named 'kopf'", name="kopf.on")

    monkeypatch.setattr(importlib, "import_module", missing)
    result = CliRunner().invoke(main, ["operator", "--help"])
    assert result.exit_code == 1
    assert "needs the library kopf.on, which is not installed: install sglang-rollout[operator]" in result.output


def test_missing_module_of_the_package_is_raised() -> None:
    with pytest.raises(ModuleNotFoundError):
        load("x", Subcommand("sglang_rollout.nowhere:command", "coordinator", ""))


def test_target_that_is_not_a_command_is_refused() -> None:
    with pytest.raises(TypeError, match="is not a click command"):
        load("x", Subcommand("sglang_rollout:__version__", "coordinator", ""))


def test_an_unknown_subcommand() -> None:
    result = CliRunner().invoke(main, ["opreator"])
    assert result.exit_code == 2
    assert "No such command 'opreator'" in result.output


def test_the_operators_options(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from sglang_rollout.controller import main as operator_main

    seen: list[operator_main.OperatorSettings] = []

    async def note(settings: operator_main.OperatorSettings) -> None:
        seen.append(settings)

    monkeypatch.setattr(operator_main, "run", note)
    monkeypatch.setattr(operator_main, "_configure_logging", lambda *_, **__: None)
    kubeconfig = tmp_path / "k"
    kubeconfig.touch()
    words = [
        "--namespace=a",
        "--namespace=b",
        "--coordinator-image=f:1",
        "--image-pull-policy=Never",
        f"--kubeconfig={kubeconfig}",
    ]
    environment = {"SGLANG_ROLLOUT_ROUTER_IMAGE": "r:1", "SGLANG_ROLLOUT_METRICS_PORT": "0"}
    result = CliRunner().invoke(operator_main.command, words, env=environment)
    assert result.exit_code == 0, result.output
    (settings,) = seen
    assert settings.namespaces == ("a", "b")
    assert (settings.render.coordinator_image, settings.render.router_image) == ("f:1", "r:1")
    assert settings.render.image_pull_policy == "Never"
    assert (settings.metrics_port, settings.health_port) == (0, 8081)
    assert settings.kubeconfig == str(kubeconfig)


def test_missing_credentials_are_reported(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from sglang_rollout.controller import main as operator_main

    monkeypatch.setattr(operator_main, "_configure_logging", lambda *_, **__: None)
    result = CliRunner().invoke(operator_main.command, [], env={"KUBECONFIG": str(tmp_path / "none")})
    assert result.exit_code == 1
    assert "Error: the operator stops: no kubeconfig at" in result.output
    assert isinstance(result.exception, SystemExit)


async def test_metrics_and_health_over_http() -> None:
    metrics = Metrics("1.2.3")
    metrics.count_request("apply", "services", "ok")
    metrics.count_request("create", "events", "ok")
    metrics.count_request("apply", "services", "error")
    metrics.set_ready(("n", "a"), "True")
    metrics.set_ready(("n", "b"), "False")
    metrics.set_ready(("n", "a"), None)
    metrics.set_ready(("n", "c"), "False")
    metrics.set_ready(("n", "c"), "True")
    async with TestClient(TestServer(build_metrics_app(metrics))) as client:
        reply = await client.get("/metrics")
        text = await reply.text()
    assert reply.headers["Content-Type"].startswith("text/plain")
    assert 'sglang_rollout_operator_writes_total{verb="apply"} 1.0' in text
    assert 'writes_total{verb="create"} 0.0' in text
    assert [line for line in text.splitlines() if line.startswith("sglang_rollout_operator_rollouts{")] == [
        'sglang_rollout_operator_rollouts{namespace="n",ready="False",rollout="b"} 1.0',
        'sglang_rollout_operator_rollouts{namespace="n",ready="True",rollout="c"} 1.0',
    ]
    assert 'sglang_rollout_operator_build_info{version="1.2.3"} 1.0' in text

    problems = ["", "worker 0 has ended: cancelled"]
    async with TestClient(TestServer(build_health_app(lambda: problems.pop(0)))) as client:
        assert (await client.get("/healthz")).status == 200
        reply = await client.get("/healthz")
        assert (reply.status, await reply.text()) == (500, "worker 0 has ended: cancelled\n")


def test_all_subcommands_are_commands() -> None:
    for name, subcommand in SUBCOMMANDS.items():
        module = Path(cli.__file__).parent.joinpath(*subcommand.target.partition(":")[0].split(".")[1:]).with_suffix(".py")
        if module.exists():
            assert isinstance(load(name, subcommand), click.Command)
