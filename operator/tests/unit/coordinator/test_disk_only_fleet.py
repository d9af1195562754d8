"""A fleet that takes weights from disk only says so to a trainer that opens a group."""

from __future__ import annotations

import pytest

from sglang_rollout.coordinator.update.model import Fleet
from sglang_rollout.coordinator.update.process_groups import open_group
from sglang_rollout.coordinator.update.ranks import Refusal
from sglang_rollout.coordinator.update.requests import OpenGroup
from sglang_rollout.wire.policy import Transport, WeightsPolicy


@pytest.mark.parametrize(("transport", "said"), [(Transport.DISK, "call /update_weights_from_disk"), (None, "has no engines")])
def test_a_group_is_refused_with_the_way_out(transport: Transport | None, said: str) -> None:
    fleet = Fleet(name="fleet", term=1, policy=WeightsPolicy(transport=transport))
    with pytest.raises(Refusal, match=said):
        open_group(fleet, OpenGroup({"group_name": "g"})).send(None)
