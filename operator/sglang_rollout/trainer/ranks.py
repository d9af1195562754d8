"""The trainer's ranks in one push of ``DTensor`` weights: the lowest rank leads, the others help to gather.

    leader     check ─ agree ─ open group ─ agree ─ gather bucket 1 ─ begin ─ agree ─ gather bucket 2 … end ─ finish
    follower   check ─ report ───────────── report ─ gather bucket 1 ──────── report ─ gather bucket 2 … ─── report

In each step every follower reports what it gathers next, and the leader publishes a verdict: continue, failed or
finished. So a rank that fails between two steps ends the push on all ranks. Messages go through torch's key-value store,
not through a process group, because waiting there keeps no GPU busy. Never imports torch.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

from sglang_rollout.json_text import load_json
from sglang_rollout.trainer.calls import Deadline
from sglang_rollout.trainer.errors import NOTHING_SENT, PushFailed
from sglang_rollout.trainer.tensors import Bucket, Source, digest, full_tensor, plan_buckets

log = logging.getLogger(__name__)

MAX_POLL_SECONDS = 0.25
"""Maximum interval between two reads of the store: 1,000 waiting ranks make 4,000 reads per second."""
MARGIN_SECONDS = 60.0
"""How much longer followers wait for the leader than the leader waits for the fleet: the leader's error is clearer."""
SAME_PUSH_ADVICE = "Every rank of the trainer must call push with the same tensors in the same order."
_ENDED = "ended"
_last_push: dict[tuple[int, Sequence[int]], int] = {}
"""Number of the last push in which this process took part, by rank and ranks."""
_leftover: dict[Sequence[int], list[str]] = {}
"""Leader: keys of the last push that its followers may not have read yet, by ranks."""


