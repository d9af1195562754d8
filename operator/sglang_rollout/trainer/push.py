"""One weight push: begin, a broadcast per bucket, end, each step with a checked reply and a deadline.

            main thread        prepare 1 │ prepare 2            │ prepare 3            │
            POST update                  │ bucket 1 ──► replied │ bucket 2 ──► replied │ …
            broadcast                    │ bucket 1 ──► sent    │ bucket 2 ──► sent    │ …

A broadcast whose engines never came would wait for ever, and an error reply means just that: engines do not come. So
the reply and the broadcast are awaited together, and the first one that fails ends the other.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, FIRST_EXCEPTION, Future, wait
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

from sglang_rollout.checkpoints.snapshots import Snapshot
from sglang_rollout.trainer.buckets import Bucket, TensorSpec, plan
from sglang_rollout.trainer.client import Http
from sglang_rollout.trainer.errors import NOTHING_SENT, FleetError, FleetRefused, PushFailed
from sglang_rollout.trainer.ranks import Ranks, bucket_digest
from sglang_rollout.trainer.tensors import NoTensorError, Source, full_tensor
from sglang_rollout.trainer.waiting import Deadline, background

log = logging.getLogger(__name__)

DEFAULT_BUCKET_BYTES = 256 << 20
"""Large enough that the cost per call vanishes, small enough that two of them fit beside any model."""
UPDATE = "/update_weights_from_distributed"
BLAME_SECONDS = 5.0
"""After one side of a bucket has failed: how long to wait for the other side, which often knows better why."""
R = TypeVar("R")
Checksums = Mapping[int, Sequence[str]]
"""By the tensor size of an engine: SGLang's ``per_gpu_checksum`` of each rank."""
Keep = Callable[[TensorSpec, Any], None]
"""Receives each full tensor while its bucket is assembled."""


class Pushable(Protocol):
    """What a push needs of a group."""

    name: str
    epoch: int
    world_size: int

    def flatten(self, bucket: Bucket[Any], turn: int, full: Callable[[TensorSpec, Any], Any]) -> Any:
        """The bucket's bytes in one buffer; ``turn`` picks one of two buffers, ``full`` gathers a tensor."""

    def broadcast(self, buffer: Any, *, timeout: float) -> None:
        """Send the buffer to every engine."""


@dataclass(frozen=True, slots=True)
class PushResult:
    """A push that the fleet has committed: every engine has it, but for those in ``fenced``."""

    version: str
    """Label of the version, as in every sample's ``weight_version``."""
    epoch: int
    world_size: int
    bytes: int
    buckets: int
    phases: dict[str, float] = field(default_factory=dict)
    """Milliseconds: ``group`` (only when one was opened), ``begin``, ``prepare`` (overlaps with transfer),
    ``transfer``, ``end``, ``total``.
    """
    fenced: dict[str, str] = field(default_factory=dict)
    """Engines that failed at the end and serve nobody until the next push, each with the reason; only with ``weights.minCommitted``."""
    snapshot: Future[Snapshot] | None = None
    """The snapshot of this push, which is being written; None if there is to be none."""


