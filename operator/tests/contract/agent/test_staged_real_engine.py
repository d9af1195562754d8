"""Transport Staged in one pod with the real SGLang server: the agent and the gate as processes, and the data port of a store."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from e2e.engine import environment, start_engine

from sglang_rollout.plugin.install import LOADER
from sglang_rollout.wire.states import EngineState, Version
from tests.contract.support.agent_pod import BASE_WIRE, Pod, run_pod, until
from tests.contract.support.staged_versions import Source, StagedVersion, activate, commit, run_source, stage
from tests.support.ports import free_port
from tests.support.staged import LIMIT, TICKET, stage_model, update_id

pytestmark = [pytest.mark.router, pytest.mark.engine, pytest.mark.timeout(600)]


def make_version(source: Source, step: int, *, flip: bool) -> StagedVersion:
    """Create a version of the engine's own model: its weights, or their negatives."""
    version = Version(run=1, step=step, label=f"step-{step}")
    copy = stage_model(source.copies.open(update_id(step), TICKET, LIMIT), environment.model(), flip=flip)
    return StagedVersion(version, copy.update, copy.seal(version).digest, {})


async def text(pod: Pod) -> str:
    sampling = {"max_new_tokens": 8, "ignore_eos": True, "temperature": 0}
    answer = await pod.ask("POST", "/generate", {"text": "alpha", "sampling_params": sampling})
    assert answer.status == 200, answer.body
    return str(answer.body["text"])


async def test_versions_are_staged_loaded_refused_and_loaded_again_after_a_restart(engine_environment: None, tmp_path: Path) -> None:
    args, port = ["--custom-weight-loader", LOADER], free_port()
    with start_engine(port, args=args, log=tmp_path / "engine.log", wait=False) as engine:
        async with run_source(tmp_path) as source, run_pod(tmp_path, engine.url, data_port=free_port()) as pod:
            await asyncio.to_thread(engine.wait)
            await until(pod.engine_up, 60, "the agent sees the engine")
            assert (await pod.status(BASE_WIRE)).gate_open
            base = await text(pod)
            changed, original = make_version(source, 1, flip=True), make_version(source, 2, flip=False)

            assert (await stage(pod, source, changed)).status == 200
            loaded = await activate(pod, changed)
            assert loaded.status == 200, loaded.body
            assert (await commit(pod, changed)).gate_open
            first = await text(pod)
            assert first != base
            assert (await pod.generate()).body["meta_info"]["weight_version"] == "step-1"

            assert (await stage(pod, source, original, keep=(changed,))).status == 200
            file = pod.volume / original.update / "00001.safetensors"
            content = file.read_bytes()
            file.write_bytes(content[:-1])
            refused = await activate(pod, original)
            assert (refused.status, refused.body["wrote"]) == (409, False), refused.body
            status = await pod.status()
            assert (status.state, status.version, status.gate_open, status.paused) == (EngineState.CLEAN, changed.version, True, False)
            assert await text(pod) == first
            assert (await pod.generate()).body["meta_info"]["weight_version"] == "step-1"
            file.write_bytes(content)

            await asyncio.to_thread(engine.kill)
            engine.start()
            await asyncio.to_thread(engine.wait)

            async def serves_again() -> bool:
                return await pod.is_open() and (await pod.status()).version == changed.version

            await until(serves_again, 60, "the engine serves the committed version from its own copy")
            assert await text(pod) == first
            again = await activate(pod, changed)
            assert again.body["checksums"] == loaded.body["checksums"]

            assert (await activate(pod, original)).status == 200
            assert (await commit(pod, original)).gate_open
            assert await text(pod) == base
