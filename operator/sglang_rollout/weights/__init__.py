"""``sglang-rollout weights``: the versions of a fleet with transport Staged, and the snapshots of its weight store."""
