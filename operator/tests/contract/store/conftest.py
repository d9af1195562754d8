"""The weight store, and trainers with torch."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import ExitStack
from tempfile import TemporaryFile

import pytest

from tests.contract.support.engine_servers import Peer
from tests.contract.support.store_process import StoreProcess, store_process, trainer_process


@pytest.fixture(scope="module")
def running_store(engine_environment: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[StoreProcess]:
    """A weight store that the tests of a module share."""
    with store_process(tmp_path_factory.mktemp("store")) as made:
        yield made


@pytest.fixture
def store(running_store: StoreProcess) -> Iterator[StoreProcess]:
    """The weight store without versions and process groups."""
    yield running_store
    running_store.drop_all()


@pytest.fixture(scope="module")
def trainers() -> Iterator[list[Peer]]:
    """Two trainers, as the stages of a pipeline-parallel one. Their tests share them, because torch takes seconds to import."""
    with ExitStack() as stack:
        logs = [stack.enter_context(TemporaryFile("w+")) for _ in range(2)]
        yield [stack.enter_context(trainer_process(log)) for log in logs]


@pytest.fixture
def trainer(trainers: list[Peer]) -> Peer:
    """A trainer that the test must not kill."""
    return trainers[0]


@pytest.fixture
def mortal() -> Iterator[Peer]:
    """A trainer for this test only."""
    with TemporaryFile("w+") as log, trainer_process(log) as made:
        yield made


@pytest.fixture(scope="module")
def running_upload_store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[StoreProcess]:
    """A weight store without torch, for uploads."""
    with store_process(tmp_path_factory.mktemp("store"), python=sys.executable) as made:
        yield made


@pytest.fixture
def upload_store(running_upload_store: StoreProcess) -> Iterator[StoreProcess]:
    """The weight store without versions."""
    yield running_upload_store
    running_upload_store.drop_all()
