"""Floods from one client: calls that are refused, bodies that do not end, and bodies that no process accepts."""

from __future__ import annotations

import json
import socket
import threading
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field

ANSWER_SECONDS = 5.0
DRIP_SECONDS = 1.0
"""Time between two bytes of a slow body."""


def message(path: str, body: bytes = b"", *, length: int | None = None, header: str = "") -> bytes:
    """Return a POST request.

    Args:
        path: Path.
        body: Bytes that are sent.
        length: ``Content-Length``; None: that of the body.
        header: A further header.
    """
    lines = [f"POST {path} HTTP/1.1", "Host: localhost", "Content-Type: application/json", header]
    lines.append(f"Content-Length: {len(body) if length is None else length}")
    return "\r\n".join([*filter(None, lines), "", ""]).encode() + body


@dataclass(frozen=True)
class FloodKind:
    """What a client sends, each message again and again."""

    address: str
    """Address of the client. Trainer and other clients use 127.0.0.1, and limits of the front apply to each address."""
    messages: Sequence[bytes]
    statuses: frozenset[int]
    """Expected answers."""
    connections: int
    drips: bool = False
    """True if a byte of the body follows each ``DRIP_SECONDS``, so that no message ends."""


_PROMPT = {"input_ids": [1], "sampling_params": {"max_new_tokens": 1}}
_CONTROL_PATHS = ("/pause_generation", "/update_weights_from_distributed", "/fleet/run")
REFUSED_CALLS = FloodKind(
    "127.0.0.2",
    # A fleet without Kubernetes refuses no other call of its own machine.
    messages=[message(path, header="Origin: http://example.com") for path in _CONTROL_PATHS],
    statuses=frozenset({403, 429, 503}),
    connections=64,
)
SLOW_BODIES = FloodKind(
    "127.0.0.3",
    messages=[message(path, b"{", length=100_000) for path in ("/generate", "/v1/completions", *_CONTROL_PATHS)],
    statuses=frozenset({408, 503}),
    connections=200,
    drips=True,
)
MALFORMED_BODIES = FloodKind(
    "127.0.0.4",
    messages=[
        *(
            message("/generate", body)
            for body in (
                b'{"\\u0069nput_ids": [-1]}',
                b'{"input_ids": [1, "2"]}',
                b'{"input_ids": [1e9]}',
                b'{"text": "a", "sampling_params": {"n": 1000000}}',
                json.dumps(_PROMPT).encode("utf-16"),
                b"[" * 50_000,
                b"\xff\xfe",
            )
        ),
        *(message(path, b"[" * 50_000) for path in _CONTROL_PATHS),
        *(message(path, b" " * 61_000, length=2**40) for path in ("/generate", *_CONTROL_PATHS)),
    ],
    statuses=frozenset({400, 413, 422, 503}),
    connections=16,
)


@dataclass
class Flood:
    """Sends the messages of a kind until it is stopped."""

    kind: FloodKind
    url: str
    running: dict[str, list[int]]
    """Processes of the fleet before the flood, by part. None of them may end."""
    statuses: Counter[int] = field(default_factory=Counter)
    connected: int = 0
    """Number of connections that were accepted."""
    _stop: threading.Event = field(default_factory=threading.Event)
    _threads: list[threading.Thread] = field(default_factory=list)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def start(self) -> None:
        """Start all connections."""
        self._threads = [threading.Thread(target=self._run, args=(index,), daemon=True) for index in range(self.kind.connections)]
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        """Stop, and wait until all connections are closed."""
        self._stop.set()
        for thread in self._threads:
            thread.join(2 * ANSWER_SECONDS)

    def check(self, running: dict[str, list[int]], outcome: str) -> None:
        """Check what a flood must not change.

        Args:
            running: Processes of the fleet now.
            outcome: Outcome of the push during which the flood began; empty: there was none.

        Raises:
            AssertionError: A process restarted, the push did not commit, or the flood got other answers than expected.
        """
        ended = {part: pids for part, pids in self.running.items() if running.get(part) != pids}
        if ended:
            raise AssertionError(f"restarted during the flood: {', '.join(ended)}")
        if outcome not in ("", "committed"):
            raise AssertionError(f"the push {outcome} because of a flood")
        unexpected = {status: number for status, number in self.statuses.items() if status not in self.kind.statuses}
        if unexpected or not self.connected:
            raise AssertionError(f"{self.connected} connections of the flood got answers {dict(self.statuses)}")

    def _run(self, index: int) -> None:
        host, _, port = self.url.removeprefix("http://").partition(":")
        turn = index
        while not self._stop.is_set():
            with (
                suppress(OSError),  # above a limit of the front
                socket.create_connection((host, int(port)), timeout=ANSWER_SECONDS, source_address=(self.kind.address, 0)) as connection,
            ):
                self.connected += 1
                connection.sendall(self.kind.messages[turn % len(self.kind.messages)])
                self._drip(connection) if self.kind.drips else self._note(connection.recv(4096))
            turn += 1

    def _drip(self, connection: socket.socket) -> None:
        """Send a byte again and again until the answer comes."""
        connection.settimeout(DRIP_SECONDS)
        while not self._stop.is_set():
            try:
                answer = connection.recv(4096)
            except TimeoutError:
                connection.sendall(b"x")
            else:
                self._note(answer)
                return

    def _note(self, answer: bytes) -> None:
        """Count the status of an answer. The front resets connections above its limits without an answer."""
        if answer:
            with self._lock:
                self.statuses[int(answer.split(b" ", 2)[1])] += 1
