"""Kubernetes objects for a fleet of stand-in engines and for its trainer's pod."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from e2e import machine_token
from e2e.kube import ROOT

CODE = "stand-in-code"
"""Name of the ConfigMap with the scripts."""
SHARED = "/var/tmp/sglang-rollout-e2e"
"""A folder of the nodes. The lab's nodes share it, because they run on one machine. Nodes of other clusters do not share it."""
CKPT = "/ckpt"
"""Path of the shared folder in engines and trainers."""
_ENGINE = {"stand-in-init": "e2e/stand_in/sglang/__init__.py", "stand-in-server": "e2e/stand_in/sglang/launch_server.py"}
_TRAINER = {
    "e2e": "e2e/__init__.py",
    "chaos": "e2e/chaos/__init__.py",
    "trainer": "e2e/chaos/trainer.py",
}
Document = dict[str, Any]


def code() -> Document:
    """Return the ConfigMap with this checkout's scripts for the pods."""
    files = {key: (ROOT / path).read_text() for key, path in {**_ENGINE, **_TRAINER}.items()}
    return {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": CODE}, "data": files}


def _mounted(files: dict[str, str], below: str) -> list[Document]:
    return [{"key": key, "path": str(Path(path).relative_to(below))} for key, path in files.items()]


def _job() -> Document:
    """Return the pod of the example trainer, which copies our library from the fleet's image."""
    return dict(yaml.safe_load((ROOT / "examples/trainer/job.yaml").read_text())["spec"]["template"]["spec"])


def rollout(name: str, *, replicas: int = 3, weights: Document | None = None) -> Document:
    """Return an SGLangRollout with stand-in engines and short deadlines."""
    document: Document = yaml.safe_load((ROOT / "examples/rollout-cpu.yaml").read_text())
    document["metadata"] = {"name": name}
    spec = document["spec"]
    spec["replicas"] = replicas
    spec["model"] = {"path": "stand-in", "servedName": "tiny"}
    spec["engine"] |= {
        "args": [],
        "memorySaver": True,
        "weightsCpuBackup": True,
        "env": [{"name": "OMP_NUM_THREADS", "value": "1"}, {"name": "PYTHONPATH", "value": "/opt/stand-in:/opt/client"}],
        "resources": {"requests": {"cpu": "50m", "memory": "256Mi"}},
    }
    spec["security"] = machine_token.security()
    spec["weights"] = {
        "backend": "gloo",
        "verify": "Always",
        "deadlines": {"groupSeconds": 10, "updateSeconds": 10, "idleSeconds": 10, "pauseSeconds": 8, "totalSeconds": 60, "stuckSeconds": 5},
        "trainerLease": {"ttlSeconds": 5},
    } | (weights or {})
    library = _job()["initContainers"][0]
    spec["podTemplate"] = {
        "spec": {
            "initContainers": [library],
            "containers": [
                {
                    "name": "engine",
                    "volumeMounts": [
                        {"name": "client", "mountPath": "/opt/client"},
                        {"name": "stand-in", "mountPath": "/opt/stand-in"},
                        {"name": "ckpt", "mountPath": CKPT},
                    ],
                }
            ],
            "volumes": [
                {"name": "client", "emptyDir": {}},
                {"name": "stand-in", "configMap": {"name": CODE, "items": _mounted(_ENGINE, "e2e/stand_in")}},
                _ckpt(),
            ],
        }
    }
    return document


def with_folder(document: Document) -> Document:
    """Mount the shared folder in the engines of a rollout that has no other volumes."""
    engine = {"name": "engine", "volumeMounts": [{"name": "ckpt", "mountPath": CKPT}]}
    document["spec"]["podTemplate"] = {"spec": {"containers": [engine], "volumes": [_ckpt()]}}
    return document


def trainer_pod(name: str) -> Document:
    """Return a pod that waits, with torch, our library and this checkout's scripts. Cases start trainers in it."""
    pod = _job()
    pod["terminationGracePeriodSeconds"] = 1
    container = pod["containers"][0]
    del container["args"]
    # Process 1 is a shell that reaps trainers, because no signal from inside the pod can kill process 1.
    container["command"] = ["sh", "-c", "while :; do sleep 5; done"]
    path = next(variable for variable in container["env"] if variable["name"] == "PYTHONPATH")
    path["value"] = f"/opt/e2e:{path['value']}"
    container["volumeMounts"] = [mount for mount in container["volumeMounts"] if mount["name"] == "client"]
    container["volumeMounts"] += [{"name": "e2e", "mountPath": "/opt/e2e"}, {"name": "ckpt", "mountPath": CKPT}]
    pod["initContainers"].append(_open_folder(pod["initContainers"][0]["image"]))
    pod["volumes"] = [volume for volume in pod["volumes"] if volume["name"] == "client"]
    pod["volumes"] += [{"name": "e2e", "configMap": {"name": CODE, "items": _mounted(_TRAINER, ".")}}, _ckpt()]
    return {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name}, "spec": pod}


def _ckpt() -> Document:
    return {"name": "ckpt", "hostPath": {"path": SHARED, "type": "DirectoryOrCreate"}}


def _open_folder(image: str) -> Document:
    """Return an init container that opens the shared folder to all users. The kubelet creates the folder for root only."""
    return {
        "name": "shared-folder",
        "image": image,
        "imagePullPolicy": "IfNotPresent",
        "command": ["sh", "-c", f"chmod 1777 {CKPT} && rm -rf {CKPT}/*"],
        "securityContext": {"runAsUser": 0, "runAsNonRoot": False},
        "volumeMounts": [{"name": "ckpt", "mountPath": CKPT}],
    }
