"""A real SGLang server over two pods, with real agents and gates: an update reaches both ranks, and they end and restart together."""

from __future__ import annotations

import os
import signal
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest
from e2e.engine import LabError, environment, make_engine

from sglang_rollout.agent.plugin_reports import PluginReports
from sglang_rollout.local.plan import EngineArg
from sglang_rollout.local.sizes import Sizes, read_sizes
from sglang_rollout.proxy.address import Address
from sglang_rollout.wire.states import Version
from tests.contract.agent.test_real_engine import push
from tests.contract.support.agent_pod import BASE_WIRE, Pod, until
from tests.contract.support.two_pod_engine import Pair, two_pods
from tests.support.ports import free_port

pytestmark = [pytest.mark.router, pytest.mark.engine, pytest.mark.timeout(900)]


@pytest.fixture
async def pair(tmp_path: Path) -> AsyncIterator[Pair]:
    try:
        environment.python(make=False)
    except LabError as error:
        pytest.skip(str(error))
    address = f"127.0.0.1:{free_port()}"
    async with two_pods(tmp_path) as made:
        for member in (made.leader, made.follower):
            ranks = ["--nnodes", "2", "--node-rank", str(member.rank), "--dist-init-addr", address]
            engine = make_engine(member.engine_port, tensor=2, args=ranks)
            member.command, member.env = list(engine.command), engine.environment
            await member.start(made.leader.relay)
        await until(made.runs, 300, "both ranks have loaded", every=0.5)
        yield made


async def checksums(pod: Pod) -> list[str]:
    answer = await pod.control("/weights_checker", {"action": "checksum"})
    assert answer.status == 200, answer.body
    return [rank["per_gpu_checksum"] for rank in answer.body["ranks"]]


async def test_an_update_reaches_both_ranks_and_a_dead_rank_ends_the_other(pair: Pair, tmp_path: Path) -> None:
    pod = pair.leader.pod
    sizes = await read_sizes([EngineArg(Address("127.0.0.1", pair.leader.engine_port))], PluginReports(tmp_path))
    assert [replace(found, unproved="") for found in sizes.values()] == [Sizes(2)], "what a local fleet reads at its start"
    await pod.open_with_base()
    base = await checksums(pod)
    assert len(base) == 2
    version = Version(run=1, step=2, label="other")
    await push(pod, version, ranks=2)
    pushed = await checksums(pod)
    assert set(pushed).isdisjoint(base), "each rank holds something else now"
    assert (await pod.generate()).status == 200

    starts = pair.starts
    os.kill(server_process(pair.follower.engine_port), signal.SIGKILL)
    await until(lambda: are_restarted(pair, starts), 90, "both containers are restarted", every=0.2)
    assert await pod.is_closed()
    await until(pair.runs, 300, "both ranks have loaded again", every=0.5)
    assert await checksums(pod) == base
    assert not (await pod.status(version.model_dump())).gate_open, "it came back without the version that is committed"
    await push(pod, version, ranks=2)
    assert await checksums(pod) == pushed
    assert (await pod.status(BASE_WIRE)).version == version


async def are_restarted(pair: Pair, before: tuple[int, int]) -> bool:
    return pair.starts == (before[0] + 1, before[1] + 1)


def server_process(port: int) -> int:
    """Return the process of ``sglang.launch_server`` on this port. Its children have other command lines."""
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            words = (folder / "cmdline").read_bytes().split(b"\0")
        except OSError:
            continue  # it ended meanwhile
        if words[1:3] == [b"-m", b"sglang.launch_server"] and str(port).encode() in words:
            return int(folder.name)
    raise LookupError(f"no server on port {port}")
