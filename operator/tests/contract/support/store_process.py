"""The real weight store as a process with torch, and trainers that send through process groups."""

from __future__ import annotations

import json
import subprocess
import uuid
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import IO, Any

import requests
from e2e.child import start_child
from e2e.engine import environment
from e2e.kube import eventually

from sglang_rollout.staging.copies import MANIFEST, shard_file
from sglang_rollout.wire.ports import (
    BASE_HEADER,
    DIGEST_HEADER,
    FLEET_UPDATES,
    STORE_DROP,
    STORE_HEALTH,
    STORE_JOIN,
    STORE_LEAVE,
    STORE_OPEN,
    STORE_RECEIVE,
    STORE_SEAL,
    STORE_STATUS,
    TERM_HEADER,
    TICKET_HEADER,
)
from tests.contract.support.engine_servers import Peer, start_peer
from tests.support.paths import TRAINERS, package_variables
from tests.support.ports import free_port
from tests.support.proven import prove_now

TOKEN = "store-secret"
SIZE_LIMIT = 1 << 30
UPLOAD_TICKET, TICKET = "upload-ticket", "read-ticket"
TensorRow = tuple[str, str, list[int]]
"""Name, type as torch writes it, and shape."""
KINDS = {"bfloat16": ("BF16", 2), "float32": ("F32", 4), "uint8": ("U8", 1)}
Answer = tuple[int, dict[str, Any]]


def new_update() -> str:
    return uuid.uuid4().hex


def shard_of(tensors: Sequence[TensorRow]) -> dict[str, Any]:
    return {"tensors": [{"name": name, "dtype": KINDS[dtype][0], "shape": shape} for name, dtype, shape in tensors]}


def version(step: int, label: str = "") -> dict[str, Any]:
    return {"run": 1, "step": step, "label": label or str(step)}


