"""Fleets for the benchmarks: real engines or stand-ins behind a complete ``sglang-rollout local``."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from bench.common import free_port, get
from e2e.child import start_child
from e2e.cluster.paths import REPOSITORY
from e2e.engine import environment, start_engine

from sglang_rollout.plugin.install import LOADER

START_SECONDS = 120.0
MEMORY = "/dev/shm" if Path("/dev/shm").is_dir() else None
"""Folder of the agents' records: in memory, as in a pod."""
PARTS = {
    "coordinator": "sglang_rollout.cli coordinator ",
    "agent": "sglang_rollout.cli agent ",
    "agents in one process": "bench.agents ",
    "gate": "gate.cfg",
    "front": "front.cfg",
    "smg": "smg::router",
    "batches": "sglang_rollout.cli batches ",
    "store": "sglang_rollout.cli store ",
    "receiver of the store": "sglang_rollout.store.receiver",
}
"""A part of each part's command line."""
LOADER_ARGS = ("--custom-weight-loader", LOADER)
"""Arguments of engines and stand-ins whose fleet has transport Staged."""
ENGINE_PARTS = {"engine server": "sglang.launch_server", "engine scheduler": "sglang::scheduler"}
"""The same for SGLang's processes. Its detokenizer does nothing in a push."""


@dataclass(frozen=True)
class Program:
    """A process that a benchmark has started, and the file that has its output."""

    process: subprocess.Popen[Any]
    log: Path | None = None


@dataclass(frozen=True)
class LocalFleet:
    """The fleet's URL, the engines behind it, and the fleet's processes."""

    url: str
    engines: list[str]
    programs: list[Program] = field(default_factory=list)
    state: Path = field(default_factory=Path)
    """State folder of ``sglang-rollout local``, with the logs of its processes."""

    @property
    def roots(self) -> list[int]:
        """Process IDs of the programs."""
        return [program.process.pid for program in self.programs]

    def parts(self) -> dict[str, list[int]]:
        """Return the process IDs of the fleet's parts, by name."""
        return _marked(self.roots, PARTS)


def engine_parts() -> dict[str, list[int]]:
    """Return the process IDs of the real engines that this process has started, by name."""
    return _marked([os.getpid()], ENGINE_PARTS)


@contextmanager
def real_engines(
    number: int, *, model: Path | None = None, args: Sequence[str] = (), env: dict[str, str] | None = None
) -> Iterator[list[str]]:
    """Run SGLang servers on the CPU, with ``env`` in their environment, and yield their URLs."""
    with ExitStack() as stack:
        engines = [stack.enter_context(start_engine(free_port(), model=model, args=args, env=env, wait=False)) for _ in range(number)]
        for engine in engines:
            engine.wait()
        yield [engine.url for engine in engines]


@contextmanager
def stand_ins(number: int, *, model: Path | None = None, token_ms: float = 0.0, args: Sequence[str] = ()) -> Iterator[list[str]]:
    """Run stand-in engines in one process, and yield their URLs."""
    first = free_port(first=27200, row=number)
    options = ["--port", str(first), "--engines", str(number), "--token-ms", str(token_ms)]
    options += ["--model", str(model)] if model is not None else []
    with ended(engine_python("sglang_rollout.testing", *options, *args)) as process:
        urls = [f"http://127.0.0.1:{first + index}" for index in range(number)]
        for url in urls:
            until(f"{url} answers", lambda url=url: bool(get(f"{url}/server_info")), programs=[Program(process)])
        yield urls


@contextmanager
def local_fleet(
    urls: list[str],
    *,
    weights: Mapping[str, Any] | None = None,
    fresh: bool = True,
    size_limit: str | None = None,
    snapshots: Path | None = None,
) -> Iterator[LocalFleet]:
    """Run ``sglang-rollout local`` over running engines. All engines serve when the block begins.

    Args:
        urls: The engines.
        weights: ``spec.weights``.
        fresh: False: the engines hold weights of another fleet. They then take a push when the block begins, and serve after it.
        size_limit: ``weights.staging.sizeLimit``, for a fleet with transport Staged, whose engines were started with ``LOADER_ARGS``.
        snapshots: With ``size_limit``: folder for snapshots of the weight store.
    """
    with TemporaryDirectory(prefix="rollout-bench-", dir=MEMORY) as name:
        folder, address = Path(name), f"127.0.0.1:{free_port()}"
        wanted = [part for url in urls for part in ("--engine", url)]
        command = [sys.executable, "-m", "sglang_rollout.cli", "local", *wanted, "--listen", address, "--backend", "gloo"]
        command += ["--state-dir", str(folder / "state"), "--weights", json.dumps(dict(weights or {}))]
        if size_limit is not None:
            python = str(environment.python(make=False))
            command += ["--transport", "Staged", "--staging-size-limit", size_limit, "--store-python", python]
            command += ["--snapshots", str(snapshots)] if snapshots is not None else []
        with (folder / "local.log").open("wb") as log:
            process = start_child(command, stdout=log, stderr=log)
        with ended(process):
            fleet = LocalFleet(f"http://{address}", urls, [Program(process, folder / "local.log")], folder / "state")
            if fresh:
                until_serving(fleet)
            else:
                until("all engines can take weights", partial(_can_take_weights, fleet.url), every=0.5, programs=fleet.programs)
            yield fleet


