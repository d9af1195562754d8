"""Engines load a staged version in turn while clients generate: no answer fails, and the other engines serve.

All parts are processes: `sglang-rollout local --activation Rolling` with its weight store, three stand-in engines, and a trainer.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from threading import Event
from typing import Any

import pytest
import requests
from e2e.chaos.tokens import FEW, PROMPT
from e2e.engine import LabError, environment
from e2e.kube import eventually

from sglang_rollout.testing import Fault
from sglang_rollout.testing.app import FAULTS
from tests.contract.fleet.test_staged import SECONDS, Uploader, kill, next_version, uploader
from tests.contract.support.trainer_dialects import Fleet, fleet

pytestmark = [pytest.mark.engine, pytest.mark.router, pytest.mark.timeout(600)]

ENGINES = 3
SESSIONS = [*(f"game-{number}" for number in range(4)), None]
"""Sessions of the clients; None: a client without session."""
LOAD_SECONDS = 1.0
"""Duration of each load, so that many requests come meanwhile."""


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    try:
        environment.python(make=False)
    except LabError as error:
        pytest.skip(str(error))
    with fleet("staged", tmp_path_factory.mktemp("rolling"), ENGINES, options=("--activation", "Rolling")) as made:
        for engine in made.engines:
            fault = Fault(kind="slow", phase="load", times=None, seconds=LOAD_SECONDS)
            assert requests.post(f"{engine.url}{FAULTS}", data=fault.model_dump_json(), timeout=10).ok
        yield made


@pytest.fixture
def uploads(lab: Fleet) -> Iterator[Uploader]:
    with uploader(lab) as made:
        yield made


@dataclass
class Traffic:
    """What clients of a fleet were answered, and what its engines served meanwhile."""

    lab: Fleet
    stop: Event = field(default_factory=Event)
    failed: list[str] = field(default_factory=list)
    samples: list[tuple[list[int], str, set[str]]] = field(default_factory=list)
    """Tokens, version in the header and versions of the spans of each answer."""
    of_session: dict[str, list[str]] = field(default_factory=lambda: defaultdict(list))
    """Versions of the answers of each session, in order."""
    open_gates: list[int] = field(default_factory=list)
    """Number of open gates at each look."""
    held: list[set[str]] = field(default_factory=list)
    """Versions behind open gates at each look."""

    def generate(self, session: str | None) -> None:
        body = {"input_ids": PROMPT, "sampling_params": {"temperature": 0, "max_new_tokens": FEW}}
        headers = {"x-session-id": session} if session else {}
        with requests.Session() as http:
            while not self.stop.is_set():
                reply = http.post(f"{self.lab.url}/generate", json=body, headers=headers, timeout=60)
                if not reply.ok:
                    self.failed.append(f"{reply.status_code} {reply.text[:200]}")
                    continue
                answer = reply.json()
                spans = answer["meta_info"].get("weight_versions") or [{"version": answer["meta_info"]["weight_version"]}]
                if session:
                    self.of_session[session].append(answer["meta_info"]["weight_version"])
                self.samples.append((answer["output_ids"], reply.headers["X-Weight-Version"], {str(span["version"]) for span in spans}))

    def look(self) -> None:
        while not self.stop.is_set():
            members = self.lab.document()["members"]
            serving = [member for member in members if member["gate_open"]]
            self.open_gates.append(len(serving))
            self.held.append({member["version"]["label"] for member in serving})
            time.sleep(0.02)


def generate_during(lab: Fleet, push: Callable[[], Any]) -> Traffic:
    """Let clients generate, and look at the fleet, while a version is pushed."""
    traffic = Traffic(lab)
    with ThreadPoolExecutor(len(SESSIONS) + 1) as pool:
        running = [*(pool.submit(traffic.generate, session) for session in SESSIONS), pool.submit(traffic.look)]
        try:
            push()
        finally:
            traffic.stop.set()
        for each in running:
            each.result(SECONDS)
    return traffic


def test_no_answer_fails_and_the_other_engines_serve(lab: Fleet, uploads: Uploader) -> None:
    first, second = lab.others()
    before = next_version(lab)
    assert uploads.push(first, before)["state"] == "committed"
    lab.serving(ENGINES, SECONDS)
    after = next_version(lab)

    def push() -> None:
        assert uploads.push(second, after)["state"] == "committed"
        check_all(lab, second, after)

    traffic = generate_during(lab, push)
    assert traffic.failed == []
    assert min(traffic.open_gates) >= ENGINES - 1, "more than one gate was closed at a time"
    assert {before, after} in traffic.held, "engines served both versions at the same time"
    assert set().union(*traffic.held) == {before, after}
    assert {version for _, version, _ in traffic.samples} == {before, after}
    for session, versions in traffic.of_session.items():
        assert versions == sorted(versions, key=[before, after].index), f"session {session} went back to an older version"
    tokens = {before: lab.expected[first], after: lab.expected[second]}
    whole = [(found, versions.copy().pop()) for found, _, versions in traffic.samples if len(versions) == 1]
    assert all(found == tokens[version] for found, version in whole), "an answer was not generated by the version that it names"


def check_all(lab: Fleet, scale: float, version: str) -> None:
    """Assert that every engine serves a version."""
    eventually("all engines hold the version", lambda: labels(lab) == [version] * ENGINES, within=SECONDS)
    lab.serving(ENGINES, SECONDS)
    assert lab.everywhere() == [(lab.expected[scale], version)] * (ENGINES + 1)


def labels(lab: Fleet) -> list[str]:
    """Return the version that each engine holds."""
    return [(member["version"] or {"label": ""})["label"] for member in lab.document()["members"]]


def test_a_restarted_coordinator_continues_the_roll(lab: Fleet, uploads: Uploader) -> None:
    scale, version = lab.others()[0], next_version(lab)
    assert uploads.push(scale, version, wait="staged")["state"] == "staged"
    eventually("one engine has the version", lambda: labels(lab).count(version) == 1, within=SECONDS)
    kill(lab, "coordinator --name local")
    check_all(lab, scale, version)


def test_an_engine_that_is_killed_before_its_turn_loads_the_version_when_it_is_back(lab: Fleet, uploads: Uploader) -> None:
    scale, version, last = lab.others()[0], next_version(lab), lab.engines[-1]
    assert uploads.push(scale, version, wait="staged")["state"] == "staged"
    eventually("one engine has the version", lambda: labels(lab).count(version) == 1, within=SECONDS)
    last.kill()
    last.start()
    last.wait()
    check_all(lab, scale, version)
