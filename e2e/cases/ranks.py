"""What the ranks of an engine hold."""

from __future__ import annotations

import json

from e2e.kube import Kubectl

_CHECKSUMS = (
    "import json, urllib.request as u\n"
    "r = u.Request('http://127.0.0.1:30001/weights_checker', b'{\"action\": \"checksum\"}', {'Content-Type': 'application/json'})\n"
    "print(json.dumps([rank['per_gpu_checksum'] for rank in json.load(u.urlopen(r, timeout=60))['ranks']]))\n"
)


def checksums(kubectl: Kubectl, engine: str) -> list[str]:
    """Of what each of an engine's two ranks holds."""
    found = json.loads(kubectl.exec(f"{engine}-0", "python3", "-c", _CHECKSUMS, container="engine"))
    assert len(found) == 2, "one for each rank"
    return list(found)
