"""What the record says about the open update and about the weight store."""

from __future__ import annotations

from sglang_rollout.api.intent import WantedStore
from sglang_rollout.coordinator.update.model import Fleet
from sglang_rollout.coordinator.update.phases import Update
from sglang_rollout.coordinator.update.store import MAX_MISSES, Store
from sglang_rollout.coordinator.update.versions import Committed
from sglang_rollout.wire.states import BASE


def test_the_record_says_when_the_open_update_began_and_does_not_change_while_it_is_open() -> None:
    fleet = Fleet("demo", 1, weights=Committed(version=BASE), now=100.0, wall_offset=1_700_000_000.0)
    closed = fleet.record()
    fleet.transaction.update = Update({}, 100.0)
    opened = fleet.record()
    fleet.now = 160.0
    assert closed is not None
    assert opened is not None
    assert (closed.under_way_since, opened.under_way_since) == ("", "2023-11-14T22:15:00.000Z")
    assert fleet.record() == opened


def test_a_new_coordinator_asks_the_store_some_times_before_it_counts_as_away() -> None:
    """Otherwise every restart of the coordinator would report a weight store that is away."""
    store = Store(WantedStore(name="demo-store", url="http://store", data_url="http://store-data"))
    found = []
    for _ in range(MAX_MISSES + 1):
        found.append(store.is_new)
        store.misses += 1
    assert found == [*[True] * MAX_MISSES, False]
