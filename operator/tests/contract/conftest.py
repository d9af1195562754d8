"""The servers of the wire's contract. One of each kind for the whole run: an engine takes half a minute to start."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from e2e.engine import LabError, environment
from engines_lab import Urls, engines_behind_a_url
from wire_lab import Peer, Server, peer, server


def _server(kind: str, factory: pytest.TempPathFactory) -> Iterator[Server]:
    try:
        environment.python(make=False)
    except LabError as error:
        pytest.skip(str(error))
    with server(kind, factory.mktemp("wire")) as made:
        yield made


@pytest.fixture(scope="session")
def sglang_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A real SGLang server."""
    yield from _server("sglang", tmp_path_factory)


@pytest.fixture(scope="session")
def stand_in_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """The stand-in, as a process of its own."""
    yield from _server("stand-in", tmp_path_factory)


@pytest.fixture(scope="session")
def urls(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Urls]:
    """Two real engines behind one URL. They hold what the last push left, both the same."""
    try:
        environment.python(make=False)
    except LabError as error:
        pytest.skip(str(error))
    with engines_behind_a_url(tmp_path_factory.mktemp("fleet"), 2) as made:
        yield made


@pytest.fixture(scope="session", params=["stand_in_server", "sglang_server"], ids=["stand-in", "sglang"])
def either_server(request: pytest.FixtureRequest) -> Server:
    """The same assertions are run against both."""
    found = request.getfixturevalue(request.param)
    assert isinstance(found, Server)
    return found


@pytest.fixture
def engine(either_server: Server) -> Iterator[Server]:
    """One of the two, as after a start but for its weights."""
    either_server.settle()
    yield either_server
    either_server.settle()


@pytest.fixture
def trainer() -> Iterator[Peer]:
    """A trainer without a group."""
    with peer() as made:
        yield made


@pytest.fixture
def joined(engine: Server, trainer: Peer) -> Iterator[Peer]:
    """A trainer in a group with the engine, which is paused and in a session."""
    assert trainer.open([engine]) == [(200, {"success": True, "message": "Succeeded to initialize custom process group."})]
    assert engine.post("/pause_generation", {"mode": "retract"})[0] == 200
    assert engine.post("/begin_weight_update", {}) == (200, {"success": True, "message": "Success"})
    yield trainer
    engine.post("/destroy_weights_update_group", {"group_name": trainer.group})
