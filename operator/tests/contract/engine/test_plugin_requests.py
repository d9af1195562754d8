"""The check of requests in real engines: what it refuses, how SGLang answers, and that the engine lives."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import requests

from tests.contract.support.plugin_engines import PluginEngine, start_plugin_engine

pytestmark = [pytest.mark.engine, pytest.mark.timeout(420)]

PARAMS = {"max_new_tokens": 2, "temperature": 0}
RANGE = "; this model's tokens are 0 to 2047."
OUTSIDE = "would_end_the_engine: input_ids holds token 99999" + RANGE
FATAL: list[tuple[str, dict[str, Any]]] = [
    ("/generate", {"input_ids": [99999]}),
    ("/generate", {"input_ids": [5, -1], "stream": True}),
    ("/generate", {"text": ["a", "b"], "input_ids": [[5], [2**31]]}),
    ("/generate", {"text": ""}),
    ("/generate", {"text": ["a", ""]}),
    ("/generate", {"input_ids": [[]]}),
    ("/generate", {"text": "a", "sampling_params": {"top_k": 2**31}}),
    ("/generate", {"text": "a", "sampling_params": {"stop_token_ids": [-7], "min_new_tokens": 2, "max_new_tokens": 4}}),
    ("/generate", {"text": "a", "return_logprob": True, "top_logprobs_num": 5000}),
    ("/generate", {"text": "a", "return_logprob": True, "top_logprobs_num": [1]}),
    ("/generate", {"text": "a", "return_logprob": True, "logprob_start_len": [0]}),
    ("/generate", {"text": "a", "positional_embed_overrides": {"x": 1}}),
    ("/generate", {"text": "a", "sampling_params": {"logit_bias": {"5": 1e39}}}),
    ("/generate", {"text": "a", "sampling_params": {"stop_regex": "(.*)*(.*)*!", "max_new_tokens": 200}}),
    ("/vertex_generate", {"instances": [{"input_ids": [99999]}], "parameters": {}}),
    ("/v1/completions", {"model": "m", "prompt": [99999], "max_tokens": 2}),
    ("/v1/completions", {"model": "m", "prompt": "", "max_tokens": 2}),
    ("/v1/completions", {"model": "m", "prompt": "a", "n": 5000}),
    ("/v1/chat/completions", {"model": "m", "messages": [{"role": "user", "content": "a"}], "n": 5000}),
    ("/v1/chat/completions", {"model": "m", "messages": [{"role": "user", "content": "a"}], "logit_bias": {"5": 1e39}}),
    ("/v1/score", {"model": "m", "query": [5], "items": [[99999]], "label_token_ids": [1]}),
]


@pytest.fixture(scope="module", params=[pytest.param(False, id="newest"), pytest.param(True, id="oldest", marks=pytest.mark.long)])
def checked(request: pytest.FixtureRequest, engine_environment: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[PluginEngine]:
    with start_plugin_engine(tmp_path_factory.mktemp("checked"), old=request.param, args=["--enable-metrics"]) as engine:
        engine.wait_for_proof(1)
        yield engine


@pytest.mark.parametrize(("path", "body"), FATAL, ids=range(len(FATAL)))
def test_a_request_that_would_end_the_engine_is_refused(checked: PluginEngine, path: str, body: dict[str, Any]) -> None:
    status, answer = checked.post(path, body)
    if body.get("stream"):
        assert "would_end_the_engine" in str(answer)
    else:
        assert status == 400, answer
    checked.generate(input_ids=[5, 6])


def test_the_answer_has_the_shape_of_sglangs_own(checked: PluginEngine) -> None:
    assert checked.post("/generate", {"input_ids": [99999], "sampling_params": PARAMS}) == (400, {"error": {"message": OUTSIDE}})
    status, answer = checked.post("/v1/completions", {"model": "m", "prompt": [99999], "max_tokens": 2})
    assert (status, answer["message"], answer["code"]) == (400, OUTSIDE, 400)


TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}
CHAT = {"model": "m", "messages": [{"role": "user", "content": "a"}]}


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


@pytest.mark.parametrize("path", ["/generate", "/v1/completions"])
def test_a_stream_ends_with_an_error_or_does_not_begin(checked: PluginEngine, path: str) -> None:
    key = "input_ids" if path == "/generate" else "prompt"
    reply = requests.post(checked.engine.url + path, json={"model": "m", key: [99999], "stream": True}, timeout=30)
    if reply.status_code == 200:
        first = reply.text.split("\n\n")[0].removeprefix("data: ")
        assert OUTSIDE in json.dumps(json.loads(first)).replace("\\u0027", "'")
    else:
        assert (reply.status_code, OUTSIDE in reply.text) == (400, True)


def test_a_long_text_is_refused_before_it_is_tokenised(checked: PluginEngine) -> None:
    status, answer = checked.post("/generate", {"text": "alpha " * 2_000_000}, timeout=20)
    assert status == 400
    assert answer["error"]["message"].startswith("above_limit: text has 12000000 characters")
    assert "text has" not in str(checked.post("/generate", {"text": "alpha " * 2000})[1])


def test_other_requests_pass(checked: PluginEngine) -> None:
    assert checked.post("/generate", {"text": ["a", "b"], "sampling_params": PARAMS})[0] == 200
    assert checked.post("/v1/completions", {"model": "m", "prompt": ["a", "b"], "max_tokens": 2, "n": 2})[0] == 200
    chat = {"model": "m", "messages": [{"role": "user", "content": "a"}], "max_tokens": 2, "logprobs": True, "top_logprobs": 3}
    assert checked.post("/v1/chat/completions", chat)[0] == 200
    assert requests.get(checked.engine.url + "/health_generate", timeout=30).status_code == 200


def test_a_streaming_session_is_refused(checked: PluginEngine) -> None:
    status, answer = checked.post("/open_session", {"capacity_of_str_len": 1000, "streaming": True})
    assert (status, answer["error"]["message"].startswith("not_accepted: streaming sessions keep")) == (400, True)
    assert checked.post("/open_session", {"capacity_of_str_len": 1000})[0] == 200
