"""The check of requests in real engines and in the stand-in: what it refuses, in which shape, and that the engine lives."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import requests

from tests.contract.support import plugin_requests as table
from tests.contract.support.plugin_engines import PluginEngine, start_plugin_engine, start_plugin_stand_in

pytestmark = [pytest.mark.engine, pytest.mark.timeout(420)]

RANGE = "; this model's tokens are 0 to 2047."
OUTSIDE = "would_end_the_engine: input_ids holds token 99999" + RANGE
STREAM = pytest.mark.parametrize("stream", [False, True], ids=["plain", "stream"])
OTHER_DOORS: list[tuple[str, dict[str, Any]]] = [
    ("/vertex_generate", {"instances": [{"input_ids": [99999]}], "parameters": {}}),
    ("/v1/score", {"model": "m", "query": [5], "items": [[99999]], "label_token_ids": [1]}),
]


OLDEST = pytest.param("oldest", marks=pytest.mark.long)
REAL = pytest.mark.parametrize("checked", ["newest", OLDEST], indirect=True, scope="module")
ALL = pytest.mark.parametrize("checked", ["stand-in", "newest", OLDEST], indirect=True, scope="module")
NEW = pytest.mark.parametrize("checked", ["stand-in", "newest"], indirect=True, scope="module")


@pytest.fixture(scope="module")
def checked(request: pytest.FixtureRequest, engine_environment: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[PluginEngine]:
    """A real engine of the newest or of the oldest release, or the stand-in, with the plug-in."""
    folder = tmp_path_factory.mktemp("checked")
    if request.param == "stand-in":
        started = start_plugin_stand_in(folder)
    else:
        started = start_plugin_engine(folder, old=request.param == "oldest", args=["--enable-metrics"])
    with started as made:
        made.wait_for_proof(1)
        yield made


ROWS = [*((*row, table.BY_RULE) for row in table.HOSTILE), *((*row, table.BY_BODY) for row in table.HEAVY)]


@ALL
@STREAM
@pytest.mark.parametrize(("path", "body", "code", "where"), ROWS, ids=range(len(ROWS)))
def test_a_hostile_request_is_refused(checked: PluginEngine, path: str, body: Any, code: str, where: str, stream: bool) -> None:
    status, answer = table.send(checked.engine.url, path, body, stream=stream)
    found, message = table.take_message(answer)
    assert ((status, found), table.code_of(message)) == (table.expect_refusal(path, where, stream=stream), code), message
    checked.generate(input_ids=[5, 6])


@ALL
def test_the_sampling_parameters_that_it_reports_are_those_that_a_request_may_set(checked: PluginEngine) -> None:
    names = checked.reports().sampling_params
    prompt = {"input_ids": [5, 6]}
    for name in names:
        value = 1 if name == "n" else None  # SGLang answers n: null with 500
        status, answer = checked.post("/generate", prompt | {"sampling_params": {name: value, "max_new_tokens": 1}})
        assert status == 200, (name, answer)
    assert "choice" not in names, "SGLang's decoder takes it, and its sampling does not"
    for name in ("max_tokens", "stop_strs"):
        status, answer = checked.post("/generate", prompt | {"sampling_params": {name: None, "max_new_tokens": 1}})
        assert name not in names
        assert status != 200, (name, answer)
    status, answer = checked.post("/generate", prompt | {"sampling_params": {"max_tokens": 1}})
    listed = set(re.findall(r"`(\w+)`", str(answer))) - {"max_tokens", "choice"}
    assert listed in (set(), set(names)), "SGLang itself lists them since 0.5.21"


@NEW
@STREAM
@pytest.mark.parametrize(("path", "body", "code"), table.EMPTY)
def test_a_text_without_a_token_is_refused(checked: PluginEngine, path: str, body: Any, code: str, stream: bool) -> None:
    test_a_hostile_request_is_refused(checked, path, body, code, table.BY_RULE, stream)


@NEW
@STREAM
@pytest.mark.parametrize(("path", "body", "where"), table.WRONG, ids=range(len(table.WRONG)))
def test_what_sglang_itself_refuses_has_its_shape_and_no_code(
    checked: PluginEngine, path: str, body: Any, where: str, stream: bool
) -> None:
    status, answer = table.send(checked.engine.url, path, body, stream=stream)
    found, message = table.take_message(answer)
    assert ((status, found), table.code_of(message)) == (table.expect_refusal(path, where, stream=stream), None), message


@ALL
@STREAM
@pytest.mark.parametrize(("path", "body", "samples"), table.VALID, ids=range(len(table.VALID)))
def test_a_valid_request_is_answered(checked: PluginEngine, path: str, body: Any, samples: int | None, stream: bool) -> None:
    status, answer = table.send(checked.engine.url, path, body, stream=stream)
    assert status == 200, answer
    assert table.count_samples(path, answer, stream=stream) == samples


@REAL
@pytest.mark.parametrize(("path", "body"), OTHER_DOORS)
def test_a_hostile_request_through_another_door_is_refused(checked: PluginEngine, path: str, body: dict[str, Any]) -> None:
    status, answer = checked.post(path, body)
    assert status == 400, answer
    checked.generate(input_ids=[5, 6])


@ALL
def test_the_answer_has_the_sentence(checked: PluginEngine) -> None:
    assert checked.post("/generate", {"input_ids": [99999]}) == (400, {"error": {"message": OUTSIDE}})
    status, answer = checked.post("/v1/completions", {"model": "m", "prompt": [99999], "max_tokens": 2})
    assert (status, answer["message"], answer["code"]) == (400, OUTSIDE, 400)


TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}
CHAT = {"model": "m", "messages": [{"role": "user", "content": "a"}]}


@REAL
@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {"model": "m", "messages": [1] * 300_000}),
        ("/v1/chat/completions", {**CHAT, "tools": [TOOL] * 100_000, "tool_choice": "required"}),
        ("/v1/chat/completions", {"model": "m", "messages": [{"role": "user", "content": "a " * 2**22}]}),
        ("/v1/completions", {"model": "m", "prompt": "a " * 2**22}),
        ("/tokenize", {"model": "m", "prompt": "a " * 2**22}),
        ("/generate", {"text": "a " * 2**22}),
    ],
    ids=["messages", "tools", "long chat", "long prompt", "tokenize", "generate"],
)
def test_a_body_is_refused_before_sglang_validates_converts_or_tokenises_it(checked: PluginEngine, path: str, body: dict[str, Any]) -> None:
    assert checked.engine.process is not None
    server = f"/proc/{checked.engine.process.pid}/stat"
    before = read_cpu_seconds(server)
    status, answer = checked.post(path, body)
    used = read_cpu_seconds(server) - before
    assert (status, "above_limit: " in str(answer), len(str(answer)) < 1000) == (400, True, True), str(answer)[:500]
    assert used < 2.5, f"{used:.1f} s of processor time"


def read_cpu_seconds(file: str) -> float:
    fields = Path(file).read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


@REAL
def test_a_long_text_is_refused_before_it_is_tokenised(checked: PluginEngine) -> None:
    status, answer = checked.post("/generate", {"text": "alpha " * 2_000_000}, timeout=20)
    assert status == 400
    assert answer["error"]["message"].startswith("above_limit: text has 12000000 characters")
    assert "text has" not in str(checked.post("/generate", {"text": "alpha " * 2000})[1])


@REAL
def test_the_health_check_passes(checked: PluginEngine) -> None:
    assert requests.get(checked.engine.url + "/health_generate", timeout=30).status_code == 200


@REAL
def test_a_streaming_session_is_refused(checked: PluginEngine) -> None:
    status, answer = checked.post("/open_session", {"capacity_of_str_len": 1000, "streaming": True})
    assert (status, answer["error"]["message"].startswith("not_accepted: streaming sessions keep")) == (400, True)
    assert checked.post("/open_session", {"capacity_of_str_len": 1000})[0] == 200
