"""Settings of all tests."""

import os

from hypothesis import HealthCheck, settings

# A busy machine makes generation and single examples slow; neither says anything about the code.
settings.register_profile("any-machine", deadline=None, suppress_health_check=[HealthCheck.too_slow])
# The same examples each time: what fails is the change's own fault. EXAMPLES=40 looks for others, see CONTRIBUTING.md.
settings.register_profile("repeatable", settings.get_profile("any-machine"), derandomize=True)
settings.load_profile("any-machine" if "EXAMPLES" in os.environ else "repeatable")
