"""Events have stable names, and their count grows."""

from __future__ import annotations

from typing import Any

import pytest

from sglang_rollout.controller import events as events_module
from sglang_rollout.controller.decide.transitions import EventToPost
from sglang_rollout.controller.events import EventPoster
from sglang_rollout.kube.errors import ApiUnavailable, Conflict, KubeError, NotFound

ROLLOUT = {
    "apiVersion": "rollout.sglang.io/v1alpha1",
    "kind": "SGLangRollout",
    "metadata": {"name": "demo", "namespace": "n", "uid": "u1"},
}
NEWS = EventToPost("Normal", "WeightsCommitted", "version 7", "WeightsCommitted")


class Store:
    """Events as the API server stores them."""

    def __init__(self) -> None:
        self.objects: dict[str, dict[str, Any]] = {}
        self.calls: list[str] = []
        self.error: KubeError | None = None

    async def create(self, obj: dict[str, Any]) -> None:
        self.calls.append("create")
        if self.error:
            raise self.error
        name = obj["metadata"]["name"]
        if name in self.objects:
            raise Conflict("exists")
        self.objects[name] = dict(obj)

    async def get(self, _resource: Any, _namespace: str, name: str) -> dict[str, Any]:
        self.calls.append("get")
        return self.objects[name]

    async def merge_patch(self, _resource: Any, _namespace: str, name: str, patch: dict[str, Any]) -> None:
        self.calls.append("patch")
        if name not in self.objects:
            raise NotFound("gone")
        self.objects[name] |= patch


def poster(store: Store) -> EventPoster:
    times = iter(f"2026-01-01T00:00:{second:02}Z" for second in range(60))
    return EventPoster(store, component="operator", instance="pod", now=lambda: next(times))  # type: ignore[arg-type]


async def test_repeated_event_is_one_object_with_a_growing_count() -> None:
    store = Store()
    post = poster(store)
    for number in (7, 8, 9):
        await post.post(ROLLOUT, EventToPost("Normal", "WeightsCommitted", f"version {number}", "WeightsCommitted"))
    (event,) = store.objects.values()
    assert (event["count"], event["message"]) == (3, "version 9")
    assert event["firstTimestamp"] < event["lastTimestamp"]
    assert event["involvedObject"]["uid"] == "u1"
    assert store.calls == ["create", "patch", "patch"]


async def test_other_events_and_other_rollouts_have_their_own_objects() -> None:
    store = Store()
    post = poster(store)
    await post.post(ROLLOUT, NEWS)
    await post.post(ROLLOUT, EventToPost("Warning", "EngineLost", "x", "EngineLost/a"))
    again = {**ROLLOUT, "metadata": {**ROLLOUT["metadata"], "uid": "u2"}}  # type: ignore[dict-item]
    await post.post(again, NEWS)
    assert len(store.objects) == 3
    assert all(name.startswith("demo.") for name in store.objects)


async def test_restarted_operator_continues_the_count() -> None:
    store = Store()
    await poster(store).post(ROLLOUT, NEWS)
    await poster(store).post(ROLLOUT, NEWS)
    (event,) = store.objects.values()
    assert event["count"] == 2


async def test_expired_event_is_created_again() -> None:
    store = Store()
    post = poster(store)
    await post.post(ROLLOUT, NEWS)
    store.objects.clear()
    await post.post(ROLLOUT, NEWS)
    await post.post(ROLLOUT, NEWS)
    (event,) = store.objects.values()
    assert event["count"] == 2


async def test_remembered_counts_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(events_module, "MAX_REMEMBERED_COUNTS", 3)
    store = Store()
    post = poster(store)
    for number in range(10):
        await post.post(ROLLOUT, EventToPost("Normal", "R", "m", f"key{number}"))
    assert len(post._counts) == 3
    await post.post(ROLLOUT, EventToPost("Normal", "R", "m", "key0"))
    assert sorted(event["count"] for event in store.objects.values()) == [1] * 9 + [2]


async def test_long_messages_are_cut_and_failures_are_logged(caplog: pytest.LogCaptureFixture) -> None:
    store = Store()
    post = poster(store)
    await post.post(ROLLOUT, EventToPost("Normal", "R", "m" * 5000, "k"))
    (event,) = store.objects.values()
    assert len(event["message"]) == 1024
    store.error = ApiUnavailable("the server is away")
    await post.post(ROLLOUT, EventToPost("Normal", "R", "m", "other"))
    assert "the server is away" in caplog.text
