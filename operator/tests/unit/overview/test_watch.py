"""``status -w``: a new screen after each change, through lost connections, and an end after a deadline."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from sglang_rollout.kube.client import Listing, WatchEvent
from sglang_rollout.kube.errors import ApiUnavailable, KubeError, Refused
from sglang_rollout.kube.resources import CONFIGMAPS, Object, Resource
from sglang_rollout.overview.observation import Observation
from sglang_rollout.overview.observe import AbsentError
from sglang_rollout.overview.watch import MIN_INTERVAL_SECONDS, RECONNECT_SECONDS, TICK_SECONDS, LostError, watch
from tests.support.virtual_time import run
from tests.unit.overview.scenes import recorded

Objects = list[Object]
START = datetime(2026, 11, 21, 12, 0, 0, tzinfo=UTC)


class Cluster:
    """An API server with one rollout. Its objects change at given times."""

    server = "http://api"

    def __init__(self) -> None:
        self.rollout: Object | None = {"metadata": {"name": "demo", "namespace": "n", "generation": 1, "resourceVersion": "1"}, "spec": {}}
        self.record: str = recorded().model_dump_json()
        self.error: KubeError | None = None
        """Answer to every request."""
        self.refused: KubeError | None = None
        """Answer to lists of ConfigMaps."""
        self._changed: set[asyncio.Event] = set()

    async def get(self, resource: Resource, namespace: str, name: str) -> Object:
        return (await self._read(resource, name))[0]

    async def list(self, resource: Resource, namespace: str, *, fields: dict[str, str], **_: Any) -> Listing:
        if self.refused is not None and resource is CONFIGMAPS:
            raise self.refused
        return Listing(await self._read(resource, fields["metadata.name"]), "1")

    async def watch(self, resource: Resource, namespace: str, *, fields: dict[str, str], **_: Any) -> AsyncIterator[WatchEvent]:
        changed = asyncio.Event()
        self._changed.add(changed)
        while True:
            await changed.wait()
            changed.clear()
            found = await self._read(resource, fields["metadata.name"])
            yield WatchEvent("MODIFIED", found[0]) if found else WatchEvent("DELETED", {"metadata": {"resourceVersion": "2"}})

    def change(self) -> None:
        """Send the objects to all watches, or break the watches if ``error`` is set."""
        for changed in self._changed:
            changed.set()

    async def _read(self, resource: Resource, name: str) -> Objects:
        if self.error is not None:
            raise self.error
        if resource is CONFIGMAPS:
            data = {"weights.json": self.record} if name == "demo-weights" else {}
            return [{"metadata": {"name": name, "resourceVersion": "1"}, "data": data}]
        return [self.rollout] if self.rollout is not None else []


def play(cluster: Cluster, script: dict[float, Callable[[], None]], seconds: float) -> list[tuple[float, Observation]]:
    """Watch while the script changes the cluster; return each screen and its time."""
    shown: list[tuple[float, Observation]] = []

    async def main() -> None:
        loop = asyncio.get_running_loop()
        for at, step in script.items():
            loop.call_at(at, step)

        def show(seen: Observation) -> None:
            shown.append((loop.time(), seen))

        async with asyncio.timeout(seconds):
            await watch(cluster, "n", "demo", show, utc_now=lambda: START + timedelta(seconds=loop.time()))  # type: ignore[arg-type]

    try:
        run(main())
    except TimeoutError:
        return shown
    raise AssertionError("the watch ended")


def test_screen_follows_changes_at_once_and_time_slowly() -> None:
    cluster = Cluster()

    def push() -> None:
        cluster.record = recorded(author="second").model_dump_json()
        cluster.change()

    shown = play(cluster, {3.0: push}, 30.0)
    authors = [(at, seen.record.author) for at, seen in shown if seen.record is not None]
    assert len(authors) == len(shown), "no screen lacks the record that could be read"
    first = next(at for at, author in authors if author == "second")
    assert 3.0 <= first <= 3.0 + MIN_INTERVAL_SECONDS
    assert [at for at, _ in authors if at > 4.0] == pytest.approx([first + TICK_SECONDS + 0.5, first + 2 * TICK_SECONDS + 1.0])


def test_many_changes_are_few_screens() -> None:
    cluster = Cluster()
    shown = play(cluster, {1 + at / 100: cluster.change for at in range(100)}, 2.0)
    assert len(shown) <= 2.0 / MIN_INTERVAL_SECONDS + 1


def test_lost_connection_is_shown_and_comes_back() -> None:
    cluster = Cluster()

    def lose() -> None:
        cluster.error = ApiUnavailable("connection refused")
        cluster.change()

    def answer() -> None:
        cluster.error = None

    shown = play(cluster, {60.0: lose, 200.0: answer}, 230.0)
    lost = [(at, seen) for at, seen in shown if seen.gaps]
    assert all(60.0 <= at <= 206.0 for at, _ in lost)
    assert {at // TICK_SECONDS for at, _ in lost} >= set(range(7, 19)), "each screen has the gap meanwhile"
    minute, deadline = ((START + timedelta(seconds=60 + more)).astimezone().strftime("%H:%M:%S") for more in (0, RECONNECT_SECONDS))
    expected = f"The API server has not answered since {minute}, and this command tries again until {deadline}. connection refused"
    assert {gap for _, seen in lost for gap in seen.gaps} == {expected}
    assert all(seen.record is not None for _, seen in lost), "what was known stays on the screen"


def test_server_that_stays_away_ends_the_watch() -> None:
    cluster = Cluster()

    def lose() -> None:
        cluster.error = ApiUnavailable("connection refused")
        cluster.change()

    with pytest.raises(LostError, match=r"The API server has not answered for 300 s: connection refused"):
        play(cluster, {10.0: lose}, 10.0 + RECONNECT_SECONDS + TICK_SECONDS + 1)


def test_deleted_rollout_ends_the_watch() -> None:
    cluster = Cluster()

    def delete() -> None:
        cluster.rollout = None
        cluster.change()

    with pytest.raises(AbsentError, match="SGLangRollout demo in namespace n was deleted"):
        play(cluster, {5.0: delete}, 7.0)


def test_missing_right_to_watch_config_maps_is_named() -> None:
    cluster = Cluster()
    cluster.refused = Refused("forbidden", code=403)
    shown = play(cluster, {}, 30.0)
    assert shown[0][1].record is not None, "the first screen needs the right to get only"
    assert "You may not list and watch configmaps demo-weights in namespace n" in "".join(shown[-1][1].gaps)
