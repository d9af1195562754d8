"""One weight push: begin, one broadcast per bucket, end. Each step has a checked reply and a deadline.

            main thread        prepare 1 │ prepare 2            │ prepare 3            │
            POST update                  │ bucket 1 ──► replied │ bucket 2 ──► replied │ …
            broadcast                    │ bucket 1 ──► sent    │ bucket 2 ──► sent    │ …

After an error reply the engines do not join the broadcast, which would then wait forever. So the push waits for the
reply and the broadcast together, and the first failure ends both.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, FIRST_EXCEPTION, Future, wait
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

from sglang_rollout.checkpoints.snapshots import Snapshot
from sglang_rollout.sglang.api import ControlCall
from sglang_rollout.trainer.calls import Deadline, Http, run_in_background
from sglang_rollout.trainer.errors import NOTHING_SENT, FleetError, FleetRefused, PushFailed
from sglang_rollout.trainer.ranks import Ranks, digest_bucket
from sglang_rollout.trainer.tensors import Bucket, NoTensorError, Source, TensorSpec, full_tensor, plan_buckets
from sglang_rollout.wire.ports import CHECK_MODEL_FIELD
from sglang_rollout.wire.record import UpdateOutcome, UpdateReason
from sglang_rollout.wire.trainer import FleetDocument

log = logging.getLogger(__name__)

DEFAULT_BUCKET_BYTES = 256 << 20
"""Large enough that the cost per call is negligible, small enough that two buckets fit beside any model."""
UPDATE = ControlCall.UPDATE_DISTRIBUTED.path
MAX_ANNOUNCED_CHARACTERS = 6 << 20
"""Characters of all names that a push announces, below the 8 MiB that the coordinator reads. A push with more announces none."""
OTHER_SIDE_SECONDS = 5.0
"""How long to wait for the other side after one side of a bucket failed. The other side often has the clearer error."""
COMMIT_POLL_SECONDS = 0.5
ALREADY_COMMITTED = "Do not push this version again: it is committed, and the engines that lack it load it from their copies."
"""Advice if engines failed after the commit (transport Staged)."""
_ADVICE: Mapping[str, str] = {
    UpdateReason.TOO_FEW_ENGINES: ALREADY_COMMITTED,
    UpdateReason.TENSORS_MISSING: "A push of the same tensors fails again.",
}
"""Advice for codes after which another push does not help."""
R = TypeVar("R")
Checksums = Mapping[int, Sequence[str]]
"""SGLang's ``per_gpu_checksum`` of each rank, by the tensor parallel size of an engine."""
TensorSink = Callable[[TensorSpec, Any], None]
"""Receives each full tensor while its bucket is assembled."""


class BroadcastGroup(Protocol):
    """The part of a process group that a push needs."""

    name: str
    epoch: int
    world_size: int

    def flatten(self, bucket: Bucket[Any], turn: int, full: Callable[[TensorSpec, Any], Any]) -> Any:
        """Return a buffer with the bucket's bytes. ``turn`` chooses one of two buffers, ``full`` gathers a tensor."""

    def broadcast(self, buffer: Any, *, timeout: float) -> None:
        """Send the buffer to every engine."""


@dataclass(frozen=True, slots=True)
class PushResult:
    """A push that the fleet has committed, or staged (``state``). Every engine holds a committed push, except those in ``fenced``."""

    version: str
    """Label of the version, as in every sample's ``weight_version``."""
    epoch: int
    """Epoch of the process group; for an upload, of the fleet."""
    world_size: int
    """Ranks of the process group, with the trainer; 1 for an upload."""
    bytes: int
    """Bytes of all tensors."""
    buckets: int
    """Number of broadcasts; for an upload, of shards."""
    phases: dict[str, float] = field(default_factory=dict)
    """Milliseconds of ``group`` (checks, and a process group if one was opened), ``begin``, ``prepare`` (overlaps with
    ``transfer``), ``transfer``, ``end`` and ``total``.
    """
    fenced: dict[str, str] = field(default_factory=dict)
    """Engines that failed at the end, with reasons; only with ``weights.minCommitted``. They serve no requests until the next push, or
    with ``weights.transport: Staged`` until they have loaded their copies."""
    snapshot: Future[Snapshot] | None = None
    """The snapshot of this push, written in the background; None if this push is not written."""
    state: str = "committed"
    """``committed``; ``staged`` after a push that did not wait for the commit: the engines have not loaded the version yet."""
    transferred: int | None = None
    """Bytes that an upload has sent: fewer than ``bytes`` if it sent differences. None for a push through a process group."""
    unchecked: str = ""
    """What the fleet did not compare with the engines' model, and why; empty if it compared all names and shapes. Engines ignore
    tensors whose names their model does not have."""


