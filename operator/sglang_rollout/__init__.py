"""sglang-rollout: a Kubernetes operator for SGLang rollout fleets.

The packages follow the processes: ``api`` and ``core`` are the custom resource and every decision about Kubernetes
objects, ``runtime`` is the operator's input and output, ``fleet`` is the coordinator, ``agent`` the sidecar of an engine,
``trainer`` the client library, and ``wire`` what these say to each other.
"""

__version__ = "0.1.0"
