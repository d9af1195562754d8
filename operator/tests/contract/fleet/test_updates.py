"""The coordinator with real SGLang engines, gates and agents, and a trainer that uses plain HTTP."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import requests
from e2e.child import start_child
from e2e.engine import Engine, environment, start_engine

from tests.support.paths import TRAINERS, package_variables

pytestmark = [pytest.mark.engine, pytest.mark.router, pytest.mark.timeout(600)]

PORTS = (25301, 25302)
URL = "http://127.0.0.1:25300"
TRAINER = TRAINERS / "plain_http.py"
PROMPT = {"input_ids": [11, 22, 33], "sampling_params": {"temperature": 0, "max_new_tokens": 8}}
LONG = 600
"""Tokens of an answer that takes longer than an update."""


@dataclass
class Stack:
    """A local fleet of two real engines."""

    engines: list[Engine]
    state: Path

    def document(self) -> dict[str, Any]:
        reply = requests.get(f"{URL}/fleet", timeout=5)
        return dict(reply.json()) if reply.ok else {}

    def until(self, what: str, check: Callable[[], bool], within: float = 30.0) -> None:
        end = time.monotonic() + within
        while True:
            try:
                if check():
                    return
            except requests.RequestException:
                pass
            assert time.monotonic() < end, f"not within {within} s: {what}: {self.document()}"
            time.sleep(0.1)

    def serving(self, number: int, within: float = 30.0) -> None:
        self.until(f"{number} engines serve", lambda: self.document().get("serving") == number, within)

    def train(self, group: str, manner: str, seed: int, version: str | None = None) -> dict[str, Any]:
        command = [str(environment.python(make=False)), str(TRAINER), URL, str(environment.model()), group, str(seed), manner]
        command += [version] if version else []
        done = subprocess.run(command, env=package_variables(), check=False, capture_output=True, text=True, timeout=120)
        if manner == "die":
            assert done.returncode == -signal.SIGKILL, done.stderr
            return {}
        assert done.returncode == 0, done.stderr
        return dict(json.loads(done.stdout))

    def tokens(self) -> list[tuple[list[int], str]]:
        """Return the tokens of each engine, bypassing its gate."""
        replies = [requests.post(f"{engine.url}/generate", json=PROMPT, timeout=30).json() for engine in self.engines]
        return [(reply["output_ids"], reply["meta_info"]["weight_version"]) for reply in replies]


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    state = tmp_path_factory.mktemp("fleet")
    with ExitStack() as cleanup:
        engines = [cleanup.enter_context(start_engine(port, wait=False)) for port in PORTS]
        for engine in engines:
            engine.wait()
        line = [sys.executable, "-m", "sglang_rollout.cli", "local", "--listen", "127.0.0.1:25300", "--backend", "gloo"]
        line += ["--state-dir", str(state), *(part for engine in engines for part in ("--engine", engine.url))]
        local = start_child(line, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        cleanup.callback(local.wait, 30)
        cleanup.callback(local.terminate)
        found = Stack(engines, state)
        found.serving(2, within=60)
        yield found


def test_a_trainer_with_a_session_updates_every_engine(stack: Stack) -> None:
    before = stack.tokens()
    found = stack.train("a", "session", seed=1, version="5")
    assert not found["refused"]
    after = stack.tokens()
    assert after[0] == after[1]
    assert after[0][1] == "5"
    assert after[0][0] != before[0][0], "other weights, other tokens"
    routed = requests.post(f"{URL}/generate", json=PROMPT, timeout=30).json()
    assert (routed["output_ids"], routed["meta_info"]["weight_version"]) == after[0]
    assert stack.document()["committed"] == {"run": 1, "step": 5, "label": "5"}


def test_a_trainer_without_session_and_version_commits_when_it_continues(stack: Stack) -> None:
    n = stack.document()["committed"]["step"]
    assert not stack.train("b", "plain", seed=2)["refused"]
    after = stack.tokens()
    assert after[0] == after[1]
    assert after[0][1] == str(n + 1)


def stream(number: int) -> dict[str, Any]:
    """Send a streamed request to the URL, and return the ``meta_info`` of its last event."""
    params = {"temperature": 0, "max_new_tokens": LONG, "ignore_eos": True}
    body = {"input_ids": [100 + number, 22, 33], "sampling_params": params, "stream": True}
    last = b""
    with requests.post(f"{URL}/generate", json=body, stream=True, timeout=120) as reply:
        reply.raise_for_status()
        for line in reply.iter_lines():
            last = line if line.startswith(b"data: {") else last
    return dict(json.loads(last.removeprefix(b"data: "))["meta_info"])


def test_running_requests_continue_with_new_weights_and_lose_no_token(stack: Stack) -> None:
    before = stack.document()["committed"]["label"]
    pushed = threading.Event()

    def client(number: int) -> list[dict[str, Any]]:
        answers = [stream(number)]
        while not pushed.is_set():
            answers.append(stream(number))
        return answers

    with ThreadPoolExecutor(4) as pool:
        clients = [pool.submit(client, number) for number in range(4)]
        try:
            assert not stack.train("f", "session", seed=6)["refused"]
        finally:
            pushed.set()
        answers = [answer for running in clients for answer in running.result(120)]
    after = stack.document()["committed"]["label"]
    assert {(answer["completion_tokens"], answer["finish_reason"]["type"]) for answer in answers} == {(LONG, "length")}
    spans = {tuple(span["version"] for span in answer["weight_versions"]) for answer in answers}
    assert (before, after) in spans, "a request ran during the update"
    assert spans <= {(before,), (before, after), (after,)}


def test_a_wrong_world_size_reaches_no_engine(stack: Stack) -> None:
    body = {"master_address": "127.0.0.1", "master_port": 25399, "rank_offset": 1, "world_size": 7, "group_name": "x"}
    reply = requests.post(f"{URL}/init_weights_update_group", json=body, timeout=30)
    assert (reply.status_code, "Use world_size=3." in reply.reason) == (400, True)
    assert stack.document()["serving"] == 2


def test_a_killed_trainer_leaves_a_fenced_fleet_and_its_successor_can_push(stack: Stack) -> None:
    before = stack.document()["committed"]
    stack.train("c", "die", seed=3)
    found = stack.document()
    assert (found["serving"], found["committed"]) == (0, before)
    assert requests.get(f"{URL}/health", timeout=5).status_code == 200
    assert not stack.train("d", "session", seed=4)["refused"]
    stack.serving(2)
    after = stack.tokens()
    assert after[0] == after[1]


def test_an_engine_that_restarts_with_base_weights_serves_only_after_the_next_push(stack: Stack) -> None:
    epoch = stack.document()["epoch"]
    victim = stack.engines[1]
    victim.kill()
    stack.serving(1)
    victim.start()
    victim.wait()
    stack.until("its agent has seen the restart", lambda: stack.document()["members"][1]["state"] == "clean")
    found = stack.document()
    assert found["epoch"] > epoch
    assert found["members"][1]["version"]["label"] == "base"
    refused = requests.post(f"{found['members'][1]['url']}/generate", json=PROMPT, timeout=5)
    assert (refused.status_code, refused.headers.get("Retry-After")) == (503, "1")
    assert requests.post(f"{URL}/generate", json=PROMPT, timeout=30).json()["meta_info"]["weight_version"] != "base"
    assert not stack.train("e", "session", seed=5)["refused"]
    stack.serving(2)
    after = stack.tokens()
    assert after[0] == after[1]


def other_weights(model: Path, folder: Path) -> Path:
    """Write a copy of the model with other weights: the lowest bits of some bytes are flipped."""
    shutil.copytree(model, folder)
    for file in folder.glob("*.safetensors"):
        raw = bytearray(file.read_bytes())
        start = 8 + int.from_bytes(raw[:8], "little")
        # Byte 2 of each little-endian float32 holds the upper bits of the fraction: other values, never infinite.
        for at in range(start + 2, len(raw), 4):
            raw[at] ^= 0x40
        file.write_bytes(raw)
    return folder


def test_a_restarted_engine_loads_weights_from_disk_without_a_trainer(stack: Stack, tmp_path: Path) -> None:
    before = stack.tokens()
    names = requests.get(f"{URL}/v1/models", timeout=5).json()
    cut = other_weights(environment.model(), tmp_path / "cut")
    with next(cut.glob("*.safetensors")).open("r+b") as file:
        file.truncate(file.seek(0, 2) - 100)
    refused = requests.post(f"{URL}/update_weights_from_disk", json={"model_path": str(cut), "weight_version": "76"}, timeout=60)
    assert (refused.status_code, "No engine received the call" in refused.json()["message"]) == (400, True), refused.text
    assert stack.document()["serving"] == 2
    good = other_weights(environment.model(), tmp_path / "good")
    done = requests.post(f"{URL}/update_weights_from_disk", json={"model_path": str(good), "weight_version": "77"}, timeout=120)
    assert done.status_code == 200, done.text
    after = stack.tokens()
    assert after[0] == after[1]
    assert after[0][1] == "77"
    assert after[0][0] != before[0][0]
    assert requests.get(f"{URL}/v1/models", timeout=5).json()["data"][0]["id"] == names["data"][0]["id"]
    victim = stack.engines[1]
    victim.kill()
    stack.serving(1)
    victim.start()
    victim.wait()
    stack.serving(2, within=60)
    assert stack.tokens() == after, "the engine caught up from the folder"
