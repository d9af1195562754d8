"""Turn an archive of ``docker save`` into an OCI stream that leaves out the layers its receiver has already.

A development image changes in its last, thin layer; the layer below holds gigabytes. containerd takes an archive without
the blobs that its content store knows, so a new version of our code costs a moment instead of another import of torch.
"""

import hashlib
import io
import json
import tarfile
from collections.abc import Set
from pathlib import Path
from typing import IO, Any

_MEDIA = "application/vnd.oci.image"


def _descriptor(kind: str, data: bytes, **more: Any) -> dict[str, Any]:
    return {"mediaType": f"{_MEDIA}.{kind}", "digest": f"sha256:{hashlib.sha256(data).hexdigest()}", "size": len(data), **more}


def _member(source: tarfile.TarFile, name: str) -> tarfile.TarInfo:
    """Return the entry; an archive names a layer that it holds twice by a symbolic link."""
    entry = source.getmember(name)
    for _ in range(8):
        if not entry.issym():
            return entry
        parts: list[str] = []
        for part in [*entry.name.split("/")[:-1], *entry.linkname.split("/")]:
            if part == "..":
                parts.pop()
            elif part not in (".", ""):
                parts.append(part)
        entry = source.getmember("/".join(parts))
    raise ValueError(f"{name} is a circle of symbolic links in this archive")


def _read(source: tarfile.TarFile, name: str) -> bytes:
    data = source.extractfile(_member(source, name))
    if data is None:
        raise ValueError(f"{name} is not a file in this archive")
    return data.read()


def _blob(out: tarfile.TarFile, digest: str, size: int, data: IO[bytes]) -> None:
    entry = tarfile.TarInfo(f"blobs/{digest.replace(':', '/')}")
    entry.size = size
    out.addfile(entry, data)


def write(archive: Path, reference: str, present: Set[str], out: IO[bytes]) -> int:
    """Write ``archive`` as an OCI stream named ``reference`` to ``out``, without blobs in ``present``; return the bytes of layers sent.

    Layers of ``docker save`` are uncompressed, so that a layer's digest is its ``diff_id``.
    """
    sent = 0
    with tarfile.open(archive) as source, tarfile.open(fileobj=out, mode="w|", format=tarfile.GNU_FORMAT) as target:
        (image,) = json.loads(_read(source, "manifest.json"))
        config = _read(source, image["Config"])
        layers = list(zip(json.loads(config)["rootfs"]["diff_ids"], [_member(source, n) for n in image["Layers"]], strict=True))
        manifest = json.dumps(
            {
                "schemaVersion": 2,
                "mediaType": f"{_MEDIA}.manifest.v1+json",
                "config": _descriptor("config.v1+json", config),
                "layers": [{"mediaType": f"{_MEDIA}.layer.v1.tar", "digest": digest, "size": entry.size} for digest, entry in layers],
            }
        ).encode()
        named = _descriptor("manifest.v1+json", manifest, annotations={"io.containerd.image.name": reference})
        index = json.dumps({"schemaVersion": 2, "manifests": [named]}).encode()
        for name, data in (("oci-layout", b'{"imageLayoutVersion": "1.0.0"}'), ("index.json", index)):
            entry = tarfile.TarInfo(name)
            entry.size = len(data)
            target.addfile(entry, io.BytesIO(data))
        _blob(target, named["digest"], len(manifest), io.BytesIO(manifest))
        _blob(target, _descriptor("config.v1+json", config)["digest"], len(config), io.BytesIO(config))
        for digest, entry in layers:
            content = source.extractfile(entry)
            if digest not in present and content is not None:
                _blob(target, digest, entry.size, content)
                sent += entry.size
    return sent
