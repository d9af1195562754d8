"""`sglang-rollout local` as a process: refusals exit with 2, children are restarted, and all processes end with it."""

from __future__ import annotations

import asyncio
import errno
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import click
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from sglang_rollout.agent.plugin_reports import PluginReports
from sglang_rollout.api.weights_spec import Staging, Transport, Weights
from sglang_rollout.credentials import CredentialFile
from sglang_rollout.local import cli
from sglang_rollout.local.plan import Child, EngineArg, parse_engine
from sglang_rollout.local.sizes import Sizes, SizesError, check_loaders, check_sizes, read_sizes, with_reported_sizes
from sglang_rollout.local.supervisor import ChildProcess, Supervisor
from sglang_rollout.plugin.install import LOADER
from sglang_rollout.plugin.settings import SETTINGS_VARIABLE, dump_settings
from sglang_rollout.proxy.address import Address
from sglang_rollout.sglang.api import PauseMode
from sglang_rollout.testing import StandIn
from sglang_rollout.trainer import connect
from tests.support.ports import free_port

LINE = [sys.executable, "-m", "sglang_rollout.cli", "local"]
pytestmark = pytest.mark.router


def refused(*args: str, env: dict[str, str] | None = None) -> str:
    done = subprocess.run([*LINE, *args], capture_output=True, text=True, timeout=30, check=False, env=os.environ | (env or {}))
    assert done.returncode == 2, done.stderr
    assert done.stdout == ""
    return done.stderr


def until(condition: Callable[[], bool], seconds: float, what: str) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, f"not within {seconds:g} s: {what}"
        time.sleep(0.1)


def answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=2) as reply:
            return bool(reply.status == 200)
    except OSError:
        return False


def children(pid: int) -> dict[int, str]:
    found = subprocess.run(["ps", "-o", "pid=,args=", "--ppid", str(pid)], capture_output=True, text=True, check=False).stdout
    return {int(line.split()[0]): line for line in found.splitlines()}


def alive(pid: int) -> bool:
    status = Path(f"/proc/{pid}/stat")
    return status.exists() and ") Z " not in status.read_text()


@pytest.fixture
def fleet(tmp_path: Path) -> Iterator[tuple[subprocess.Popen[bytes], str]]:
    """A fleet of one engine that is not up: that is no error."""
    url = f"127.0.0.1:{free_port()}"
    line = [*LINE, "--engine", f"127.0.0.1:{free_port()}", "--listen", url, "--state-dir", str(tmp_path / "state"), "--backend", "gloo"]
    with (
        (tmp_path / "out").open("wb") as out,
        subprocess.Popen(line, stdout=out, stderr=out) as process,
    ):
        try:
            until(lambda: "answers at" in (tmp_path / "out").read_text() or process.poll() is not None, 90, "the fleet answers")
            assert process.poll() is None, (tmp_path / "out").read_text()
            yield process, f"http://{url}"
        finally:
            process.kill()


def test_a_used_port_is_refused() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        text = refused("--engine", "127.0.0.1:1", "--listen", f"127.0.0.1:{taken.getsockname()[1]}")
    assert "cannot be used: Address already in use" in text


