"""The operator's decisions: pure functions over plain dicts. No I/O, no clock, no randomness, no Kubernetes client."""
