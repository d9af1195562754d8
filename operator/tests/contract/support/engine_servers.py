"""The two servers of the engine contract, real SGLang and the stand-in, as processes with the same interface."""

from __future__ import annotations

import json
import subprocess
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryFile
from typing import IO, Any

import requests
from e2e.child import start_child
from e2e.engine import Engine, environment
from e2e.engine import make_engine as make_sglang

from tests.support.paths import TRAINERS, package_variables
from tests.support.ports import free_port

PEER = TRAINERS / "command_peer.py"


TIMES = {
    "request_received_ts", "first_token_latency", "api_server_dispatch_finish_ts", "response_sent_to_client_ts", "request_finished_ts",
    "decode_throughput", "forward_entry_time", "prefill_finished_time", "queue_time", "storage_prefetch_wait", "storage_staging_wait",
}  # fmt: skip
"""Fields that SGLang adds with --enable-metrics, each when its value is known. The stand-in omits them."""


def stand_in(port: int, log: Path, *args: str) -> Engine:
    """Return a stand-in process with torch and the real engine's model, which is not started yet."""
    command = [str(environment.python(make=False)), "-m", "sglang_rollout.testing", "--port", str(port)]
    command += ["--model", str(environment.model()), "--weight-version", "base", "--token-ms", "3", *args]
    return Engine(port, command, log, package_variables())


def sglang(port: int, log: Path, *, old: bool = False, args: Sequence[str] = (), model: Path | None = None) -> Engine:
    return make_sglang(port, log=log, old=old, args=["--enable-metrics", *args], model=model)


@dataclass
class Server:
    """One of the two servers, and a pool for calls that block."""

    kind: str
    engine: Engine
    pool: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(16))

    @property
    def url(self) -> str:
        return self.engine.url

    def ask(self, method: str, path: str, body: Any = None, timeout: float = 60) -> tuple[int, Any]:
        """Return status and body. The body is JSON or text."""
        reply = requests.request(method, self.url + path, json=body, timeout=timeout)
        if reply.headers.get("Content-Type", "").startswith("application/json"):
            return reply.status_code, reply.json()
        return reply.status_code, reply.text

    def get(self, path: str) -> tuple[int, Any]:
        return self.ask("GET", path)

    def post(self, path: str, body: Any = None) -> tuple[int, Any]:
        return self.ask("POST", path, body)

    def later(self, path: str, body: Any) -> Future[tuple[int, Any]]:
        return self.pool.submit(self.post, path, body)

    def generate(self, tokens: int = 4, **fields: Any) -> dict[str, Any]:
        body = {"input_ids": [11, 22, 33], "sampling_params": {"temperature": 0, "max_new_tokens": tokens, "ignore_eos": True}} | fields
        status, reply = self.post("/generate", body)
        assert status == 200, reply
        return dict(reply)

    def start_long(self, tokens: int = 1500) -> Future[dict[str, Any]]:
        """Start a generation that runs for seconds, and return after its begin."""
        future = self.pool.submit(self.generate, tokens)
        time.sleep(0.5)
        assert not future.done(), "the generation ended too early"
        return future

    def label(self) -> str:
        return str(self.get("/model_info")[1]["weight_version"])

    def restart(self) -> None:
        self.engine.kill()
        self.engine.start()
        self.engine.wait()

    def settle(self) -> None:
        """Bring the server back to the state after a start, except for its weights."""
        if self.engine.process is None or self.engine.process.poll() is not None:
            self.restart()
        self.post("/continue_generation", {})
        self.post("/abort_request", {"abort_all": True})
        self.post("/end_weight_update", {})

    def has_ended(self, seconds: float = 20) -> bool:
        """Return whether the process ends within the time."""
        assert self.engine.process is not None
        try:
            self.engine.process.wait(seconds)
        except subprocess.TimeoutExpired:
            return False
        return True


def refused(answer: tuple[int, Any], *places: str) -> None:
    """Assert that the answer is SGLang's validation error about these places of the body."""
    status, body = answer
    assert (status, body["object"], body["type"], body["code"]) == (400, "error", "Bad Request", 400)
    assert "validation error" in body["message"]
    for place in places:
        assert place in body["message"]