def test_an_address_without_kernel_support_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel without IPv6 refuses the socket itself."""

    def refuse(*_: object) -> None:
        raise OSError(errno.EAFNOSUPPORT, os.strerror(errno.EAFNOSUPPORT))

    monkeypatch.setattr(socket, "socket", refuse)
    assert cli._find_listen_error(Address.parse("[::1]:30000")) == "Address family not supported by protocol"


def test_invalid_engines_are_refused() -> None:
    assert "is not the URL" in refused("--engine", "https://x:1")
    assert "named twice" in refused("--engine", "127.0.0.1:1", "--engine", "http://127.0.0.1:1", "--listen", f"127.0.0.1:{free_port()}")
    assert "cannot be resolved" in refused("--engine", "nowhere.invalid:1", "--listen", f"127.0.0.1:{free_port()}")
    assert "--engine" in refused()


def test_a_wrong_tensor_size_is_refused() -> None:
    listen = f"127.0.0.1:{free_port()}"
    with StandIn(tensor=2) as engine:
        said = {text: refused("--engine", f"{engine.url}{text}", "--listen", listen) for text in (",tp=3", ",tp=1")}
        by_option = refused("--engine", engine.url, "--listen", listen, "--tensor-size", "3")
    for text, wanted in ((said[",tp=3"], 3), (said[",tp=1"], 1), (by_option, 3)):
        assert f"runs with tensor parallel size 2, and the command line says {wanted}: leave the size out, or" in text
        assert f"--tp-size {wanted}" in text


SGLANG = {"tp_size": 2, "pp_size": 1, "dp_size": 1}
ONE = EngineArg(Address("127.0.0.1", 30101))


@pytest.mark.parametrize(
    ("status", "info", "found"),
    [
        (200, SGLANG, Sizes(2)),
        (200, {**SGLANG, "dp_size": 4, "enable_dp_attention": True}, Sizes(2)),
        (200, {**SGLANG, "pp_size": 2}, "runs with pipeline parallel size 2: SGLang cannot take weights over a process group then"),
        (200, {**SGLANG, "dp_size": 2}, "runs with data parallel size 2: SGLang cannot take weights over a process group then"),
        (200, {"tp_size": "2"}, "as an SGLang server does"),
        (404, {}, "as an SGLang server does"),
        (401, {"error": "Unauthorized"}, "HTTP 401: a local fleet sends no API key"),
        (503, {}, None),
    ],
)
async def test_reported_sizes_are_checked_at_the_start(
    tmp_path: Path, status: int, info: dict[str, object], found: Sizes | str | None
) -> None:
    async def answer(_: web.Request) -> web.Response:
        return web.json_response(info, status=status)

    app = web.Application()
    app.router.add_get("/server_info", answer)
    async with TestServer(app) as server:
        engine = EngineArg(Address("127.0.0.1", server.port or 0))
        if not isinstance(found, str):
            sizes = await read_sizes([engine], PluginReports(tmp_path))
            check_sizes(sizes, Weights())
            assert sizes.get(engine) == (found and replace(found, unproved=sizes[engine].unproved))
            return
        with pytest.raises(SizesError, match=re.escape(found)):
            check_sizes(await read_sizes([engine], PluginReports(tmp_path)), Weights())


def test_pipeline_and_data_parallel_engines_need_another_transport() -> None:
    check_sizes({ONE: Sizes(2, pipeline=2, data=2)}, Weights(transport=Transport.DISK))
    check_sizes({ONE: Sizes(2, pipeline=2, data=2)}, Weights(transport=Transport.STAGED, staging=Staging(size_limit="1Gi")))


def test_engines_that_load_folders_need_no_loader() -> None:
    check_loaders({ONE: Sizes(1, data=2), EngineArg(Address("127.0.0.1", 30102)): Sizes(1, loaders=(LOADER,))})
    with pytest.raises(SizesError, match="without the loader"):
        check_loaders({ONE: Sizes(1)})


@contextmanager
def running(*args: str) -> Iterator[str]:
    """Run ``local`` and yield its URL."""
    url = f"127.0.0.1:{free_port()}"
    with subprocess.Popen([*LINE, *args, "--listen", url], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        try:
            until(lambda: answers(f"http://{url}/fleet/health"), 60, "the fleet answers")
            yield f"http://{url}"
        finally:
            process.terminate()


def fleet_document(url: str) -> Any:
    """Return ``GET /fleet``; without engines until the coordinator has heard of them."""
    try:
        with urllib.request.urlopen(f"{url}/fleet", timeout=5) as reply:
            return json.load(reply)
    except urllib.error.HTTPError:
        return {"serving": 0, "members": [{"reason": None}]}


def test_an_engine_without_the_plug_in_is_refused_unless_it_is_accepted() -> None:
    with StandIn() as proved, StandIn(plugin=False) as engine:
        line = ("--engine", proved.url, "--engine", engine.url, "--listen", f"127.0.0.1:{free_port()}")
        text = refused(*line)
        assert f"engine {engine.url} runs without the plug-in, so that one request could end it" in text
        assert 'eval "$(sglang-rollout plugin)"' in text
        assert "--plugin Optional" in text
        with running(*line[:4], "--plugin", "Optional") as url:
            until(lambda: fleet_document(url)["serving"] == 2, 30, "the engine without the plug-in serves")
    # The proof of an engine that has ended says nothing about another engine at its port.
    with StandIn(port=proved.port, plugin=False) as engine:
        assert f"engine {engine.url} runs without the plug-in" in refused("--engine", engine.url, "--listen", f"127.0.0.1:{free_port()}")


def test_the_client_refuses_a_sampling_parameter_that_one_engine_does_not_take() -> None:
    with StandIn() as new, StandIn(sessions=False) as old, running("--engine", new.url, "--engine", old.url) as url:
        until(lambda: fleet_document(url)["serving"] == 2, 30, "both engines serve")
        names = fleet_document(url)["sampling_params"]
        assert {"max_new_tokens", "custom_params", "logit_bias"} < set(names)
        assert "watermark" not in names, "SGLang 0.5.20 does not have it"
        with connect(url, timeout=30) as fleet:
            assert fleet.generate(["a"], sampling_params={"max_new_tokens": 3})[0].output_ids
            with pytest.raises(ValueError, match="The nearest name is 'max_new_tokens'"):
                fleet.generate(["a"], sampling_params={"max_tokens": 3})
            with pytest.raises(ValueError, match="'watermark'"):
                fleet.generate(["a"], sampling_params={"watermark": {}})


def test_versions_share_a_prefix_cache_only_if_the_fleet_and_its_engines_agree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SETTINGS_VARIABLE, dump_settings(reports=str(tmp_path), cache_key=False))
    with StandIn() as engine:
        assert "sets no cache key of the version" in refused("--engine", engine.url, "--listen", f"127.0.0.1:{free_port()}")
        with running("--engine", engine.url, "--shared-prefix-cache") as url:
            until(lambda: fleet_document(url)["serving"] == 1, 30, "the engine serves without a key")
    port = free_port()
    with running("--engine", f"http://127.0.0.1:{port}") as url, StandIn(port=port):
        until(lambda: fleet_document(url)["members"][0]["reason"] == "PluginMissing", 30, "the gate is closed for want of the key")
        assert "sets no cache key of the version" in fleet_document(url)["members"][0]["message"]


def test_the_reports_of_engines_that_ended_are_deleted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SETTINGS_VARIABLE, dump_settings(reports=str(tmp_path)))
    with StandIn() as other, StandIn() as engine:
        for _ in range(3):
            engine.restart()
        assert len(list(tmp_path.iterdir())) == 2, "one folder of each engine"
        line = ("--engine", engine.url, "--engine", other.url)
        with running(*line) as url:
            until(lambda: fleet_document(url)["serving"] == 2, 30, "both engines prove that the plug-in is active")


def test_an_engine_that_comes_later_without_the_plug_in_does_not_serve() -> None:
    port = free_port()
    with running("--engine", f"http://127.0.0.1:{port}") as url, StandIn(port=port, plugin=False):
        until(lambda: fleet_document(url)["members"][0]["reason"] == "PluginMissing", 30, "the gate is closed for want of the plug-in")
        message = fleet_document(url)["members"][0]["message"]
        assert "The plug-in is not active in SGLang 0.5.23" in message
        assert "engine.plugin: Optional" in message
        assert fleet_document(url)["serving"] == 0


def test_the_plug_in_command_prints_what_a_shell_needs(tmp_path: Path) -> None:
    folder = tmp_path / "a folder"
    script = f"eval \"$({sys.executable} -m sglang_rollout.cli plugin --dir '{folder}')\" && {sys.executable} -c '{_SHOW}'"
    environment = os.environ | {"PYTHONPATH": f"{os.environ.get('PYTHONPATH', '')}:/of-the-user"}
    done = subprocess.run(["sh", "-c", script], capture_output=True, text=True, timeout=60, check=True, env=environment)
    path, settings, entries = done.stdout.splitlines()
    assert path.endswith(":/of-the-user"), "the user's own folders stay"
    assert json.loads(settings)["reports"] == str(folder / "plugin-reports")
    assert entries == "['sglang_rollout_plugin']", "SGLang finds the plug-in"


_SHOW = (
    'import os, importlib.metadata as m; print(os.environ["PYTHONPATH"]); print(os.environ["SGLANG_ROLLOUT_PLUGIN"]);'
    ' print([e.name for e in m.entry_points(group="sglang.srt.plugins")])'
)


def test_what_an_engine_reports_replaces_the_sizes_of_the_command_line() -> None:
    silent = parse_engine("http://127.0.0.1:30102,pp=2,dp=3")
    found = with_reported_sizes(
        (parse_engine("http://127.0.0.1:30101,dp=3"), silent), {parse_engine("http://127.0.0.1:30101,dp=3"): Sizes(1)}
    )
    assert [(engine.pipeline_size, engine.data_size) for engine in found] == [(1, 1), (2, 3)]


def test_options_of_transport_staged_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    with StandIn() as engine:
        line = ("--engine", engine.url, "--listen", f"127.0.0.1:{free_port()}")
        state, limit = ("--state-dir", str(tmp_path)), ("--staging-size-limit", "1Gi")
        assert "belong to --transport Staged" in refused(*line, *limit)
        assert "needs --staging-size-limit" in refused(*line, "--transport", "Staged", *state)
        assert "write 20Gi or 500M" in refused(*line, "--transport", "Staged", *state, "--staging-size-limit", "much")
        text = refused(*line, "--transport", "Staged", *state, *limit)
        assert "--custom-weight-loader sglang_rollout_plugin.loader.load" in text
        disk = '{"catchUp": {"disk": "/d"}}'
        assert "needs no catchUp.disk" in refused(*line, "--transport", "Staged", *state, *limit, "--weights", disk)
        one_copy = '{"staging": {"copies": 1}, "catchUp": {"disk": "/d"}}'
        assert "needs no catchUp.disk" in refused(*line, "--transport", "Staged", *state, *limit, "--weights", one_copy)
        assert "belongs to --transport Staged" in refused(*line, "--activation", "Rolling")
        latest = '{"versionPolicy": "LatestOnly"}'
        in_turn = ("--transport", "Staged", *state, *limit, "--activation", "Rolling", "--weights", latest)
        assert "needs versionPolicy MaxStaleness" in refused(*line, *in_turn)
        assert "--snapshots belongs to --transport Staged" in refused(*line, "--snapshots", str(tmp_path))
        assert "--store-python belongs to --transport Staged" in refused(*line, "--store-python", sys.executable)
        staged = (*line, "--transport", "Staged", *state, *limit)
        assert f"--store-python {sys.executable} has no torch" in refused(*staged, "--store-python", sys.executable)
        gpu = refused(*staged, "--weights", '{"store": {"gpu": {}}}')
        assert f"weights.store.gpu needs a weight store with torch, which {sys.executable} lacks" in gpu
        claim = '{"store": {"snapshots": {"volume": {"claim": "policy"}}}}'
        assert "needs hostPath without Kubernetes" in refused(*line, "--transport", "Staged", *state, *limit, "--weights", claim)


def test_an_unwritable_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    text = refused("--engine", "127.0.0.1:1", "--listen", f"127.0.0.1:{free_port()}", "--state-dir", str(tmp_path / "file"))
    assert "cannot be used" in text


async def test_a_slow_start_is_reported_with_its_log_and_advice(tmp_path: Path) -> None:
    supervisor = Supervisor([Child("coordinator", ("sleep", "60"))], tmp_path, report=print)
    supervisor.start()
    url = f"http://127.0.0.1:{free_port()}"
    try:
        with pytest.raises(cli.NotReadyError) as failed:
            await cli._wait_for_coordinator(supervisor, url, asyncio.Event(), 0.5)
    finally:
        await supervisor.stop()
    text = failed.value.format_message()
    assert f"{url}/fleet/health has not answered with 200 within 0.5 s" in text
    assert "--start-timeout" in text
    assert f"The log of coordinator, {tmp_path}/coordinator.log, is empty" in text


def test_the_end_of_a_log_is_quoted(tmp_path: Path) -> None:
    (tmp_path / "front.log").write_text("".join(f"line {number}\n" for number in range(9)))
    text = ChildProcess(Child("front", ("true",)), tmp_path, report=print).describe_log(lines=2)
    assert text == f"The end of the log of front, {tmp_path}/front.log:\nline 7\nline 8"


def test_the_logs_of_a_failed_start_are_kept() -> None:
    text = refused("--engine", "127.0.0.1:1", "--listen", f"127.0.0.1:{free_port()}", "--start-timeout", "0.01")
    assert "within 0.01 s" in text
    log = re.search(r"The (?:end of the )?log of coordinator, (/\S+\.log)", text)
    assert log, text
    kept = Path(log[1])
    assert kept.exists()
    shutil.rmtree(kept.parents[2])


def test_a_start_timeout_of_zero_is_refused() -> None:
    assert "--start-timeout" in refused("--engine", "127.0.0.1:1", "--start-timeout", "0")


@pytest.mark.parametrize("mode", ["InPlace", "inplace"])
def test_the_pause_mode_has_the_values_of_the_field(mode: str) -> None:
    option = next(option for option in cli.command.params if option.name == "pause_mode")
    assert option.make_metavar(click.Context(cli.command)) == "Retract|Abort|InPlace"
    assert option.type.convert(mode, option, None) == Weights(pause_mode=PauseMode.IN_PLACE).pause_mode.value
    with pytest.raises(click.BadParameter, match=r"(?i)retract.*abort.*inplace"):
        option.type.convert("in_place", option, None)


def test_it_runs_without_engines_and_ends_on_sigterm(fleet: tuple[subprocess.Popen[bytes], str], tmp_path: Path) -> None:
    process, url = fleet
    assert answers(f"{url}/fleet/health")
    asked = urllib.request.Request(f"{url}/generate", data=b'{"text": "a"}', headers={"Content-Type": "application/json"})
    with pytest.raises(urllib.error.HTTPError, match="503") as failed:
        urllib.request.urlopen(asked, timeout=5)
    assert failed.value.headers["Retry-After"] == "1"
    started = children(process.pid)
    assert len(started) == 6, started
    victim = next(pid for pid, line in started.items() if " agent " in line)
    os.kill(victim, signal.SIGKILL)
    until(lambda: any(" agent " in line for line in children(process.pid).values()), 10, "the agent is started again")
    assert "local-engine-0-agent ended (by SIGKILL) and restarts in 0.5 s" in (tmp_path / "out").read_text()
    ended = children(process.pid)
    folders = [word.rpartition("/")[0] for line in ended.values() for word in line.split() if word.endswith(".cfg")]
    assert folders
    process.send_signal(signal.SIGTERM)
    assert process.wait(20) == 0
    assert not [pid for pid in ended if alive(pid)]
    assert not [line for line in folders if Path(line).exists()], "configurations and sockets are gone"
    key, credential = tmp_path / "state" / "token", tmp_path / "state" / "credentials" / "local-engine-0"
    assert [oct(file.stat().st_mode)[-3:] for file in (key, credential)] == ["600", "600"]
    assert CredentialFile(credential).lines() == CredentialFile(key).derive("local-engine-0").lines()


def test_an_engine_with_another_size_stays_out(tmp_path: Path) -> None:
    """The second engine is not up at the start, so only its agent can compare."""
    url, late, log = f"127.0.0.1:{free_port()}", free_port(), tmp_path / "out"
    with StandIn(tensor=2, weight_version="base") as engine, StandIn(tensor=2, port=late) as other, log.open("wb") as out:
        other.kill()
        line = [*LINE, "--engine", engine.url, "--engine", f"{other.url},tp=3", "--listen", url, "--backend", "gloo"]
        with subprocess.Popen(line, stdout=out, stderr=out) as process:
            try:
                until(lambda: "Ctrl-C ends" in log.read_text() or process.poll() is not None, 90, "the fleet answers")
                assert f"not up yet  {other.url}: its tensor parallel size must be 3 when it is up" in log.read_text()
                other.restart()
                said = "it runs with tensor parallel size 2, and the fleet expects 3: start the engine with --tp-size 3"
                until(lambda: said in str(document(url)) and document(url)["members"][0]["gate_open"], 20, "both engines have reported")
                first, second = document(url)["members"]
                assert (first["tensor_size"], first["gate_open"], first["rank_offset"]) == (2, True, 1)
                assert (second["gate_open"], second["rank_offset"]) == (False, None)
            finally:
                process.terminate()
                assert process.wait(20) == 0


def document(url: str) -> dict[str, Any]:
    """``GET /fleet``; empty while the coordinator cannot answer."""
    try:
        with urllib.request.urlopen(f"http://{url}/fleet", timeout=5) as reply:
            return dict(json.load(reply))
    except OSError:
        return {}


def test_killing_the_supervisor_ends_its_children(fleet: tuple[subprocess.Popen[bytes], str]) -> None:
    process, url = fleet
    started = children(process.pid)
    assert len(started) == 6, started
    process.kill()
    assert process.wait(5) == -signal.SIGKILL
    until(lambda: not [pid for pid in started if alive(pid)], 10, "no child is left")
    assert not answers(f"{url}/fleet/health")
