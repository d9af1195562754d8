"""Fixtures of the agents' contract tests."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.contract.support.staged_versions import Source, run_source


@pytest.fixture
async def source(tmp_path: Path) -> AsyncIterator[Source]:
    """A pod from which agents copy versions."""
    async with run_source(tmp_path) as made:
        yield made
