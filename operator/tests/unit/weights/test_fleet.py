"""Calls of ``sglang-rollout weights`` to a fleet that answers from a script."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from sglang_rollout.trainer.calls import Http
from sglang_rollout.trainer.errors import FleetRefused
from sglang_rollout.weights import fleet as weights_fleet
from sglang_rollout.weights.fleet import FleetWeights
from sglang_rollout.wire.ports import FLEET_UPDATES

UPDATE = "a" * 32


class Scripted:
    """Refuses some commits, and takes the next."""

    def __init__(self, *refusals: int) -> None:
        self.refusals = list(refusals)
        self.withdrawn: list[str] = []

    def post(self, path: str, body: dict[str, Any], *, timeout: float) -> dict[str, Any]:
        """Answer a call."""
        if path == FLEET_UPDATES:
            return {"fleet": {"update": UPDATE, "ticket": "t"}}
        if self.refusals:
            raise FleetRefused(path, self.refusals.pop(0), "Too few engines are up. Try again.")
        return {"fleet": {"state": "committed"}, "message": ""}

    def send(self, *_: object, **__: object) -> SimpleNamespace:
        """Say that nothing is known about pieces."""
        return SimpleNamespace(ok=False)

    def delete(self, path: str, *, timeout: float) -> None:
        """Note that the update is withdrawn."""
        self.withdrawn.append(path)


def test_restore_waits_for_engines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weights_fleet, "POLL_SECONDS", 0.0)
    fleet = Scripted(503, 502)
    assert FleetWeights(cast("Http", fleet)).restore("1/1", None, 60, take_over=False)["state"] == "committed"
    assert fleet.withdrawn == []


def test_restore_gives_up_what_the_fleet_refuses() -> None:
    fleet = Scripted(409)
    with pytest.raises(FleetRefused):
        FleetWeights(cast("Http", fleet)).restore("1/1", None, 60, take_over=False)
    assert fleet.withdrawn == [f"{FLEET_UPDATES}/{UPDATE}"]
