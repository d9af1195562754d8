"""Settings of all tests."""

from hypothesis import HealthCheck, settings

# A busy machine makes generation and single examples slow; neither says anything about the code.
settings.register_profile("any-machine", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("any-machine")
