"""The heartbeat of our client."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from sglang_rollout.trainer.calls import Http
from sglang_rollout.trainer.group_control import Heartbeat
from sglang_rollout.wire.ports import FLEET_LEASE
from tests.unit.trainer.support.scripted_fleet import FakeFleet, Reply


@contextmanager
def heartbeat(fake: FakeFleet, lease: float) -> Iterator[None]:
    beats = Heartbeat(Http(fake.url), "g", lease=lease)
    try:
        yield
    finally:
        beats.stop()


def test_heartbeats_name_the_group_and_continue_after_a_refusal(fake: FakeFleet) -> None:
    third = threading.Event()

    def answer(body: dict[str, object]) -> Reply:
        if fake.counts[FLEET_LEASE] >= 3:
            third.set()
        return 503, {"success": False, "message": "the coordinator has just started"}

    fake.replies[FLEET_LEASE] = answer
    with heartbeat(fake, 0.15):
        assert third.wait(30)
    assert {body["group_name"] for path, body in fake.calls if path == FLEET_LEASE} == {"g"}


def test_no_heartbeat_is_sent_after_stop(fake: FakeFleet) -> None:
    fake.replies[FLEET_LEASE] = (200, {"success": True})
    beats = Heartbeat(Http(fake.url), "g", lease=3600)
    beats.stop()
    beats._thread.join(30)
    assert not beats._thread.is_alive(), "its thread ends with it, and not after a third of the lease"
    assert fake.counts[FLEET_LEASE] == 0
