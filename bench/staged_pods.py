"""Pods of bench.staged_fanout in one process: each copies a version with the staging package, or through plain sockets.

    python -m bench.staged_pods FOLDER FIRST_PORT FIRST_POD COUNT

Each line of the input is a command in JSON, each line of the output an answer. Pod 0 has the bytes. A pod serves version data at port
FIRST_PORT + 2 * pod, and plain bytes at the next port.

    {"do": "fill", "size"}                                          {"digest"}       create the version in pod 0
    {"do": "stage", "update", "parents": {pod: [pod, …]}, "digest"} {"done": time}   copy it into these pods
    {"do": "raw", "parents": {pod: pod}, "size"}                    {"done": time}   copy plain bytes along the same tree
    {"do": "drop", "keep": [update]}                                {"done": time}   delete all other copies
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import socket
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack, ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import uvloop
from aiohttp import web

from sglang_rollout.staging.copies import Copies
from sglang_rollout.staging.pull import pull
from sglang_rollout.staging.serve import staging_routes
from sglang_rollout.wire.staged import PIECE_BYTES, Shard, StagedTensor, StageRequest

TICKET = "ticket-of-the-benchmark"
UPDATE = "0" * 32
RAW_FILE = "plain-bytes"
_CHUNK = 2**20
_SECONDS = 120.0


@dataclass
class RawPod:
    """One node of a tree of plain sockets. It writes what arrives to a file, and sends the file to its children meanwhile."""

    path: Path
    port: int
    received: int = 0
    arrived: threading.Condition = field(default_factory=threading.Condition)

    def listen(self, children: int) -> socket.socket:
        """Listen for the children of this pod."""
        return socket.create_server(("127.0.0.1", self.port), backlog=max(1, children))

    def run(self, listener: socket.socket, parent: int | None, children: int, size: int) -> float:
        """Receive from the parent's port, and send to all children. Returns the time when all bytes had arrived here."""
        with listener, ThreadPoolExecutor(children + 1) as pool:
            listener.settimeout(_SECONDS)
            served = pool.submit(self._serve, listener, pool, children, size)
            if parent is None:
                self._note(size)
            else:
                self._receive(parent, size)
            ended = time.monotonic()
            served.result()
        return ended

    def _receive(self, port: int, size: int) -> None:
        buffer = memoryview(bytearray(_CHUNK))
        with socket.create_connection(("127.0.0.1", port), timeout=_SECONDS) as connection, self.path.open("r+b", buffering=0) as file:
            while self.received < size:
                count = connection.recv_into(buffer)
                if not count:
                    raise RuntimeError("the parent has closed the connection")
                os.pwrite(file.fileno(), buffer[:count], self.received)
                self._note(self.received + count)

    def _note(self, received: int) -> None:
        with self.arrived:
            self.received = received
            self.arrived.notify_all()

    def _wait_for_more(self, known: int) -> int:
        with self.arrived:
            if not self.arrived.wait_for(lambda: self.received > known, timeout=_SECONDS):
                raise RuntimeError("no further bytes have arrived")
            return self.received

    def _serve(self, listener: socket.socket, pool: ThreadPoolExecutor, children: int, size: int) -> None:
        sends = [pool.submit(self._send, listener.accept()[0], size) for _ in range(children)]
        for send in sends:
            send.result()

    def _send(self, connection: socket.socket, size: int) -> None:
        sent = 0
        with connection, self.path.open("rb", buffering=0) as file:
            connection.settimeout(None)
            while sent < size:
                received = self._wait_for_more(sent)
                while sent < received:
                    sent += os.sendfile(connection.fileno(), file.fileno(), sent, received - sent)


