"""The agent's handshake with a store of real torch."""

import asyncio
from pathlib import Path
from tempfile import TemporaryFile

import pytest
from e2e.child import killed_with_parent
from e2e.engine import environment

from sglang_rollout.internal.reachability import preflight
from sglang_rollout.wire.agent import PreflightRequest
from tests.contract.support.store_process import trainer_process

STORE = Path(__file__).parents[1] / "support" / "trainers" / "store.py"


@pytest.mark.parametrize("kind", ["libuv", "threads"])
async def test_a_store_of_torch_answers_the_handshake_and_keeps_its_contents(engine_environment: None, kind: str) -> None:
    command = killed_with_parent([str(environment.python(make=False)), str(STORE), "127.0.0.1", kind])
    pipe = asyncio.subprocess.PIPE
    store = await asyncio.create_subprocess_exec(*command, stdin=pipe, stdout=pipe)
    assert store.stdin is not None
    assert store.stdout is not None
    try:
        port = int(await store.stdout.readline())
        store.stdin.write(b"before\n")
        assert await store.stdout.readline() == b"before 2\n"
        for _ in range(3):
            reply = await preflight(PreflightRequest(host="127.0.0.1", port=port, deadline=60, handshake=True))
            assert reply.refusal is None
        store.stdin.write(b"after\n")
        assert await store.stdout.readline() == b"after 2\n"
    finally:
        store.kill()
        await store.wait()


async def test_a_handshake_is_not_counted_as_a_rank(engine_environment: None) -> None:
    """Rank 0 of torch's rendezvous waits until as many clients as ranks have counted themselves."""
    with TemporaryFile("w+") as log, trainer_process(log) as trainer:
        trainer.send_command("open", group="g", seconds=4)
        port = trainer.read_answer()["port"]
        for _ in range(3):
            reply = await preflight(PreflightRequest(host="127.0.0.1", port=port, deadline=60, handshake=True))
            assert reply.refusal is None
        assert "1/2 clients joined" in trainer.read_answer()["error"]
