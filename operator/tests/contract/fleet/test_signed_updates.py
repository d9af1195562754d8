"""A fleet that accepts signed updates only: the coordinator and the agents as in pods, and stand-in engines."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import requests
from e2e.engine import environment

from sglang_rollout.testing.policy import read_folder
from sglang_rollout.wire.signed import SignedVersion
from sglang_rollout.wire.states import Version
from tests.contract.support.agent_pod import Pod
from tests.contract.support.complete_fleet import complete_fleet
from tests.contract.support.engine_servers import stand_in
from tests.contract.support.trainer_dialects import Fleet, Trainer, trainer
from tests.support.ports import free_port
from tests.support.signing import UID, make_pem, sign, write_public_keys

pytestmark = [pytest.mark.engine, pytest.mark.router, pytest.mark.timeout(300)]

PEM = make_pem()
PATH = "/begin_weight_update"


class SignedFleet(Fleet):
    """Engines behind one URL, and their pods."""

    pods: list[Pod]

    def sign(self, label: str, checksums: dict[int, tuple[str, ...]] | None = None) -> SignedVersion:
        """Sign the next version, as the client does."""
        signing = requests.get(f"{self.url}/fleet", params={"label": label}, timeout=10).json()["signing"]
        return sign(PEM, Version.model_validate(signing["version"]), signing["uid"], checksums)


@pytest.fixture
async def fleet(engine_environment: None, tmp_path: Path) -> AsyncIterator[SignedFleet]:
    with ExitStack() as stack:
        engines = [stand_in(free_port(), tmp_path / f"engine-{index}.log") for index in range(2)]
        for engine in engines:
            engine.start()
            stack.callback(engine.kill)
        for engine in engines:
            await asyncio.to_thread(engine.wait)
        async with complete_fleet(tmp_path, [engine.url for engine in engines], uid=UID) as complete:
            for pod in complete.pods:
                write_public_keys(pod.public_keys, PEM)
            await complete.serving(2)
            made = SignedFleet("stand-in", complete.url, engines, list(read_folder(environment.model())))
            made.pods = complete.pods
            yield made


def begin(t: Trainer, signed: SignedVersion | None) -> requests.Response:
    return t.call("POST", PATH, {} if signed is None else {"signed": signed.model_dump(mode="json")})


def send(t: Trainer, scale: float, label: str) -> None:
    sent = t.send(scale, t.fleet.names, flat=True, load_format="flattened_bucket", weight_version=label)
    assert sent["success"] is True


def held(url: str) -> tuple[str, ...]:
    """Return the checksums that an engine reports."""
    ranks = requests.post(f"{url}/weights_checker", json={"action": "checksum"}, timeout=30).json()["ranks"]
    return tuple(str(rank["per_gpu_checksum"]) for rank in ranks)


def is_untouched(fleet: SignedFleet, committed: dict[str, Any]) -> bool:
    found = fleet.document()
    return (found["committed"], found["serving"], found["phase"]) == (committed, 2, "idle")


def run_trainer(fleet: SignedFleet) -> None:
    with trainer(fleet) as t:
        base = fleet.committed()
        stranger = {"master_address": "127.0.0.1", "master_port": free_port(), "rank_offset": 1, "world_size": 3}
        unsigned = t.call("POST", "/init_weights_update_group", stranger)
        assert (unsigned.status_code, unsigned.json()["code"]) == (403, "Forbidden")
        assert "docs/how-to/sign-updates.md" in unsigned.text
        t.open(3, signs_updates=True)
        refused = begin(t, None)
        assert (refused.status_code, "accepts signed updates only" in refused.reason) == (403, True)
        foreign = begin(t, fleet.sign("5").model_copy(update={"uid": "another"}))
        assert (foreign.status_code, "for another rollout" in foreign.text) == (403, True)
        assert is_untouched(fleet, base)

        first = fleet.sign("5")
        assert begin(t, first).ok
        send(t, 1.5, "5")
        assert t.post("/end_weight_update", {})["fleet"]["outcome"] == "Committed"
        assert fleet.committed() == {"run": 1, "step": 5, "label": "5"}
        assert fleet.document()["last_update"]["signed_by"] == first.key
        replayed = begin(t, first)
        assert (replayed.status_code, "becomes version 2/5" in replayed.reason) == (409, True)

        right = {1: held(fleet.engines[0].url)}
        assert begin(t, fleet.sign("6", right)).ok
        send(t, 1.5, "6")
        assert t.post("/end_weight_update", {})["fleet"]["outcome"] == "Committed"

        assert begin(t, fleet.sign("7", right)).ok
        send(t, 0.6, "7")
        wrong = t.call("POST", "/end_weight_update", {})
        assert (wrong.status_code, "holds other weights than the trainer signed" in wrong.text) == (400, True), wrong.text
        assert fleet.committed()["label"] == "6"
        assert fleet.document()["serving"] == 0


def run_trainer_while_an_engine_loses_the_key(fleet: SignedFleet) -> None:
    with trainer(fleet) as t:
        base = fleet.committed()
        t.open(3, signs_updates=True)
        assert begin(t, fleet.sign("5")).ok
        send(t, 1.5, "5")
        (fleet.pods[1].public_keys / "0.pem").unlink()
        failed = t.call("POST", "/end_weight_update", {})
        assert (failed.status_code, "engine e1 did not acknowledge version 1/5: The key" in failed.text) == (400, True), failed.text
        assert fleet.committed() == base


async def test_signed_updates_commit_and_others_do_not(fleet: SignedFleet) -> None:
    await asyncio.to_thread(run_trainer, fleet)


async def test_one_engine_that_refuses_the_signature_fails_the_update(fleet: SignedFleet) -> None:
    await asyncio.to_thread(run_trainer_while_an_engine_loses_the_key, fleet)
