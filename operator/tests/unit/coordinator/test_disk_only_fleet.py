"""A fleet that takes weights from disk only says so to a trainer that opens a group."""

from __future__ import annotations

import pytest

from sglang_rollout.api.weights_spec import Transport, Weights
from sglang_rollout.coordinator.update.model import Fleet
from sglang_rollout.coordinator.update.process_groups import open_group
from sglang_rollout.coordinator.update.requests import OpenGroup
from sglang_rollout.wire.reasons import RefusedError


@pytest.mark.parametrize(
    ("transport", "said"), [(Transport.DISK, "call /update_weights_from_disk"), (Transport.DISTRIBUTED, "has no engines")]
)
def test_a_group_is_refused_with_the_way_out(transport: Transport, said: str) -> None:
    fleet = Fleet(name="fleet", term=1, policy=Weights(transport=transport))
    with pytest.raises(RefusedError, match=said):
        open_group(fleet, OpenGroup({"group_name": "g"})).send(None)