class Pods:
    """The pods of this process."""

    def __init__(self, folder: Path, first_port: int, numbers: range, session: aiohttp.ClientSession) -> None:
        self._folder = folder
        self._first_port = first_port
        self._session = session
        self._copies = {number: Copies(folder / f"pod-{number}", folder / f"state-{number}") for number in numbers}

    async def listen(self, stack: AsyncExitStack) -> None:
        """Serve the data port of each pod."""
        for number, copies in self._copies.items():
            app = web.Application()
            app.add_routes(staging_routes(copies))
            runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
            await runner.setup()
            stack.push_async_callback(runner.cleanup)
            await web.TCPSite(runner, "127.0.0.1", self._port(number)).start()

    def _port(self, number: int, *, raw: bool = False) -> int:
        return self._first_port + 2 * number + raw

    async def fill(self, size: int) -> dict[str, Any]:
        """Create a version of random bytes in pod 0, and the file of plain bytes."""
        copy = self._copies[0].open(UPDATE, TICKET, size)
        copy.add_shard(Shard(tensors=[StagedTensor(name="weights", dtype="U8", shape=[size])]))
        with self._raw_path(0).open("wb") as file:
            for piece in range(-(-size // PIECE_BYTES)):
                data = os.urandom(min(PIECE_BYTES, size - piece * PIECE_BYTES))
                copy.write_piece(0, piece, data, hashlib.sha256(data).hexdigest())
                file.write(data)
        return {"digest": copy.seal().digest, "update": UPDATE}

    async def stage(self, parents: Mapping[str, list[int]], size: int, digest: str) -> dict[str, Any]:
        """Copy the version into these pods at the same time."""
        calls = []
        for number, above in parents.items():
            copy = self._copies[int(number)].open(UPDATE, TICKET, size)
            urls = [f"http://127.0.0.1:{self._port(each)}" for each in above]
            request = StageRequest(update=UPDATE, parents=urls, ticket=TICKET, size_limit=size, digest=digest, deadline=_SECONDS)
            calls.append(pull(self._session, request, copy))
        await asyncio.gather(*calls)
        return {"done": time.monotonic()}

    async def raw(self, parents: Mapping[str, int | None], children: Mapping[str, int], size: int) -> dict[str, Any]:
        """Copy plain bytes into these pods at the same time."""
        pods = {number: RawPod(self._raw_path(int(number)), self._port(int(number), raw=True)) for number in parents}
        with ThreadPoolExecutor(len(pods)) as pool, ExitStack() as stack:
            listeners = {number: stack.enter_context(pod.listen(children[number])) for number, pod in pods.items()}
            print(json.dumps({"listening": True}), flush=True)
            await asyncio.to_thread(sys.stdin.readline)  # all other processes listen
            for number, pod in pods.items():
                if parents[number] is not None:
                    pod.path.write_bytes(b"")
            ports = {number: None if above is None else self._port(above, raw=True) for number, above in parents.items()}
            runs = [pool.submit(pod.run, listeners[number], ports[number], children[number], size) for number, pod in pods.items()]
            ended = [await asyncio.wrap_future(run) for run in runs]
        return {"done": max(ended)}

    async def drop(self, keep: list[str]) -> dict[str, Any]:
        """Delete all copies but these, and the files of plain bytes in all pods but pod 0."""
        for number, copies in self._copies.items():
            await copies.keep(set(keep))
            if number:
                self._raw_path(number).unlink(missing_ok=True)
        return {"done": time.monotonic()}

    def _raw_path(self, number: int) -> Path:
        return self._folder / f"pod-{number}" / RAW_FILE


async def main() -> None:
    """Obey commands until the input ends."""
    folder, first_port, first_pod, count = Path(sys.argv[1]), *map(int, sys.argv[2:5])
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector) as session, AsyncExitStack() as stack:
        pods = Pods(folder, first_port, range(first_pod, first_pod + count), session)
        await pods.listen(stack)
        works: dict[str, Callable[..., Awaitable[dict[str, Any]]]] = {
            "fill": pods.fill,
            "stage": pods.stage,
            "raw": pods.raw,
            "drop": pods.drop,
        }
        print(json.dumps({"ready": True}), flush=True)
        while line := await asyncio.to_thread(sys.stdin.readline):
            command = json.loads(line)
            print(json.dumps(await works[command.pop("do")](**command)), flush=True)


if __name__ == "__main__":
    uvloop.run(main())
