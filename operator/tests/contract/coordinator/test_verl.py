"""Calls of verl's HTTP server adapter (``AsyncHttpServerAdapter``, 0.9.1) that a fleet refuses before it calls an agent.

``contract/fleet/test_verl.py`` has the calls that it accepts.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from sglang_rollout.wire.states import KEEPS_WEIGHTS, FleetMode
from tests.contract.support.coordinator_process import Lab, fleet_lab


@asynccontextmanager
async def made(folder: Path, mode: FleetMode | None) -> AsyncIterator[Lab]:
    async with fleet_lab(folder, mode=mode) as lab:
        await lab.until("the coordinator knows the engines", lambda: answers(lab, "/server_info"))
        yield lab


async def answers(lab: Lab, path: str) -> bool:
    return (await lab.get(path))[0] == 200


@pytest.fixture
async def own_gpus(tmp_path: Path) -> AsyncIterator[Lab]:
    async with made(tmp_path, None) as lab:
        yield lab


@pytest.fixture
async def colocated(tmp_path: Path) -> AsyncIterator[Lab]:
    async with made(tmp_path, FleetMode.COLOCATED) as lab:
        yield lab


async def test_handles_of_gpu_memory_are_refused_with_an_alternative(own_gpus: Lab) -> None:
    body = {"serialized_named_tensors": ["AAAA"], "load_format": None, "flush_cache": False}
    status, reason, answer = await own_gpus.post("/update_weights_from_tensor", body)
    assert (status, "init_weights_update_group" in answer["message"]) == (501, True)
    assert "does not work for a fleet" in reason
    assert not any(agent.bodies_of("/update_weights_from_tensor") for agent in own_gpus.agents)


@pytest.mark.parametrize(
    "path",
    [
        "/update_weights_from_tensor",
        "/update_weights_from_ipc",
        "/init_weights_update_group",
        "/begin_weight_update",
        "/update_weights_from_disk",
        "/update_weight_version",
        "/end_weight_update",
        "/destroy_weights_update_group",
    ],
)
async def test_a_colocated_fleet_refuses_weights(colocated: Lab, path: str) -> None:
    body = {"model_path": "/m", "new_version": "2", "group_name": "g"}
    status, reason, answer = await colocated.post(path, body)
    assert (status, answer["message"]) == (400, KEEPS_WEIGHTS)
    assert "spec.mode: Colocated" in reason
    assert not any(agent.bodies_of(path) for agent in colocated.agents)
