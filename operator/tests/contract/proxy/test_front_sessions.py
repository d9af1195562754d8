"""A session in a request's body reaches smg as a header, by which smg routes."""

from __future__ import annotations

import json

import pytest

from tests.contract.proxy.test_front import Front, front  # noqa: F401 - the fixture

pytestmark = pytest.mark.router
CHAT = {"messages": [{"role": "user", "content": 'my "session_id": "x"'}]}


@pytest.mark.parametrize(
    ("path", "body", "session"),
    [
        ("/generate", {"text": "a", "session_id": "game-7"}, "game-7"),
        ("/generate", {"input_ids": list(range(4000)), "session_id": "last"}, "last"),
        ("/generate", {"session_id": "first", "input_ids": list(range(60_000))}, "first"),
        ("/v1/chat/completions", {**CHAT, "session_id": "talk"}, "talk"),
        ("/v1/completions", {"prompt": "a", "session_id": 12}, "12"),
        ("/v1/chat/completions", CHAT, None),
        ("/generate", {"text": "a", "sampling_params": {"session_id": "deeper"}}, None),
        ("/generate", {"text": "a", "session_id": None}, None),
    ],
)
async def test_session_in_the_body_becomes_a_header(front: Front, path: str, body: object, session: str | None) -> None:  # noqa: F811
    for text in (json.dumps(body), json.dumps(body, indent=2), json.dumps(body, separators=(",", ":"))):
        _, answer, _ = await front.ask(path, text)
        assert (answer["from"], answer["session"]) == ("smg" if len(text) <= 60_000 else "batches", session)


@pytest.mark.parametrize("header", ["x-session-id", "x-smg-routing-key"])
async def test_header_has_precedence_over_the_body(front: Front, header: str) -> None:  # noqa: F811
    async with front.http.post(f"{front.url}/generate", json={"text": "a", "session_id": "body"}, headers={header: "head"}) as reply:
        assert (await reply.json())["session"] == ("head" if header == "x-session-id" else None)


@pytest.mark.parametrize("text", ["", "{", "[]", "no json", '{"session_id": "a', "\x00"])
async def test_body_that_is_not_json_passes_unchanged(front: Front, text: str) -> None:  # noqa: F811
    status, answer, _ = await front.ask("/generate", text)
    assert (status, answer["session"]) == (200, None)