@dataclass
class Peer:
    """A trainer process."""

    process: subprocess.Popen[str]
    log: IO[str]
    group: str = ""

    def errors(self) -> str:
        """Return the end of what the process wrote to its error output."""
        self.log.seek(0)
        return self.log.read()[-2000:]

    def send_command(self, what: str, **fields: Any) -> None:
        assert self.process.stdin is not None
        try:
            self.process.stdin.write(json.dumps({"do": what, **fields}) + "\n")
            self.process.stdin.flush()
        except BrokenPipeError:
            raise AssertionError(self._end()) from None

    def _end(self) -> str:
        return f"the trainer process ended with {self.process.wait(10)}: {self.errors()}"

    def read_answer(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, self._end()
        return dict(json.loads(line))

    def open(self, servers: Sequence[Server | str], *, group: str | None = None, world: int | None = None) -> list[tuple[int, Any]]:
        """Open a process group with servers of one rank each, and return their answers."""
        self.group = group or f"group-{time.monotonic_ns()}"
        self.send_command("open", group=self.group, world=world or 1 + len(servers))
        port = self.read_answer()["port"]
        urls = [server if isinstance(server, str) else server.url for server in servers]
        with ThreadPoolExecutor(len(urls)) as pool:
            asked = [
                pool.submit(requests.post, f"{url}/init_weights_update_group", json=self.at(port, rank, world or 1 + len(urls)))
                for rank, url in enumerate(urls)
            ]
            try:
                assert self.read_answer() == {"joined": True}
            except AssertionError as error:
                early = {rank: future.result().text for rank, future in enumerate(asked, 1) if future.done()}
                raise AssertionError(f"{error}\nRanks that have answered: {early}") from error
            return [(future.result().status_code, future.result().json()) for future in asked]

    def at(self, port: int, rank: int, world: int) -> dict[str, Any]:
        return {
            "master_address": "127.0.0.1", "master_port": port, "rank_offset": 1 + rank, "world_size": world, "group_name": self.group,
            "backend": "gloo",
        }  # fmt: skip

    def describe(self, scale: float = 1.0, **how: Any) -> dict[str, Any]:
        """Prepare tensors, and return the part of the update's body that describes them."""
        self.send_command("send", model=str(environment.model()), scale=scale, **how)
        form = {"load_format": "flattened_bucket"} if how.get("flat") else {}
        return {**self.read_answer(), "group_name": self.group, **form}

    def send(self) -> dict[str, Any]:
        self.send_command("go")
        return self.read_answer()

    def push(self, server: Server, scale: float, fields: dict[str, Any] | None = None, **how: Any) -> tuple[int, Any]:
        """Send tensors with one update call and return its answer. Needs an open session."""
        body = self.describe(scale, **how) | {"flush_cache": False} | (fields or {})
        asked = server.later("/update_weights_from_distributed", body)
        self.send()
        return asked.result(60)

    def save(self, scale: float, folder: Path) -> None:
        self.send_command("save", model=str(environment.model()), scale=scale, to=str(folder))
        assert self.read_answer() == {"saved": True}

    def close(self) -> None:
        self.send_command("close")
        self.read_answer()

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(10)


@contextmanager
def peer() -> Iterator[Peer]:
    with TemporaryFile("w+") as log, start_peer(PEER, log) as process:
        yield Peer(process, log)


@contextmanager
def start_peer(script: Path, log: IO[str]) -> Iterator[subprocess.Popen[str]]:
    """Run a trainer that takes commands, for the length of the block."""
    command = [str(environment.python(make=False)), str(script)]
    process = start_child(command, env=package_variables(), stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True)
    watchdog = threading.Timer(240, process.kill)  # a trainer without an answer must not block the tests
    watchdog.start()
    try:
        yield process
    finally:
        watchdog.cancel()
        process.kill()
        process.wait(10)
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                with suppress(BrokenPipeError):
                    pipe.close()


@contextmanager
def server(kind: str, folder: Path) -> Iterator[Server]:
    port = free_port()
    engine = (stand_in if kind == "stand-in" else sglang)(port, folder / f"{kind}.log")
    engine.start()
    try:
        engine.wait()
        yield Server(kind, engine)
    finally:
        engine.kill()
