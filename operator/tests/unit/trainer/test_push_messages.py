"""What a failed push says: the reason once, the phase once, and one advice, which loses no weight."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from sglang_rollout.trainer import FleetRefused, PushFailed, connect
from sglang_rollout.trainer.push import push_failure
from sglang_rollout.trainer.upload import UNCHANGED
from tests.unit.trainer.support.scripted_fleet import FakeFleet

MESSAGE = (
    "engine e1 did not take the tensors: no memory (phase transfer). The update was given up: version 3 stays committed, and e1 "
    "stay closed until a complete update. Open a new process group with world_size=3 and push again."
)


def test_a_failure_names_its_phase_and_its_advice_once() -> None:
    details = {"phase": "transfer", "cause": "engine e1 did not take the tensors: no memory.", "engine": "e1", "reason": "EngineFailed"}
    text = str(push_failure("transfer", FleetRefused("/update_weights_from_distributed", 400, MESSAGE, details)))
    assert text.lower().count("push again") == 1
    assert text.lower().count("transfer") == 1
    assert "did not take the tensors: no memory." in text


@pytest.mark.parametrize(("message", "cause"), [("It ended. Push again.", "It ended."), ("It ended", None)])
@pytest.mark.parametrize("advice", [UNCHANGED, None])
def test_a_message_of_the_fleet_with_an_advice_is_followed_by_no_second_one(message: str, cause: str | None, advice: str | None) -> None:
    text = str(push_failure("end", FleetRefused("/fleet/updates", 409, message, {"cause": cause} if cause else {}), advice))
    assert text.startswith("The weight push failed in phase 'end': It ended. Push again")
    assert text.count("Push again") == 1


@pytest.mark.parametrize("advice", [UNCHANGED, None])
def test_a_push_that_lacks_tensors_is_not_to_be_repeated(advice: str | None) -> None:
    details = {"cause": "the version lacks 1 of 3 tensors, the first is c: push all of them", "reason": "TensorsMissing"}
    text = str(push_failure("begin", FleetRefused("/fleet/updates", 400, "It lacks tensors.", details), advice))
    assert text.endswith("the first is c: push all of them. A push of the same tensors fails again.")
    assert "push again" not in text.lower()


def test_a_committed_version_gets_its_own_advice_once() -> None:
    message = "version 3 is committed, but only 1 of 3 engines have loaded it. The fleet moves forward. Do not push it again."
    details = {"cause": "version 3 is committed, but only 1 of 3 engines have loaded it.", "reason": "TooFewEngines"}
    text = str(push_failure("end", FleetRefused("/end_weight_update", 500, message, details)))
    assert text.lower().count("again") == 1
    assert "Do not push this version again" in text


def test_the_reason_of_a_failure_is_quoted_unchanged() -> None:
    """The client adds its advice, and never edits the fleet's sentence."""
    assert "It said: Push again. Push again: a push opens" in str(PushFailed(phase="end", reason="It said: Push again."))


class Model:
    """As a torch.nn.Module; torch.nn.Sequential is iterable, too."""

    def state_dict(self) -> dict[str, object]:
        return {}

    def __iter__(self) -> Iterator[object]:
        return iter([object()])


def test_a_model_in_place_of_its_weights_is_refused(fake: FakeFleet) -> None:
    with connect(fake.url, timeout=5) as fleet, pytest.raises(ValueError, match=r"is a model \(Model\); pass its state_dict\(\)"):
        fleet.push(Model(), version=1)  # type: ignore[arg-type]
