"""`sglang-rollout local`: the whole fleet on one machine, without Kubernetes."""
