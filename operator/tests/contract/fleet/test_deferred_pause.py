"""Requests while an unmodified trainer, which pauses the fleet itself, sends weights to a fleet with transport Staged."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
import requests
from e2e.chaos.tokens import PROMPT
from e2e.engine import LabError, environment

from tests.contract.fleet.test_dialects import CONTINUE, Dialect, close_groups, slime, torchrl
from tests.contract.support.engine_servers import peer
from tests.contract.support.trainer_dialects import Fleet, Trainer, fleet

pytestmark = [pytest.mark.engine, pytest.mark.router, pytest.mark.timeout(300)]

SECONDS = 30.0
"""Deadline of waits that end at once unless something is broken."""
LONG = 2000
"""Tokens of a request that runs for 6 s; the model has room for 2048."""
CLIENTS = 2
"""Clients with long requests, so that one runs when another has just ended."""


@dataclass
class Observed(Trainer):
    """A trainer whose fleet gets requests before each of its buckets."""

    answers_at_once: bool = True
    during: list[Future[tuple[list[int], str]]] = field(default_factory=list)
    done_before_continue: list[bool] = field(default_factory=list)

    def send(self, scale: float, names: list[str], **options: Any) -> Any:
        self.during.append(self.pool.submit(self.fleet.generate))
        if self.answers_at_once:
            self.during[-1].result(SECONDS)
        return super().send(scale, names, **options)

    def post(self, path: str, body: Any = None) -> Any:
        if path == CONTINUE:
            self.done_before_continue = [answer.done() for answer in self.during]
        return super().post(path, body)


@pytest.fixture(scope="module", params=[pytest.param("Honour", marks=pytest.mark.long), "Defer"])
def lab(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    try:
        environment.python(make=False)
    except LabError as error:
        pytest.skip(str(error))
    staging = {"sizeLimit": "1Gi", "trainerPause": request.param}
    with fleet("staged", tmp_path_factory.mktemp("pause"), staging=staging) as made:
        made.kind = request.param
        yield made


def count_running(lab: Fleet) -> int:
    """Return the number of requests that run in the engines."""
    replies = [requests.get(f"{engine.url}/v1/loads", timeout=SECONDS).json() for engine in lab.engines]
    return sum(load["num_running_reqs"] for reply in replies for load in reply["loads"])


@contextmanager
def long_requests(lab: Fleet) -> Iterator[None]:
    """Let requests run from the beginning of the block to its end."""
    body = {"input_ids": PROMPT, "sampling_params": {"temperature": 0, "max_new_tokens": LONG}}
    stop = threading.Event()

    def repeat() -> None:
        while not stop.is_set():
            requests.post(f"{lab.url}/generate", json=body, timeout=60)

    clients = [threading.Thread(target=repeat) for _ in range(CLIENTS)]
    for client in clients:
        client.start()
    try:
        while not count_running(lab):
            time.sleep(0.01)  # the test's timeout ends it
        yield
    finally:
        stop.set()
        for client in clients:
            while client.is_alive():  # a request that a pause held back may begin after the first abort
                requests.post(f"{lab.url}/abort_request", json={"rid": "", "abort_all": True}, timeout=SECONDS)
                client.join(0.2)


@pytest.mark.parametrize("dialect", [Dialect(torchrl, CONTINUE), Dialect(slime, CONTINUE, processes=2)], ids=["torchrl", "slime"])
def test_requests_wait_for_the_trainer_or_are_answered_with_the_old_version(lab: Fleet, dialect: Dialect) -> None:
    """TorchRL polls the load until it is 0; slime flushes after its pause, which an engine refuses while requests run."""
    defers, scale, version = lab.kind == "Defer", lab.others()[0], str(lab.committed()["step"] + 1)
    before = lab.generate()
    with long_requests(lab), ExitStack() as stack:
        peers = [stack.enter_context(peer()) for _ in range(dialect.processes)]
        made = Observed(lab, peers, answers_at_once=defers)
        dialect.push(made, scale, version)
        after = (lab.expected[scale], version)
        answers = [answer.result(SECONDS) for answer in made.during]
    assert made.done_before_continue == [defers] * len(made.during)
    assert answers == [before if defers else after] * len(answers)
    assert lab.everywhere() == [after] * 3
    close_groups(lab)


def test_the_fleet_reports_no_running_requests_while_engines_generate(lab: Fleet) -> None:
    with long_requests(lab):
        paused = requests.post(f"{lab.url}/pause_generation", json={"mode": "retract"}, timeout=SECONDS)
        assert (paused.status_code, paused.json()["status"]) == (200, "ok")
        document = lab.document()
        assert (document["phase"], document["pause_deferred"]) == (("idle", True) if lab.kind == "Defer" else ("pause", False))
        assert [load["num_running_reqs"] for load in requests.get(f"{lab.url}/get_load", timeout=10).json()] == [0, 0]
        assert (count_running(lab) > 0) == (lab.kind == "Defer")
        assert requests.post(f"{lab.url}{CONTINUE}", json={}, timeout=SECONDS).ok
        assert not lab.document()["pause_deferred"]
