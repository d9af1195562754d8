"""Answers of other processes are read with limits, and no part of the product reads one without."""

from __future__ import annotations

import ast
import gzip
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

import sglang_rollout
from sglang_rollout.bounded import MIB, AnswerTooLargeError, open_session, read_answer, read_json

ROOT = Path(sglang_rollout.__file__).parent
FORBIDDEN = frozenset({"read", "text", "json"})
"""Methods of an answer that read all of it, and decompress it."""
ALLOWED = {
    "bounded.py": "the one place",
    "kube/client.py": "answers of the API server, which the operator trusts with everything",
    "trainer": "read_body of trainer/calls.py has read these with its limit",
    "weights": "read_body of trainer/calls.py has read these with its limit",
    "testing": "the stand-in engine",
}
"""Files and packages that may call these methods, and why."""
ANSWERS = frozenset({"answer", "reply", "response", "resp"})
"""How answers are called. Requests to our servers have a limit of their own (client_max_size)."""


@asynccontextmanager
async def served(handle: Callable[[web.Request], web.StreamResponse]) -> AsyncIterator[str]:
    async def answer(request: web.Request) -> web.StreamResponse:
        return handle(request)

    app = web.Application()
    app.router.add_get("/", answer)
    async with TestServer(app) as server:
        yield str(server.make_url("/"))


async def test_an_answer_is_read_up_to_its_limit() -> None:
    async with served(lambda _: web.json_response([1, 2])) as url, open_session() as http:
        async with http.get(url) as answer:
            assert await read_json(answer, 6) == [1, 2]
        async with http.get(url) as answer:
            with pytest.raises(AnswerTooLargeError, match="at most 5"):
                await read_answer(answer, 5)


async def test_an_answer_without_a_length_is_cut() -> None:
    async def endless(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        while True:
            await response.write(b" " * MIB)

    app = web.Application()
    app.router.add_get("/", endless)
    async with TestServer(app) as server, open_session() as http, http.get(str(server.make_url("/"))) as answer:
        with pytest.raises(AnswerTooLargeError, match="more than"):
            await read_answer(answer, 3 * MIB)


@pytest.mark.parametrize("encoding", ["gzip", "deflate", "br", "zstd", "GZIP"])
async def test_a_compressed_answer_is_not_read(encoding: str) -> None:
    seen: list[str] = []

    def packed(request: web.Request) -> web.Response:
        seen.append(request.headers["Accept-Encoding"])
        return web.Response(body=gzip.compress(b" " * MIB), headers={"Content-Encoding": encoding})

    async with served(packed) as url, open_session() as http, http.get(url) as answer:
        with pytest.raises(AnswerTooLargeError, match="compressed"):
            await read_answer(answer, 2 * MIB)
    assert seen == ["identity"]


def test_errors_of_limits_are_errors_of_the_call() -> None:
    assert issubclass(AnswerTooLargeError, aiohttp.ClientError)


def unbounded(source: str) -> Iterator[int]:
    """Yield the lines that read an answer without limit, or open a session that decompresses."""
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
            continue
        owner, method = node.func.value, node.func.attr
        if isinstance(owner, ast.Name) and owner.id in ANSWERS and method in FORBIDDEN and not node.args:
            yield node.lineno
        if method == "ClientSession" and not any(word.arg == "auto_decompress" for word in node.keywords):
            yield node.lineno
        if (
            method in {"readany", "read"}
            and ast.unparse(node).startswith(tuple(f"{name}.content.read(" for name in ANSWERS))
            and not node.args
        ):
            yield node.lineno


def test_the_check_finds_each_form() -> None:
    for line in ("await reply.read()", "await answer.json(content_type=None)", "await response.text()", "aiohttp.ClientSession(timeout=1)"):
        assert list(unbounded(f"async def f(reply, answer, response):\n    {line}\n")) == [2], line
    assert not list(unbounded("async def f(file, request):\n    file.read(); await request.read(); file.read_text()\n"))


def test_no_answer_is_read_without_a_limit() -> None:
    found = []
    for path in ROOT.rglob("*.py"):
        name = str(path.relative_to(ROOT))
        if name in ALLOWED or name.split("/", maxsplit=1)[0] in ALLOWED:
            continue
        found += [f"{name}:{line}" for line in unbounded(path.read_text())]
    assert found == [], "use sglang_rollout.bounded"
