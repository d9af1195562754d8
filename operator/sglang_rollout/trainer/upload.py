"""One weight upload: begin, pieces over several connections, commit. For fleets with transport Staged.

    main thread        read tensors, cut pieces ─► queue of a few pieces ─► …
    sending threads    SHA-256, PUT, repeat after an error

An upload needs no process group, and no engine waits for it: until the commit nothing changes what the fleet serves.
Tensors in host memory are sent from where they are. Others are copied bucket by bucket, so no second copy of the model exists, except that
of the version before for uploads of differences.
Never imports torch.
"""

from __future__ import annotations

import hashlib
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION
from concurrent.futures import wait as wait_for
from contextlib import contextmanager
from dataclasses import dataclass, field
from http import HTTPStatus
from queue import Full, Queue
from typing import Any, Literal

from pydantic import ValidationError

from sglang_rollout.checkpoints.format import DTYPE_OF_TORCH
from sglang_rollout.trainer.calls import Cancellation, Deadline, Http, run_in_background
from sglang_rollout.trainer.deltas import LastUpload
from sglang_rollout.trainer.errors import NOTHING_SENT, FleetError, FleetRefused, FleetUnreachable, FleetUntrusted, PushFailed, is_temporary
from sglang_rollout.trainer.push import PushOptions, TensorSink, push_failure, read_fenced
from sglang_rollout.trainer.ranks import Ranks, digest_bucket
from sglang_rollout.trainer.store_watch import StoreWatch
from sglang_rollout.trainer.tensors import Source, TensorSpec, full_tensor, plan_buckets
from sglang_rollout.wire import Message
from sglang_rollout.wire.ports import BASE_HEADER, CHECK_MODEL_FIELD, DIGEST_HEADER, FLEET_UPDATES, TICKET_HEADER
from sglang_rollout.wire.reasons import RefusalCode
from sglang_rollout.wire.record import UpdateReason
from sglang_rollout.wire.staged import Shard, StagedTensor

log = logging.getLogger(__name__)

Wait = Literal["staged", "committed"]
"""When a push returns: when the fleet has all bytes, or when the engines serve them."""
SHARD_BYTES = 512 << 20
"""Bytes of a shard; a larger tensor gets a shard of its own."""
SENDING_THREADS = 4
"""Pieces that are sent at a time."""
STALLED_SECONDS = 60.0
"""Time in which the fleet must take a further part of a piece, or answer."""
FIRST_PAUSE_SECONDS = 0.2
"""Pause before a call is repeated; it doubles each time."""
LONGEST_PAUSE_SECONDS = 5.0
COMMIT_STEPS = 3
"""A commit may take this many times the timeout of a push: the engine pods copy the version, one engine tries it, all engines load it."""
ENDING_SECONDS = 5.0
"""Longest wait for threads whose calls were cancelled. They end within milliseconds, except while they look up a name or connect."""
ABORT_SECONDS = 10.0
"""Timeout of deleting an upload that has failed."""
UNCHANGED = "Push again. The engines serve the previous version."
UNKNOWN = "The fleet may still commit it: see GET /fleet. If it does not, push again."

_ENDED = frozenset({HTTPStatus.NOT_FOUND, HTTPStatus.CONFLICT})
"""Answers to the deletion of an upload that the fleet has given up itself."""

ReadBytes = Callable[[Any], memoryview]
"""Returns a tensor's bytes in host memory."""


@dataclass(frozen=True, slots=True)
class PieceData:
    """One piece of a shard: bytes of one tensor, or of several neighbours."""

    shard: int
    piece: int
    parts: tuple[memoryview, ...]

    def read(self) -> memoryview:
        """Return the bytes, which are copied only if they are of several tensors."""
        return self.parts[0] if len(self.parts) == 1 else memoryview(b"".join(self.parts))


