"""A failure or an interrupt ends ``generate`` at once, cancels running prompts, and keeps finished samples."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import requests

from sglang_rollout.testing import StandIn
from sglang_rollout.trainer import FailedPrompt, Fleet, GenerateFailed, connect, connect_engine
from sglang_rollout.trainer.calls import Cancellation, Http
from sglang_rollout.trainer.errors import FleetUnreachable
from tests.support.ports import free_port
from tests.unit.trainer.support.scripted_fleet import FakeFleet, Reply


class Script:
    """``held`` prompts are not answered until the test ends; others are answered once two held ones run."""

    def __init__(self) -> None:
        self.release = threading.Event()
        self.two_held = threading.Barrier(3)
        self.still_held = 0

    def __call__(self, body: dict[str, Any]) -> Reply:
        if body["text"] == "held":
            self.still_held += 1
            self.two_held.wait(10)
            self.release.wait(60)
            self.still_held -= 1
        elif body["text"] == "refused":
            self.two_held.wait(10)
            return 400, {"error": {"message": "temperature must not be negative"}}
        elif body["text"] == "interrupt":
            self.two_held.wait(10)
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
            self.release.wait(60)
        return 200, {"text": body["text"], "output_ids": [1], "meta_info": {}}


@pytest.fixture
def script(fake: FakeFleet) -> Iterator[Script]:
    made = Script()
    fake.replies["/generate"] = made
    yield made
    made.release.set()


@pytest.fixture
def fleet(fake: FakeFleet) -> Iterator[Fleet]:
    with connect(fake.url, timeout=5) as made:
        yield made


def until(check: Callable[[], bool], what: str) -> None:
    end = time.monotonic() + 20
    while not check():
        assert time.monotonic() < end, what
        time.sleep(0.02)


def threads_end() -> None:
    until(lambda: not any(thread.name == "rollout-send_prompts" for thread in threading.enumerate()), "the threads of generate end")


def test_the_first_refused_prompt_ends_the_call_with_the_finished_samples(fleet: Fleet, script: Script) -> None:
    with pytest.raises(GenerateFailed) as raised:
        fleet.generate(["done", "held", "held", "refused", "waiting"], concurrency=3, timeout=60)
    error = raised.value
    assert script.still_held == 2, "the call did not wait for the prompts that ran"
    assert [(sample.prompt_index, sample.text) for sample in error.samples] == [(0, "done")]
    assert error.failed == [FailedPrompt(3, "refused with HTTP 400: temperature must not be negative.")]
    assert error.cancelled == [1, 2, 4]
    assert str(error) == (
        f"1 of 5 prompts failed at {fleet.url}. Prompt 3: refused with HTTP 400: temperature must not be negative. "
        "1 finished (attribute `samples`), 3 were cancelled (attribute `cancelled`)."
    )
    threads_end()
    assert [sample.text for sample in fleet.generate(["again"] * 3)] == ["again"] * 3, "the handle is still good"


def test_keyboard_interrupt_is_raised_at_once(fleet: Fleet, script: Script) -> None:
    with pytest.raises(KeyboardInterrupt):
        fleet.generate(["held", "held", "interrupt"], timeout=60)
    assert script.still_held == 2
    threads_end()
    assert fleet.generate(["again"])[0].text == "again"


def test_the_deadline_names_each_prompt_without_a_sample(fake: FakeFleet, fleet: Fleet) -> None:
    busy = (503, {"error": {"message": "no engine holds version 3"}}, {"Retry-After": "30"})
    fake.replies["/generate"] = lambda body: busy if body["text"] == "busy" else (200, {"text": "x", "meta_info": {}})
    with pytest.raises(GenerateFailed, match=r"1 finished.*GET /fleet") as raised:
        fleet.generate(["done", "busy", "late"], concurrency=1, timeout=0.5)
    assert raised.value.failed == [
        FailedPrompt(1, "no sample within 0.5 s; the last answer (attempt 1): HTTP 503: no engine holds version 3."),
        FailedPrompt(2, "no sample within 0.5 s; it was not sent, because other prompts ran."),
    ]
    assert (len(raised.value.samples), raised.value.cancelled) == (1, [])


def test_an_unexpected_exception_is_raised_unchanged(fleet: Fleet, script: Script, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object, **__: object) -> None:
        raise RuntimeError("a defect")

    monkeypatch.setattr("sglang_rollout.trainer.generate.parse_samples", broken)
    with pytest.raises(RuntimeError, match="a defect"):
        fleet.generate(["done", "done"])


def test_an_engine_aborts_cancelled_requests() -> None:
    def running() -> int:
        return int(requests.get(f"{engine.url}/v1/loads", timeout=5).json()["loads"][0]["num_running_reqs"])

    def interrupt() -> None:
        until(lambda: running() == 6, "all samples are generated at the same time")
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)

    # Without the abort, 2000 tokens of 0.05 s keep the engine busy for 100 s.
    with StandIn(token_seconds=0.05) as engine, connect_engine(engine.url) as fleet:
        threading.Thread(target=interrupt, daemon=True).start()
        with pytest.raises(KeyboardInterrupt):
            fleet.generate(["a", "b"], n=3, sampling_params={"max_new_tokens": 2000})
        until(lambda: running() == 0, "the engine has aborted the requests")


def test_a_cancelled_session_can_be_used_again(fake: FakeFleet, script: Script) -> None:
    """Also one that had kept a connection alive, and a call that began after the cancel."""
    http, cancellation = Http(fake.url), Cancellation()
    assert http.send("POST", "/generate", {"text": "a"}, timeout=5, cancellation=cancellation).ok
    cancellation.cancel()
    with pytest.raises(FleetUnreachable, match=r"/generate could not be reached: the call was cancelled\.$"):
        http.send("POST", "/generate", {"text": "a"}, timeout=5, cancellation=cancellation)
    assert http.send("POST", "/generate", {"text": "a"}, timeout=5).ok
    assert fake.counts["/generate"] == 2
    http.close()


def test_an_address_without_a_server_is_reported_in_the_words_of_the_system() -> None:
    http = Http(f"http://127.0.0.1:{free_port()}")
    with pytest.raises(FleetUnreachable, match=r"/fleet could not be reached: Connection refused\.$"):
        http.send("POST", "/fleet", {}, timeout=5)
    with pytest.raises(FleetUnreachable, match=r"/fleet could not be reached: Connection refused\.$"):
        http.get("/fleet", timeout=5)
    http.close()
