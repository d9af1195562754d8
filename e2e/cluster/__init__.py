"""A real Kubernetes on one Linux machine without Docker; ``e2e/cluster/lab --help`` is the way in."""