@dataclass
class PieceCutter:
    """Cuts the bytes of consecutive tensors into pieces."""

    sizes: Sequence[int]
    """Bytes of each shard."""
    piece_bytes: int
    _shard: int = 0
    _sent: int = 0
    """Bytes of the current shard that are in earlier pieces."""
    _parts: list[memoryview] = field(default_factory=list)
    _held: int = 0

    def add(self, data: memoryview) -> Iterator[PieceData]:
        """Add the bytes of the next tensor, and yield the pieces that are complete. Tensors do not cross the end of a shard."""
        while data:
            wanted = min(self.piece_bytes, self.sizes[self._shard] - self._sent)
            part = data[: wanted - self._held]
            data = data[len(part) :]
            self._parts.append(part)
            self._held += len(part)
            if self._held == wanted:
                yield PieceData(self._shard, self._sent // self.piece_bytes, tuple(self._parts))
                self._sent += wanted
                self._parts, self._held = [], 0
                if self._sent == self.sizes[self._shard]:
                    self._shard, self._sent = self._shard + 1, 0


class Senders:
    """Threads that send pieces. The first failure ends them all.

    Args:
        send: Sends one piece, and repeats it after an error that may pass.
        cancellation: Ends the calls that ``send`` makes.
        check: Called now and then while the caller waits. Raises if the pieces will never arrive.
    """

    def __init__(self, send: Callable[[PieceData], None], cancellation: Cancellation, check: Callable[[], None]) -> None:
        self._send = send
        self._cancellation = cancellation
        self._check = check
        self._queue: Queue[PieceData | None] = Queue(SENDING_THREADS)
        self._failure: BaseException | None = None
        self._threads = [run_in_background(self._work) for _ in range(SENDING_THREADS)]

    def put(self, piece: PieceData | None) -> None:
        """Wait for a free thread, and let it send the piece. Raises the failure of an earlier piece."""
        while True:
            self._raise_failure()
            try:
                self._queue.put(piece, timeout=FIRST_PAUSE_SECONDS)
            except Full:
                self._check()
                continue
            return

    def finish(self) -> None:
        """Wait until all pieces are sent. Raises the failure of a piece."""
        for _ in self._threads:
            self.put(None)
        while not all(thread.done() for thread in self._threads):
            wait_for(self._threads, timeout=1.0, return_when=FIRST_EXCEPTION)
            self._raise_failure()
            self._check()
        self._raise_failure()

    def stop(self) -> None:
        """End all threads and their calls, and wait for them, because they read the caller's tensors."""
        self._cancel()
        wait_for(self._threads, timeout=ENDING_SECONDS)

    def _cancel(self) -> None:
        self._cancellation.cancel()
        for _ in self._threads:
            try:
                self._queue.put_nowait(None)
            except Full:  # the threads find the cancellation when they take the next piece
                return

    def _work(self) -> None:
        while (piece := self._queue.get()) is not None and not self._cancellation.is_requested:
            try:
                self._send(piece)
            except Exception as error:  # noqa: BLE001 - the main thread raises it
                self._failure = self._failure or error
                self._cancel()

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise self._failure


class _Begun(Message):
    """The fleet's answer to the begin of an upload."""

    update: str
    ticket: str
    piece_bytes: int
    base: str = ""
    """Digest of the version from which the fleet takes differences; empty: it takes whole pieces only."""
    store: str = ""
    """Name of the weight store. Empty: the coordinator is of an earlier release."""


class Upload:
    """The state of one upload. Used once.

    Args:
        http: The fleet.
        options: The settings of the push. ``bucket_bytes``: most bytes that are copied to host memory at a time.
        wait: When :meth:`run` returns.
        read_bytes: Returns the bytes of a full tensor.
        ranks: The trainer's ranks that gather together with this rank.
        tensor_sink: Receives every full tensor.
        last: The upload before. With it, pieces are sent as differences where that is shorter. None: all pieces are sent whole.
    """

    def __init__(
        self,
        http: Http,
        options: PushOptions,
        *,
        wait: Wait,
        read_bytes: ReadBytes,
        ranks: Ranks | None = None,
        tensor_sink: TensorSink | None = None,
        last: LastUpload | None = None,
    ) -> None:
        self._http = http
        self._options = options
        self._wait = wait
        self._read_bytes = read_bytes
        self._ranks = ranks
        self._tensor_sink = tensor_sink
        self._last = last
        self._sent: list[int] = []
        """Bytes of each piece or difference that the fleet has taken."""
        self._digest = ""
        """Digest of the version, if the fleet has named it."""
        self._cancellation = Cancellation()
        self._has_committed = False
        """True if the fleet has committed the version and still reports a failure."""
        self.phases: dict[str, float] = {}
        self.bytes = 0
        self.shards = 0
        self.fenced: dict[str, str] = {}
        self.state: str = wait

    def run(self, source: Source) -> None:
        """Send all tensors, and return when the fleet has staged or committed the version.

        Raises:
            PushFailed: A step failed or took too long. The upload is deleted, unless its version is committed.
        """
        shards, sizes = plan_shards(source.specs)
        with self._timed("begin"):
            begun = self._begin(shards)
        path = f"{FLEET_UPDATES}/{begun.update}"
        try:
            with self._timed("transfer"):
                self._transfer(source, PieceCutter(sizes, begun.piece_bytes), path, begun)
            self.bytes = sum(sizes)
            with self._timed("end"):
                self._commit(path)
            if self._last is not None:
                self._last.finish(self._digest)
        except BaseException:  # also KeyboardInterrupt
            if not self._has_committed:
                self._abort(path)
            raise

    def result(self, epoch: int) -> dict[str, Any]:
        """Return the fields of PushResult, except the snapshot, as JSON values."""
        return {
            "version": self._options.version,
            "epoch": epoch,
            "world_size": 1,
            "bytes": self.bytes,
            "transferred": sum(self._sent),
            "buckets": self.shards,
            "phases": {name: round(ms, 1) for name, ms in self.phases.items()},
            "fenced": self.fenced,
            "state": self.state,
        }

    def _begin(self, shards: list[Shard]) -> _Begun:
        """Begin the upload, as a delta upload if the last one is known here and at the fleet."""
        if self._last is None:
            return self._open(shards, "")
        base = self._last.find_base(shards)
        try:
            begun = self._open(shards, base)
        except PushFailed as failure:
            error = failure.__cause__
            if not base or not isinstance(error, FleetRefused) or error.code != RefusalCode.BASE_MISSING:
                raise
            log.info("Version %s is uploaded completely: %s", self._options.version, error.reason)
            begun = self._open(shards, "")
        self._last.begin(shards, begun.base)
        return begun

    def _open(self, shards: list[Shard], base: str) -> _Begun:
        body: dict[str, Any] = {"shards": [shard.model_dump(mode="json") for shard in shards], "label": self._options.version}
        body |= {"base": base} if base else {}
        body |= {} if self._options.check_model else {CHECK_MODEL_FIELD: False}
        try:
            begun = _Begun.model_validate(self._http.post(FLEET_UPDATES, body, timeout=self._options.timeout).get("fleet"))
        except FleetError as error:
            raise push_failure("begin", error, UNCHANGED) from error
        except ValidationError as error:
            raise PushFailed(phase="begin", reason=f"the fleet's answer is not that of an upload: {error}", advice=UNCHANGED) from error
        self.shards = len(shards)
        return begun

    def _transfer(self, source: Source, cutter: PieceCutter, path: str, begun: _Begun) -> None:
        questions, headers = self._http.without_retries(), {TICKET_HEADER: begun.ticket}
        watch = StoreWatch(begun.store, lambda seconds: questions.get(path, headers=headers, timeout=seconds))

        def send(piece: PieceData) -> None:
            self._send(piece, path, begun)
            watch.note_piece()

        def check() -> None:
            try:
                watch.check()
            except FleetError as error:
                raise push_failure("transfer", error, UNCHANGED) from error

        senders = Senders(send, self._cancellation, check)
        try:
            for data in self._read_tensors(source):
                for piece in cutter.add(data):
                    senders.put(piece)
            senders.finish()
        except BaseException:
            senders.stop()
            raise
        finally:
            questions.close()

    def _read_tensors(self, source: Source) -> Iterator[memoryview]:
        """Yield the bytes of each tensor. A bucket is gathered at once, because the trainer's other ranks wait in its collectives."""
        buckets = plan_buckets(source, self._options.bucket_bytes)
        while True:
            with self._timed("prepare"):
                try:
                    bucket = next(buckets, None)
                    if bucket is None:
                        return
                    if self._ranks is not None:
                        self._ranks.agree(digest_bucket(bucket))
                    gathered = [self._gather(spec, tensor) for spec, tensor in bucket.items]
                except PushFailed:
                    raise
                except Exception as error:
                    reason = f"the tensors could not be prepared: {error}"
                    raise PushFailed(phase="prepare", reason=reason, advice=UNCHANGED) from error
            yield from gathered

    def _gather(self, spec: TensorSpec, tensor: Any) -> memoryview:
        full = full_tensor(tensor)
        if self._tensor_sink is not None:
            self._tensor_sink(spec, full)
        return self._read_bytes(full)

    def _send(self, piece: PieceData, path: str, begun: _Begun) -> None:
        """Send one piece, or its difference."""
        data = piece.read()
        digest = hashlib.sha256(data).hexdigest()
        headers = {TICKET_HEADER: begun.ticket, DIGEST_HEADER: digest, "Content-Type": "application/octet-stream"}
        target = f"{path}/pieces/{piece.shard}/{piece.piece}"
        difference = self._last.replace((piece.shard, piece.piece), digest, data) if self._last is not None else None
        try:
            if difference is None or not self._put_difference(target, difference, {**headers, BASE_HEADER: begun.base}):
                self._put(target, data, headers)
        except FleetError as error:
            raise push_failure("transfer", error, UNCHANGED) from error

    def _put_difference(self, target: str, difference: bytes, headers: dict[str, str]) -> bool:
        """Send a difference. Return False if the fleet cannot use it, and needs the whole piece."""
        try:
            self._put(target, difference, headers)
        except FleetRefused as error:
            if error.code not in (RefusalCode.BASE_MISSING, RefusalCode.INVALID_REQUEST):
                raise
            log.info("A piece is sent whole: %s", error.reason)
            return False
        return True

    def _put(self, target: str, data: bytes | memoryview, headers: dict[str, str]) -> None:
        """Send bytes. Repeat that after a lost connection, because a piece that arrives twice does no harm."""

        def put(seconds: float) -> dict[str, Any]:
            return self._http.put(
                target, memoryview(data), headers=headers, timeout=min(seconds, STALLED_SECONDS), cancellation=self._cancellation
            )

        self._repeat(put, Deadline(self._options.timeout))
        self._sent.append(len(data))

    def _commit(self, path: str) -> None:
        body: dict[str, Any] = {"wait": self._wait}
        if self._options.checksums:
            body["checksums"] = {str(size): list(ranks) for size, ranks in self._options.checksums.items()}
        deadline = Deadline(COMMIT_STEPS * self._options.timeout)

        def post(seconds: float) -> dict[str, Any]:
            return self._http.post(f"{path}/commit", body, timeout=min(seconds, self._options.timeout))

        try:
            # The fleet may answer before it has committed; the call may be repeated.
            while not self._has_ended(reply := self._repeat(post, deadline)):
                if deadline.has_passed:
                    raise PushFailed(phase="end", reason=f"the fleet did not commit within {deadline.seconds:g} s", advice=UNKNOWN)
                time.sleep(FIRST_PAUSE_SECONDS)
        except FleetRefused as error:
            self._has_committed = error.fleet.get("reason") == UpdateReason.TOO_FEW_ENGINES
            raise push_failure("end", error, UNCHANGED) from error
        except FleetUnreachable as error:
            raise push_failure("end", error, UNKNOWN) from error
        self.fenced = read_fenced(reply)
        for name, reason in self.fenced.items():
            log.warning("Version %s is committed without engine %s: %s", self._options.version, name, reason)

    def _has_ended(self, reply: dict[str, Any]) -> bool:
        fleet = reply.get("fleet")
        details = fleet if isinstance(fleet, dict) else {}
        self.state, self._digest = str(details.get("state", "committed")), str(details.get("digest", ""))
        return self.state == "committed" or self._wait == "staged"

    def _repeat(self, call: Callable[[float], dict[str, Any]], deadline: Deadline) -> dict[str, Any]:
        """Make a call that may be repeated, until the fleet answers. ``call`` receives the seconds that are left."""
        pause = FIRST_PAUSE_SECONDS
        while True:
            try:
                return call(max(deadline.remaining, 1.0))
            except FleetUntrusted:
                raise
            except FleetError as error:
                if not is_temporary(error) or deadline.remaining <= pause or self._cancellation.wait(pause):
                    raise
                log.info("Repeating a call of the upload: %s", error)
            pause = min(2 * pause, LONGEST_PAUSE_SECONDS)

    def _abort(self, path: str) -> None:
        """Delete the upload. If that fails, the fleet deletes it when its ticket expires."""
        self._cancellation.cancel()
        try:
            self._http.delete(path, timeout=ABORT_SECONDS)
        except FleetError as error:
            if isinstance(error, FleetRefused) and error.status in _ENDED:
                return
            log.warning("The failed upload could not be deleted: %s", error)

    @contextmanager
    def _timed(self, phase: str) -> Iterator[None]:
        started = time.monotonic()
        try:
            yield
        finally:
            self.phases[phase] = self.phases.get(phase, 0.0) + (time.monotonic() - started) * 1000


def plan_shards(specs: Sequence[TensorSpec]) -> tuple[list[Shard], list[int]]:
    """Return the shards of a version, and the bytes of each.

    Raises:
        PushFailed: The tensors are not known yet, or have a type that safetensors does not have.
    """
    if not specs:
        reason = "an upload announces all tensors first, but an iterator does not name them"
        raise PushFailed(phase="prepare", reason=reason, advice=f"Pass specs=, or a state dict. {NOTHING_SENT}")
    for spec in specs:
        if spec.dtype not in DTYPE_OF_TORCH:
            reason = f"tensor {spec.name!r} has the type {spec.dtype}, which safetensors does not have"
            raise PushFailed(phase="prepare", reason=reason, advice=NOTHING_SENT)
    buckets = list(plan_buckets(((spec, None) for spec in specs), SHARD_BYTES))
    shards = [Shard(tensors=[_describe(spec) for spec, _ in bucket.items]) for bucket in buckets]
    return shards, [bucket.nbytes for bucket in buckets]


def _describe(spec: TensorSpec) -> StagedTensor:
    return StagedTensor(name=spec.name, dtype=DTYPE_OF_TORCH[spec.dtype], shape=list(spec.shape))
