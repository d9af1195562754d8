"""A client that sends requests all the time and checks every answer by its tokens, not by its label."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass, field
from typing import Any

import requests

from e2e.chaos.tokens import PROMPT, Expected


@dataclass
class Watch:
    """Sends requests to the fleet's URL. ``violations`` are wrong answers."""

    url: str
    expected: dict[str, Expected]
    """Expected tokens by label, of every version that was pushed or is being pushed."""
    violations: list[str] = field(default_factory=list)
    answers: int = 0
    spanning: int = 0
    """Number of answers with tokens of more than one version."""
    errors: int = 0
    answered: set[str] = field(default_factory=set)
    """Labels of all answers so far."""
    _stop: threading.Event = field(default_factory=threading.Event)
    _over: dict[str, float] = field(default_factory=dict)
    """When each version was replaced. No later request may be answered with it."""
    _threads: list[threading.Thread] = field(default_factory=list)

    def start(self, *lengths: int) -> None:
        """Start one client for each answer length, in tokens."""
        self._threads = [threading.Thread(target=self._run, args=(length,), daemon=True) for length in lengths]
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        """Stop and wait until the last answer is checked."""
        self._stop.set()
        for thread in self._threads:
            thread.join(30)

    def committed(self, label: str) -> None:
        """Record that the trainer knows of the commit: from now on only this version is right."""
        now = time.monotonic()
        for other in self.expected:
            if other != label:
                self._over.setdefault(other, now)
        self._over.pop(label, None)

    def failed(self, label: str) -> None:
        """Record that the version was not committed: no answer may come from it."""
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
            self.answered.add(span["version"])
            before, part = tokens[: span["start"]], tokens[span["start"] : span["end"]]
            if violation := self._wrong(span["version"], before, part, began):
                self.violations.append(violation)
                return

    def _wrong(self, label: str, before: list[int], tokens: list[int], began: float) -> str:
        """Return why tokens with this label are wrong after the given tokens; empty if they are right."""
        expected = self.expected.get(label)
        if expected is None or expected(before, len(tokens)) not in (tokens, None):
            known = list(self.expected.items())
            versions = (f"the tokens of {name}" for name, generated in known if generated(before, len(tokens)) == tokens)
            found = next(versions, "tokens of no version")
            return f"an answer labelled {label} holds {found}: {tokens}"
        if label in self._over and began > self._over[label]:
            return f"an answer of version {label} began {began - self._over[label]:.2f} s after it was replaced"
        return ""
