"""Sessions with every policy of the router: the real front, smg and coordinator with three stand-in engines."""

from __future__ import annotations

import itertools
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import requests
from e2e.child import start_child

from sglang_rollout.proxy.smg import POLICIES
from sglang_rollout.testing import StandInFleet
from tests.support.ports import free_port

pytestmark = [pytest.mark.router, pytest.mark.timeout(300)]

SESSIONS = [f"game-{number}" for number in range(8)]
WAYS: dict[str, Callable[[str], dict[str, Any]]] = {
    "session_id": lambda name: {"json": {"session_id": name}},
    "x-session-id": lambda name: {"headers": {"x-session-id": name}},
    "x-session-id before rid": lambda name: {"headers": {"x-session-id": name}, "json": {"rid": uuid.uuid4().hex}},
    "x-smg-routing-key": lambda name: {"headers": {"x-smg-routing-key": name}},
}
PROMPT = {"input_ids": [5, 6], "sampling_params": {"max_new_tokens": 2}}


@dataclass
class Routed:
    """A fleet, and the engines that answered."""

    url: str
    engines: StandInFleet
    log: Path
    http: requests.Session = field(default_factory=requests.Session)
    unused: Iterator[int] = field(default_factory=itertools.count)

    def ask(self, path: str = "/generate", **request: Any) -> str:
        """Send one request, and return the gate that smg chose."""
        body = PROMPT | request.pop("json", {})
        reply = self.http.post(self.url + path, json=body, timeout=90, **request)
        assert reply.status_code == 200, reply.text
        return reply.headers["x-smg-routed-worker-id"]

    def rounds(self, number: int) -> dict[tuple[str, str], list[str]]:
        """Ask all sessions in turn. Return the gates that answered each session, without repetitions."""
        found: dict[tuple[str, str], list[str]] = {}
        for _ in range(number):
            for name in SESSIONS:
                for way, request in WAYS.items():
                    seen = found.setdefault((name, way), [])
                    gate = self.ask(**request(name))
                    if seen[-1:] != [gate]:
                        seen.append(gate)
        return found

    def listed(self) -> set[str]:
        """Return the gates that smg chooses for new sessions. A known session stays at its gate."""
        return {self.ask(headers={"x-session-id": f"new-{number}"}) for number in itertools.islice(self.unused, 20)}

    def until(self, what: str, check: Callable[[], bool]) -> None:
        end = time.monotonic() + 90
        last: object = None
        while True:
            try:
                last = check()
            except (requests.RequestException, AssertionError) as error:
                last = error  # the front is not up yet, or smg has no engines
            if last is True:
                return
            assert time.monotonic() < end, f"not within 90 s: {what} (last seen: {last}); the fleet said:\n{self.log.read_text()[-3000:]}"
            time.sleep(0.1)

    def members(self) -> list[dict[str, Any]]:
        return list(requests.get(f"{self.url}/fleet", timeout=10).json()["members"])


@pytest.fixture(scope="module")
def engines() -> Iterator[StandInFleet]:
    with StandInFleet(engines=3, weight_version="base") as made:
        yield made


@pytest.fixture(params=list(POLICIES))
def routed(request: pytest.FixtureRequest, engines: StandInFleet, tmp_path: Path) -> Iterator[Routed]:
    address = f"127.0.0.1:{free_port()}"
    line = [sys.executable, "-m", "sglang_rollout.cli", "local", "--listen", address, "--policy", request.param]
    line += ["--backend", "gloo", "--state-dir", str(tmp_path), *(part for url in engines.urls for part in ("--engine", url))]
    with ExitStack() as stack:
        path = tmp_path / "local.log"
        log = stack.enter_context(path.open("wb"))
        local = start_child(line, stdout=log, stderr=log)
        stack.callback(local.wait, 30)
        stack.callback(local.terminate)
        made = Routed(f"http://{address}", engines, path)
        stack.callback(made.http.close)
        made.until("three engines are routed to", lambda: len(made.listed()) == 3)
        yield made


def test_a_session_moves_only_when_its_engine_leaves(routed: Routed) -> None:
    before = routed.rounds(4)
    assert {way: len(gates) for way, gates in before.items()} == dict.fromkeys(before, 1), "each session has one engine"
    assert all(len({before[name, way][0] for way in WAYS}) == 1 for name in SESSIONS), "for each way to name the session"
    assert len({gates[0] for gates in before.values()}) > 1, "the sessions use several engines"

    left = before[SESSIONS[0], "session_id"][0]
    number = next(at for at, member in enumerate(routed.members()) if member["url"] == left)
    routed.engines[number].kill()
    after = routed.rounds(3)  # also while smg still lists the engine
    routed.until("smg does not list the engine", lambda: left not in routed.listed())
    later = routed.rounds(3)
    for session, [old] in before.items():
        gates = [old]
        for gate in [*after[session], *later[session]]:
            if gates[-1] != gate:
                gates.append(gate)
        assert len(gates) == (2 if old == left else 1), f"{session} went {gates}"
    routed.engines[number].restart()
