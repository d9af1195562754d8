"""``sglang-rollout local``: a fleet on one machine, without Kubernetes."""
