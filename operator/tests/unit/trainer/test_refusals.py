"""Why a call was refused, as the client reads it from all shapes of answers."""

from __future__ import annotations

import json
from typing import Any

import pytest
import requests

from sglang_rollout.testing import StandIn
from sglang_rollout.trainer import FailedPrompt, FleetRefused, GenerateFailed, connect, connect_engine
from sglang_rollout.trainer.refusals import find_error, read_reason
from sglang_rollout.wire.errors import AnsweredError
from tests.unit.trainer.support.scripted_fleet import FakeFleet

TOO_MANY = "n is 5000, above the limit of 1024; engine.limits.samplesPerPrompt raises it."
EVENT = {"error": {"message": f"above_limit: {TOO_MANY}", "type": "invalid_request_error", "code": 400, "retryable": False}}


def answer(body: Any, kind: str = "application/json", status: int = 400) -> requests.Response:
    made = requests.Response()
    made.status_code, made.reason = status, "Bad Request"
    made.headers["Content-Type"] = kind
    made._content = (body if isinstance(body, str) else json.dumps(body)).encode()
    return made


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ({"error": {"message": f"above_limit: {TOO_MANY}"}}, AnsweredError(TOO_MANY, "above_limit")),
        (
            {"object": "error", "message": f"above_limit: {TOO_MANY}", "type": "400", "param": None, "code": 400},
            AnsweredError(TOO_MANY, "above_limit"),
        ),
        ({"error": {"code": "above_limit", "type": "invalid_request_error", "message": TOO_MANY}}, AnsweredError(TOO_MANY, "above_limit")),
        ({"success": False, "code": "Forbidden", "message": "No."}, AnsweredError("No.", "Forbidden")),
        ({"error": {"message": "temperature: must be positive"}}, AnsweredError("temperature: must be positive")),
        ({"error": "invalid type: string, expected i64"}, AnsweredError("invalid type: string, expected i64")),
        ({"object": "error", "message": "1 validation error:\n x", "code": 400}, AnsweredError("1 validation error:\n x")),
        ("", AnsweredError("Bad Request")),
        ([1], AnsweredError("Bad Request")),
    ],
    ids=range(9),
)
def test_the_code_and_the_sentence_are_read_from_every_shape(body: Any, reason: AnsweredError) -> None:
    assert read_reason(answer(body)) == reason


def test_plain_text_says_more_than_the_phrase() -> None:
    text = "Failed to deserialize the JSON body into the target type: sampling_params.top_k: invalid value"
    assert read_reason(answer(text, "text/plain; charset=utf-8")) == AnsweredError(text)
    assert read_reason(answer("<html>", "text/html")) == AnsweredError("Bad Request")
    assert read_reason(answer("", "text/plain")) == AnsweredError("Bad Request")


def test_an_error_in_a_stream_is_found() -> None:
    def stream(*events: Any) -> requests.Response:
        text = "".join(f"data: {json.dumps(event)}\n\n" for event in events)
        return answer(f": waiting\n\n{text}data: [DONE]\n\n", "text/event-stream; charset=utf-8", 200)

    sample = {"text": 'the "error" of a model', "meta_info": {}}
    assert find_error(stream(EVENT)) == AnsweredError(TOO_MANY, "above_limit")
    assert find_error(stream(sample, {**EVENT, "index": 3})) == AnsweredError(TOO_MANY, "above_limit")
    assert find_error(stream(sample)) is None
    assert find_error(answer(EVENT, status=200)) == AnsweredError(TOO_MANY, "above_limit")
    assert find_error(answer(sample, status=200)) is None


def test_the_exception_has_the_code_and_the_sentence_of_the_plug_in() -> None:
    with StandIn() as engine, connect_engine(engine.url) as fleet, pytest.raises(GenerateFailed) as raised:
        fleet.generate(["a"], sampling_params={"top_k": 2**31})
    sentence = "refused with HTTP 400: top_k is larger than 2147483647; use -1 for the whole vocabulary."
    assert raised.value.failed == [FailedPrompt(0, sentence, "would_end_the_engine")]
    assert raised.value.code == "would_end_the_engine"
    assert sentence in str(raised.value)


def test_an_error_with_status_200_is_raised(fake: FakeFleet) -> None:
    fake.replies["/generate"] = (200, EVENT)
    with connect(fake.url, timeout=5) as fleet, pytest.raises(GenerateFailed) as raised:
        fleet.generate(["a"])
    assert raised.value.failed == [FailedPrompt(0, f"refused with {TOO_MANY}", "above_limit")]


def test_a_refusal_of_sglang_itself_has_no_code(fake: FakeFleet) -> None:
    fake.replies["/generate"] = (400, {"error": {"message": "temperature must not be negative"}})
    with connect(fake.url, timeout=5) as fleet, pytest.raises(GenerateFailed) as raised:
        fleet.generate(["a"])
    assert raised.value.code is None


def test_a_refused_control_call_has_its_code(fake: FakeFleet) -> None:
    fake.replies["/flush_cache"] = (403, {"success": False, "code": "Forbidden", "message": "Not you."})
    with connect(fake.url, timeout=5) as fleet, pytest.raises(FleetRefused) as raised:
        fleet._http.post("/flush_cache", {}, timeout=5)
    assert (raised.value.code, raised.value.reason) == ("Forbidden", "Not you.")
