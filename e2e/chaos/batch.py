"""Batches of the fault matrix: one that runs when its server is killed, and the next one."""

from __future__ import annotations

import threading

import requests

from e2e.chaos.tokens import PROMPT

PROMPTS = 4
LONG = 500
"""Tokens of each answer to a batch that must still run at the strike: ten seconds of a stand-in."""
RETRYABLE = (502, 503)


def send_batch(url: str, tokens: int) -> requests.Response:
    """Send a batch and return the reply."""
    params = {"temperature": 0, "max_new_tokens": tokens}
    return requests.post(f"{url}/generate", json={"input_ids": [PROMPT] * PROMPTS, "sampling_params": params}, timeout=60)


def is_complete(reply: requests.Response, tokens: int) -> bool:
    """Return whether the reply has an answer of this length to each prompt."""
    return reply.ok and [len(answer["output_ids"]) for answer in reply.json()] == [tokens] * PROMPTS


class RunningBatch:
    """A batch with long answers, sent at once. Its server is killed before the answers are complete."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._result = "no answer"
        self._thread = threading.Thread(target=self._send, daemon=True)
        self._thread.start()

    @property
    def has_ended(self) -> bool:
        """True if the client has the result."""
        return not self._thread.is_alive()

    def check_is_retryable(self, within: float) -> None:
        """Wait for the result. Raise AssertionError unless it is an error after which clients send the batch again."""
        self._thread.join(within)
        if self._result:
            raise AssertionError(f"the batch whose server was killed must end with a retryable error within {within:g} s: {self._result}")

    def _send(self) -> None:
        try:
            reply = send_batch(self._url, LONG)
        except requests.RequestException as error:
            self._result = type(error).__name__
            return
        is_retryable = reply.status_code in RETRYABLE and "Retry-After" in reply.headers
        self._result = "" if is_retryable else f"HTTP {reply.status_code}: {reply.text[:200]}"
