"""Engines join and leave while one trainer process runs: each push reaches exactly the present engines."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import requests
from e2e.child import start_child
from e2e.cluster.say import LabError
from e2e.engine import environment

from tests.support.paths import OPERATOR, TRAINERS
from tests.support.ports import free_port

pytestmark = [pytest.mark.router, pytest.mark.timeout(300)]

ENGINES = 5
PROMPT = {"input_ids": [5, 6, 7], "sampling_params": {"temperature": 0, "max_new_tokens": 12}}


def engine_python(*line: str, **popen: Any) -> subprocess.Popen[str]:
    variables = environment.environment_variables()
    variables["PYTHONPATH"] = os.pathsep.join([str(OPERATOR), variables["PYTHONPATH"]])
    return start_child([str(environment.python(make=False)), *line], env=variables, text=True, **popen)


@dataclass
class Changing:
    """A fleet whose intent the test writes in place of the operator, and its trainer."""

    url: str
    engines: list[str]
    intent: Path
    trainer: subprocess.Popen[str]

    def want(self, *numbers: int) -> None:
        """Write the intent of a fleet of these engines, and wait until the fleet has them."""
        intent = json.loads(self.intent.read_text())
        every = {row["name"]: row for row in json.loads(self.intent.with_suffix(".all").read_text())["engines"]}
        intent["generation"] += 1
        intent["engines"] = [every[f"local-engine-{number}"] for number in numbers]
        fresh = self.intent.with_suffix(".new")
        fresh.write_text(json.dumps(intent))
        fresh.rename(self.intent)
        names = [f"local-engine-{number}" for number in numbers]
        self.until(f"the members are {names}", lambda: [member["name"] for member in self.ready()] == names)

    def ready(self) -> list[dict[str, Any]]:
        """Return the members that can take part in a push."""
        reply = requests.get(f"{self.url}/fleet", timeout=10)
        reply.raise_for_status()
        members: list[dict[str, Any]] = reply.json()["members"]
        return members if all(member["rank_offset"] for member in members) else []

    def until(self, what: str, check: Callable[[], bool], within: float = 60) -> None:
        end, last = time.monotonic() + within, ""
        while True:
            try:
                if check():
                    return
            except requests.RequestException as error:
                last = str(error)  # the front is not up yet
            assert time.monotonic() < end, f"not within {within:g} s: {what} {last}"
            time.sleep(0.1)

    def push(self, factor: int) -> dict[str, Any]:
        """Let the trainer push, which does not know the changes of the fleet."""
        assert self.trainer.stdin is not None
        assert self.trainer.stdout is not None
        self.trainer.stdin.write(f"{factor}\n")
        self.trainer.stdin.flush()
        line = self.trainer.stdout.readline()
        assert line, "the trainer has ended"
        return dict(json.loads(line))

    def held(self) -> list[tuple[int, ...]]:
        """Return the tokens of each engine, bypassing its gate. Equal weights make equal tokens."""
        return [tuple(requests.post(f"{url}/generate", json=PROMPT, timeout=30).json()["output_ids"]) for url in self.engines]


@pytest.fixture
def changing(tmp_path: Path) -> Iterator[Changing]:
    try:
        environment.python(make=False)
    except LabError as error:
        pytest.skip(str(error))
    with ExitStack() as stack:

        def keep(process: subprocess.Popen[str]) -> subprocess.Popen[str]:
            stack.callback(process.wait, 30)
            stack.callback(process.terminate)
            return process

        log = stack.enter_context((tmp_path / "log").open("wb"))
        first, address = free_port(row=ENGINES), f"127.0.0.1:{free_port()}"
        engines = [f"http://127.0.0.1:{first + number}" for number in range(ENGINES)]
        keep(engine_python("-m", "sglang_rollout.testing", "--port", str(first), "--engines", str(ENGINES), stdout=log, stderr=log))
        line = [sys.executable, "-m", "sglang_rollout.cli", "local", "--listen", address, "--backend", "gloo"]
        line += ["--state-dir", str(tmp_path), *(part for url in engines for part in ("--engine", url))]
        keep(start_child(line, stdout=log, stderr=log, text=True))
        url, intent = f"http://{address}", tmp_path / "intent.json"
        trainer = keep(engine_python(str(TRAINERS / "push_on_request.py"), url, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log))
        made = Changing(url, engines, intent, trainer)
        made.until("all engines are up", lambda: len(made.ready()) == ENGINES)
        intent.with_suffix(".all").write_text(intent.read_text())
        yield made


def test_each_push_reaches_exactly_the_present_engines(changing: Changing) -> None:
    changing.want(0, 1, 2)
    pushed = changing.push(2)
    assert (pushed["version"], pushed["world_size"], pushed["members"]) == ("1", 4, named(0, 1, 2))
    before = changing.held()
    assert len({before[0], before[1], before[2]}) == 1
    assert before[0] != before[3] == before[4], "the others hold their base weights"

    changing.want(1, 2, 3, 4)  # two more, one less; the trainer does not know
    pushed = changing.push(3)
    assert (pushed["version"], pushed["world_size"], pushed["members"]) == ("2", 5, named(1, 2, 3, 4))
    after = changing.held()
    assert after[0] == before[0], "the engine is not a member"
    assert len(set(after[1:])) == 1
    assert after[1] != before[1]
    changing.until("all four serve", lambda: requests.get(f"{changing.url}/fleet", timeout=10).json()["serving"] == 4)


def test_a_push_survives_an_engine_that_ends_in_the_middle(changing: Changing) -> None:
    changing.want(0, 1, 2)
    fault = {"kind": "die", "phase": "received", "times": 1}
    assert requests.post(f"{changing.engines[1]}/stand_in/faults", json=fault, timeout=10).ok
    pushed = changing.push(2)
    assert (pushed["version"], pushed["world_size"], pushed["members"]) == ("1", 3, named(0, 2)), "the second attempt, without the engine"
    committed = requests.get(f"{changing.url}/fleet", timeout=10).json()
    assert (committed["committed"]["label"], committed["serving"]) == ("1", 2)
    assert committed["last_update"]["outcome"] == "Committed"


def named(*numbers: int) -> list[str]:
    """Return the names of engines."""
    return [f"local-engine-{number}" for number in numbers]
