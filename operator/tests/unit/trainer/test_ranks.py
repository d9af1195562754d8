"""Ranks of a trainer that push together, each in a thread of its own, with a store in memory. Without torch."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import count
from typing import Any

import pytest

from sglang_rollout.trainer import PushFailed
from sglang_rollout.trainer.ranks import Ranks, digest_bucket, follow
from sglang_rollout.trainer.tensors import Source, plan_buckets
from tests.unit.trainer.test_tensors import Sharded, Tensor, mesh

RESULT = {"version": "1"}
_firsts = count(0, 100)


class MemoryStore:
    def __init__(self) -> None:
        self.values: dict[str, bytes] = {}

    def set(self, key: str, value: str) -> None:
        self.values[key] = value.encode()

    def get(self, key: str) -> bytes:
        return self.values[key]

    def check(self, keys: list[str]) -> bool:
        return all(key in self.values for key in keys)

    def delete_key(self, key: str) -> bool:
        return self.values.pop(key, None) is not None


class Trainer:
    """Three ranks. ``push`` gives each its tensors; returns what each got or raised."""

    def __init__(self) -> None:
        self.store = MemoryStore()
        first = next(_firsts)  # the numbers of pushes are kept per process, and all of these ranks are in this one
        self.ranks = [first, first + 1, first + 2]
        self.gathered: list[list[str]] = []

    def tensors(self) -> dict[str, Any]:
        return {name: Named(name, self.gathered[-1], device_mesh=mesh(*self.ranks)) for name in "abc"}

    def push(self, *given: Any, lead: Callable[[Ranks, Source], None] | None = None, timeout: float = 20.0) -> list[Any]:
        def one(place: int, tensors: Any) -> Any:
            ranks = Ranks(self.store, self.ranks[place], self.ranks, timeout=timeout)
            source = Source(tensors)
            try:
                if not ranks.is_leader:
                    return follow(ranks, source, "1", bucket_bytes=12, timeout=timeout)
                try:
                    (lead or led)(ranks, source)
                except Exception as error:
                    ranks.fail(error)
                    raise
            except (PushFailed, ValueError) as error:
                return str(error)
            return RESULT

        with ThreadPoolExecutor(len(given)) as pool:
            return list(pool.map(one, range(len(given)), given))

    def all(self, tensors: Callable[[], Any] | None = None) -> list[Any]:
        self.gathered.append([])
        return [(tensors or self.tensors)() for _ in self.ranks]


class Named(Sharded):
    """Notes that it was gathered."""

    def __init__(self, name: str, gathered: list[str], **fields: Any) -> None:
        super().__init__(**fields)
        self.name, self.gathered = name, gathered

    def full_tensor(self) -> str:
        self.gathered.append(self.name)
        return "full"


def led(ranks: Ranks, source: Source) -> None:
    source.check(12)
    ranks.agree(source.digest("1"), patience=20)
    for bucket in plan_buckets(source, 12):
        ranks.agree(digest_bucket(bucket))
        for _, tensor in bucket.items:
            tensor.full_tensor()
    ranks.finish(RESULT)


@pytest.fixture
def trainer() -> Trainer:
    return Trainer()


def test_all_ranks_gather_the_same_tensors_and_return_the_leaders_result(trainer: Trainer) -> None:
    for _ in range(20):
        assert trainer.push(*trainer.all()) == [RESULT] * 3
        assert sorted(trainer.gathered[-1]) == list("aaabbbccc")
    assert len(trainer.store.values) < 10, "keys of earlier pushes are removed"


def test_every_rank_raises_the_reason_and_the_next_push_succeeds(trainer: Trainer) -> None:
    first = trainer.ranks[0]

    def broken() -> Iterator[tuple[str, Any]]:
        yield from list(trainer.tensors().items())[:2]
        raise RuntimeError("out of memory")

    def refusing(ranks: Ranks, source: Source) -> None:
        source.check(12)
        ranks.agree(source.digest("1"), patience=20)
        raise PushFailed(phase="begin", reason="an update is running.", engine="e1")

    good = trainer.all()
    cases: list[tuple[list[Any], str]] = [
        ([*good[:2], {**good[2], "c": 5}], f"rank {first + 2} of the trainer: 'c' is of type int"),
        ([{**good[0], "c": 5}, *good[1:]], "'c' is of type int"),
        ([good[0], dict(reversed(good[1].items())), good[2]], f"rank {first + 1} of the trainer pushes other tensors than rank {first}."),
        ([iter(good[0].items()), iter(good[1].items()), broken()], f"rank {first + 2} of the trainer: out of memory"),
    ]
    for given, sentence in cases:
        for said in trainer.push(*given):
            assert sentence in said
        assert trainer.push(*trainer.all()) == [RESULT] * 3
    for said in trainer.push(*trainer.all(), lead=refusing):
        assert "failed in phase 'begin' on engine e1: an update is running. Push again" in said
    assert trainer.push(*trainer.all()) == [RESULT] * 3


def test_a_rank_that_missed_a_push_takes_part_in_the_next_one(trainer: Trainer) -> None:
    first = trainer.ranks[0]
    said = trainer.push(*trainer.all()[:2], timeout=0.2)
    for one in said:
        assert f"ranks [{first + 2}] of the trainer did not take part within 0.2 s" in one
        assert "Nothing was sent" in one
    assert trainer.push(*trainer.all()) == [RESULT] * 3


def test_followers_do_not_wait_for_a_leader_that_never_comes(trainer: Trainer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sglang_rollout.trainer.ranks.MARGIN_SECONDS", 0.0)
    ranks = Ranks(trainer.store, trainer.ranks[1], trainer.ranks, timeout=0.1)
    trainer.all()
    with pytest.raises(PushFailed, match=r"the leading rank of the trainer did not continue within 0.1 s"):
        follow(ranks, Source(trainer.tensors()), "1", bucket_bytes=12, timeout=0.1)


def test_a_leader_that_fails_at_once_waits_for_its_followers(trainer: Trainer) -> None:
    """Else a follower that comes later would take the failed push for the next one."""
    waits = threading.Event()

    class Watched(MemoryStore):
        def check(self, keys: list[str]) -> bool:
            if keys == [f"1/0/{trainer.ranks[1]}"]:
                waits.set()
            return super().check(keys)

    store = Watched()
    leader = Ranks(store, trainer.ranks[0], trainer.ranks[:2], timeout=20)
    threading.Thread(target=leader.fail, args=(ValueError("no"),), daemon=True).start()
    assert waits.wait(20)
    follower = Ranks(store, trainer.ranks[1], trainer.ranks[:2], timeout=20)
    with pytest.raises(PushFailed, match=r"rank \d+ of the trainer: no"):
        follow(follower, Source({"a": Tensor()}), "1", bucket_bytes=12, timeout=20)
