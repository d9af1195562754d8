"""Answers of a fleet that ``spec.state`` pauses: the coordinator over HTTP, with scripted agents."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from sglang_rollout.wire.record import Record
from sglang_rollout.wire.states import FleetState, describe_state
from tests.contract.support.coordinator_process import Lab, fleet_lab

UPDATE: dict[str, Any] = {"names": ["w"], "dtypes": ["float32"], "shapes": [[2]], "group_name": "g", "weight_version": "1"}
PAUSED = describe_state(FleetState.PAUSED)


@pytest.fixture
async def lab(tmp_path: Path) -> AsyncIterator[Lab]:
    async with fleet_lab(tmp_path) as lab:
        yield lab


async def all_paused(lab: Lab) -> bool:
    return all(agent.agent.paused and not agent.agent.gate_open for agent in lab.agents)


async def test_a_paused_fleet_names_the_cause_and_accepts_weights(lab: Lab) -> None:
    await lab.set_state(FleetState.PAUSED)
    await lab.until("all engines are paused", lambda: all_paused(lab))
    for path, body in (("/generate", {"text": "a"}), ("/v1/completions", {"prompt": "a"}), ("/v1/chat/completions", {"messages": []})):
        async with lab.session.post(lab.url_of(path), json=body) as reply:
            assert (reply.status, reply.headers["Retry-After"]) == (503, "1")
            assert (await reply.json())["error"]["message"] == PAUSED
    assert (await lab.get("/fleet/held"))[0] == 200
    assert (await lab.get("/health"))[0] == 200, "the fleet accepts weights"
    assert (await lab.open_group())[0] == 200
    for path in ("/pause_generation", "/begin_weight_update"):
        assert (await lab.post(path, {}))[0] == 200
    assert (await lab.post("/update_weights_from_distributed", UPDATE))[0] == 200
    status, _, body = await lab.post("/end_weight_update", {})
    assert (status, body["fleet"]["state"]) == (200, "paused")
    status, _, body = await lab.post("/continue_generation", {})
    assert (status, body["success"], body["status"]) == (200, True, "ok")
    assert body["message"] == f"Generation stays paused. {PAUSED}"
    found = await lab.document()
    assert (found["committed"]["label"], found["serving"], found["held"]) == ("1", 0, PAUSED)
    assert await all_paused(lab)

    await lab.set_state(FleetState.ACTIVE)
    await lab.serving(2)
    assert not any(agent.agent.paused for agent in lab.agents)
    assert (await lab.get("/fleet/held"))[0] == 404


async def test_a_restarted_coordinator_keeps_the_fleet_paused(lab: Lab) -> None:
    await lab.set_state(FleetState.PAUSED)
    await lab.until("all engines are paused", lambda: all_paused(lab))

    async def recorded() -> bool:
        return Record.model_validate_json(lab.record.read_text()).state is FleetState.PAUSED

    await lab.until("the record has the state", recorded)
    await lab.kill()
    lab.start()

    async def adopted() -> bool:
        return bool((await lab.document()).get("held") == PAUSED)

    await lab.until("the new coordinator reports the state", adopted)
    assert await all_paused(lab)
    assert not any(
        agent.bodies_of("/continue_generation") or agent.bodies_of("/agent/run") or agent.bodies_of("/agent/fence") for agent in lab.agents
    )
