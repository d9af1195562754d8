"""Prompts that the batch server holds, and the end of those that an abort names. Does no I/O.

An engine ends only the requests that it has. Prompts that wait here for a place, for an engine or for the end of a pause would start after
the abort. So the coordinator sends each abort here before it sends it to the engines:

- A prompt that waits gets SGLang's answer to an aborted request.
- A prompt that was sent is ended by its engine, and is not sent again. Its answer is that of the engine, unless there is none in time.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Collection, Iterator
from contextlib import asynccontextmanager, contextmanager
from enum import Enum

from sglang_rollout.batches.aborted import AbortedError, Form
from sglang_rollout.wire.held import HeldAbort

_REMEMBERED_ABORTS = 256
"""Aborts whose repetitions are recognized. They come within seconds."""


class _State(Enum):
    """Who ends a prompt that is aborted."""

    WAITING = "waiting"
    """The batch server."""
    SENT = "sent"
    """The engine that has it or gets it; the batch server, if that engine does not."""
    ANSWERED = "answered"
    """The engine that answers."""


class HeldPrompt:
    """A prompt until its answer is complete."""

    def __init__(self, form: Form, aborts: list[HeldAbort]) -> None:
        self.form = form
        self.aborts = aborts
        """Aborts that name this prompt."""
        self.limit = asyncio.timeout(None)
        self._began = asyncio.get_running_loop().time()
        self._state = _State.WAITING

    def end(self, abort: HeldAbort) -> None:
        """Note an abort that names this prompt, and cancel a wait."""
        self.aborts.append(abort)
        if self._state is _State.WAITING:
            self.cancel()

    def cancel(self) -> None:
        """Cancel what is done for this prompt."""
        if not self.limit.expired():
            self.limit.reschedule(asyncio.get_running_loop().time())

    def is_left_of(self, abort: HeldAbort) -> bool:
        """Return True if the abort names this prompt and no engine has answered yet."""
        return self._state is _State.SENT and any(known.id == abort.id for known in self.aborts)

    def refuse_aborted(self) -> None:
        """Raise AbortedError if an abort names this prompt."""
        if self.aborts:
            raise AbortedError(self.form, self.aborts[0].weight_version, asyncio.get_running_loop().time() - self._began)

    @contextmanager
    def sending(self) -> Iterator[None]:
        """Send the prompt in this block. Raises AbortedError before the block if an abort names the prompt."""
        self.refuse_aborted()
        self._state = _State.SENT
        try:
            yield
        finally:
            self._state = _State.WAITING

    def note_answer(self) -> None:
        """Note that the answer of an engine begins."""
        self._state = _State.ANSWERED


class HeldRequest:
    """One request of a client. Keeps the aborts that came after it, because prompts of a large batch exist only when it is their turn."""

    def __init__(self, ended: asyncio.Event) -> None:
        self.rids: Collection[str] = frozenset()
        """Request IDs of all prompts, and the ID of a batch for which the client gave one."""
        self.prompts: set[HeldPrompt] = set()
        self._aborts: list[HeldAbort] = []
        self._ended = ended

    def end(self, abort: HeldAbort) -> None:
        """End the prompts that an abort names."""
        if abort.abort_all or any(_names(abort, rid) for rid in self.rids):
            self._aborts.append(abort)
        for prompt in self.prompts:
            if _names(abort, prompt.form.rid):
                prompt.end(abort)

    @asynccontextmanager
    async def hold(self, form: Form) -> AsyncIterator[HeldPrompt]:
        """Hold a prompt for the length of the block. Raises AbortedError if it is aborted."""
        prompt = HeldPrompt(form, [abort for abort in self._aborts if _names(abort, form.rid)])
        if prompt.aborts:
            await asyncio.sleep(0)  # many prompts of a batch end in a row
        self.prompts.add(prompt)
        try:
            async with prompt.limit:
                prompt.refuse_aborted()
                yield prompt
        except TimeoutError:
            if prompt.limit.expired():
                prompt.refuse_aborted()
            raise
        finally:
            self.prompts.discard(prompt)
            self._ended.set()


class HeldRequests:
    """All requests that the batch server holds."""

    def __init__(self) -> None:
        self._requests: set[HeldRequest] = set()
        self._known: deque[str] = deque(maxlen=_REMEMBERED_ABORTS)
        self._ended = asyncio.Event()
        """Set when a prompt ends."""

    @contextmanager
    def open(self) -> Iterator[HeldRequest]:
        """Hold a request of a client for the length of the block."""
        request = HeldRequest(self._ended)
        self._requests.add(request)
        try:
            yield request
        finally:
            self._requests.discard(request)

    async def abort(self, abort: HeldAbort) -> int:
        """End requests, and return how many of them were sent and are not answered."""
        if abort.id not in self._known:
            self._known.append(abort.id)
            if abort.abort_all or any(abort.rid in request.rids for request in self._requests):
                for request in self._requests:
                    request.end(abort)
        loop = asyncio.get_running_loop()
        end = loop.time() + abort.wait_seconds
        while (sent := self._find_sent(abort)) and loop.time() < end:
            self._ended.clear()
            try:
                async with asyncio.timeout_at(end):
                    await self._ended.wait()
            except TimeoutError:
                break
        if abort.is_last:
            for prompt in sent:
                prompt.cancel()
        return len(sent)

    def _find_sent(self, abort: HeldAbort) -> list[HeldPrompt]:
        return [prompt for request in self._requests for prompt in request.prompts if prompt.is_left_of(abort)]


def _names(abort: HeldAbort, rid: str) -> bool:
    """Return True if an abort names a request ID."""
    return abort.abort_all or (abort.rid != "" and rid.startswith(abort.rid))
