"""Engines with two ranks: their spec, and the checksums of the ranks."""

from __future__ import annotations

import json
from typing import Any

from e2e.cases.conftest import sample
from e2e.engine import environment
from e2e.kube import Kubectl

_CHECKSUMS = (
    "import json, urllib.request as u\n"
    "r = u.Request('http://127.0.0.1:30001/weights_checker', b'{\"action\": \"checksum\"}', {'Content-Type': 'application/json'})\n"
    "print(json.dumps([rank['per_gpu_checksum'] for rank in json.load(u.urlopen(r, timeout=60))['ranks']]))\n"
)


def two_ranks(name: str, *, patches: str = "", **engine: Any) -> dict[str, Any]:
    """Return a rollout of one such engine, with a core for each rank. ``patches``: SGLANG_CPU_PATCHES (images/engine-cpu/README.md)."""
    made = sample(name, **({"parallelism": {"tensor": 2}} | engine))
    made["spec"]["replicas"] = 1
    settings = {"SGLANG_CPU_OMP_THREADS_BIND": "0|1", "SGLANG_CPU_PATCHES": f"paused-sleep,{patches}", **environment.SEVERAL_RANKS}
    made["spec"]["engine"]["env"] += [{"name": key, "value": value} for key, value in settings.items()]
    return made


def checksums(kubectl: Kubectl, engine: str) -> list[str]:
    """Return the checksum of each rank's weights."""
    found = json.loads(kubectl.exec(f"{engine}-0", "python3", "-c", _CHECKSUMS, container="engine"))
    assert len(found) == 2, "one for each rank"
    return list(found)