@dataclass(frozen=True, slots=True)
class PushOptions:
    """Settings of one push."""

    version: str
    """Label of the version."""
    bucket_bytes: int
    """Maximum bytes of one broadcast."""
    timeout: float
    """Seconds for each step."""
    check_model: bool = True
    """False: the engines' model may lack these tensors, or have other shapes."""
    checksums: Checksums = field(default_factory=dict)
    """Checksums that the fleet compares before it commits."""

    @property
    def intent(self) -> str:
        """The settings that all ranks of the trainer must share."""
        return f"{self.version} {self.bucket_bytes}"


class Push:
    """The state of one push. Used once.

    Args:
        http: The fleet.
        group: An open process group.
        options: The settings.
        ranks: The trainer's ranks that gather together with this rank.
        tensor_sink: Receives every full tensor.
    """

    def __init__(
        self,
        http: Http,
        group: BroadcastGroup,
        options: PushOptions,
        *,
        ranks: Ranks | None = None,
        tensor_sink: TensorSink | None = None,
    ) -> None:
        self._http = http
        self._group = group
        self._options = options
        self._ranks = ranks
        self._tensor_sink = tensor_sink
        self.phases: dict[str, float] = {}
        self.bytes = 0
        self.buckets = 0
        self.fenced: dict[str, str] = {}
        self.staged = ""
        """ID of the update, if the fleet has answered before the commit (transport Staged)."""
        self._sent: Future[None] | None = None

    def run(self, source: Source) -> None:
        """Transfer all tensors, and return when the fleet has replied to ``end``.

        Raises:
            PushFailed: A step failed or took too long.
        """
        prepared = self._prepare_buckets(source)
        first = self._timed("prepare", lambda: self._next_bucket(prepared))
        if first is None:
            raise prepare_failure(NoTensorError())
        self._timed("begin", lambda: self._call("begin", ControlCall.BEGIN_UPDATE.path, self._begin_body(source)))
        self._timed("transfer", lambda: self._transfer(first, prepared))
        ended = self._timed("end", lambda: self._call("end", ControlCall.END_UPDATE.path, self._end_body()))
        self.fenced = read_fenced(ended)
        details = ended.get("fleet")
        self.staged = str(details.get("update", "")) if isinstance(details, dict) and details.get("state") == "staged" else ""
        for name, reason in self.fenced.items():
            log.warning("Version %s is committed without engine %s: %s", self._options.version, name, reason)

    def result(self) -> dict[str, Any]:
        """Return the fields of PushResult, except the snapshot, as JSON values."""
        return {
            "version": self._options.version,
            "epoch": self._group.epoch,
            "world_size": self._group.world_size,
            "bytes": self.bytes,
            "buckets": self.buckets,
            "phases": {name: round(ms, 1) for name, ms in self.phases.items()},
            "fenced": self.fenced,
        }

    def wait_for_broadcast(self, seconds: float) -> None:
        """Wait until the thread of a running broadcast has ended. Call it after a failure, when the process group is closed.

        If the interpreter ended before this thread, torch would abort the process.
        """
        if self._sent is not None:
            wait([self._sent], timeout=seconds)

    def _transfer(self, current: tuple[Bucket[Any], Any] | None, prepared: Iterator[tuple[Bucket[Any], Any]]) -> None:
        while current is not None:
            bucket, buffer = current
            timeout = self._options.timeout
            deadline = Deadline(timeout)
            reply = run_in_background(self._http.post, UPDATE, self._body(bucket), timeout=timeout)
            sent = self._sent = run_in_background(self._group.broadcast, buffer, timeout=timeout)
            upcoming = None if bucket.last else self._timed("prepare", lambda: self._next_bucket(prepared))
            _await_bucket(reply, sent, deadline)
            self.bytes += bucket.nbytes
            self.buckets += 1
            current = upcoming

    def _body(self, bucket: Bucket[Any]) -> dict[str, Any]:
        body = bucket.request(self._group.name) | {"flush_cache": bucket.last, "abort_all_requests": False}
        body |= {} if self._options.check_model else {CHECK_MODEL_FIELD: False}
        # Label and cache flush belong to the last bucket: before it the engine is dirty.
        return body | {"weight_version": self._options.version} if bucket.last else body

    def _begin_body(self, source: Source) -> dict[str, Any]:
        """Return the label, and all names if they are known, so that the fleet refuses an incomplete push before it begins."""
        names = [spec.name for spec in source.specs]
        is_short = 0 < sum(len(name) + 4 for name in names) <= MAX_ANNOUNCED_CHARACTERS
        return {"weight_version": self._options.version} | ({"names": names} if is_short else {})

    def _end_body(self) -> dict[str, Any]:
        checksums = {str(size): list(ranks) for size, ranks in self._options.checksums.items()}
        return {"checksums": checksums} if checksums else {}

    def _prepare_buckets(self, source: Source) -> Iterator[tuple[Bucket[Any], Any]]:
        for turn, bucket in enumerate(plan_buckets(source, self._options.bucket_bytes)):
            if self._ranks is not None:
                self._ranks.agree(digest_bucket(bucket))
            yield bucket, self._group.flatten(bucket, turn, self._gather)

    def _gather(self, spec: TensorSpec, tensor: Any) -> Any:
        full = full_tensor(tensor)
        if self._tensor_sink is not None:
            self._tensor_sink(spec, full)
        return full

    def _next_bucket(self, prepared: Iterator[tuple[Bucket[Any], Any]]) -> tuple[Bucket[Any], Any] | None:
        try:
            return next(prepared, None)
        except PushFailed:
            raise
        except Exception as error:
            raise PushFailed(phase="prepare", reason=f"the tensors could not be prepared: {error}") from error

    def _call(self, phase: str, path: str, body: dict[str, Any]) -> dict[str, Any]:
        try:
            return self._http.post(path, body, timeout=self._options.timeout)
        except FleetError as error:
            raise push_failure(phase, error) from error

    def _timed(self, phase: str, step: Callable[[], R]) -> R:
        started = time.monotonic()
        try:
            return step()
        finally:
            self.phases[phase] = self.phases.get(phase, 0.0) + (time.monotonic() - started) * 1000


