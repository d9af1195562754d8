"""Fixtures of tests with Mooncake."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.contract.support.staging_pods import has_mooncake, use_stand_in_mooncake


@pytest.fixture
def faults(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Use the stand-in for the library. A file in the returned folder makes it fail."""
    folder = tmp_path / "faults"
    folder.mkdir()
    monkeypatch.setenv("MOONCAKE_FAULTS", str(folder))
    use_stand_in_mooncake(monkeypatch, tmp_path)
    return folder


@pytest.fixture(params=["stand-in", "library"])
def library(request: pytest.FixtureRequest) -> None:
    """Run the test with the stand-in, and with the library if it is installed."""
    if request.param == "stand-in":
        request.getfixturevalue("faults")
    elif not has_mooncake():
        pytest.skip("Mooncake Transfer Engine is not installed")
