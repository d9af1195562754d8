"""A push that is repeated after failures that may not recur."""

from __future__ import annotations

from typing import Any

import pytest

from sglang_rollout.trainer import PushFailed, fleet
from sglang_rollout.trainer.calls import Http
from sglang_rollout.trainer.errors import FleetRefused
from sglang_rollout.trainer.fleet import Fleet
from sglang_rollout.trainer.push import PushResult, push_failure
from sglang_rollout.wire.record import UpdateReason

RESULT = PushResult("7", epoch=1, world_size=3, bytes=4, buckets=1)
LOST, UNCHECKED = UpdateReason.ENGINE_LOST, UpdateReason.VERIFICATION_FAILED


def failed(code: str | None) -> PushFailed:
    """Return the failure that the client makes of a refusal by the fleet."""
    refused = FleetRefused("/update_weights_from_distributed", 400, f"engine e1: {code}", {} if code is None else {"reason": code})
    return push_failure("transfer", refused)


class Scripted(Fleet):
    """A fleet whose attempts end as a list says."""

    def __init__(self, *outcomes: str | PushResult | None) -> None:
        super().__init__(Http("http://127.0.0.1:1"))
        self.outcomes = list(outcomes)
        self.attempts: list[tuple[int, str, bool]] = []

    def _push_once(self, source: Any, options: Any, *, again: bool, **_: Any) -> PushResult:
        self.attempts.append((id(source), options.version, again))
        outcome = self.outcomes.pop(0)
        if isinstance(outcome, PushResult):
            return outcome
        raise failed(outcome)


@pytest.fixture(autouse=True)
def no_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fleet, "RETRY_SECONDS", 0.0)


def test_a_lost_engine_costs_one_attempt() -> None:
    made = Scripted(LOST, RESULT)
    assert made.push({}, version=7, retries=2) is RESULT
    assert [(version, again) for _, version, again in made.attempts] == [("7", False), ("7", True)], "the same version"


def test_the_last_failure_names_the_attempts_before_it() -> None:
    made = Scripted(LOST, UpdateReason.ENGINE_FAILED, LOST)
    with pytest.raises(PushFailed) as found:
        made.push({}, version=7, retries=2)
    assert len(made.attempts) == 3
    assert ["EngineLost" in found.value.attempts[0], "EngineFailed" in found.value.attempts[1]] == [True, True]


@pytest.mark.parametrize("code", [None, UNCHECKED, UpdateReason.MISFIT, UpdateReason.TOO_FEW_ENGINES, UpdateReason.TAKEN_OVER, "new code"])
def test_a_failure_that_would_recur_or_has_committed_is_not_repeated(code: str | None) -> None:
    made = Scripted(code, RESULT)
    with pytest.raises(PushFailed) as found:
        made.push({}, version=7, retries=2)
    assert len(made.attempts) == 1
    assert found.value.attempts == ()


def test_without_retries_the_first_failure_is_raised() -> None:
    made = Scripted(LOST, RESULT)
    with pytest.raises(PushFailed) as found:
        made.push({}, version=7)
    assert found.value.is_retryable, "so that a loop can decide by itself"


def test_an_iterator_cannot_be_repeated() -> None:
    made = Scripted(RESULT)
    with pytest.raises(ValueError, match="the tensors of an iterator can be sent once"):
        made.push(iter([]), version=7, retries=1)
    assert made.attempts == []
    assert made.push(iter([]), version=7) is RESULT


@pytest.mark.parametrize("retries", [-1, 1.5, True, "2", None])
def test_retries_is_a_whole_number(retries: Any) -> None:
    made = Scripted(RESULT)
    with pytest.raises(ValueError, match="retries is"):
        made.push({}, version=7, retries=retries)
    assert made.attempts == []
