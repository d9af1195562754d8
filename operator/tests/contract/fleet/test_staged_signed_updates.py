"""A fleet with transport Staged that accepts signed updates only: client, weight store, coordinator and agents, and stand-in engines."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from e2e.held_tensors import HeldTensor, changed_state, held_tensors

from sglang_rollout.staging.payload import LOADER
from sglang_rollout.testing import StandIn, expected_tokens
from sglang_rollout.trainer import PushFailed, connect
from sglang_rollout.trainer.calls import Http
from sglang_rollout.trainer.push import PushOptions
from sglang_rollout.trainer.tensors import Source
from sglang_rollout.trainer.upload import Sign, Upload
from sglang_rollout.wire.states import Version
from tests.contract.support.agent_pod import until
from tests.contract.support.complete_fleet import CompleteFleet, complete_fleet
from tests.support.signing import UID, make_pem, sign, write_public_keys

pytestmark = [pytest.mark.router, pytest.mark.timeout(300)]

SECONDS = 60.0
PROMPT = [4, 5, 6]
PEM = make_pem()


@dataclass
class SignedFleet:
    """Engines behind one URL."""

    complete: CompleteFleet
    engines: list[StandIn]

    async def push(self, step: int, *, sign: Sign | None = None, pem: bytes | None = PEM) -> Mapping[str, Any]:
        """Upload the weights of a step with the client. ``sign``: how the version is signed; None: as the client does."""
        return await asyncio.to_thread(self._push, step, sign, pem)

    def _push(self, step: int, sign: Sign | None, pem: bytes | None) -> Mapping[str, Any]:
        source, options = Source(held_tensors(step)), PushOptions(str(step), 1 << 20, SECONDS)
        source.check(options.bucket_bytes)
        with connect(self.complete.url, signing_key=pem) as client:
            signs = sign or (partial(client._sign, options) if pem is not None else None)
            made = Upload(Http(self.complete.url), options, wait="committed", read_bytes=HeldTensor.read, sign=signs)
            made.run(source)
            return made.result(epoch=1)

    async def serve(self, step: int) -> None:
        """Wait until all engines serve the weights of a step."""
        await self.complete.serving(len(self.engines))
        right = expected_tokens(changed_state(step), PROMPT, 6)
        for engine in self.engines:
            found = await self.complete.generate({"input_ids": PROMPT, "sampling_params": {"max_new_tokens": 6}}, engine.url)
            assert found["output_ids"] == right

    async def committed(self) -> str:
        return str((await self.complete.document())["committed"]["label"])


@pytest.fixture
async def fleet(tmp_path: Path) -> AsyncIterator[SignedFleet]:
    with ExitStack() as stack:
        engines = [stack.enter_context(StandIn(weight_version="base", loaders=[LOADER])) for _ in range(2)]
        async with complete_fleet(tmp_path, [engine.url for engine in engines], uid=UID, staged=True) as complete:
            for pod in complete.pods:
                write_public_keys(pod.public_keys, PEM)
            await complete.serving(2)
            yield SignedFleet(complete, engines)


async def push_what_is_not_signed(fleet: SignedFleet) -> None:
    with pytest.raises(PushFailed, match="this trainer does not sign") as unsigned:
        await fleet.push(5, pem=None)
    assert unsigned.value.phase == "begin"
    with pytest.raises(PushFailed, match="is not known") as unknown:
        await fleet.push(5, pem=make_pem())
    assert unknown.value.phase == "end"

    def sign_other_bytes(_: str) -> Any:
        return sign(PEM, Version(run=1, step=5, label="5"), digest="0" * 64)

    with pytest.raises(PushFailed, match="the trainer signed 000000000000"):
        await fleet.push(5, sign=sign_other_bytes)
    assert await fleet.committed() == "base"
    await fleet.complete.serving(2)


async def test_only_signed_uploads_are_served_also_after_a_restart(fleet: SignedFleet) -> None:
    await push_what_is_not_signed(fleet)
    assert (await fleet.push(5))["state"] == "committed"
    await fleet.serve(5)
    document = await fleet.complete.document()
    assert document["last_update"]["signed_by"] == sign(PEM, Version(run=1, step=5, label="5")).key
    boots = {member["name"]: member["boot_id"] for member in document["members"]}
    for pod, engine in zip(fleet.complete.pods, fleet.engines, strict=True):
        engine.restart()
        pod.boot(f"restarted-{pod.name}")

    async def have_restarted() -> bool:
        found = (await fleet.complete.document()).get("members", [])
        return all(member["boot_id"] not in (None, boots[member["name"]]) for member in found)

    await until(have_restarted, SECONDS, "the coordinator knows the new engines")
    await fleet.serve(5)
    assert (await fleet.push(6))["state"] == "committed"
    await fleet.serve(6)
