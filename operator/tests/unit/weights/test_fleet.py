"""Calls of ``sglang-rollout weights`` to a fleet that answers from a script."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from sglang_rollout.trainer.calls import Http
from sglang_rollout.trainer.errors import FleetRefused, FleetUnreachable
from sglang_rollout.weights import fleet as weights_fleet
from sglang_rollout.weights.fleet import FleetWeights
from sglang_rollout.wire.ports import FLEET_UPDATES

UPDATE = "a" * 32


class Scripted:
    """Refuses some commits, and takes the next."""

    def __init__(self, *errors: BaseException) -> None:
        self.errors = list(errors)
        self.withdrawn: list[str] = []

    def post(self, path: str, body: dict[str, Any], *, timeout: float) -> dict[str, Any]:
        """Answer a call."""
        if path == FLEET_UPDATES:
            return {"fleet": {"update": UPDATE, "ticket": "t"}}
        if self.errors:
            raise self.errors.pop(0)
        return {"fleet": {"state": "committed"}, "message": ""}

    def send(self, *_: object, **__: object) -> SimpleNamespace:
        """Say that nothing is known about pieces."""
        return SimpleNamespace(ok=False)

    def delete(self, path: str, *, timeout: float) -> None:
        """Note that the update is withdrawn."""
        self.withdrawn.append(path)


def refused(status: int) -> FleetRefused:
    return FleetRefused(f"{FLEET_UPDATES}/{UPDATE}/commit", status, "Too few engines are up. Try again.")


def test_restore_waits_for_engines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weights_fleet, "POLL_SECONDS", 0.0)
    fleet = Scripted(refused(503), FleetUnreachable("The coordinator is away."), refused(502))
    assert FleetWeights(cast("Http", fleet)).restore("1/1", None, 60, take_over=False)["state"] == "committed"
    assert fleet.withdrawn == []


@pytest.mark.parametrize("error", [refused(409), KeyboardInterrupt()])
def test_restore_gives_up_what_the_fleet_refuses_or_the_user_interrupts(error: BaseException) -> None:
    fleet = Scripted(error)
    with pytest.raises(type(error)):
        FleetWeights(cast("Http", fleet)).restore("1/1", None, 60, take_over=False)
    assert fleet.withdrawn == [f"{FLEET_UPDATES}/{UPDATE}"]