def _can_take_weights(url: str) -> bool:
    return all(row["rank_offset"] for row in get(f"{url}/fleet")["members"])


@contextmanager
def bare_coordinator(urls: list[str], *, weights: Mapping[str, Any] | None = None, token: str = "") -> Iterator[LocalFleet]:
    """Run a coordinator, and the agents of all engines in one process, without gates, front and smg.

    For more engines than this machine can run complete sets of processes for.

    Args:
        urls: The engines.
        weights: ``spec.weights``.
        token: Token that control calls must send (``security.control: Token``); empty: control calls are open.
    """
    with TemporaryDirectory(prefix="rollout-bench-", dir=MEMORY) as name, ExitStack() as stack:
        folder, listen, port = Path(name), f"127.0.0.1:{free_port()}", free_port(first=28200, row=len(urls))
        (folder / "token").write_text("bench")
        agents = [{"name": f"e{i}", "tensor_size": 1, "url": f"http://127.0.0.1:{port + i}"} for i in range(len(urls))]
        policy = {"backend": "gloo", **(weights or {})}
        intent = {"generation": 1, "name": "bench", "namespace": "bench", "engines": agents, "weights": policy}
        intent["security"] = {"control": "Token" if token else "Open"}
        (folder / "intent.json").write_text(json.dumps(intent))
        logs = [stack.enter_context((folder / f"{part}.log").open("wb")) for part in ("agents", "coordinator")]
        line = [sys.executable, "-m", "bench.agents", str(folder), str(port), *urls]
        first = stack.enter_context(ended(start_child(line, stdout=logs[0], stderr=logs[0])))
        line = [
            sys.executable,
            "-m",
            "sglang_rollout.cli",
            "coordinator",
            "--name",
            "bench",
            "--listen",
            listen,
            "--public-url",
            f"http://{listen}",
        ]
        line += ["--token-file", str(folder / "token"), "--intent-file", str(folder / "intent.json")]
        line += ["--record-file", str(folder / "record.json"), "--smg-url", "http://127.0.0.1:9"]
        if token:
            (folder / "trainer-token").write_text(token)
            line += ["--trainer-token-file", str(folder / "trainer-token")]
        second = stack.enter_context(ended(start_child(line, stdout=logs[1], stderr=logs[1])))
        programs = [Program(process, folder / f"{part}.log") for process, part in ((first, "agents"), (second, "coordinator"))]
        fleet = LocalFleet(f"http://{listen}", urls, programs)
        until_serving(fleet)
        yield fleet


def engine_python(module: str, *options: str, **popen: Any) -> subprocess.Popen[Any]:
    """Start one of our modules with the engine environment's Python, which has torch."""
    variables = environment.environment_variables()
    variables["PYTHONPATH"] = os.pathsep.join([str(REPOSITORY / "operator"), str(REPOSITORY), variables["PYTHONPATH"]])
    return start_child([str(environment.python(make=False)), "-m", module, *options], env=variables, cwd=REPOSITORY, **popen)


@contextmanager
def ended(process: subprocess.Popen[Any]) -> Iterator[subprocess.Popen[Any]]:
    """End the process when the block ends."""
    try:
        yield process
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def until(what: str, check: Any, within: float = START_SECONDS, every: float = 0.1, programs: Sequence[Program] = ()) -> None:
    """Wait for a condition. A refused connection counts as False. Raises SystemExit at the end of the time, or if a program has ended."""
    end = time.monotonic() + within
    while time.monotonic() < end:
        for program in programs:
            _require_running(program, what)
        try:
            if check():
                return
        except OSError:
            pass
        time.sleep(every)
    raise SystemExit(f"not within {within:.0f} s: {what}")


def _require_running(program: Program, what: str) -> None:
    code = program.process.poll()
    if code is not None:
        said = program.log.read_text(errors="replace").strip()[-2000:] if program.log is not None else "its output is above"
        raise SystemExit(f"process {program.process.pid} ended with code {code} before this: {what}\n{said}")


def until_serving(fleet: LocalFleet, within: float = START_SECONDS) -> None:
    """Wait until all engines serve."""
    wanted = len(fleet.engines)
    until(f"{fleet.url}: {wanted} engines serve", lambda: get(f"{fleet.url}/fleet")["serving"] == wanted, within, 0.5, fleet.programs)


def _marked(roots: Sequence[int], marks: Mapping[str, str]) -> dict[str, list[int]]:
    """Return the process IDs below ``roots``, by the mark in their command lines."""
    found: dict[str, list[int]] = {name: [] for name in marks}
    for pid, words in below(roots).items():
        for name, mark in marks.items():
            if mark in words:
                found[name].append(pid)
    return {name: sorted(pids) for name, pids in found.items() if pids}


def below(roots: Sequence[int]) -> dict[int, str]:
    """Return the command lines of these processes and of all their descendants."""
    parents: dict[int, int] = {}
    for entry in Path("/proc").iterdir():
        try:
            parents[int(entry.name)] = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
        except (ValueError, OSError):
            continue  # no process, or one that has just ended
    found: dict[int, str] = {}
    for pid in parents:
        top = pid
        while top in parents and top not in roots:
            top = parents[top]
        if top in roots:
            try:
                found[pid] = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            except OSError:
                continue
    return found
