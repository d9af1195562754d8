"""Folders of the repository that tests read."""

from __future__ import annotations

import os
from pathlib import Path

TESTS = Path(__file__).parents[1]
REPOSITORY = TESTS.parents[1]
OPERATOR = REPOSITORY / "operator"
"""Entry for the `PYTHONPATH` of processes that need the package or these tests."""
DOCS = REPOSITORY / "docs"
CHARTS = REPOSITORY / "charts"
GOLDEN_INPUTS = TESTS / "golden/in"
CONTRACT_SUPPORT = TESTS / "contract/support"
TRAINERS = CONTRACT_SUPPORT / "trainers"
"""Programs that act as a trainer. Most run with the engine environment's Python, which has torch."""


def package_variables() -> dict[str, str]:
    """Return the environment of another Python that needs the package: this one, with the package's folder first on the path."""
    return os.environ | {"PYTHONPATH": os.pathsep.join([str(OPERATOR), os.environ.get("PYTHONPATH", "")])}
