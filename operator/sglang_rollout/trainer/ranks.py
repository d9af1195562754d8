"""The trainer's own ranks in one push of ``DTensor`` weights: rank 0 leads, the others take part in gathering.

    leader     check ─ agree ─ open group ─ agree ─ gather bucket 1 ─ begin ─ agree ─ gather bucket 2 … end ─ finish
    follower   check ─ report ───────────── report ─ gather bucket 1 ──────── report ─ gather bucket 2 … ─── report

In each step every follower reports what it is about to gather, and the leader publishes a verdict: continue, failed or
finished. A rank that fails between two steps therefore ends the push on all of them. Messages go through torch's
key-value store, not through a process group, because waiting there keeps no GPU busy. Imports no torch.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

from sglang_rollout.trainer.buckets import Bucket, plan
from sglang_rollout.trainer.errors import NOTHING_SENT, PushFailed
from sglang_rollout.trainer.tensors import Source, digest, full_tensor
from sglang_rollout.trainer.waiting import Deadline

log = logging.getLogger(__name__)

LONGEST_POLL_SECONDS = 0.25
"""Between two looks at the store: 4,000 reads per second with 1,000 ranks that wait long."""
MARGIN_SECONDS = 60.0
"""How much longer followers wait for the leader than the leader for the fleet: the leader's error says more."""
TOGETHER = "Every rank of the trainer must call push with the same tensors in the same order."
_ENDED = "ended"
_last_push: dict[tuple[int, Sequence[int]], int] = {}
"""Number of the last push in which this process took part, by rank and ranks."""
_leftover: dict[Sequence[int], list[str]] = {}
"""Leader: keys of the last push that its followers may still have to read, by ranks."""


class Store(Protocol):
    """The part of ``torch.distributed.Store`` that is needed."""

    def set(self, key: str, value: str) -> None:
        """Store a value."""

    def get(self, key: str) -> bytes:
        """Return the value of a key that exists."""

    def check(self, keys: list[str]) -> bool:
        """Return True if all keys exist."""

    def delete_key(self, key: str) -> bool:
        """Remove a key."""


