"""Pack one program into an image archive, for the pause container of each pod."""

import hashlib
import io
import json
import os
import tarfile
from pathlib import Path

_ARCHITECTURES = {"x86_64": "amd64", "aarch64": "arm64"}


def _add(tar: tarfile.TarFile, name: str, data: bytes, mode: int = 0o644) -> None:
    entry = tarfile.TarInfo(name)
    entry.size, entry.mode = len(data), mode
    tar.addfile(entry, io.BytesIO(data))


def pack(program: Path, reference: str, archive: Path) -> None:
    """Write an image with ``program`` as its only file and entry point to ``archive`` (the format of docker save)."""
    layer = io.BytesIO()
    with tarfile.open(fileobj=layer, mode="w") as tar:
        _add(tar, program.name, program.read_bytes(), 0o755)
    digest = hashlib.sha256(layer.getvalue()).hexdigest()
    machine = os.uname().machine
    config = json.dumps(
        {
            "architecture": _ARCHITECTURES.get(machine, machine),
            "os": "linux",
            "config": {"Entrypoint": [f"/{program.name}"], "User": "65535:65535", "WorkingDir": "/"},
            "rootfs": {"type": "layers", "diff_ids": [f"sha256:{digest}"]},
        },
        sort_keys=True,
    ).encode()
    name = hashlib.sha256(config).hexdigest() + ".json"
    manifest = [{"Config": name, "RepoTags": [reference], "Layers": [f"{digest}/layer.tar"]}]
    archive.parent.mkdir(parents=True, exist_ok=True)
    part = archive.with_suffix(".part")
    with tarfile.open(part, "w") as tar:
        _add(tar, name, config)
        _add(tar, f"{digest}/layer.tar", layer.getvalue())
        _add(tar, "manifest.json", json.dumps(manifest).encode())
    part.rename(archive)
