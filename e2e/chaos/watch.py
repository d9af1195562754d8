"""A client that never rests: it judges every answer by its tokens, not by its label."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass, field
from typing import Any

import requests

from e2e.chaos.tokens import PROMPT, Says


@dataclass
class Watch:
    """Asks through the URL, again and again. ``violations`` are answers that must not have been."""

    url: str
    expected: dict[str, Says]
    """By label, what is right of every version that was ever pushed or is being pushed."""
    violations: list[str] = field(default_factory=list)
    answers: int = 0
    spanning: int = 0
    """Of the answers: those with tokens of more than one version."""
    errors: int = 0
    _stop: threading.Event = field(default_factory=threading.Event)
    _over: dict[str, float] = field(default_factory=dict)
    """When a version was replaced: nothing that starts later may come from it."""
    _threads: list[threading.Thread] = field(default_factory=list)

    def start(self, *lengths: int) -> None:
        """Begin: a client for each length of an answer, in tokens."""
        self._threads = [threading.Thread(target=self._run, args=(length,), daemon=True) for length in lengths]
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

    def _run(self, tokens: int) -> None:
        params = {"temperature": 0, "max_new_tokens": tokens}
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
                    try:
                        self._judge(reply.json(), began)
                    except (KeyError, TypeError, ValueError) as error:
                        self.violations.append(f"an answer that cannot be judged ({error!r}): {reply.text[:200]}")
                else:
                    self.errors += 1
                time.sleep(0.02)

    def _judge(self, reply: dict[str, Any], began: float) -> None:
        self.answers += 1
        meta, tokens = reply["meta_info"], reply["output_ids"]
        if (meta.get("finish_reason") or {}).get("type") == "abort":
            return
        whole = {"version": meta["weight_version"], "start": 0, "end": len(tokens)}
        spans = meta.get("weight_versions") or [whole]
        self.spanning += len(spans) > 1
        for span in spans:
            before, part = tokens[: span["start"]], tokens[span["start"] : span["end"]]
            if said := self._wrong(span["version"], before, part, began):
                self.violations.append(said)
                return

    def _wrong(self, label: str, before: list[int], tokens: list[int], began: float) -> str:
        """What is wrong with tokens that are labelled so and follow others; empty: nothing."""
        says = self.expected.get(label)
        if says is None or says(before, len(tokens)) not in (tokens, None):
            known = list(self.expected.items())
            found = next((f"the tokens of {name}" for name, says in known if says(before, len(tokens)) == tokens), "tokens of no version")
            return f"an answer labelled {label} holds {found}: {tokens}"
        if label in self._over and began > self._over[label]:
            return f"an answer of version {label} began {began - self._over[label]:.2f} s after it was replaced"
        return ""
