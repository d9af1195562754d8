"""Servers of the contract tests. Each kind starts once per run, because an engine takes half a minute to start."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from e2e.engine import LabError, environment, start_engine

from sglang_rollout.testing import StandInFleet
from tests.contract.support.agent_pod import Pod, run_pod
from tests.contract.support.engine_servers import Peer, Server, peer, server
from tests.contract.support.local_fleet import Urls, engines_behind_a_url
from tests.contract.support.stub_engine import StubEngine, stub_engine
from tests.support.ports import free_port

SAVER = ("--enable-memory-saver", "--enable-weights-cpu-backup")
LORA = (
    *("--enable-lora", "--max-lora-rank", "4", "--lora-target-modules", "q_proj", "v_proj", "--lora-backend", "torch_native"),
    *("--max-loras-per-batch", "2"),
)


def _server(kind: str, factory: pytest.TempPathFactory) -> Iterator[Server]:
    try:
        environment.python(make=False)
    except LabError as error:
        pytest.skip(str(error))
    with server(kind, factory.mktemp("wire")) as made:
        yield made


@pytest.fixture
async def stub() -> AsyncIterator[StubEngine]:
    """A server with SGLang's HTTP API and without weights."""
    async with stub_engine() as made:
        yield made


@pytest.fixture
async def pod(stub: StubEngine, tmp_path: Path) -> AsyncIterator[Pod]:
    """Gate and agent in front of the stub. The gate is closed until a coordinator calls."""
    async with run_pod(tmp_path, stub.url) as made:
        yield made


@pytest.fixture(scope="session")
def sglang_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A real SGLang server."""
    yield from _server("sglang", tmp_path_factory)


@pytest.fixture(scope="session")
def stand_in_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A stand-in in a separate process."""
    yield from _server("stand-in", tmp_path_factory)


@pytest.fixture(scope="session")
def engine_environment() -> None:
    """Skip the test, with the reason, if SGLang for CPU is not installed."""
    try:
        environment.python(make=False)
    except LabError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="session")
def urls(engine_environment: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Urls]:
    """Two real engines behind one URL. Both hold the version of the last push."""
    with engines_behind_a_url(tmp_path_factory.mktemp("fleet"), 2) as made:
        yield made


@pytest.fixture(scope="session")
def sglang_pair(engine_environment: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[str]]:
    """URLs of two real engines that release memory and load adapters. A test must leave them awake, with base weights and no adapter."""
    folder = tmp_path_factory.mktemp("pair")
    with ExitStack() as stack:
        patch = {"SGLANG_CPU_PATCHES": "lora,paused-sleep"}
        logs = [folder / f"engine-{index}.log" for index in range(2)]
        engines = [stack.enter_context(start_engine(free_port(), args=[*SAVER, *LORA], env=patch, log=log, wait=False)) for log in logs]
        for engine in engines:
            engine.wait()
        yield [engine.url for engine in engines]


@pytest.fixture(scope="session")
def stand_in_pair() -> Iterator[list[str]]:
    """URLs of two stand-ins that release memory and load adapters."""
    with StandInFleet(engines=2, weight_version="base", memory_saver=True, weights_backup=True, token_seconds=0.003) as made:
        yield list(made.urls)


@pytest.fixture(scope="session", params=["stand_in_server", "sglang_server"], ids=["stand-in", "sglang"])
def either_server(request: pytest.FixtureRequest) -> Server:
    """Run the test once with the stand-in and once with SGLang."""
    found = request.getfixturevalue(request.param)
    assert isinstance(found, Server)
    return found


@pytest.fixture
def engine(either_server: Server) -> Iterator[Server]:
    """The stand-in or SGLang. Except for its weights, its state is that after a start."""
    either_server.settle()
    yield either_server
    either_server.settle()


@pytest.fixture
def trainer() -> Iterator[Peer]:
    """A trainer without a process group."""
    with peer() as made:
        yield made


@pytest.fixture
def joined(engine: Server, trainer: Peer) -> Iterator[Peer]:
    """A trainer in a process group with the engine, which is paused and has an open update session."""
    assert trainer.open([engine]) == [(200, {"success": True, "message": "Succeeded to initialize custom process group."})]
    assert engine.post("/pause_generation", {"mode": "retract"})[0] == 200
    assert engine.post("/begin_weight_update", {}) == (200, {"success": True, "message": "Success"})
    yield trainer
    engine.post("/destroy_weights_update_group", {"group_name": trainer.group})
