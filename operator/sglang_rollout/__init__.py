"""sglang-rollout: a Kubernetes operator for SGLang rollout fleets.

Packages, top to bottom: ``cli`` and ``local`` start processes; ``controller`` is the operator, ``coordinator`` and ``agent``
are the processes of a fleet, ``trainer`` is the client library and ``testing`` the stand-in engine; ``proxy`` configures gate,
front and smg; ``api`` is the custom resource; ``kube``, ``checkpoints`` and ``wire`` are shared by all.
"""

__version__ = "0.1.0"
