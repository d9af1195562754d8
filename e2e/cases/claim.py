"""A PersistentVolumeClaim for the cases: a folder that only a pod with ``fsGroup`` can write, on the node of the client's pod."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from e2e.kube import Kubectl
from e2e.stand_in import CKPT, SHARED

GROUP = 65532
"""``fsGroup`` of the pods that write to the claim."""


@contextlib.contextmanager
def claim(kubectl: Kubectl, name: str, client: str) -> Iterator[str]:
    """Create a claim and its volume, and yield its name. The client's pod makes the folder.

    The kubelet makes the folder writable for ``fsGroup``, as it does with network volumes.
    """
    remove_claim(kubectl, name)
    kubectl.exec(client, "sh", "-c", f"rm -rf {CKPT}/{name} && mkdir -m 0555 {CKPT}/{name}", container="trainer")
    node = kubectl.get("node", kubectl.get("pod", client)["spec"]["nodeName"])["metadata"]["labels"]["kubernetes.io/hostname"]
    for made in _objects(name, node):
        kubectl.apply(made)
    try:
        yield name
    finally:
        remove_claim(kubectl, name)


def remove_claim(kubectl: Kubectl, name: str) -> None:
    """Delete the claim and its volume. Pods that use them must have ended."""
    kubectl("delete", "pvc", name, "--ignore-not-found", "--wait=false")
    kubectl("delete", "pv", name, "--ignore-not-found", "--wait=false")


def _objects(name: str, node: str) -> list[dict[str, Any]]:
    size = {"storage": "1Gi"}
    common = {"accessModes": ["ReadWriteOnce"], "storageClassName": ""}
    here = {"key": "kubernetes.io/hostname", "operator": "In", "values": [node]}
    volume = {
        "local": {"path": f"{SHARED}/{name}"},
        "capacity": size,
        "persistentVolumeReclaimPolicy": "Retain",
        "nodeAffinity": {"required": {"nodeSelectorTerms": [{"matchExpressions": [here]}]}},
    }
    return [
        {"apiVersion": "v1", "kind": "PersistentVolume", "metadata": {"name": name}, "spec": common | volume},
        {
            "apiVersion": "v1",
            "kind": "PersistentVolumeClaim",
            "metadata": {"name": name},
            "spec": common | {"volumeName": name, "resources": {"requests": size}},
        },
    ]
