"""The open process group of a trainer, and its heartbeat: no torch."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest

from sglang_rollout.trainer import FleetRefused, GroupFailed, group_control
from sglang_rollout.trainer.calls import Deadline, Http
from sglang_rollout.trainer.group_control import GroupControl, Heartbeat
from sglang_rollout.wire.ports import FLEET_LEASE
from sglang_rollout.wire.trainer import FleetDocument
from tests.unit.trainer.support.scripted_fleet import FakeFleet, Reply, document

DESTROY = "/destroy_weights_update_group"


@dataclass
class Group:
    """The part of a process group that its control uses."""

    name: str
    epoch: int
    is_closed: bool = False

    def close(self) -> None:
        self.is_closed = True


class ScriptedControl(GroupControl):
    """Opens groups without torch, after the failures that a test scripts."""

    def __init__(self, fake: FakeFleet) -> None:
        self.fields: dict[str, Any] = {}
        super().__init__(Http(fake.url), lambda: FleetDocument.model_validate(document(**self.fields)))
        self.failures: list[GroupFailed] = []
        self.opened: list[Group] = []

    def _join(self, document: FleetDocument, deadline: Deadline) -> Any:
        if self.failures:
            raise self.failures.pop(0)
        self.opened.append(Group(f"g{len(self.opened)}", document.epoch))
        return self.opened[-1]

    def list_open_group(self, epoch: int) -> None:
        """Let the fleet list the newest group in this epoch."""
        group = {"name": self.opened[-1].name, "epoch": epoch, "world_size": 3, "master": "m", "backend": "gloo", "members": []}
        self.fields = {"epoch": epoch, "groups": [group]}


@pytest.fixture
def control(fake: FakeFleet, monkeypatch: pytest.MonkeyPatch) -> Iterator[ScriptedControl]:
    monkeypatch.setattr(group_control, "REOPEN_INTERVAL_SECONDS", 0.01)
    fake.replies[DESTROY] = (200, {"success": True})
    made = ScriptedControl(fake)
    yield made
    made.close()


def test_an_open_group_is_used_again_in_its_epoch(control: ScriptedControl) -> None:
    first = control.current()
    control.list_open_group(epoch=1)
    assert control.current() is first


@pytest.mark.parametrize("epoch", [1, 2], ids=["the fleet has closed it", "another epoch"])
def test_a_lost_group_is_closed_and_replaced(control: ScriptedControl, fake: FakeFleet, epoch: int) -> None:
    control.current()
    if epoch == 2:
        control.list_open_group(epoch)
    assert control.current().name == "g1"
    assert control.opened[0].is_closed
    assert fake.calls == [(DESTROY, {"group_name": "g0"})]


def test_opening_is_repeated_only_after_a_temporary_failure(control: ScriptedControl) -> None:
    control.failures = [GroupFailed("engines are starting", temporary=True)] * 2
    assert control.open().name == "g0"
    control.failures = [GroupFailed("no route")]
    with pytest.raises(GroupFailed, match="no route"):
        control.open()
    assert control.group is None


class NoRendezvous:
    """A rendezvous in which no engine arrives."""

    host, port, name, world_size, backend = "10.0.0.1", 29500, "g", 3, "gloo"

    def facts(self) -> dict[str, Any]:
        return {}

    def join(self) -> None:
        raise OSError("no engine joined")

    def abort(self) -> None:
        """End nothing."""


def test_a_refusal_has_the_code_of_the_fleet(fake: FakeFleet) -> None:
    fake.replies["/pause_generation"] = (403, {"success": False, "message": "not allowed", "code": "Forbidden"})
    with pytest.raises(FleetRefused) as caught:
        Http(fake.url).post("/pause_generation", {}, timeout=30)
    assert (caught.value.code, caught.value.status) == ("Forbidden", 403)


def test_an_abandoned_group_is_closed_here_before_the_engines_leave(control: ScriptedControl, fake: FakeFleet) -> None:
    control.open()
    seen: list[bool] = []

    def answer(_: dict[str, Any]) -> Reply:
        seen.append(control.opened[0].is_closed)
        return 200, {"success": True}

    fake.replies[DESTROY] = answer
    control.abandon()
    assert (seen, control.group) == ([True], None)


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


def test_a_lost_lease_is_reported_once(fake: FakeFleet, caplog: pytest.LogCaptureFixture) -> None:
    third = threading.Event()

    def answer(_: dict[str, object]) -> Reply:
        if fake.counts[FLEET_LEASE] >= 3:
            third.set()
        return 403, {"success": False, "message": "another trainer holds this fleet: ml/Job/ben."}

    fake.replies[FLEET_LEASE] = answer
    with heartbeat(fake, 0.15):
        assert third.wait(30)
    assert len([record for record in caplog.records if "ml/Job/ben" in record.getMessage() and record.levelname == "WARNING"]) == 1


def test_no_heartbeat_is_sent_after_stop(fake: FakeFleet) -> None:
    fake.replies[FLEET_LEASE] = (200, {"success": True})
    beats = Heartbeat(Http(fake.url), "g", lease=3600)
    beats.stop()
    beats._thread.join(30)
    assert not beats._thread.is_alive(), "its thread ends with it, and not after a third of the lease"
    assert fake.counts[FLEET_LEASE] == 0
