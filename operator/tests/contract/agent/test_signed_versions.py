"""An agent with public keys: it verifies before an update, and acknowledges only what a trainer has signed."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from sglang_rollout.wire.agent import AckRequest, AgentStatus
from sglang_rollout.wire.ports import AGENT_ACK, AGENT_SIGNATURE
from sglang_rollout.wire.signed import SignedVersion
from sglang_rollout.wire.states import Version
from tests.contract.support.agent_pod import Pod, run_pod
from tests.contract.support.stub_engine import StubEngine
from tests.support.signing import UID, make_pem, sign, write_public_keys

pytestmark = pytest.mark.router

PEM = make_pem()
V1 = Version(run=1, step=1, label="1")
GROUP = {"group_name": "g", "master_address": "127.0.0.1", "master_port": 1, "rank_offset": 1, "world_size": 2}


@pytest.fixture
async def pod(stub: StubEngine, tmp_path: Path) -> AsyncIterator[Pod]:
    async with run_pod(tmp_path, stub.url, uid=UID) as made:
        write_public_keys(made.public_keys, PEM)
        await made.open_with_base()
        yield made


async def update(pod: Pod) -> str:
    """Make the calls of an update, and return the boot ID of the engine."""
    steps: list[tuple[str, Any]] = [
        ("/init_weights_update_group", GROUP),
        ("/pause_generation", {"mode": "retract"}),
        ("/begin_weight_update", {}),
        ("/update_weights_from_distributed", {"names": [], "group_name": "g"}),
        ("/end_weight_update", {}),
    ]
    for path, body in steps:
        answer = await pod.control(path, body)
        assert answer.status == 200, answer.body
    return str((await pod.status()).boot_id)


def ack(boot: str, signed: SignedVersion | None, version: Version = V1) -> dict[str, Any]:
    return AckRequest(version=version, boot_id=boot, cohort=["e0"], signed=signed).model_dump(mode="json")


async def test_the_agent_says_that_it_demands_signatures_and_checks_them_before_an_update(pod: Pod) -> None:
    assert (await pod.status()).signed_only
    good = sign(PEM, V1)
    assert (await pod.control(AGENT_SIGNATURE, good.model_dump(mode="json"))).status == 200
    answer = await pod.control(AGENT_SIGNATURE, good.model_copy(update={"step": 2}).model_dump(mode="json"))
    assert (answer.status, "is not valid" in answer.body["message"]) == (403, True)


async def test_only_a_signed_version_is_acknowledged(pod: Pod) -> None:
    boot = await update(pod)
    refused = await pod.control(AGENT_ACK, ack(boot, None))
    assert (refused.status, "is not signed" in refused.body["message"]) == (403, True)
    answer = await pod.control(AGENT_ACK, ack(boot, sign(PEM, V1)))
    status = AgentStatus.model_validate(answer.body)
    assert (status.version, status.gate_open) == (V1, False)


async def test_signed_checksums_must_be_those_of_the_engine(pod: Pod, stub: StubEngine) -> None:
    boot = await update(pod)
    refused = await pod.control(AGENT_ACK, ack(boot, sign(PEM, V1, checksums={1: ("other",)})))
    assert refused.status in (403, 409)
    assert "weights_checker" in stub.calls
    assert (await pod.status()).version is None


async def test_without_keys_no_signature_is_accepted(stub: StubEngine, tmp_path: Path) -> None:
    async with run_pod(tmp_path, stub.url, uid=UID) as made:
        await made.open_with_base()
        answer = await made.control(AGENT_SIGNATURE, sign(PEM, V1).model_dump(mode="json"))
        assert (answer.status, "the Secret of security.signatures has no key" in answer.body["message"]) == (403, True)


async def test_an_agent_without_the_option_verifies_nothing(stub: StubEngine, tmp_path: Path) -> None:
    async with run_pod(tmp_path, stub.url) as made:
        await made.open_with_base()
        assert not (await made.status()).signed_only
        assert (await made.control(AGENT_SIGNATURE, sign(PEM, V1).model_dump(mode="json"))).status == 409
