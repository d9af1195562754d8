"""Messages of ``POST /batches/abort``: the coordinator ends requests that the batch server holds."""

from __future__ import annotations

from sglang_rollout.wire import Message


class HeldAbort(Message):
    """Which requests end."""

    id: str
    """Identifies the abort. A repeated call ends no request that has arrived since the first."""
    rid: str = ""
    """As in SGLang: if a request with this ID is held, all requests whose IDs begin with it end."""
    abort_all: bool = False
    weight_version: str = ""
    """Label of the committed version, for the answers to the requests."""
    wait_seconds: float = 0.0
    """Longest wait for the engines' answers to requests that were sent before."""
    is_last: bool = False
    """True: cancel the requests that no engine has answered by then."""


class HeldAbortReply(Message):
    """What is left of an abort."""

    sent: int
    """Number of its requests that were sent and are not answered. Engines end them."""
