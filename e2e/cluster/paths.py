"""Paths of the repository, the cache and the lab, and content keys of cached files."""

import hashlib
import os
from collections.abc import Iterable
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
CLUSTER = REPOSITORY / "e2e" / "cluster"
IMAGES = REPOSITORY / "images"


def cache_root() -> Path:
    """Return the folder of all data that can be recreated: binaries, images, environments, the lab."""
    named = os.environ.get("SGLANG_ROLLOUT_CACHE")
    if named:
        return Path(named).expanduser().resolve()
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "sglang-rollout"


def lab_root() -> Path:
    """Return the folder of the lab cluster: certificates, node folders, logs, the image store."""
    return cache_root() / "lab"


def files_below(*roots: Path) -> list[Path]:
    """Return all regular files at or below ``roots`` in a fixed order, without Python's compiled files."""
    found: list[Path] = []
    for root in roots:
        inside = [root] if root.is_file() else sorted(p for p in root.rglob("*") if p.is_file())
        found += [p for p in inside if "__pycache__" not in p.parts and not p.name.endswith(".pyc")]
    return found


def content_key(files: Iterable[Path], *extra: str) -> str:
    """Return a short hash of the files' names (relative to the repository), modes and contents, and of ``extra``."""
    digest = hashlib.sha256()
    for path in files:
        name = path.relative_to(REPOSITORY) if path.is_relative_to(REPOSITORY) else path.name
        digest.update(f"{name}\0{os.access(path, os.X_OK)}\0{path.stat().st_size}\0".encode())
        digest.update(path.read_bytes())
    for word in extra:
        digest.update(f"\0{word}".encode())
    return digest.hexdigest()[:16]