class Store(Protocol):
    """The part of ``torch.distributed.Store`` that ranks use."""

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
        # A rank that missed a push continues with the next push, not with the messages of the missed one.
        ended = int(store.get(_ENDED)) if store.check([_ENDED]) else 0
        self._push = max(_last_push.get((rank, self._ranks), 0), ended) + 1
        _last_push[rank, self._ranks] = self._push
        self._step = 0
        self._has_met = False
        """Leader: True if all followers of this push have reported once, or the wait for them has ended."""
        self._is_over = False

    def agree(self, intent: str, **more: Any) -> None:
        """Leader: wait until every follower has reported the same intent, then let all followers continue.

        Raises:
            PushFailed: A follower failed, reported another intent, or did not report in time.
        """
        with self._translate_store_errors():
            keys = {rank: self._key(rank) for rank in self._others}
            self._await_followers(keys.values())
            absent = [rank for rank, key in keys.items() if not self._store.check([key])]
            if absent:
                raise self._push_failure(f"ranks {absent} of the trainer did not take part within {self._timeout:g} s. {SAME_PUSH_ADVICE}")
            self._compare_reports({rank: load_json(self._store.get(key)) for rank, key in keys.items()}, intent)
            # All followers are in this step, so no follower still reads an earlier verdict.
            for key in (*keys.values(), *_leftover.pop(self._ranks, [])):
                self._store.delete_key(key)
            _leftover[self._ranks] = [self._key()]
            self._publish({"go": True, **more})

    def _compare_reports(self, reports: dict[int, dict[str, Any]], intent: str) -> None:
        for rank, report in reports.items():
            if report["error"]:
                raise self._push_failure(f"rank {rank} of the trainer: {report['error']}")
            if report["intent"] != intent:
                raise self._push_failure(f"rank {rank} of the trainer pushes other tensors than rank {self._rank}. {SAME_PUSH_ADVICE}")

    def finish(self, result: dict[str, Any]) -> None:
        """Leader: publish the result of the committed push to the followers."""
        self._end({"result": result})

    @contextmanager
    def publish_failure(self) -> Iterator[None]:
        """Leader: if the block raises an error, publish to the followers why the push failed."""
        try:
            yield
        except BaseException as error:
            self.fail(error)
            raise

    def fail(self, error: BaseException) -> None:
        """Leader: publish to the followers why the push failed."""
        if isinstance(error, PushFailed):
            failure = {"phase": error.phase, "reason": error.reason, "engine": error.engine, "advice": error.advice, "code": error.code}
        else:
            failure = {"phase": "prepare", "reason": f"rank {self._rank} of the trainer: {error or type(error).__name__}"}
        try:
            if not self._has_met and isinstance(error, Exception):
                # A late follower would take this push for the next one.
                self._await_followers(map(self._key, self._others))
            self._end({"failed": failure})
        except RuntimeError as broken:  # the caller raises the error itself
            log.warning("The other ranks of the trainer did not receive the failure of the push: %s", broken)

    def report(self, intent: str, seconds: float, *, error: str = "") -> dict[str, Any]:
        """Follower: report the intent or an error, and return the leader's verdict.

        Raises:
            PushFailed: The push failed, or the leader published no verdict in time.
        """
        with self._translate_store_errors():
            self._store.set(self._key(self._rank), json.dumps({"intent": intent, "error": error}))
            key = self._key()
            self._wait([key], Deadline(seconds))
            if not self._store.check([key]):
                raise self._push_failure(f"the leading rank of the trainer did not continue within {seconds:g} s. {SAME_PUSH_ADVICE}")
            verdict: dict[str, Any] = load_json(self._store.get(key))
        self._step += 1
        if "failed" in verdict:
            raise PushFailed(**verdict["failed"])
        return verdict

    @contextmanager
    def _translate_store_errors(self) -> Iterator[None]:
        try:
            yield
        except RuntimeError as broken:
            raise self._push_failure(f"the trainer's key-value store cannot be reached. Did its first rank end? {broken}") from broken

    def _await_followers(self, keys: Iterable[str]) -> None:
        self._wait(list(keys), Deadline(self._timeout))
        self._has_met = True

    def _push_failure(self, reason: str) -> PushFailed:
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
        """Return the key of a rank's report; without ``rank`` that of the leader's verdict."""
        place = f"{self._push}/{self._step}"
        return place if rank is None else f"{place}/{rank}"

    def _wait(self, keys: list[str], deadline: Deadline) -> None:
        """Wait until all keys exist or the deadline passes.

        Poll, because ``Store.wait`` blocks the store's connection and cannot be interrupted.
        """
        started = time.monotonic()
        while keys and not self._store.check(keys) and not deadline.has_passed:
            waited = time.monotonic() - started
            time.sleep(min(max(waited / 10, 0.0005), MAX_POLL_SECONDS, deadline.remaining))


def follow(ranks: Ranks, source: Source, intent: str, *, bucket_bytes: int, timeout: float) -> dict[str, Any]:
    """Take part in a push as a follower, and return the fields of the leader's result.

    Raises:
        PushFailed: The push failed on any rank.
    """
    try:
        source.check(bucket_bytes)
    except ValueError as error:
        ranks.report("", timeout + MARGIN_SECONDS, error=str(error))
    patience = float(ranks.report(source.digest(intent), timeout + MARGIN_SECONDS)["patience"])
    buckets = plan_buckets(source, bucket_bytes)
    while True:
        try:
            bucket = next(buckets, None)
        except Exception as error:
            ranks.report("", patience, error=str(error) or type(error).__name__)
            raise
        verdict = ranks.report(digest_bucket(bucket), patience)
        if "result" in verdict:
            return dict(verdict["result"])
        for _, tensor in bucket.items if bucket is not None else ():
            full_tensor(tensor)


def digest_bucket(bucket: Bucket[Any] | None) -> str:
    """Return the intent to report for the next bucket, equal on all ranks; None as bucket: all buckets are done."""
    return digest([[spec.name, spec.dtype, spec.shape] for spec, _ in bucket.items]) if bucket is not None else "end"
