"""State of a stand-in from one boot to its death.

This is what SGLang's tokenizer process keeps (pause, versions, running requests) and the queue to its scheduler. Everything runs in one
event loop; blocking work goes to threads.

SGLang's scheduler handles one message at a time and generates between messages. Here the scheduler is a lock. A control call holds the
lock, and tokens wait for it. A call that never ends blocks all others, but calls that only the tokenizer process answers still work.
"""

from __future__ import annotations

import asyncio
import itertools
import secrets
import threading
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar

from sglang_rollout.testing.faults import Fault, Faults, Kind, Phase
from sglang_rollout.testing.policy import VOCABULARY, Held, Weights


class RequestsOrUpdate:
    """SGLang's lock between generation and updates.

    Readers are requests, writers are updates. A waiting writer blocks new readers.
    """

    def __init__(self) -> None:
        self._condition = asyncio.Condition()
        self.readers = 0
        self._writing = False
        self._waiting = 0

    @asynccontextmanager
    async def reader(self) -> AsyncIterator[None]:
        """Hold the lock while a request runs."""
        async with self._condition:
            await self._condition.wait_for(lambda: not self._writing and not self._waiting)
            self.readers += 1
        try:
            yield
        finally:
            async with self._condition:
                self.readers -= 1
                self._condition.notify_all()

    @asynccontextmanager
    async def writer(self) -> AsyncIterator[None]:
        """Hold the lock for an update of an engine that is not paused. Waits for the last running request."""
        async with self._condition:
            self._waiting += 1
            try:
                await self._condition.wait_for(lambda: not self._writing and not self.readers)
            finally:
                self._waiting -= 1
            self._writing = True
        try:
            yield
        finally:
            async with self._condition:
                self._writing = False
                self._condition.notify_all()


T = TypeVar("T")

NEW_VERSION = "0.5.23"
"""SGLang version whose API a stand-in has."""
OLD_VERSION = "0.5.20"
"""Last SGLang version without begin_weight_update and end_weight_update."""
_ABORT_AGAIN_SECONDS = 1.0
"""SGLang repeats the abort of running requests after this time. So a pause takes a second if a request runs."""


@dataclass(frozen=True)
class Setup:
    """Start options of a stand-in, the same for all its boots."""

    tensors: Mapping[str, Held]
    sessions: bool = True
    """Updates must run between begin_weight_update and end_weight_update, as in SGLang 0.5.21 and later."""
    tensor_size: int = 1
    """Number of tensor-parallel ranks. Each is one rank of a weight-update group."""
    pipeline_size: int = 1
    """Number of pipeline stages. They take part in loads of staged versions only."""
    data_size: int = 1
    """Replicas of the model. They hold the same weights here; with several, SGLang takes weights from disk only."""
    loaders: tuple[str, ...] = ()
    """Values of ``load_format`` that name the loader of staged versions, as ``--custom-weight-loader`` does."""
    weight_version: str = "default"
    model_path: str = "stand-in"
    token_seconds: float = 0.0
    """Time per token. With 0, requests end at once, so none runs when a control call arrives."""
    context_length: int = 2048
    """Tokens of prompt and completion together."""
    health_seconds: float = 20.0
    """Timeout of /health_generate."""
    vocabulary: int = VOCABULARY
    memory_saver: bool = False
    """Released memory loses its contents, as with --enable-memory-saver. Without it a release changes nothing, as in SGLang."""
    lora: bool = False
    """Adapters can be loaded."""
    plugin: bool = True
    """The plug-in is active: the stand-in writes its reports, if the environment names a folder for them."""
    updates_refused: str = ""
    """Why updates of the weights are refused, as by an SGLang that has derived data from them; empty: they are not."""
    weights_backup: bool = False
    """Restored weights are unchanged, as with --enable-weights-cpu-backup."""

    @property
    def ranks(self) -> int:
        """Number of processes that load a staged version."""
        return self.tensor_size * self.pipeline_size

    @property
    def version(self) -> str:
        """SGLang version that the stand-in reports."""
        return NEW_VERSION if self.sessions else OLD_VERSION


@dataclass(eq=False)
class Running:
    """A request in the scheduler."""

    rid: str
    prompt: list[int]
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    changes: list[tuple[str, int]] = field(default_factory=list)
    """(previous version, tokens generated with it) for each update during the request."""
    retractions: int = 0
    waiting: bool = False
    """Moved back to the queue by a pause in mode retract."""
    aborted: bool = False
    started: float = field(default_factory=time.monotonic)


class Unavailable(Exception):
    """A fault answers this call with 503."""


