"""Settings of all tests."""

import os
import signal
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, settings

# A busy machine makes generation and single examples slow; neither says anything about the code.
settings.register_profile("any-machine", deadline=None, suppress_health_check=[HealthCheck.too_slow])
# The same examples each time: what fails is the change's own fault. EXAMPLES=40 looks for others, see CONTRIBUTING.md.
settings.register_profile("repeatable", settings.get_profile("any-machine"), derandomize=True)
settings.load_profile("any-machine" if "EXAMPLES" in os.environ else "repeatable")


@pytest.fixture(autouse=True)
def ctrl_c_raises() -> Iterator[None]:
    """Let SIGINT raise KeyboardInterrupt. A shell starts background jobs with SIGINT ignored, and Python keeps that."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)
