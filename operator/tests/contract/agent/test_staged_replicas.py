"""Transport Staged with the real SGLang server and two data-parallel replicas, which load versions as folders."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest
from e2e.engine import environment, make_engine

from sglang_rollout.wire.states import Version
from tests.contract.support.agent_pod import BASE_WIRE, Pod, run_pod, until
from tests.contract.support.staged_versions import Source, StagedVersion, activate, commit, run_source, stage
from tests.support.ports import free_port
from tests.support.staged import LIMIT, TICKET, stage_model, update_id

pytestmark = [pytest.mark.router, pytest.mark.engine, pytest.mark.timeout(900)]

_NAME = "policy"


def make_version(source: Source, step: int, *, flip: bool) -> StagedVersion:
    """Create a version of the engine's own model: its weights, or their negatives."""
    version = Version(run=1, step=step, label=f"step-{step}")
    copy = stage_model(source.copies.open(update_id(step), TICKET, LIMIT), environment.model(), flip=flip)
    return StagedVersion(version, copy.update, copy.seal(version).digest, {})


async def samples(pod: Pod) -> list[tuple[str, str]]:
    """Return the texts and labels of several requests, which SGLang gives to its replicas in turn."""
    found = []
    for _ in range(4):
        sampling = {"max_new_tokens": 8, "ignore_eos": True, "temperature": 0}
        answer = await pod.ask("POST", "/generate", {"text": "alpha", "sampling_params": sampling})
        assert answer.status == 200, answer.body
        found.append((str(answer.body["text"]), str(answer.body["meta_info"]["weight_version"])))
    return found


@pytest.mark.parametrize("old", [False, True], ids=["new", "old"])
async def test_both_replicas_load_each_version_and_load_it_again_after_a_restart(
    engine_environment: None, tmp_path: Path, *, old: bool
) -> None:
    settings = environment.SEVERAL_RANKS | {"SGLANG_CPU_OMP_THREADS_BIND": "|".join(str(n % (os.cpu_count() or 1)) for n in range(2))}
    args = ["--dp-size", "2", "--served-model-name", _NAME]
    engine = make_engine(free_port(), args=args, env=settings, log=tmp_path / "engine.log", old=old)
    engine.start()
    try:
        async with run_source(tmp_path) as source, run_pod(tmp_path, engine.url, data_port=free_port(), data=2) as pod:
            await asyncio.to_thread(engine.wait)
            await until(pod.engine_up, 60, "the agent sees the engine")
            assert (await pod.status(BASE_WIRE)).gate_open
            base = (await samples(pod))[0][0]
            changed, original = make_version(source, 1, flip=True), make_version(source, 2, flip=False)

            assert (await stage(pod, source, changed)).status == 200
            loaded = await activate(pod, changed)
            assert loaded.status == 200, loaded.body
            assert len(loaded.body["checksums"]) == 2
            assert len(set(loaded.body["checksums"])) == 1, "both replicas hold the same weights"
            assert (await commit(pod, changed)).gate_open
            first = (await samples(pod))[0][0]
            assert first != base
            assert await samples(pod) == [(first, "step-1")] * 4
            found = (await pod.ask("GET", "/model_info")).body
            assert (found["model_path"], found["served_model_name"]) == (str(environment.model()), _NAME)

            await asyncio.to_thread(engine.kill)
            engine.start()
            await asyncio.to_thread(engine.wait)

            async def serves_again() -> bool:
                return await pod.is_open() and (await pod.status()).version == changed.version

            await until(serves_again, 60, "the engine serves the committed version from its own copy")
            assert await samples(pod) == [(first, "step-1")] * 4
            assert (await activate(pod, changed)).body["checksums"] == loaded.body["checksums"]

            assert (await stage(pod, source, original)).status == 200, "the copy that the engine names as its model is deleted"
            assert not (pod.volume / changed.update).exists()
            assert await samples(pod) == [(first, "step-1")] * 4
            assert (await activate(pod, original)).status == 200
            assert (await commit(pod, original)).gate_open
            assert await samples(pod) == [(base, "step-2")] * 4
    finally:
        engine.kill()
