"""Heartbeats, a requested run, a lost trainer, and the engines' NCCL in the discovery document."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from sglang_rollout.api.security_spec import ControlAccess, Security
from sglang_rollout.api.weights_spec import OnLoss, TrainerLease
from sglang_rollout.wire.access import CALLER_HEADER
from sglang_rollout.wire.agent import AgentStatus, Nccl
from sglang_rollout.wire.ports import AGENT_PREFLIGHT, FLEET, FLEET_LEASE, FLEET_RUN
from tests.contract.support.agent_pod import until
from tests.contract.support.coordinator_process import Lab, fleet_lab

UPDATE: dict[str, Any] = {"names": ["w"], "dtypes": ["float32"], "shapes": [[2]]}


@pytest.fixture
async def lab(tmp_path: Path) -> AsyncIterator[Lab]:
    async with fleet_lab(tmp_path) as lab:
        yield lab


async def push(lab: Lab, group: str, version: int) -> None:
    assert (await lab.open_group(group))[0] == 200
    assert (await lab.post("/begin_weight_update", {}))[0] == 200
    assert (await lab.post("/update_weights_from_distributed", {**UPDATE, "group_name": group, "weight_version": version}))[0] == 200
    assert (await lab.post("/end_weight_update", {}))[0] == 200


async def test_the_answer_to_a_heartbeat_has_the_state_of_the_group(lab: Lab) -> None:
    await push(lab, "g", 1)
    status, _, body = await lab.post(FLEET_LEASE, {"group_name": "g"})
    assert (status, body["success"], body["group_open"], body["lease"]) == (200, True, True, 20.0)
    assert not (await lab.post(FLEET_LEASE, {"group_name": "other"}))[2]["group_open"]
    lab.agents[1].agent.restart()
    await lab.serving(1)
    after = (await lab.post(FLEET_LEASE, {"group_name": "g"}))[2]
    assert (after["group_open"], after["epoch"] > body["epoch"]) == (False, True)


ELSEWHERE = {CALLER_HEADER: "192.0.2.7"}


async def admit_everyone(lab: Lab) -> None:
    lab.security = Security(control=ControlAccess.OPEN)
    lab.write_intent()

    async def is_open() -> bool:
        async with lab.session.get(lab.url + FLEET, headers=ELSEWHERE) as reply:
            return reply.status == 200

    await until(is_open, 30, "everyone may call")


async def test_a_heartbeat_of_another_caller_is_refused(lab: Lab) -> None:
    await admit_everyone(lab)
    await push(lab, "g", 1)
    async with lab.session.post(lab.url + FLEET_LEASE, json={"group_name": "g"}, headers=ELSEWHERE) as reply:
        assert (reply.status, "another trainer holds this fleet: 127.0.0.1" in await reply.text()) == (403, True)
    assert (await lab.post(FLEET_LEASE, {"group_name": "g"}))[0] == 200


async def test_requests_are_not_aborted_by_a_trainer_that_does_not_hold_the_fleet(lab: Lab) -> None:
    await admit_everyone(lab)
    await push(lab, "g", 1)
    abort = {"abort_all": True}
    async with lab.session.post(f"{lab.url}/abort_request", json=abort, headers=ELSEWHERE) as reply:
        body = await reply.json()
        assert (reply.status, body["fleet"]["holder"]) == (409, "127.0.0.1")
        assert "Another trainer holds this fleet" in body["message"]
    assert not any(agent.bodies_of("/abort_request") for agent in lab.agents)
    assert (await lab.post("/abort_request", abort))[0] == 200
    assert (await lab.post("/destroy_weights_update_group", {"group_name": "g"}))[0] == 200
    async with lab.session.post(f"{lab.url}/abort_request", json=abort, headers=ELSEWHERE) as reply:
        assert reply.status == 200, "nothing is open"
    assert [len(agent.bodies_of("/abort_request")) for agent in lab.agents] == [2, 2]


async def test_a_requested_run_begins_with_the_next_push(lab: Lab) -> None:
    await push(lab, "g", 5)
    status, _, body = await lab.post(FLEET_RUN)
    assert (status, body["fleet"]["next_run"]) == (200, 2)
    await push(lab, "h", 6)
    assert (await lab.document())["committed"] == {"run": 2, "step": 6, "label": "6"}
    assert (await lab.post("/begin_weight_update", {}))[0] == 200
    status, reason, _ = await lab.post(FLEET_RUN)
    assert (status, "a weight update is open: end it" in reason) == (409, True)


async def test_handles_of_one_process_are_refused_with_an_alternative(lab: Lab) -> None:
    status, reason, body = await lab.post("/update_weights_from_ipc", {"zmq_handles": {"GPU-1": "ipc://@x"}})
    assert (status, body["success"]) == (501, False)
    assert reason.startswith("/update_weights_from_ipc does not work for a fleet: its payload belongs to the GPUs of one process")
    assert "update_weights_from_distributed" in body["message"]
    assert all(agent.calls == [] for agent in lab.agents)


async def test_the_document_has_the_nccl_of_each_engine(lab: Lab) -> None:
    agent = lab.agents[1].agent
    status, nccl = agent.status, Nccl(version="2.28.3", settings={"NCCL_CUMEM_ENABLE": "0"})

    def with_nccl() -> AgentStatus:
        return status().model_copy(update={"nccl": nccl})

    agent.status = with_nccl  # type: ignore[method-assign]

    async def has_nccl() -> bool:
        members = (await lab.document())["members"]
        return [member["nccl"] for member in members] == [None, nccl.model_dump(mode="json")]

    await lab.until("GET /fleet has the NCCL", has_nccl)
    assert await has_nccl()


async def test_an_idle_fleet_with_on_loss_pause_pauses_when_the_trainers_store_closes(tmp_path: Path) -> None:
    lease = TrainerLease(ttl_seconds=1, on_loss=OnLoss.PAUSE)
    async with fleet_lab(tmp_path, trainer_lease=lease) as lab:
        await push(lab, "g", 1)
        assert not any(agent.agent.paused for agent in lab.agents)
        for agent in lab.agents:
            agent.broken[AGENT_PREFLIGHT] = "connection refused."

        async def paused() -> bool:
            return all(agent.agent.paused for agent in lab.agents)

        async def running() -> bool:
            return not any(agent.agent.paused for agent in lab.agents)

        await lab.until("all engines are paused", paused, 30)
        assert (await lab.post("/pause_generation", {}))[0] == 200
        assert (await lab.post("/continue_generation", {}))[0] == 200
        await lab.until("the engines generate again", running, 30)
