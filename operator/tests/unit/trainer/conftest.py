from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.unit.trainer.support.scripted_fleet import FakeFleet


@pytest.fixture
def fake() -> Iterator[FakeFleet]:
    with FakeFleet() as fleet:
        yield fleet
