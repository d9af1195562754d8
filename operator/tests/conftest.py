"""Settings of all tests."""

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from sglang_rollout.plugin.settings import SETTINGS_VARIABLE, dump_settings

# A busy machine makes generation and single examples slow; neither says anything about the code.
settings.register_profile("any-machine", deadline=None, suppress_health_check=[HealthCheck.too_slow])
# The same examples each time: what fails is the change's own fault. EXAMPLES=40 looks for others, see CONTRIBUTING.md.
settings.register_profile("repeatable", settings.get_profile("any-machine"), derandomize=True)
settings.load_profile("any-machine" if "EXAMPLES" in os.environ else "repeatable")


@pytest.fixture(autouse=True, scope="session")
def plugin_reports(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Name a folder in which engines report that the plug-in is active in them, as `sglang-rollout plugin` does for a shell."""
    folder = tmp_path_factory.mktemp("plugin-reports")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(SETTINGS_VARIABLE, dump_settings(reports=str(folder)))
        yield folder


@pytest.fixture(autouse=True)
def ctrl_c_raises() -> Iterator[None]:
    """Let SIGINT raise KeyboardInterrupt. A shell starts background jobs with SIGINT ignored, and Python keeps that."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)
