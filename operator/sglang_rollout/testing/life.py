"""One life of a stand-in, from boot to death: what SGLang's tokenizer process keeps (pause, versions, running requests) and the queue to
its scheduler. Everything here runs in one event loop; what blocks goes to threads.

SGLang's scheduler handles one message at a time and generates between messages. Here it is a lock: a control call holds it, tokens wait
for it, and a call that never ends blocks all others, while what the tokenizer process answers by itself still works.
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
from sglang_rollout.testing.locks import RequestsOrUpdate
from sglang_rollout.testing.tokens import VOCABULARY
from sglang_rollout.testing.weights import Held, Weights

T = TypeVar("T")

NEW_VERSION = "0.5.23"
"""The SGLang that a stand-in speaks like."""
OLD_VERSION = "0.5.20"
"""The last one without begin_weight_update and end_weight_update."""
_ABORT_AGAIN_SECONDS = 1.0
"""SGLang asks running requests to abort again after so long, and so a pause with something running takes a second."""


@dataclass(frozen=True)
class Setup:
    """What a stand-in is started with; the same for all its lives."""

    tensors: Mapping[str, Held]
    sessions: bool = True
    """Updates must run between begin_weight_update and end_weight_update, as since 0.5.21."""
    tensor_size: int = 1
    """Tensor-parallel ranks: so many consecutive ranks of a weight-update group."""
    weight_version: str = "default"
    model_path: str = "stand-in"
    token_seconds: float = 0.0
    """Time per token. 0: as fast as it goes; then nothing is ever running when a call arrives."""
    context_length: int = 2048
    """Tokens of prompt and completion together."""
    health_seconds: float = 20.0
    """/health_generate gives up after so long, as SGLang does."""
    vocabulary: int = VOCABULARY
    memory_saver: bool = False
    """Memory that is released is gone, and with it the weights, as with --enable-memory-saver. Else a release changes nothing, as there."""
    lora: bool = False
    """Adapters can be loaded."""
    weights_backup: bool = False
    """As --enable-weights-cpu-backup: weights that come back are what they were."""

    @property
    def version(self) -> str:
        """The SGLang version that is reported."""
        return NEW_VERSION if self.sessions else OLD_VERSION


@dataclass(eq=False)
class Running:
    """A request in the scheduler."""

    rid: str
    prompt: list[int]
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    changes: list[tuple[str, int]] = field(default_factory=list)
    """(version before, tokens generated under it) for each update that came meanwhile."""
    retractions: int = 0
    waiting: bool = False
    """Moved back to the queue by a pause in mode retract."""
    aborted: bool = False
    started: float = field(default_factory=time.monotonic)


class Unavailable(Exception):
    """A fault answers this call with 503."""


class Life:
    """State of one boot. ``die`` is told why when the real server would end here."""

    def __init__(self, setup: Setup, faults: Faults, *, port: int, die: Callable[[str], None]) -> None:
        self.setup, self.faults, self.port, self._die = setup, faults, port, die
        self.boot_id = secrets.token_hex(8)
        self.started = time.time()
        self.startup_seconds = secrets.randbelow(10**9) / 10**8
        """Differs at every boot, as a measured time does: what tells one life from another by /server_info."""
        self.seed = secrets.randbelow(10**9)
        self.weights = Weights(setup.tensors)
        self.model_path = setup.model_path
        self.weight_version = setup.weight_version
        """What /model_info says."""
        self.scheduler_version = setup.weight_version
        """What samples say. Differs from the other only after a flush that failed."""
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
        """Of an adapter that was unloaded SGLang takes requests all the same."""
        self.calls: set[asyncio.Task[Any]] = set()
        """Calls that are being answered."""
        self.generated = 0
        self.lock = RequestsOrUpdate()
        self._pausing = asyncio.Lock()
        self._scheduler = asyncio.Lock()
        self._event = asyncio.Event()

    async def died(self, why: str) -> None:
        """The real server ends here: so does this one, and the call is never answered."""
        self._die(why)
        await asyncio.Event().wait()

    async def reach(self, phase: Phase) -> list[Fault]:
        """A call has reached a phase: do what armed faults ask for here, and return those that are the caller's to act out."""
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
        """For as long as the scheduler handles one message."""
        try:
            async with self._scheduler:
                yield
        finally:
            self.changed()

    @asynccontextmanager
    async def exclusive(self) -> AsyncIterator[None]:
        """As SGLang orders an update: at once when paused (a continue waits), else after all running requests."""
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
        """Whether the scheduler is in a control call."""
        return self._scheduler.locked()

    def changed(self) -> None:
        """Something happened that a waiting request may want to know."""
        event, self._event = self._event, asyncio.Event()
        event.set()

    async def pause(self, mode: str) -> None:
        """``/pause_generation``."""
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
        """``/continue_generation``."""
        async with self._pausing:
            await self.reach(Phase.CONTINUE)
            self.paused = self.frozen = False
            for request in self.requests.values():
                request.waiting = False
            self.changed()

    def abort(self, rid: str | None) -> None:
        """``/abort_request``; None means all. Requests that a pause holds back are not in the scheduler yet and stay."""
        for request in self.requests.values():
            request.aborted |= rid is None or request.rid == rid
        self.changed()

    async def unpaused(self) -> None:
        """Return when no pause holds new requests back."""
        while True:
            async with self._pausing:  # held by a pause that waits for requests to abort, and by an update of a paused engine
                if not self.paused:
                    return
                event = self._event
            await event.wait()

    async def turn(self, request: Running) -> None:
        """Return when the scheduler can do the next step of a request, or end it."""
        if self.setup.token_seconds:
            await asyncio.sleep(self.setup.token_seconds)
        else:
            await asyncio.sleep(0)
        while (self.frozen or self.busy) and not (request.aborted and request.waiting):
            await self._event.wait()

    def record_version(self, label: str | None) -> None:
        """The scheduler's note of a new version: from here on, tokens of running requests are of it."""
        if label is None or label == self.scheduler_version:
            return
        for request in self.requests.values():
            if request.tokens:
                request.changes.append((self.scheduler_version, len(request.tokens)))
        self.scheduler_version = label

    def flush(self) -> bool:
        """Whether the cache can be flushed: nothing runs; while paused, what waits does not count, but for 0.5.20."""
        return all(request.waiting and self.frozen and self.setup.sessions for request in self.requests.values())

    def kill(self) -> None:
        """End this life: whoever waits in a group gives up, and its peers see closed connections."""
        for rank in [*self.joining, *itertools.chain.from_iterable(self.groups.values())]:
            rank.kill()
        for task in list(self.calls):
            task.cancel()


def in_thread(work: Callable[[], T]) -> asyncio.Future[T]:
    """Run what blocks, perhaps for ever, in a thread that does not keep the process alive."""
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
        except BaseException as raised:  # noqa: BLE001 - it is handed on
            error = raised
        if not loop.is_closed():
            loop.call_soon_threadsafe(settle, result, error)

    threading.Thread(target=run, daemon=True, name="stand-in").start()
    return future
