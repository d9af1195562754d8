"""A scripted HTTP server in place of the API server, for replies that a real server rarely gives."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from aiohttp import web

from sglang_rollout.kube.client import Kube

Reply = web.StreamResponse | Callable[[web.Request], Awaitable[web.StreamResponse]]


@dataclass
class Script:
    """Replies in order, and the requests that came."""

    replies: list[Reply] = field(default_factory=list)
    requests: list[tuple[str, str, dict[str, str], Any]] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)
    bodies: list[str] = field(default_factory=list)

    async def answer(self, request: web.Request) -> web.StreamResponse:
        body = await request.text()
        self.requests.append((request.method, request.path, dict(request.query), json.loads(body) if body else None))
        self.headers.append(dict(request.headers))
        self.bodies.append(body)
        reply = self.replies.pop(0)
        return await reply(request) if callable(reply) else reply


def ok(body: Any) -> web.Response:
    return web.json_response(body)


def status(code: int, message: str, reason: str = "", **headers: str) -> web.Response:
    body = {"kind": "Status", "code": code, "message": message, "reason": reason}
    return web.json_response(body, status=code, headers={key.replace("_", "-"): value for key, value in headers.items()})


def stream(*chunks: bytes) -> Reply:
    async def send(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        for chunk in chunks:
            await response.write(chunk)
        return response

    return send


def write_kubeconfig(path: Path, server: str, token: str = "first") -> str:
    path.write_text(
        yaml.safe_dump(
            {
                "apiVersion": "v1",
                "kind": "Config",
                "current-context": "c",
                "contexts": [{"name": "c", "context": {"cluster": "c", "user": "u"}}],
                "clusters": [{"name": "c", "cluster": {"server": server}}],
                "users": [{"name": "u", "user": {"token": token}}],
            }
        )
    )
    return str(path)


@asynccontextmanager
async def scripted(folder: Path, *replies: Reply, **options: Any) -> AsyncIterator[tuple[Script, Kube]]:
    script = Script(list(replies))
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", script.answer)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    port = runner.addresses[0][1]
    kubeconfig = write_kubeconfig(folder / "kubeconfig", f"http://127.0.0.1:{port}")
    try:
        async with await Kube.connect(field_manager="tester", kubeconfig=kubeconfig, **options) as kube:
            yield script, kube
    finally:
        await runner.cleanup()
