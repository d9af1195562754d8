"""A fleet that takes weights from disk only refuses a process group, and names the call to use instead."""

from __future__ import annotations

import pytest

from sglang_rollout.api.weights_spec import Transport, Weights
from sglang_rollout.coordinator.update.model import Fleet
from sglang_rollout.coordinator.update.process_groups import check_group_request
from sglang_rollout.coordinator.update.requests import OpenGroup
from sglang_rollout.wire.reasons import RefusedError


@pytest.mark.parametrize(
    ("transport", "message"),
    [(Transport.DISK, "call /update_weights_from_disk"), (Transport.DISTRIBUTED, "no engines, because spec")],
)
def test_a_group_is_refused_with_the_way_out(transport: Transport, message: str) -> None:
    fleet = Fleet(name="fleet", term=1, policy=Weights(transport=transport))
    with pytest.raises(RefusedError, match=message):
        check_group_request(fleet, OpenGroup({"group_name": "g"})).send(None)
