"""Two pods of one engine, with real agents and gates: they start together, end together, and answer as one engine."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from sglang_rollout.wire.ports import AGENT_CHECKPOINT, AGENT_GROUP, AGENT_PREFLIGHT
from tests.contract.support.agent_pod import BASE_WIRE, until
from tests.contract.support.two_pod_engine import Pair, two_pods
from tests.support.ports import free_port

pytestmark = pytest.mark.router


@pytest.fixture
async def pair(tmp_path: Path) -> AsyncIterator[Pair]:
    """Return two pods of an engine that serves."""
    async with two_pods(tmp_path) as made:
        await made.leader.start(made.leader.relay)
        await made.follower.start(made.leader.relay)
        await until(made.runs, 60, "both pods run")
        await made.leader.pod.open_with_base()
        yield made


async def test_sglang_starts_only_when_both_pods_run(tmp_path: Path) -> None:
    async with two_pods(tmp_path) as made:
        await made.leader.start(made.leader.relay)

        async def waits() -> bool:
            return "until all 2 pods can start together, now for e0-1" in await made.why()

        await until(waits, 30, "pod 0 says whom it waits for")
        assert not (made.leader.pod.folder / "pid").exists()
        await made.follower.start(made.leader.relay)
        await until(made.runs, 60, "both pods run")
        assert made.starts == (1, 1)


async def test_only_pod_0_serves_and_accepts_calls(pair: Pair) -> None:
    assert (await pair.leader.pod.generate()).status == 200
    assert await pair.follower.pod.is_closed()
    refused = await pair.follower.pod.control("/pause_generation")
    assert (refused.status, "only its pod 0 answers" in refused.reason) == (421, True)
    report = {"rank": 1, "address": "127.0.0.1:1", "boot_id": "unknown"}
    assert (await pair.leader.pod.control(AGENT_GROUP, report, token="wrong")).status == 403
    assert (await pair.leader.pod.control(AGENT_GROUP, {**report, "rank": 2})).status == 400
    await asyncio.sleep(2)
    assert pair.starts == (1, 1)


async def test_every_pod_must_reach_the_trainer_and_see_the_same_checkpoint(pair: Pair, tmp_path: Path) -> None:
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    header = b'{"w": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}'
    (folder / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + bytes(4))
    async with await asyncio.start_server(lambda _, writer: writer.close(), "127.0.0.1", free_port()) as trainer:
        reach = {"host": "127.0.0.1", "port": trainer.sockets[0].getsockname()[1], "deadline": 5.0}
        asked = {AGENT_PREFLIGHT: reach, AGENT_CHECKPOINT: {"path": str(folder), "deadline": 5.0}}
        for path, wanted in asked.items():
            reply = (await pair.leader.pod.control(path, wanted)).body
            assert reply["refusal"] is None
        await pair.follower.pod.agent.end()
        for path, wanted in asked.items():
            reply = (await pair.leader.pod.control(path, wanted)).body
            assert reply["refusal"]["message"].startswith("from pod e0-1: ")


@pytest.mark.parametrize("rank", [0, 1])
async def test_a_dead_rank_ends_the_other_rank_and_both_restart(pair: Pair, rank: int) -> None:
    (pair.leader, pair.follower)[rank].kill()
    await pair.wait_for_restart((1, 1))
    assert (await pair.leader.pod.status(BASE_WIRE)).gate_open
    other = (pair.follower, pair.leader)[rank]
    words = (other.pod.folder / "engine.log").read_text()
    assert any(f"pod e0-{rank} {what}" in words for what in ("has ended", "was restarted")), "its last words say why"


async def test_agents_that_die_end_no_rank(pair: Pair) -> None:
    boots = [member.pod.boot_file.read_text() for member in (pair.leader, pair.follower)]
    for member in (pair.leader, pair.follower):
        await member.pod.agent.end()
        await asyncio.sleep(6)  # longer than a rank may be silent before it is looked after
        await member.pod.agent.start()
        await until(pair.leader.pod.agent_answers, 40, "pod 0's agent is back")
        await until(pair.follower.pod.agent_answers, 40, "the other agent is back")
        await until(pair.runs, 40, "both know that all runs")
    await asyncio.sleep(2)
    assert [member.pod.boot_file.read_text() for member in (pair.leader, pair.follower)] == boots


async def test_a_cut_link_ends_both_ranks_and_they_start_when_it_is_restored(pair: Pair) -> None:
    pair.leader.relay.cut()
    pair.follower.relay.cut()
    await until(lambda: restarted(pair), 60, "both notice that the other is out of reach", every=0.2)
    await until(lambda: says(pair, "now for e0-1; it ended because pod e0-1 could not be reached"), 30, "pod 0 says what it waits for")
    assert not await pair.leader.up()
    pair.leader.relay.mend()
    pair.follower.relay.mend()
    await until(pair.runs, 60, "they start together again")


async def test_a_pod_that_stops_drains_the_engine_first(pair: Pair) -> None:
    (pair.follower.run / "drain").touch()  # its preStop hook
    await until(pair.leader.pod.is_closed, 30, "pod 0 takes no new requests")
    await until(lambda: exists(pair.follower.run / "drained"), 30, "the hook hears that nothing runs any more")
    assert pair.starts == (1, 1)
    pair.follower.kill()
    await pair.wait_for_restart((1, 1))
    assert (await pair.leader.pod.status(BASE_WIRE)).gate_open


async def restarted(pair: Pair) -> bool:
    return pair.starts == (2, 2)


async def says(pair: Pair, words: str) -> bool:
    return words in await pair.why()


async def exists(path: Path) -> bool:
    return path.exists()