class Ranks:
    """One rank's view of one push."""

    def __init__(self, store: Store, rank: int, ranks: Sequence[int], *, timeout: float) -> None:
        self._store = store
        self._timeout = timeout
        self._rank = rank
        self._ranks = tuple(ranks)
        self._others = [other for other in ranks if other != rank]
        self.is_leader = rank == ranks[0]
        # A rank that missed a push continues with the next one, not with messages of the one that it missed.
        ended = int(store.get(_ENDED)) if store.check([_ENDED]) else 0
        self._push = max(_last_push.get((rank, self._ranks), 0), ended) + 1
        _last_push[rank, self._ranks] = self._push
        self._step = 0
        self._has_met = False
        """Leader: the followers of this push have reported once, or their time has passed."""
        self._is_over = False

    def agree(self, intent: str, **more: Any) -> None:
        """Leader: wait until every follower has reported the same intent, then tell all of them to continue.

        Raises:
            PushFailed: A follower failed, intends something else or did not report in time. All followers hear the same.
        """
        with self._store_errors():
            keys = {rank: self._key(rank) for rank in self._others}
            self._meet(keys.values())
            absent = [rank for rank, key in keys.items() if not self._store.check([key])]
            if absent:
                raise self._failed(f"ranks {absent} of the trainer did not take part within {self._timeout:g} s. {TOGETHER}")
            self._compare({rank: json.loads(self._store.get(key)) for rank, key in keys.items()}, intent)
            # All followers are in this step: none of them reads an earlier verdict any more.
            for key in (*keys.values(), *_leftover.pop(self._ranks, [])):
                self._store.delete_key(key)
            _leftover[self._ranks] = [self._key()]
            self._publish({"go": True, **more})

    def _compare(self, reports: dict[int, dict[str, Any]], intent: str) -> None:
        for rank, report in reports.items():
            if report["error"]:
                raise self._failed(f"rank {rank} of the trainer: {report['error']}")
            if report["intent"] != intent:
                raise self._failed(f"rank {rank} of the trainer pushes other tensors than rank {self._rank}. {TOGETHER}")

    def finish(self, result: dict[str, Any]) -> None:
        """Leader: tell the followers that the push is committed."""
        self._end({"result": result})

    def fail(self, error: BaseException) -> None:
        """Leader: tell the followers why the push failed."""
        if isinstance(error, PushFailed):
            said = {"phase": error.phase, "reason": error.reason, "engine": error.engine, "advice": error.advice}
        else:
            said = {"phase": "prepare", "reason": f"rank {self._rank} of the trainer: {error or type(error).__name__}"}
        try:
            if not self._has_met and isinstance(error, Exception):
                # A follower that came later would take this push for the next one.
                self._meet(map(self._key, self._others))
            self._end({"failed": said})
        except RuntimeError as broken:  # the error itself is raised by the caller
            log.warning("the other ranks of the trainer did not receive the failure of the push: %s", broken)

    def report(self, intent: str, seconds: float, *, error: str = "") -> dict[str, Any]:
        """Follower: report, and return the leader's verdict.

        Raises:
            PushFailed: The leader says that the push failed, or does not answer in time.
        """
        with self._store_errors():
            self._store.set(self._key(self._rank), json.dumps({"intent": intent, "error": error}))
            verdict = self._key()
            self._wait([verdict], Deadline(seconds))
            if not self._store.check([verdict]):
                raise self._failed(f"the leading rank of the trainer did not continue within {seconds:g} s. {TOGETHER}")
            heard: dict[str, Any] = json.loads(self._store.get(verdict))
        self._step += 1
        if "failed" in heard:
            raise PushFailed(**heard["failed"])
        return heard

    @contextmanager
    def _store_errors(self) -> Iterator[None]:
        try:
            yield
        except RuntimeError as broken:
            raise self._failed(f"the trainer's key-value store cannot be reached, did its first rank end? {broken}") from broken

    def _meet(self, keys: Iterable[str]) -> None:
        self._wait(list(keys), Deadline(self._timeout))
        self._has_met = True

    def _failed(self, reason: str) -> PushFailed:
        advice = "Push again on all ranks." if self._step else NOTHING_SENT
        return PushFailed(phase="prepare", reason=reason, advice=advice)

    def _end(self, verdict: dict[str, Any]) -> None:
        if not self._is_over:
            self._is_over = True
            _leftover.setdefault(self._ranks, []).extend([self._key(), *map(self._key, self._others)])
            self._store.set(_ENDED, str(self._push))
            self._publish(verdict)

    def _publish(self, verdict: dict[str, Any]) -> None:
        self._store.set(self._key(), json.dumps(verdict))
        self._step += 1

    def _key(self, rank: int | None = None) -> str:
        """Key of a rank's report; without ``rank`` of the verdict."""
        place = f"{self._push}/{self._step}"
        return place if rank is None else f"{place}/{rank}"

    def _wait(self, keys: list[str], deadline: Deadline) -> None:
        """Wait until all keys exist or the deadline passes.

        Polls, because ``Store.wait`` holds the store's connection and cannot be interrupted.
        """
        started = time.monotonic()
        while keys and not self._store.check(keys) and not deadline.passed:
            waited = time.monotonic() - started
            time.sleep(min(max(waited / 10, 0.0005), LONGEST_POLL_SECONDS, deadline.remaining))


def follow(ranks: Ranks, source: Source, intent: str, *, bucket_bytes: int, timeout: float) -> dict[str, Any]:
    """Take part in a push as a rank that does not lead; returns the fields of the leader's result.

    Raises:
        PushFailed: The push failed, on whichever rank.
    """
    try:
        source.check(bucket_bytes)
    except ValueError as error:
        ranks.report("", timeout + MARGIN_SECONDS, error=str(error))
    patience = float(ranks.report(source.digest(intent), timeout + MARGIN_SECONDS)["patience"])
    buckets = plan(source, bucket_bytes)
    while True:
        try:
            bucket = next(buckets, None)
        except Exception as error:
            ranks.report("", patience, error=str(error) or type(error).__name__)
            raise
        verdict = ranks.report(bucket_digest(bucket), patience)
        if "result" in verdict:
            return dict(verdict["result"])
        for _, tensor in bucket.items if bucket is not None else ():
            full_tensor(tensor)


def bucket_digest(bucket: Bucket[Any] | None) -> str:
    """Return what all ranks must say of the bucket that they gather next; None: all buckets are done."""
    return digest([[spec.name, spec.dtype, spec.shape] for spec, _ in bucket.items]) if bucket is not None else "end"
