from __future__ import annotations

import socket
import threading
import time

import pytest

from sglang_rollout.testing import StandIn
from sglang_rollout.trainer import FleetError, FleetRefused, FleetUnreachable, GenerateFailed, VersionSpan, connect
from tests.unit.trainer.support.scripted_fleet import FakeFleet, Reply, Script, document


def reply(text: str, **meta: object) -> dict[str, object]:
    info = {"weight_version": "7", "finish_reason": {"type": "length", "length": 2}} | meta
    return {"text": text, "output_ids": [1, 2], "meta_info": info}


def test_samples_keep_the_order_of_the_prompts(fake: FakeFleet) -> None:
    fake.replies["/generate"] = lambda body: (200, reply(body["text"].upper()))
    with connect(fake.url, timeout=5) as fleet:
        samples = fleet.generate([f"p{i}" for i in range(20)], concurrency=5)
    assert [sample.text for sample in samples] == [f"P{i}" for i in range(20)]
    assert samples[0].finish_reason == "length"
    assert samples[0].weight_versions == [VersionSpan("7", 0, 2)]
    assert samples[0].logprobs is None
    assert samples[0].on_policy


def test_at_the_url_for_data_paths_generation_needs_no_control_path(fake: FakeFleet) -> None:
    del fake.replies["/fleet"]
    fake.replies["/fleet/health"] = (403, {"error": {"code": "data_paths_only", "message": "This port serves requests for tokens"}})
    fake.replies["/generate"] = (200, reply("x"))
    with connect(fake.url, timeout=5) as fleet:
        assert [sample.text for sample in fleet.generate(["p"])] == ["x"]
    assert set(fake.counts) == {"/fleet/health", "/health", "/generate"}


def test_a_name_that_no_engine_takes_is_refused_before_anything_is_sent(fake: FakeFleet) -> None:
    fake.replies["/fleet"] = (200, document(sampling_params=["max_new_tokens", "min_new_tokens", "sampling_seed", "temperature"]))
    fake.replies["/generate"] = (200, reply("x"))
    with connect(fake.url, timeout=5) as fleet:
        with pytest.raises(
            ValueError, match=r"^sampling_params has 'max_tokens'.* The nearest name is 'max_new_tokens'; .*Nothing was sent\."
        ):
            fleet.generate(["p"], sampling_params={"temperature": 1, "max_tokens": 8})
        with pytest.raises(ValueError, match=r"^sampling_params\[1\] has 'seed'.* The nearest name is 'sampling_seed'"):
            fleet.generate(["p", "q"], sampling_params=[{"temperature": 1}, {"seed": 8}])
        assert fake.counts["/generate"] == 0
        asked = fake.counts["/fleet"]
        for _ in range(3):
            fleet.generate(["p"], sampling_params={"temperature": 1, "max_new_tokens": 8})
        assert fake.counts["/fleet"] == asked, "names that are known cost no call"
        fake.replies["/fleet"] = (200, document(sampling_params=["max_tokens"]))
        fleet.generate(["p"], sampling_params={"max_tokens": 8})
    assert fake.calls[-1][1]["sampling_params"] == {"max_tokens": 8}, "the engines of a newer release know it"


@pytest.mark.parametrize("answer", [(200, document()), (404, {"success": False, "message": "no such path"}), (403, {"message": "no"})])
def test_a_fleet_that_does_not_say_its_names_is_asked_once_and_gets_any_name(fake: FakeFleet, answer: Reply) -> None:
    fake.replies["/fleet"] = answer
    fake.replies["/generate"] = (200, reply("x"))
    with connect(fake.url, timeout=5) as fleet:
        for _ in range(3):
            assert fleet.generate(["p"], sampling_params={"max_tokens": 8})[0].text == "x"
    assert (fake.counts["/fleet"], fake.counts["/generate"]) == (1, 3)


def test_prompts_are_sent_concurrently(fake: FakeFleet) -> None:
    together = threading.Barrier(4, timeout=10)
    fake.replies["/generate"] = lambda _: (together.wait() * 0 + 200, reply("x"))
    with connect(fake.url, timeout=5) as fleet:
        assert len(fleet.generate(["p"] * 4)) == 4


def test_spans_and_logprobs_are_read(fake: FakeFleet) -> None:
    spans = [{"version": "6", "start": 0, "end": 1}, {"version": "7", "start": 1, "end": 2}]
    logprobs = [[-0.5, 1, None], [-0.25, 2, None]]
    fake.replies["/generate"] = (200, reply("x", weight_versions=spans, output_token_logprobs=logprobs))
    with connect(fake.url, timeout=5) as fleet:
        (sample,) = fleet.generate(input_ids=[[5, 6]], return_logprob=True)
    assert sample.prompt == [5, 6]
    assert sample.logprobs == [-0.5, -0.25]
    assert sample.weight_versions == [VersionSpan("6", 0, 1), VersionSpan("7", 1, 2)]
    assert not sample.on_policy
    assert fake.calls[-1][1] == {"input_ids": [5, 6], "sampling_params": {}, "return_logprob": True}