class Push:
    """The state of one push. Used once."""

    def __init__(
        self,
        http: Http,
        group: Pushable,
        *,
        version: str,
        bucket_bytes: int,
        timeout: float,
        checksums: Checksums | None = None,
        ranks: Ranks | None = None,
        keep: Keep | None = None,
    ) -> None:
        """Prepare a push.

        ``ranks``: the trainer's ranks that gather together with this one; ``keep``: receives every full tensor.
        """
        self._http = http
        self._group = group
        self._version = version
        self._bucket_bytes = bucket_bytes
        self._timeout = timeout
        self._ranks = ranks
        self._keep = keep
        self._end = {"checksums": {str(size): list(ranks) for size, ranks in checksums.items()}} if checksums else {}
        self.phases: dict[str, float] = {}
        self.bytes = 0
        self.buckets = 0
        self.fenced: dict[str, str] = {}
        self._sent: Future[None] | None = None

    def run(self, source: Source) -> None:
        """Transfer all tensors; returns when the fleet has replied to ``end``. Raises PushFailed."""
        prepared = self._prepared(source)
        first = self._timed("prepare", lambda: self._next(prepared))
        if first is None:
            raise refused(NoTensorError())
        self._timed("begin", lambda: self._call("begin", "/begin_weight_update", {}))
        self._timed("transfer", lambda: self._transfer(first, prepared))
        ended = self._timed("end", lambda: self._call("end", "/end_weight_update", self._end))
        self.fenced = _fenced(ended)
        for name, reason in self.fenced.items():
            log.warning("version %s is committed without engine %s, which %s", self._version, name, reason)

    def result(self, phases: Mapping[str, float]) -> dict[str, Any]:
        """Return the fields of PushResult, but for the snapshot, as JSON values."""
        return {
            "version": self._version,
            "epoch": self._group.epoch,
            "world_size": self._group.world_size,
            "bytes": self.bytes,
            "buckets": self.buckets,
            "phases": {name: round(ms, 1) for name, ms in phases.items()},
            "fenced": self.fenced,
        }

    def settle(self, seconds: float) -> None:
        """After a failure, and after the group was closed everywhere: wait for the broadcast that was under way to end with it.

        If the interpreter ended before that thread, torch would abort the process.
        """
        if self._sent is not None:
            wait([self._sent], timeout=seconds)

    def _transfer(self, current: tuple[Bucket[Any], Any] | None, prepared: Iterator[tuple[Bucket[Any], Any]]) -> None:
        while current is not None:
            bucket, buffer = current
            deadline = Deadline(self._timeout)
            reply = background(self._http.post, UPDATE, self._body(bucket), timeout=self._timeout)
            sent = self._sent = background(self._group.broadcast, buffer, timeout=self._timeout)
            upcoming = None if bucket.last else self._timed("prepare", lambda: self._next(prepared))
            _await_bucket(reply, sent, deadline)
            self.bytes += bucket.nbytes
            self.buckets += 1
            current = upcoming

    def _body(self, bucket: Bucket[Any]) -> dict[str, Any]:
        body = bucket.request(self._group.name) | {"flush_cache": bucket.last, "abort_all_requests": False}
        # Label and cache flush belong to the last bucket: before it the engine holds a mixture.
        return body | {"weight_version": self._version} if bucket.last else body

    def _prepared(self, source: Source) -> Iterator[tuple[Bucket[Any], Any]]:
        for turn, bucket in enumerate(plan(source, self._bucket_bytes)):
            if self._ranks is not None:
                self._ranks.agree(bucket_digest(bucket))
            yield bucket, self._group.flatten(bucket, turn, self._full)

    def _full(self, spec: TensorSpec, tensor: Any) -> Any:
        full = full_tensor(tensor)
        if self._keep is not None:
            self._keep(spec, full)
        return full

    def _next(self, prepared: Iterator[tuple[Bucket[Any], Any]]) -> tuple[Bucket[Any], Any] | None:
        try:
            return next(prepared, None)
        except PushFailed:
            raise
        except Exception as error:
            raise PushFailed(phase="prepare", reason=f"the tensors could not be prepared: {error}") from error

    def _call(self, phase: str, path: str, body: dict[str, Any]) -> dict[str, Any]:
        try:
            return self._http.post(path, body, timeout=self._timeout)
        except FleetError as error:
            raise _failed(phase, error) from error

    def _timed(self, phase: str, step: Callable[[], R]) -> R:
        started = time.monotonic()
        try:
            return step()
        finally:
            self.phases[phase] = self.phases.get(phase, 0.0) + (time.monotonic() - started) * 1000


def refused(error: ValueError) -> PushFailed:
    """The failure of a push whose tensors cannot be sent, found before the fleet heard of the push."""
    if isinstance(error, NoTensorError):
        return PushFailed(phase="prepare", reason="there is no tensor to push", advice="Pass the policy's state dict.")
    return PushFailed(phase="prepare", reason=str(error), advice=NOTHING_SENT)


def _await_bucket(reply: Future[dict[str, Any]], sent: Future[None], deadline: Deadline) -> None:
    both: list[Future[Any]] = [reply, sent]
    done, _ = wait(both, timeout=deadline.remaining, return_when=FIRST_EXCEPTION)
    if any(future.exception() for future in done):
        if reply not in done:  # a broken connection shows up here first, but the fleet knows which engine it was
            wait(both, timeout=BLAME_SECONDS, return_when=FIRST_COMPLETED if sent not in done else "ALL_COMPLETED")
        raise _failed("transfer", _telling(reply, sent))
    if len(done) < len(both):
        silent = "the broadcast did not finish" if reply in done else "the fleet did not reply"
        raise PushFailed(phase="transfer", reason=f"{silent} within {deadline.seconds:.0f} s")


def _telling(reply: Future[dict[str, Any]], sent: Future[None]) -> BaseException:
    """The more telling of the errors: what the fleet says beats what the broken collective says."""
    error = (reply.exception() if reply.done() else None) or (sent.exception() if sent.done() else None)
    return error or FleetError("the transfer broke for no known reason")


def _failed(phase: str, error: BaseException) -> PushFailed:
    if isinstance(error, PushFailed):
        return error
    if isinstance(error, FleetRefused):
        return PushFailed(phase=phase, reason=error.reason, engine=_blamed(error.fleet))
    return PushFailed(phase=phase, reason=str(error))


def _fenced(reply: Mapping[str, Any]) -> dict[str, str]:
    fleet = reply.get("fleet")
    found = fleet.get("fenced") if isinstance(fleet, dict) else None
    return {str(name): str(why) for name, why in found.items()} if isinstance(found, dict) else {}


def _blamed(fleet: Mapping[str, Any]) -> str | None:
    engine = fleet.get("engine")
    return engine if isinstance(engine, str) else None