def wait_for_commit(read: Callable[[], FleetDocument], update: str, seconds: float) -> None:
    """Wait until an update that the fleet has answered before its commit has ended.

    Raises:
        PushFailed: The update failed, too few engines have loaded the version, or the time is over.
    """
    deadline = Deadline(seconds)
    while (last := read().last_update) is None or last.update != update:
        if deadline.has_passed:
            reason = f"the version is staged, but was not committed within {seconds:g} s"
            raise PushFailed(phase="commit", reason=reason, advice="The fleet may still commit it: see GET /fleet before you push again.")
        time.sleep(min(COMMIT_POLL_SECONDS, deadline.remaining))
    if last.reason is UpdateReason.TOO_FEW_ENGINES or last.outcome not in (UpdateOutcome.COMMITTED, UpdateOutcome.PARTIAL):
        advice = find_advice(last.reason) or "Push again. The engines serve the previous version."
        raise PushFailed(phase="commit", reason=last.message, advice=advice, code=last.reason)


def find_advice(code: str | None) -> str | None:
    """Return what to do about a failure with this code; None if the caller knows it."""
    return _ADVICE.get(code) if code is not None else None


def prepare_failure(error: ValueError) -> PushFailed:
    """Return the failure of a push whose tensors cannot be sent, found before the first call to the fleet."""
    if isinstance(error, NoTensorError):
        return PushFailed(phase="prepare", reason="there is no tensor to push", advice="Pass the policy's state dict.")
    return PushFailed(phase="prepare", reason=str(error), advice=NOTHING_SENT)


def _await_bucket(reply: Future[dict[str, Any]], sent: Future[None], deadline: Deadline) -> None:
    both: list[Future[Any]] = [reply, sent]
    done, _ = wait(both, timeout=deadline.remaining, return_when=FIRST_EXCEPTION)
    if any(future.exception() for future in done):
        if reply not in done:  # a broken connection fails the broadcast first, but the fleet knows which engine failed
            wait(both, timeout=OTHER_SIDE_SECONDS, return_when=FIRST_COMPLETED if sent not in done else "ALL_COMPLETED")
        raise push_failure("transfer", _clearer_error(reply, sent))
    if len(done) < len(both):
        late = "the broadcast did not finish" if reply in done else "the fleet did not reply"
        raise PushFailed(phase="transfer", reason=f"{late} within {deadline.seconds:.0f} s")


def _clearer_error(reply: Future[dict[str, Any]], sent: Future[None]) -> BaseException:
    """Return the clearer error of both sides: the fleet's error names an engine, that of the collective does not."""
    error = (reply.exception() if reply.done() else None) or (sent.exception() if sent.done() else None)
    return error or FleetError("the transfer failed for an unknown reason")


def push_failure(phase: str, error: BaseException, advice: str | None = None) -> PushFailed:
    """Return the failure of a push in which a call failed with this error."""
    if isinstance(error, PushFailed):
        return error
    if isinstance(error, FleetRefused):
        code = error.fleet.get("reason")
        known = code if isinstance(code, str) else None
        advice = find_advice(known) or advice
        cause = error.fleet.get("cause")  # the message also says the phase, and what to do
        reason = cause if isinstance(cause, str) and cause else error.reason
        return PushFailed(phase=phase, reason=reason, engine=_blamed_engine(error.fleet), advice=advice, code=known)
    return PushFailed(phase=phase, reason=str(error), advice=advice)


def read_fenced(reply: Mapping[str, Any]) -> dict[str, str]:
    """Return the engines that failed at the end of a push, with reasons."""
    fleet = reply.get("fleet")
    fenced = fleet.get("fenced") if isinstance(fleet, dict) else None
    return {str(name): str(reason) for name, reason in fenced.items()} if isinstance(fenced, dict) else {}


def _blamed_engine(fleet: Mapping[str, Any]) -> str | None:
    engine = fleet.get("engine")
    return engine if isinstance(engine, str) else None
