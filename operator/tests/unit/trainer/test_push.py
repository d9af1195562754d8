"""The push transaction against a scripted fleet and a scripted group: no torch."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest

from sglang_rollout.trainer import PushFailed
from sglang_rollout.trainer import push as push_module
from sglang_rollout.trainer.calls import Http
from sglang_rollout.trainer.push import UPDATE, Push, PushOptions, wait_for_commit
from sglang_rollout.trainer.tensors import Bucket, Source, TensorSpec
from sglang_rollout.wire.trainer import FleetDocument
from tests.unit.trainer.support.scripted_fleet import FakeFleet, document

GOOD = (200, {"success": True, "message": "ok"})


@dataclass
class Tensor:
    """What the planning reads of a torch tensor."""

    shape: tuple[int, ...]
    dtype: str = "torch.float32"

    def element_size(self) -> int:
        return 4


@dataclass
class FakeGroup:
    """Remembers what was broadcast; ``hold`` makes broadcasts wait for peers that never come."""

    name: str = "g"
    epoch: int = 1
    world_size: int = 3
    sent: list[str] = field(default_factory=list)
    hold: threading.Event | None = None
    error: Exception | None = None
    flattened: list[tuple[float, int]] = field(default_factory=list)

    def flatten(self, bucket: Bucket[Any], turn: int, full: Callable[[TensorSpec, Any], Any]) -> str:
        self.flattened.append((time.monotonic(), turn))
        for spec, tensor in bucket.items:
            full(spec, tensor)
        return "+".join(spec.name for spec, _ in bucket.items)

    def broadcast(self, buffer: str, *, timeout: float) -> None:
        if self.error:
            raise self.error
        if self.hold:
            self.hold.wait(timeout)
        self.sent.append(buffer)


@pytest.fixture
def willing(fake: FakeFleet) -> FakeFleet:
    fake.replies |= dict.fromkeys(("/begin_weight_update", UPDATE, "/end_weight_update"), GOOD)
    return fake


def run(fake: FakeFleet, group: FakeGroup, names: str = "abc", timeout: float = 10.0) -> Push:
    push = Push(Http(fake.url), group, PushOptions("7", bucket_bytes=8, timeout=timeout))
    push.run(Source({name: Tensor((1,)) for name in names}))
    return push


def test_a_push_announces_its_names_and_sends_nothing_if_the_fleet_refuses_them(willing: FakeFleet) -> None:
    cause = "engine e1 did not hold version 1/1 before and lacks 1 of 3 tensors of a complete push, the first is c: push all of them"
    details = {"reason": "TensorsMissing", "engine": "e1", "cause": cause}
    willing.replies["/begin_weight_update"] = (400, {"success": False, "message": f"{cause}. Nothing was sent.", "fleet": details})
    source, group = Source({name: Tensor((1,)) for name in "ab"}), FakeGroup()
    source.check(8)
    with pytest.raises(PushFailed, match=r"the first is c: push all of them\. A push of the same tensors fails again\.") as failed:
        Push(Http(willing.url), group, PushOptions("7", bucket_bytes=8, timeout=10.0)).run(source)
    assert (failed.value.phase, failed.value.code, failed.value.is_retryable) == ("begin", "TensorsMissing", False)
    assert "Push again" not in str(failed.value)
    assert willing.calls == [("/begin_weight_update", {"weight_version": "7", "names": ["a", "b"]})]
    assert group.sent == []


def test_the_calls_of_a_push(willing: FakeFleet) -> None:
    group = FakeGroup()
    push = run(willing, group)
    assert [path for path, _ in willing.calls] == ["/begin_weight_update", UPDATE, UPDATE, "/end_weight_update"]
    first, last = (body for path, body in willing.calls if path == UPDATE)
    assert (first["names"], first["flush_cache"], first.get("weight_version")) == (["a", "b"], False, None)
    assert (last["names"], last["flush_cache"], last["weight_version"]) == (["c"], True, "7")
    assert group.sent == ["a+b", "c"]
    assert (push.bytes, push.buckets) == (12, 2)
    assert set(push.phases) == {"prepare", "begin", "transfer", "end"}


def test_a_push_names_fenced_engines(willing: FakeFleet) -> None:
    assert run(willing, FakeGroup()).fenced == {}
    willing.replies["/end_weight_update"] = (200, {"success": True, "fleet": {"fenced": {"demo-engine-1": "could not end the session"}}})
    assert run(willing, FakeGroup()).fenced == {"demo-engine-1": "could not end the session"}


def ended(update: str, outcome: str, **fields: Any) -> dict[str, Any]:
    version = {"run": 1, "step": 7, "label": "7"}
    return document(last_update={"version": version, "outcome": outcome, "finished": "2026-11-26T00:00:00Z", "update": update, **fields})


def wait_for(fake: FakeFleet, *documents: dict[str, Any], seconds: float = 10.0) -> None:
    answers = iter(documents)
    wait_for_commit(lambda: FleetDocument.model_validate(next(answers)), "u7", seconds)


def test_a_push_that_is_answered_before_its_commit_names_its_update(willing: FakeFleet) -> None:
    assert run(willing, FakeGroup()).staged == ""
    willing.replies["/end_weight_update"] = (200, {"success": True, "fleet": {"state": "staged", "update": "u7"}})
    assert run(willing, FakeGroup()).staged == "u7"


@pytest.mark.parametrize("outcome", ["Committed", "Partial"])
def test_a_staged_push_waits_for_the_end_of_its_update(fake: FakeFleet, monkeypatch: pytest.MonkeyPatch, outcome: str) -> None:
    monkeypatch.setattr(push_module, "COMMIT_POLL_SECONDS", 0.01)
    wait_for(fake, document(), ended("u6", "Committed"), ended("u7", outcome))


@pytest.mark.parametrize(
    ("outcome", "fields", "said", "advice"),
    [
        ("Failed", {"message": "too few engines were up"}, "too few engines", "Push again"),
        (
            "Failed",
            {"message": "the version lacks 1 of 3 tensors", "reason": "TensorsMissing"},
            "lacks 1 of 3",
            "the same tensors fails again",
        ),
        ("Partial", {"message": "only 1 of 3 engines", "reason": "TooFewEngines"}, "only 1 of 3", "Do not push this version again"),
    ],
)
def test_a_staged_push_fails_with_its_update(fake: FakeFleet, outcome: str, fields: dict[str, str], said: str, advice: str) -> None:
    with pytest.raises(PushFailed, match=said) as caught:
        wait_for(fake, ended("u7", outcome, **fields))
    assert advice in caught.value.advice


def test_a_staged_push_does_not_wait_for_ever(fake: FakeFleet) -> None:
    with pytest.raises(PushFailed, match="not committed within 0 s") as caught:
        wait_for(fake, document(), seconds=0)
    assert "may still commit" in caught.value.advice


def test_the_next_bucket_is_prepared_during_a_broadcast(willing: FakeFleet) -> None:
    arrived: list[float] = []

    def slow(_: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        time.sleep(0.3)
        arrived.append(time.monotonic())
        return GOOD

    willing.replies[UPDATE] = slow
    group = FakeGroup()
    run(willing, group)
    assert [turn for _, turn in group.flattened] == [0, 1]
    assert group.flattened[1][0] < arrived[0]


def test_a_push_of_many_buckets_keeps_one_connection(willing: FakeFleet) -> None:
    assert run(willing, FakeGroup(), names="abcdefghijklmnop").buckets == 8
    assert willing.connections == 1


def test_a_refusal_ends_a_broadcast_without_receivers(willing: FakeFleet) -> None:
    refused = {"success": False, "message": "engine demo-engine-1 is not up", "fleet": {"engine": "demo-engine-1"}}
    willing.replies[UPDATE] = (400, refused)
    hold = threading.Event()
    started = time.monotonic()
    with pytest.raises(PushFailed, match=r"phase 'transfer' on engine demo-engine-1.*Push again") as failed:
        run(willing, FakeGroup(hold=hold), timeout=60)
    hold.set()
    assert time.monotonic() - started < 50, "it waited for a broadcast without receivers"
    assert (failed.value.phase, failed.value.engine) == ("transfer", "demo-engine-1")


def test_success_false_is_a_refusal_whatever_the_status(willing: FakeFleet) -> None:
    willing.replies["/end_weight_update"] = (200, {"success": False, "message": "engine demo-engine-0: flush failed"})
    with pytest.raises(PushFailed, match=r"phase 'end'.*flush failed"):
        run(willing, FakeGroup())


def test_a_broken_broadcast_waits_for_the_fleets_error(willing: FakeFleet) -> None:
    def late(_: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        time.sleep(0.3)
        return 500, {"success": False, "message": "engine demo-engine-0 was killed"}

    willing.replies[UPDATE] = late
    with pytest.raises(PushFailed, match="demo-engine-0 was killed"):
        run(willing, FakeGroup(error=RuntimeError("Connection closed by peer")))


def test_a_silent_fleet_fails_the_push_at_the_deadline(willing: FakeFleet) -> None:
    release = threading.Event()
    willing.replies[UPDATE] = lambda _: (release.wait(20), GOOD)[1]
    with pytest.raises(PushFailed, match=r"phase 'transfer'"):
        run(willing, FakeGroup(), timeout=0.5)
    release.set()


def test_a_broadcast_without_end_fails_at_the_deadline(willing: FakeFleet) -> None:
    hold = threading.Event()
    with pytest.raises(PushFailed, match="broadcast did not finish within"):
        run(willing, FakeGroup(hold=hold), timeout=0.5)
    hold.set()


def test_a_refused_begin_sends_no_tensor(willing: FakeFleet) -> None:
    willing.replies["/begin_weight_update"] = (409, {"success": False, "message": "an update is running"})
    group = FakeGroup()
    with pytest.raises(PushFailed, match=r"phase 'begin'.*an update is running"):
        run(willing, group)
    assert group.sent == []


def test_empty_and_failing_sources_are_refused(willing: FakeFleet) -> None:
    with pytest.raises(PushFailed, match="there is no tensor to push"):
        run(willing, FakeGroup(), names="")

    def gather() -> Iterator[tuple[str, Tensor]]:
        yield "a", Tensor((1,))
        raise RuntimeError("shard 3 is lost")

    with pytest.raises(PushFailed, match=r"phase 'prepare'.*shard 3 is lost"):
        Push(Http(willing.url), FakeGroup(), PushOptions("7", bucket_bytes=4, timeout=5)).run(Source(gather()))
