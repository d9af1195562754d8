"""A real SGLang with a reward model behind the fleet's URL: its answers pass unchanged, and no request ends its process."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio
from e2e.engine import environment, start_engine

from sglang_rollout.sglang.api import DATA_PATHS
from sglang_rollout.wire.ports import VERSION_HEADER
from tests.contract.fleet.test_batches import steady
from tests.contract.support.agent_pod import until
from tests.contract.support.complete_fleet import CompleteFleet, complete_fleet
from tests.support.ports import free_port

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.router, pytest.mark.engine, pytest.mark.timeout(420)]

CLASSIFY, EMBEDDINGS, SCORE = "/classify", "/v1/embeddings", "/v1/score"


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def fleet(engine_environment: None, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[CompleteFleet]:
    """Yield a fleet of one engine with a reward model, whose process must not end."""
    with start_engine(free_port(), model=environment.model("--arch", "reward"), args=["--is-embedding"]) as engine:
        async with complete_fleet(tmp_path_factory.mktemp("fleet"), [engine.url]) as made:
            await made.serving(1)
            yield made
            assert engine.process is not None
            assert engine.process.poll() is None, "the engine ended"
            assert (await made.ask("POST", CLASSIFY, {"text": "alpha"})).status == 200, "the engine answers as before"


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (CLASSIFY, {"text": "alpha"}),
        (CLASSIFY, {"text": ["alpha", "beta gamma"], "rid": ["a", "b"]}),
        (CLASSIFY, {"input_ids": [[5, 6], [7]]}),
        ("/encode", {"input_ids": [5, 6]}),
        (EMBEDDINGS, {"model": "default", "input": ["alpha", "beta"]}),
        (EMBEDDINGS, {"model": "default", "input": [5, 6]}),
        ("/v1/classify", {"model": "default", "input": "alpha"}),
        ("/v1/rerank", {"query": "alpha", "documents": ["beta", "gamma"]}),
        (SCORE, {"query": "alpha", "items": ["beta", "gamma"]}),
        ("/tokenize", {"prompt": "alpha beta"}),
        ("/v1/tokenize", {"prompt": ["alpha", "beta"]}),
        ("/detokenize", {"tokens": [5, 6]}),
        ("/v1/detokenize", {"tokens": [[5], [6]]}),
    ],
)
async def test_a_reward_model_has_the_engines_answer(fleet: CompleteFleet, path: str, body: dict[str, Any]) -> None:
    ours, own = await fleet.ask("POST", path, body), await fleet.ask("POST", path, body, at=fleet.pods[0].engine_url)
    assert (ours.status, own.status) == (200, 200), ours
    assert steady(ours.body) == steady(own.body)
    assert {name.lower(): value for name, value in ours.headers.items()}[VERSION_HEADER.lower()] == "base"


@pytest.mark.parametrize(
    ("path", "body", "code"),
    [
        ("/generate", {"text": "alpha", "sampling_params": {"max_new_tokens": 2}}, "model_does_not_generate"),
        ("/v1/completions", {"model": "default", "prompt": [5, 6], "max_tokens": 2}, "model_does_not_generate"),
        (CLASSIFY, {"input_ids": [99999]}, "would_end_the_engine"),
        (CLASSIFY, {"input_ids": [[5], [-1]]}, "would_end_the_engine"),
        (CLASSIFY, {"input_ids": [[]]}, "would_end_the_engine"),
        (CLASSIFY, {"text": ["a", ""]}, "would_end_the_engine"),
        (CLASSIFY, {"text": "a", "sampling_params": {"top_k": 2**31}}, "would_end_the_engine"),
        (EMBEDDINGS, {"model": "default", "input": [99999]}, "would_end_the_engine"),
        ("/v1/classify", {"model": "default", "input": [99999]}, "would_end_the_engine"),
        (SCORE, {"query": [5], "items": [[99999]]}, "would_end_the_engine"),
        (SCORE, {"query": "", "items": [""]}, "would_end_the_engine"),
        (SCORE, {"query": [5], "items": [[6]], "embed_override_token_id": 5, "query_embed_overrides": [[0.5]]}, "would_end_the_engine"),
        (EMBEDDINGS, {"input": [[5]], "embed_override_token_id": 5, "embed_overrides": [[[0.5]]]}, "would_end_the_engine"),
    ],
)
async def test_a_request_that_would_end_sglang_does_not_reach_the_engine(
    fleet: CompleteFleet, path: str, body: dict[str, Any], code: str
) -> None:
    for at in (fleet.pods[0].url, None):
        answer = await fleet.ask("POST", path, body, at)
        if path == "/generate" and at is None and answer.status == 503:  # smg hears of an open gate a moment later

            async def refused() -> bool:
                return (await fleet.ask("POST", path, body)).status == 400

            await until(refused, 60, "smg has heard of an open gate")
            answer = await fleet.ask("POST", path, body)
        # The plug-in answers in SGLang's shape, which differs from path to path; the code begins the message.
        assert answer.status == 400, answer
        assert code in json.dumps(answer.body), answer


@pytest.mark.parametrize("body", ['{"\\u0069nput_ids": [99999]}', '{"input_ids": ["99999"]}', '{"input_ids": [1e5]}'])
async def test_a_body_with_a_hidden_token_is_refused(fleet: CompleteFleet, body: str) -> None:
    """The plug-in sees what SGLang has parsed, so no spelling hides a token."""
    async with fleet.http.post(fleet.url + CLASSIFY, data=body) as reply:
        assert reply.status == 400
        assert "would_end_the_engine" in await reply.text()


async def test_every_path_of_sglang_is_served_or_refused_by_name(fleet: CompleteFleet) -> None:
    schema = (await fleet.ask("GET", "/openapi.json", at=fleet.pods[0].engine_url)).body
    if isinstance(schema, str):
        schema = json.loads(schema)
    assert {*DATA_PATHS} - schema["paths"].keys() == {"/tokenize", "/detokenize"}, "SGLang leaves these two out of its schema"
    unknown = []
    for path, methods in schema["paths"].items():
        if path in (*DATA_PATHS, "/"):
            continue
        # With a method that no path takes, nothing is done: what is served answers 405.
        answer = await fleet.ask("PATCH", path.replace("{", "").replace("}", ""))
        if answer.status not in (405, 501):
            unknown.append((answer.status, path, sorted(methods)))
    assert unknown == []


async def test_an_unknown_tensor_gets_sglangs_refusal(fleet: CompleteFleet) -> None:
    answer = await fleet.ask("GET", "/get_weights_by_name?name=score.weight")
    assert (answer.status, "Get parameter by name failed" in str(answer.body)) == (400, True)
    assert (await fleet.ask("GET", "/ready")).status == 200
