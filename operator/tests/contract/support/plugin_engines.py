"""Real SGLang engines with the plug-in, and stand-ins."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import requests
from e2e.engine import Engine, environment, make_engine

from sglang_rollout.plugin.install import install_plugin
from sglang_rollout.plugin.reports import Reports, read_reports
from sglang_rollout.plugin.settings import RUN_VARIABLE, SETTINGS_VARIABLE, dump_settings
from tests.contract.support.engine_servers import stand_in
from tests.support.ports import free_port

RUN = "boot-1"


@dataclass
class PluginEngine:
    """An engine with the plug-in, and its reports."""

    engine: Engine
    folder: Path
    run: str = RUN
    more: list[Engine] = field(default_factory=list)
    """The engine's processes on other nodes."""

    def reports(self) -> Reports:
        return read_reports(self.folder / "reports", self.run)

    def wait_for_proof(self, schedulers: int, *, requests: bool = True, cache_key: bool = True, seconds: float = 20) -> Reports:
        deadline = time.monotonic() + seconds
        while (missing := self.reports().missing(schedulers, requests=requests, cache_key=cache_key)) and time.monotonic() < deadline:
            time.sleep(0.2)
        assert missing is None, missing
        return self.reports()

    def post(self, path: str, body: Any, timeout: float = 60) -> tuple[int, Any]:
        reply = requests.post(self.engine.url + path, json=body, timeout=timeout)
        return reply.status_code, reply.json() if reply.headers.get("Content-Type", "").startswith("application/json") else reply.text

    def generate(self, **body: Any) -> dict[str, Any]:
        sampling = {"temperature": 0, "max_new_tokens": 4, "ignore_eos": True}
        status, answer = self.post("/generate", {"sampling_params": sampling} | body)
        assert status == 200, answer
        return dict(answer)

    def is_alive(self) -> bool:
        return self.engine.process is not None and self.engine.process.poll() is None

    def log(self) -> str:
        return self.engine.log.read_text(errors="replace")


def plugin_environment(folder: Path, *, old: bool = False, run: str = RUN, **settings: Any) -> dict[str, str]:
    """Return the variables with which an engine finds the plug-in. An image's own ``PYTHONPATH`` stays behind it."""
    path = os.pathsep.join([str(install_plugin(folder)), environment.environment_variables(old=old)["PYTHONPATH"]])
    reports = str(folder / "reports")
    return {"PYTHONPATH": path, SETTINGS_VARIABLE: dump_settings(reports=reports, **settings), RUN_VARIABLE: run}


@contextmanager
def start_plugin_engine(
    folder: Path,
    *,
    args: Sequence[str] = (),
    tensor: int = 1,
    old: bool = False,
    env: dict[str, str] | None = None,
    model: Path | None = None,
    wait: bool = True,
    **settings: Any,
) -> Iterator[PluginEngine]:
    """Run an engine with the plug-in for the length of the block. ``settings``: as of ``dump_settings``."""
    variables = plugin_environment(folder, old=old, **settings) | (env or {})
    engine = make_engine(free_port(), model=model, args=args, tensor=tensor, log=folder / "engine.log", env=variables, old=old)
    engine.start()
    made = PluginEngine(engine, folder)
    try:
        if wait:
            engine.wait()
        yield made
    finally:
        engine.kill()


@contextmanager
def start_plugin_stand_in(folder: Path, *, run: str = RUN, **settings: Any) -> Iterator[PluginEngine]:
    """Run a stand-in with the plug-in for the length of the block. ``settings``: as of ``dump_settings``."""
    engine = stand_in(free_port(), folder / "stand-in.log")
    engine.environment |= {SETTINGS_VARIABLE: dump_settings(reports=str(folder / "reports"), **settings), RUN_VARIABLE: run}
    engine.start()
    try:
        engine.wait()
        yield PluginEngine(engine, folder, run)
    finally:
        engine.kill()
