"""Find out during an upload whether the weight store still works.

The weight store answers questions over a slow link, too. A weight store that hangs, or whose node is lost, answers none.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from http import HTTPStatus
from typing import Any

import requests

from sglang_rollout.trainer.errors import FleetError, FleetRefused, FleetUnreachable

SILENT_SECONDS = 5.0
"""Time without a complete piece after which the weight store is asked for the state of the upload. Also the timeout of the question."""
MAX_UNANSWERED = 2
"""Questions in a row without an answer after which the weight store counts as lost."""
_NO_STORE = frozenset({HTTPStatus.BAD_GATEWAY, HTTPStatus.SERVICE_UNAVAILABLE, HTTPStatus.GATEWAY_TIMEOUT})
"""Answers of the fleet's URL in place of the weight store."""


class StoreWatch:
    """Finds out whether the weight store still works while no piece becomes complete.

    Args:
        store: Name of the weight store; empty: not known.
        ask: Asks the weight store for the state of the upload, with a timeout in seconds.
    """

    def __init__(self, store: str, ask: Callable[[float], Any]) -> None:
        self._store = store
        self._ask = ask
        self._lock = threading.Lock()
        self._alive_at = self._asked_at = time.monotonic()
        self._unanswered = 0

    def note_piece(self) -> None:
        """Note that a piece is complete. Any thread may call this."""
        with self._lock:
            self._alive_at, self._unanswered = time.monotonic(), 0

    def check(self) -> None:
        """Ask the weight store, if no piece has become complete for some time and the last question is as old.

        Raises:
            FleetUnreachable: The questions stay unanswered.
            FleetRefused: The weight store does not have the upload.
        """
        now = time.monotonic()
        if now - max(self._alive_at, self._asked_at) < SILENT_SECONDS:
            return
        self._asked_at = now
        try:
            self._ask(SILENT_SECONDS)
        except FleetRefused as error:
            if error.status in _NO_STORE:
                self._note_unanswered(error.reason)
            elif error.status != HTTPStatus.TOO_MANY_REQUESTS:  # the fleet's URL itself answers with this status
                raise
        except FleetError as error:
            # A URL that takes no connection says nothing about the weight store: a new router pod starts.
            if isinstance(error.__cause__, requests.exceptions.ReadTimeout):
                self._note_unanswered(str(error))
        else:
            self.note_piece()

    def _note_unanswered(self, answer: str) -> None:
        self._unanswered += 1
        if self._unanswered < MAX_UNANSWERED:
            return
        silent = time.monotonic() - self._alive_at
        store = f"the weight store {self._store}".rstrip()
        raise FleetUnreachable(f"{store} has taken no piece and answered no question for {silent:.0f} s. The last question: {answer}")
