"""A client that never rests: it judges every answer by its tokens, not by its label."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass, field

import requests

from e2e.chaos.trainer_protocol import PROMPT, TOKENS


@dataclass
class Watch:
    """Asks through the URL, again and again. ``violations`` are answers that must not have been."""

    url: str
    expected: dict[str, list[int]]
    """Tokens by label of every version that was ever pushed, or is being pushed."""
    violations: list[str] = field(default_factory=list)
    answers: int = 0
    errors: int = 0
    _stop: threading.Event = field(default_factory=threading.Event)
    _over: dict[str, float] = field(default_factory=dict)
    """When a version was replaced: nothing that starts later may come from it."""
    _threads: list[threading.Thread] = field(default_factory=list)

    def start(self, clients: int = 3) -> None:
        """Begin."""
        self._threads = [threading.Thread(target=self._run, daemon=True) for _ in range(clients)]
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        """End; returns when the last answer has been judged."""
        self._stop.set()
        for thread in self._threads:
            thread.join(30)

    def committed(self, label: str) -> None:
        """The trainer has been told that this version is committed: from now on no other is right."""
        now = time.monotonic()
        for other in self.expected:
            if other != label:
                self._over.setdefault(other, now)
        self._over.pop(label, None)

    def failed(self, label: str) -> None:
        """The version was not committed: nothing may come from it."""
        self._over.setdefault(label, time.monotonic())

    def _run(self) -> None:
        params = {"temperature": 0, "max_new_tokens": TOKENS}
        with requests.Session() as session:
            while not self._stop.is_set():
                began = time.monotonic()
                try:
                    reply = session.post(f"{self.url}/generate", json={"input_ids": PROMPT, "sampling_params": params}, timeout=60)
                except requests.RequestException:
                    self.errors += 1
                    time.sleep(0.05)
                    continue
                if reply.ok:
                    self._judge(reply.json(), began)
                else:
                    self.errors += 1
                time.sleep(0.02)

    def _judge(self, reply: dict[str, object], began: float) -> None:
        self.answers += 1
        meta = reply.get("meta_info")
        label = str(meta.get("weight_version")) if isinstance(meta, dict) else "?"
        finish = meta.get("finish_reason") if isinstance(meta, dict) else None
        if isinstance(finish, dict) and finish.get("type") == "abort":
            return
        tokens = reply.get("output_ids")
        match = [name for name, wanted in self.expected.items() if wanted == tokens]
        if isinstance(meta, dict) and len(meta.get("weight_versions") or []) > 1:
            return  # it spans an update and says so, token by token
        if not match:
            self.violations.append(f"an answer labelled {label} holds tokens of no version: {tokens}")
        elif match[0] != label:
            self.violations.append(f"an answer labelled {label} holds the tokens of {match[0]}")
        elif label in self._over and began > self._over[label]:
            self.violations.append(f"an answer of version {label} began {began - self._over[label]:.2f} s after it was replaced")
