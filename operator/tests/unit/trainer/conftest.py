from __future__ import annotations

from collections.abc import Iterator

import pytest
from trainer_fakefleet import FakeFleet


@pytest.fixture
def fake() -> Iterator[FakeFleet]:
    with FakeFleet() as fleet:
        yield fleet
