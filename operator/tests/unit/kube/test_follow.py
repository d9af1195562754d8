"""Following a set of objects survives every failure of a watch."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from itertools import pairwise
from typing import Any

from sglang_rollout.kube.client import Listing, WatchEvent
from sglang_rollout.kube.errors import ApiUnavailable, Expired, KubeError
from sglang_rollout.kube.resources import CONFIGMAPS
from sglang_rollout.kube.watch import follow
from tests.support.virtual_time import run


def obj(name: str, version: int) -> dict[str, Any]:
    return {"metadata": {"name": name, "resourceVersion": str(version)}}


class Scripted:
    """Return lists and watches in a given order, then send nothing."""

    def __init__(self, *steps: Any) -> None:
        self.steps = list(steps)
        self.calls: list[tuple[str, float, str]] = []

    def _next(self, verb: str, version: str) -> Any:
        self.calls.append((verb, asyncio.get_running_loop().time(), version))
        step = self.steps.pop(0)
        if isinstance(step, KubeError):
            raise step
        return step

    async def list(self, _resource: Any, _namespace: str, **_: Any) -> Listing:
        listing = self._next("list", "")
        assert isinstance(listing, Listing)
        return listing

    async def watch(self, _resource: Any, _namespace: str, *, resource_version: str, **_: Any) -> AsyncIterator[Any]:
        if not self.steps:
            await asyncio.sleep(1e9)
        for item in self._next("watch", resource_version):
            if isinstance(item, KubeError):
                raise item
            yield item


def collect(kube: Scripted, count: int, on_error: Callable[[KubeError], None] | None = None) -> list[set[str]]:
    async def main() -> list[set[str]]:
        seen = []
        async for objects in follow(kube, CONFIGMAPS, "n", on_error=on_error):  # type: ignore[arg-type]
            seen.append(set(objects))
            if len(seen) == count:
                break
        return seen

    return run(main())


def test_every_change_yields_all_objects() -> None:
    events = [WatchEvent("ADDED", obj("b", 2)), WatchEvent("BOOKMARK", obj("", 3)), WatchEvent("DELETED", obj("a", 4))]
    kube = Scripted(Listing([obj("a", 1)], "1"), events)
    assert collect(kube, 3) == [{"a"}, {"a", "b"}, {"b"}]


def test_empty_set_is_yielded() -> None:
    assert collect(Scripted(Listing([], "1")), 1) == [set()]


def test_watch_continues_at_the_newest_version() -> None:
    kube = Scripted(Listing([], "1"), [WatchEvent("BOOKMARK", obj("", 9))], [WatchEvent("ADDED", obj("a", 10))])
    assert collect(kube, 2) == [set(), {"a"}]
    assert [(verb, version) for verb, _, version in kube.calls] == [("list", ""), ("watch", "1"), ("watch", "9")]
    # Not in the same instant: a server that is going down ends every watch at once.
    assert kube.calls[2][1] > kube.calls[1][1]


def test_list_after_an_expired_watch_yields_only_a_change() -> None:
    errors: list[KubeError] = []
    kube = Scripted(Listing([obj("a", 1)], "1"), [Expired("old")], Listing([obj("a", 1)], "5"), [Expired("old")], Listing([], "7"))
    assert collect(kube, 2, errors.append) == [{"a"}, set()]
    assert not errors


def test_outage_yields_nothing_and_slows_down() -> None:
    errors: list[KubeError] = []
    away = [ApiUnavailable("away")] * 12
    kube = Scripted(Listing([obj("a", 1)], "1"), *away, Listing([obj("b", 2)], "2"))
    assert collect(kube, 2, errors.append) == [{"a"}, {"b"}]
    assert errors == away
    times = [at for _, at, _ in kube.calls]
    gaps = [later - earlier for earlier, later in pairwise(times[1:])]
    assert gaps[0] < 0.5
    assert all(gap <= 7.5 for gap in gaps)
    assert max(gaps) > 2.0
