"""Build the images whose archives are missing in the cache."""

import fcntl
import shutil
from collections.abc import Sequence

from e2e.cluster.say import LabError, step
from e2e.images.builder import Builder, choose
from e2e.images.catalog import Version, folder, versions

_NEEDED_GB = 25  # engine image: build storage, archive, and one copy in the cluster's own store


def build(names: Sequence[str]) -> list[Version]:
    """Build the images with these names, or all images, and return them."""
    builder = choose()
    folder().mkdir(parents=True, exist_ok=True)
    with (folder() / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # a second build waits, and then finds most images built
        return _build(builder, names)


def _build(builder: Builder, names: Sequence[str]) -> list[Version]:
    wanted = versions(builder.base, names)
    missing = [version for version in wanted if not version.archive.exists()]
    free = shutil.disk_usage(folder()).free / 1e9
    if any(version.image.name == "engine-cpu" for version in missing) and free < _NEEDED_GB:
        raise LabError(f"The images need about {_NEEDED_GB} GB of disk; {folder()} has {free:.1f} GB free")
    for version in missing:
        _build_one(builder, version)
    return wanted


def _build_one(builder: Builder, version: Version) -> None:
    image, log = version.image, folder() / f"{version.image.name}.log"
    part = version.archive.with_suffix(".part")
    part.unlink(missing_ok=True)
    log.unlink(missing_ok=True)
    for old in folder().glob(f"{image.name}-[0-9a-f]*.tar"):  # archives are large, so only the newest content is kept
        old.unlink()
    with step(f"image {image.name} (log: {log})"):
        builder.build(image, version.base, part)
    part.rename(version.archive)