@dataclass
class StoreProcess:
    """A weight store, and the calls of a coordinator and of an uploader."""

    folder: Path
    python: str = ""
    """Interpreter. Empty: that of the engine environment, which has torch."""
    port: int = field(default_factory=free_port)
    data_port: int = field(default_factory=free_port)
    metrics_port: int = field(default_factory=free_port)
    term: int = 1
    options: tuple[str, ...] = ()
    """Further options of the command."""
    wrapper: tuple[str, ...] = ()
    """Command that starts the store's command."""
    process: subprocess.Popen[bytes] | None = None
    pool: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(8))

    @property
    def volume(self) -> Path:
        return self.folder / "volume"

    @property
    def data_url(self) -> str:
        return f"http://127.0.0.1:{self.data_port}"

    def start(self) -> None:
        (self.folder / "token").write_text(TOKEN)
        command = [
            *self.wrapper,
            *(self.python or str(environment.python(make=False)), "-m", "sglang_rollout.cli", "store", "--name", "demo-store"),
            *("--listen", f"127.0.0.1:{self.port}", "--data-listen", f"127.0.0.1:{self.data_port}"),
            *("--metrics-listen", f"127.0.0.1:{self.metrics_port}"),
            *("--volume", str(self.volume), "--state-dir", str(self.folder / "state"), "--token-file", str(self.folder / "token")),
            *self.options,
        ]
        with (self.folder / "store.log").open("ab") as log:
            self.process = start_child(command, env=package_variables(), stdout=log, stderr=log)
        eventually("the weight store answers", self._is_up, within=60)

    def stop(self) -> None:
        assert self.process is not None
        self.process.kill()
        self.process.wait(10)

    def restart(self) -> None:
        self.stop()
        self.start()

    def log(self) -> str:
        return (self.folder / "store.log").read_text()

    def call(self, path: str, body: dict[str, Any] | None = None, *, term: int | None = None, token: str = TOKEN) -> Answer:
        url, data = f"http://127.0.0.1:{self.port}{path}", json.dumps(body or {}).encode()
        headers = prove_now(url, data, {TERM_HEADER: str(self.term if term is None else term)}, token=token)
        reply = requests.post(url, data=data, headers=headers, timeout=120)
        return reply.status_code, reply.json() | {"headers": dict(reply.headers)}

    def later(self, path: str, body: dict[str, Any]) -> Future[Answer]:
        return self.pool.submit(self.call, path, body)

    def status(self) -> dict[str, Any]:
        status, body = self.call(STORE_STATUS)
        assert status == 200, body
        return body

    def updates(self) -> dict[str, str]:
        """Return the digest of each version by the ID of its update."""
        return {copy["update"]: copy["digest"] for copy in self.status()["copies"]}

    def open(self, update: str, tensors: Sequence[Sequence[TensorRow]] = (), **changes: Any) -> Answer:
        shards = [shard_of(rows) for rows in tensors]
        upload = {"upload_ticket": UPLOAD_TICKET} if shards else {}
        return self.call(STORE_OPEN, {"update": update, "ticket": TICKET, "size_limit": SIZE_LIMIT, "shards": shards, **upload, **changes})

    def join(self, trainer: Peer, group: str, how: str = "rendezvous") -> Answer:
        """Open a process group with a trainer, in one of the ways of ``store_peer.py``, and return the answer."""
        trainer.send_command("open", group=group, how=how)
        opened = trainer.read_answer()
        trainer.group = opened["group"]
        reply = self.later(STORE_JOIN, self.at(opened))
        assert trainer.read_answer() == {"joined": True}
        return reply.result(60)

    @staticmethod
    def at(opened: dict[str, Any], **changes: Any) -> dict[str, Any]:
        """Return the body of a call to join the process group that a trainer opens."""
        return {"group_name": opened["group"], "master_address": "127.0.0.1", "master_port": opened["port"], "deadline": 60} | changes

    def leave(self, group: str) -> Answer:
        return self.call(STORE_LEAVE, {"group_name": group})

    def announce(self, update: str, group: str, tensors: Sequence[TensorRow], *, flat: bool, deadline: float = 60) -> Future[Answer]:
        body = {"update": update, "group_name": group, "shard": shard_of(tensors), "flattened": flat, "deadline": deadline}
        return self.later(STORE_RECEIVE, body)

    def receive(self, trainer: Peer, update: str, tensors: Sequence[TensorRow], *, flat: bool, seed: int = 0) -> str:
        """Let a trainer send one bucket, and return the SHA-256 of its bytes."""
        trainer.send_command("send", tensors=tensors, seed=seed, flat=flat)
        digest = str(trainer.read_answer()["sha256"])
        reply = self.announce(update, trainer.group, tensors, flat=flat)
        trainer.send_command("go")
        sent = trainer.read_answer()
        assert "sent" in sent, sent
        status, body = reply.result(60)
        assert status == 200, body
        return digest

    def drop_all(self) -> None:
        """Leave all process groups, and delete all versions."""
        for group in self.status()["groups"]:
            self.leave(group)
        assert self.call(STORE_DROP, {"keep": []})[1]["copies"] == []

    def seal(self, update: str, step: int) -> Answer:
        return self.call(STORE_SEAL, {"update": update, "version": version(step)})

    def put(
        self,
        update: str,
        place: tuple[int, int],
        data: bytes,
        *,
        ticket: str = UPLOAD_TICKET,
        digest: str | None = None,
        base: str | None = None,
    ) -> Answer:
        headers = {TICKET_HEADER: ticket, DIGEST_HEADER: digest or sha256(data).hexdigest()}
        headers |= {} if base is None else {BASE_HEADER: base}
        url = f"{self.data_url}{FLEET_UPDATES}/{update}/pieces/{place[0]}/{place[1]}"
        reply = requests.put(url, data=data, headers=headers, timeout=60)
        return reply.status_code, reply.json()

    def missing(self, update: str, ticket: str = UPLOAD_TICKET) -> list[tuple[int, int]]:
        reply = requests.get(f"{self.data_url}{FLEET_UPDATES}/{update}", headers={TICKET_HEADER: ticket}, timeout=60)
        assert reply.status_code == 200, reply.text
        return [(shard, piece) for shard, piece in reply.json()["missing"]]

    def data_digest(self, update: str, shard: int) -> str:
        """Return the SHA-256 of the tensors' bytes in a shard's file."""
        data = (self.volume / update / shard_file(shard)).read_bytes()
        return sha256(data[8 + int.from_bytes(data[:8], "little") :]).hexdigest()

    def is_complete(self, update: str) -> bool:
        return (self.volume / update / MANIFEST).exists()

    def _is_up(self) -> bool:
        with suppress(requests.ConnectionError):
            return requests.get(f"http://127.0.0.1:{self.port}{STORE_HEALTH}", timeout=10).status_code == 200
        return False


@contextmanager
def store_process(
    folder: Path, python: str = "", *, options: tuple[str, ...] = (), wrapper: tuple[str, ...] = ()
) -> Iterator[StoreProcess]:
    """Run a weight store for the length of the block."""
    made = StoreProcess(folder, python, options=options, wrapper=wrapper)
    made.start()
    try:
        yield made
    finally:
        made.stop()
        made.pool.shutdown(cancel_futures=True)


@contextmanager
def trainer_process(log: IO[str]) -> Iterator[Peer]:
    """Run a trainer for the length of the block."""
    with start_peer(TRAINERS / "store_peer.py", log) as process:
        yield Peer(process, log)
