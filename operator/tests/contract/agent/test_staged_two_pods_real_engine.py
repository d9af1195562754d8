"""Transport Staged with a real SGLang server over two pods: each rank reads the files of its own pod."""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from e2e.engine import environment, make_engine

from sglang_rollout.plugin.install import LOADER, PLUGIN, install_plugin
from sglang_rollout.wire.states import EngineState
from tests.contract.agent.test_staged_real_engine import make_version, text
from tests.contract.agent.test_two_pods_real_engine import are_restarted, checksums, server_process
from tests.contract.support.agent_pod import until
from tests.contract.support.staged_versions import Source, activate, commit, stage
from tests.contract.support.two_pod_engine import Pair, two_pods
from tests.support.ports import free_port

pytestmark = [pytest.mark.router, pytest.mark.engine, pytest.mark.timeout(900)]


@pytest.fixture(params=[pytest.param((2, 1), id="tensor"), pytest.param((1, 2), id="pipeline", marks=pytest.mark.long)])
async def pair(engine_environment: None, tmp_path: Path, request: pytest.FixtureRequest) -> AsyncIterator[Pair]:
    tensor, pipeline = request.param
    address = f"127.0.0.1:{free_port()}"
    variables = {**environment.SEVERAL_RANKS, "SGLANG_CPU_OMP_THREADS_BIND": "0|1"}
    async with two_pods(tmp_path, is_staged=True, pipeline=pipeline) as made:
        for member in (made.leader, made.follower):
            args = ["--nnodes", "2", "--node-rank", str(member.rank), "--dist-init-addr", address, "--custom-weight-loader", LOADER]
            engine = make_engine(member.engine_port, tensor=tensor, args=[*args, "--pp-size", str(pipeline)], env=variables)
            plugin = install_plugin(member.pod.volume.parent / f"plugin-{member.rank}")
            path = os.pathsep.join([str(plugin), engine.environment["PYTHONPATH"]])
            member.command, member.env = list(engine.command), {**engine.environment, "PYTHONPATH": path}
            await member.start(made.leader.relay)
        await until(made.runs, 300, "both ranks have loaded", every=0.5)
        slow_down(plugin)
        yield made


def slow_down(plugin: Path) -> None:
    """Let the ranks of a pod load more slowly than those of the other pod. SGLang imports the loader at the first load."""
    loader = plugin / PLUGIN / "loader.py"
    source = loader.read_text()
    assert source.count("        model.load_weights(") == 1
    loader.write_text(source.replace("        model.load_weights(", "        __import__('time').sleep(1)\n        model.load_weights("))


async def test_ranks_of_two_pods_load_a_version_and_load_it_again_after_a_pod_was_recreated(pair: Pair, source: Source) -> None:
    pod, member = pair.leader.pod, pair.follower.pod
    tensor = (await pod.status()).tensor_size
    await pod.open_with_base()
    base, base_text = await checksums(pod), await text(pod)
    changed, original = make_version(source, 1, flip=True), make_version(source, 2, flip=False)

    answer = await stage(pod, source, changed)
    assert [copy["digest"] for copy in answer.body["staged"]] == [changed.digest], answer.body
    loaded = await activate(pod, changed)
    assert loaded.status == 200, loaded.body
    assert (await commit(pod, changed)).gate_open
    first = await checksums(pod)
    assert loaded.body["checksums"] == first
    assert len(first) == tensor, "SGLang compares the ranks of the first pipeline stage only"
    assert set(first).isdisjoint(base), "each rank holds something else now"
    assert await text(pod) != base_text

    assert (await stage(pod, source, original, keep=(changed,))).status == 200
    file = member.volume / original.update / "00001.safetensors"
    content = file.read_bytes()
    file.write_bytes(content[:-1])
    refused = await activate(pod, original)
    assert (refused.status, refused.body["wrote"]) == (409, True), refused.body
    assert "1 of 2 ranks" in refused.body["message"], "only the rank in the member pod has read that file"
    assert (await pod.status()).state is EngineState.DIRTY
    file.write_bytes(content)
    assert (await activate(pod, original)).status == 200
    assert (await commit(pod, original)).gate_open
    assert await checksums(pod) == base
    assert await text(pod) == base_text

    starts = pair.starts
    await member.agent.end()
    for folder in (member.volume, member.folder / "agent"):
        shutil.rmtree(folder)
    await member.agent.start()
    await until(member.agent_answers, 60, "the agent of the new pod answers")
    os.kill(server_process(pair.follower.engine_port), signal.SIGKILL)
    await until(lambda: are_restarted(pair, starts), 90, "both containers are restarted", every=0.2)

    async def serves_again() -> bool:
        return await pod.is_open() and (await pod.status()).version == original.version

    await until(serves_again, 300, "the engine serves the committed version without a coordinator and without the store", every=0.5)
    assert (member.volume / original.update / "manifest.json").exists()
    assert await checksums(pod) == base
    assert await text(pod) == base_text