class Boot:
    """State of one boot. ``die`` is called with the reason where the real server would end."""

    def __init__(self, setup: Setup, faults: Faults, *, port: int, die: Callable[[str], None]) -> None:
        self.setup, self.faults, self.port, self._die = setup, faults, port, die
        self.boot_id = secrets.token_hex(8)
        self.started = time.time()
        self.startup_seconds = secrets.randbelow(10**9) / 10**8
        """Random, like a measured time. /server_info shows it, so that clients can tell one boot from another."""
        self.seed = secrets.randbelow(10**9)
        self.weights = Weights(setup.tensors)
        self.model_path = setup.model_path
        self.weight_version = setup.weight_version
        """Version that /model_info reports."""
        self.scheduler_version = setup.weight_version
        """Version that samples report. Differs from ``weight_version`` only after a flush that failed."""
        self.healthy = True
        self.paused = False
        self.frozen = False
        """The scheduler does not step: paused in mode retract or in_place."""
        self.requests: dict[str, Running] = {}
        self.session = False
        self.groups: dict[str, list[Any]] = {}
        self.joining: list[Any] = []
        """Ranks of a group that is not open yet."""
        self.released: set[str] = set()
        self.adapters: dict[str, str] = {}
        self.pinned: set[str] = set()
        """Names of the adapters that were loaded with ``pinned``."""
        self.ever_loaded: set[str] = set()
        """Names of all adapters ever loaded. SGLang accepts requests for an adapter that was unloaded."""
        self.calls: set[asyncio.Task[Any]] = set()
        """Calls in progress."""
        self.generated = 0
        self.lock = RequestsOrUpdate()
        self._pausing = asyncio.Lock()
        self._scheduler = asyncio.Lock()
        self._event = asyncio.Event()

    async def died(self, why: str) -> None:
        """End this boot where the real server would end. The call is never answered."""
        self._die(why)
        await asyncio.Event().wait()

    async def reach(self, phase: Phase) -> list[Fault]:
        """Apply the faults that are armed for a phase, and return those that the caller must apply."""
        theirs = []
        for fault in self.faults.take(phase, boot_id=self.boot_id, port=self.port):
            if fault.kind is Kind.DIE:
                await self.died(f"fault: die in phase {phase}")
            elif fault.kind is Kind.HANG:
                await asyncio.Event().wait()
            elif fault.kind is Kind.SLOW:
                await asyncio.sleep(fault.seconds)
            elif fault.kind is Kind.UNAVAILABLE:
                raise Unavailable
            else:
                theirs.append(fault)
        return theirs

    @asynccontextmanager
    async def scheduler(self) -> AsyncIterator[None]:
        """Hold the scheduler while it handles one message."""
        try:
            async with self._scheduler:
                yield
        finally:
            self.changed()

    @asynccontextmanager
    async def exclusive(self) -> AsyncIterator[None]:
        """Hold the scheduler for an update: at once if paused (a continue waits), else after all running requests."""
        async with self._pausing:
            paused = self.paused
            if paused:
                async with self.scheduler():
                    yield
        if not paused:
            async with self.lock.writer(), self.scheduler():
                yield

    @property
    def busy(self) -> bool:
        """True while the scheduler handles a control call."""
        return self._scheduler.locked()

    def changed(self) -> None:
        """Wake waiting requests, so that they look at the state again."""
        event, self._event = self._event, asyncio.Event()
        event.set()

    async def pause(self, mode: str) -> None:
        """Pause, as ``/pause_generation`` does."""
        async with self._pausing:
            await self.reach(Phase.PAUSE)
            self.paused = True
            if mode == "abort":
                self.abort(None)
                while self.lock.readers:
                    await asyncio.sleep(_ABORT_AGAIN_SECONDS)
                    self.abort(None)
                return
            self.frozen = True
            if mode == "retract":
                for request in self.requests.values():
                    request.retractions += not request.waiting
                    request.waiting = True

    async def resume(self) -> None:
        """Continue, as ``/continue_generation`` does."""
        async with self._pausing:
            await self.reach(Phase.CONTINUE)
            self.paused = self.frozen = False
            for request in self.requests.values():
                request.waiting = False
            self.changed()

    def abort(self, rid: str | None) -> None:
        """Abort all requests if ``rid`` is None, else those whose IDs begin with it, if there is one with this ID.

        Requests that a pause holds back are not in the scheduler yet and stay.
        """
        if rid is None or any(request.rid == rid for request in self.requests.values()):
            for request in self.requests.values():
                request.aborted |= rid is None or request.rid.startswith(rid)
        self.changed()

    async def unpaused(self) -> None:
        """Wait until no pause holds new requests back."""
        while True:
            async with self._pausing:  # held by a pause that waits for requests to abort, and by an update of a paused engine
                if not self.paused:
                    return
                event = self._event
            await event.wait()

    async def turn(self, request: Running) -> None:
        """Wait until the scheduler can do the next step of a request, or end it."""
        if self.setup.token_seconds:
            await asyncio.sleep(self.setup.token_seconds)
        else:
            await asyncio.sleep(0)
        while (self.frozen or self.busy) and not (request.aborted and request.waiting):
            await self._event.wait()

    def record_version(self, label: str | None) -> None:
        """Record a new version in the scheduler. Later tokens of running requests belong to it."""
        if label is None or label == self.scheduler_version:
            return
        for request in self.requests.values():
            if request.tokens:
                request.changes.append((self.scheduler_version, len(request.tokens)))
        self.scheduler_version = label

    def flush(self) -> bool:
        """Return whether the cache can be flushed: no request runs. Waiting requests of a paused engine are ignored, except in 0.5.20."""
        return all(request.waiting and self.frozen and self.setup.sessions for request in self.requests.values())

    def kill(self) -> None:
        """End this boot. Threads that wait in a process group give up, and its peers see closed connections."""
        for rank in [*self.joining, *itertools.chain.from_iterable(self.groups.values())]:
            rank.kill()
        for task in list(self.calls):
            task.cancel()


def in_thread(work: Callable[[], T]) -> asyncio.Future[T]:
    """Run blocking work in a daemon thread, because it may never end."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[T] = loop.create_future()

    def settle(result: T | None, error: BaseException | None) -> None:
        if future.done():
            return
        if error is not None:
            future.set_exception(error)
        else:
            future.set_result(result)  # type: ignore[arg-type]

    def run() -> None:
        result, error = None, None
        try:
            result = work()
        except BaseException as raised:  # noqa: BLE001 - the future raises it again
            error = raised
        if not loop.is_closed():
            loop.call_soon_threadsafe(settle, result, error)

    threading.Thread(target=run, daemon=True, name="stand-in").start()
    return future