def test_a_prompt_is_retried_while_the_fleet_may_not_serve(fake: FakeFleet) -> None:
    closed = (503, {"error": {"message": "no engine holds version 3"}}, {"Retry-After": "0"})
    fake.replies["/generate"] = [closed, closed, (200, reply("now"))]
    with connect(fake.url, timeout=5) as fleet:
        assert fleet.generate(["p"])[0].text == "now"
    assert fake.counts["/generate"] == 3


def test_at_the_deadline_the_error_has_the_last_answer(fake: FakeFleet) -> None:
    fake.replies["/generate"] = (503, {"error": {"message": "no engine holds version 3"}}, {"Retry-After": "30"})
    started = time.monotonic()
    with connect(fake.url, timeout=5) as fleet, pytest.raises(GenerateFailed, match="no engine holds version 3"):
        fleet.generate(["p", "q"], timeout=0.5)
    assert time.monotonic() - started < 20, "it waited for Retry-After, beyond its own timeout"


def test_a_permanent_refusal_is_not_retried(fake: FakeFleet) -> None:
    fake.replies["/generate"] = (400, {"error": {"message": "temperature must not be negative"}})
    with connect(fake.url, timeout=5) as fleet, pytest.raises(GenerateFailed, match="temperature must not be"):
        fleet.generate(["p"], sampling_params={"temperature": -1})
    assert fake.counts["/generate"] == 1


def test_contradictory_arguments_are_refused(fake: FakeFleet) -> None:
    with connect(fake.url, timeout=5) as fleet:
        assert fleet.generate([]) == []
        with pytest.raises(ValueError, match="either prompts or input_ids"):
            fleet.generate(["p"], input_ids=[[1]])
        with pytest.raises(ValueError, match="1 sampling_params for 2 prompts"):
            fleet.generate(["p", "q"], sampling_params=[{}])


def test_connect_waits_for_control_health(fake: FakeFleet) -> None:
    starting: list[Script] = [(503, {"message": "no engine is up yet"})] * 5
    fake.replies["/health"] = [*starting, (200, {})]
    connect(fake.url, timeout=10).close()
    assert fake.counts["/health"] == 6


def test_connect_reports_the_last_answer(fake: FakeFleet) -> None:
    fake.replies["/health"] = (503, {"message": "no engine is up yet"})
    with pytest.raises(FleetUnreachable, match=r"did not become healthy within 1 s.*no engine is up yet"):
        connect(fake.url, timeout=1)


@pytest.mark.parametrize(("status", "path"), [(401, "/fleet/health"), (403, "/fleet/health"), (403, "/health"), (400, "/fleet/health")])
def test_connect_raises_a_permanent_refusal_at_once(fake: FakeFleet, status: int, path: str) -> None:
    fake.replies[path] = (status, {"message": "pods of namespace other may not call", "code": "Forbidden"})
    with pytest.raises(FleetRefused, match=f"refused {path} with HTTP {status}: pods of namespace other may not call") as raised:
        connect(fake.url, timeout=60)
    assert fake.counts[path] == 1
    assert (raised.value.status, raised.value.code) == (status, "Forbidden")
    assert ("Pass token= or token_file=" in str(raised.value)) == (status in (401, 403) and path == "/fleet/health")


@pytest.mark.parametrize("status", [408, 429, 500, 502, 503, 504])
def test_connect_repeats_a_refusal_that_passes(fake: FakeFleet, status: int) -> None:
    fake.replies["/fleet/health"] = [(status, {"message": "later"}), (200, {"status": "ok", "term": 1})]
    connect(fake.url, timeout=10).close()


@pytest.mark.parametrize(
    "reply", [(404, {"detail": "Not Found"}), (405, {}), (501, {}), (200, {}), (200, "<html>")], ids=["404", "405", "501", "empty", "page"]
)
def test_connect_refuses_an_url_that_is_not_of_a_fleet_at_once(fake: FakeFleet, reply: Reply) -> None:
    fake.replies["/fleet/health"] = reply
    with pytest.raises(FleetRefused, match=r"is not the URL of a rollout fleet\. Use the URL of its router"):
        connect(fake.url, timeout=60)
    assert fake.counts["/fleet/health"] == 1


def test_connect_refuses_the_url_of_one_engine() -> None:
    with StandIn() as engine, pytest.raises(FleetRefused, match=r"If this is one engine, connect_engine\(url\) samples from it\."):
        connect(engine.url, timeout=60)


def test_connect_fails_if_no_server_listens() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # bound, not listening: connections are refused
        with pytest.raises(FleetUnreachable, match="could not be reached"):
            connect(f"http://127.0.0.1:{taken.getsockname()[1]}", timeout=0.5)


@pytest.mark.parametrize("url", ["demo-router:30000", "", "ftp://x"])
def test_connect_refuses_a_malformed_url(url: str) -> None:
    with pytest.raises(FleetError, match="is not the URL of a fleet"):
        connect(url)


def test_another_service_at_the_url_is_refused(fake: FakeFleet) -> None:
    fake.replies["/fleet"] = (200, {"hello": "world"})
    with connect(fake.url, timeout=5) as fleet, pytest.raises(FleetError, match="not a discovery document"):
        fleet.document()
