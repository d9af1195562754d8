"""Paths of the fleet's URL beside those that generate: served, refused by name, or unknown."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio
from aiohttp import web

from sglang_rollout.batches import sending
from sglang_rollout.sglang.api import DIRECT_PATHS
from tests.contract.support.coordinator_process import HttpAgent, Lab, fleet_lab

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def lab(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Lab]:
    async with fleet_lab(tmp_path_factory.mktemp("fleet")) as made:
        yield made


def echo(agent: HttpAgent, name: str, status: int = 200) -> list[bytes]:
    """Let an engine answer its data paths, and return the list of the bodies that it will receive."""
    seen: list[bytes] = []

    async def answer(request: web.Request) -> web.StreamResponse:
        assert request.headers.get("Authorization") != "Bearer secret", "the control token is not for data paths"
        seen.append(await request.read())
        return web.json_response({"from": name, "path": request.path}, status=status)

    agent.answer_tokens = answer
    return seen


@pytest.mark.parametrize("path", DIRECT_PATHS)
async def test_engines_are_asked_in_turn_and_a_closed_gate_is_skipped(lab: Lab, path: str) -> None:
    first, second = lab.agents
    seen = echo(first, "e0"), echo(second, "e1")
    answers = [await lab.post(path, {"text": "a"}) for _ in range(4)]
    assert answers[0] == (200, "OK", {"from": answers[0][2]["from"], "path": path})
    assert [len(bodies) for bodies in seen] == [2, 2]
    echo(first, "e0", 503)
    assert [(await lab.post(path, {"text": "a"}))[2]["from"] for _ in range(3)] == ["e1"] * 3


async def test_an_engine_with_a_closed_gate_is_not_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sending, "HOLD_SECONDS", 0.3)
    async with fleet_lab(tmp_path) as lab:
        seen = [echo(agent, agent.agent.name) for agent in lab.agents]
        assert (await lab.get("/ready"))[0] == 200
        assert (await lab.open_group())[0] == 200
        assert (await lab.post("/begin_weight_update", {}))[0] == 200
        update = {"names": ["w"], "dtypes": ["float32"], "shapes": [[2]], "group_name": "g"}
        assert (await lab.post("/update_weights_from_distributed", update))[0] == 200
        await lab.serving(0)
        status, _, body = await lab.post("/v1/embeddings", {"input": "a"})
        assert (status, "none holds the weights that the fleet has committed" in body["error"]["message"]) == (503, True)
        assert seen == [[], []]
        for path in ("/ready", "/get_weights_by_name?name=w"):
            status, _, body = await lab.get(path)
            assert (status, "No engine serves now" in body["message"]) == (503, True)


@pytest.mark.parametrize(
    "data", [b'{"\\u0069nput_ids": [5, 1e3]}', '{"text": "\u00e9"}'.encode(), b'{"text": "a", "text": "b"}', b"[1]", b"{"]
)
async def test_bodies_of_direct_paths_reach_the_engine_as_they_came(lab: Lab, data: bytes) -> None:
    seen = [echo(agent, agent.agent.name) for agent in lab.agents]
    assert (await lab.call("POST", "/classify", data=data))[0] == 200
    assert seen[0] + seen[1] == [data]


@pytest.mark.parametrize(
    ("method", "path", "status", "sentence"),
    [
        ("POST", "/start_profile", 501, "/start_profile is not offered at the fleet's URL: it works on one engine's process"),
        ("GET", "/weights_checker", 501, "the fleet compares the engines' checksums itself"),
        ("POST", "/v1/responses/r1/cancel", 501, "Use /v1/chat/completions or /generate."),
        ("PUT", "/hicache/storage-backend", 501, "Set the flag in engine.args"),
        ("POST", "/hicaches", 404, "/hicaches is no path of this URL, which serves a fleet of SGLang engines. Data: /generate,"),
        ("GET", "/pause_generation", 405, "GET /pause_generation: use POST."),
        ("GET", "/v1/models/other", 404, "The model 'other' does not exist"),
        ("POST", "/get_weights_by_name", 400, "name is missing"),
        ("GET", "/get_weights_by_name?name=w&truncate_size=-5", 400, "truncate_size '-5' is out of range: use 1 to 100 rows."),
        ("GET", "/get_weights_by_name?name=w&truncate_size=101", 400, "truncate_size '101' is out of range"),
    ],
)
async def test_other_paths_are_refused_by_name(lab: Lab, method: str, path: str, status: int, sentence: str) -> None:
    found, reason, body = await lab.call(method, path)
    text = body["message"] if "message" in body else body["error"]["message"]
    assert (found, sentence in text) == (status, True), body
    assert text[:60] in reason or status == 404


async def test_data_paths_take_post_only(lab: Lab) -> None:
    status, _, body = await lab.get("/classify")
    assert (status, body["error"]["message"]) == (405, "GET /classify: use POST.")


async def test_a_refused_path_is_named_for_every_type_of_body(lab: Lab) -> None:
    headers = {"Content-Type": "multipart/form-data; boundary=b"}
    status, _, body = await lab.call("POST", "/v1/audio/transcriptions", data=b"--b--", headers=headers)
    assert (status, "audio" in body["message"]) == (501, True)


async def test_a_model_is_found_by_its_name(lab: Lab) -> None:
    assert await lab.get("/v1/models/m") == (200, "OK", {"id": "m"})
