"""Build the images, list the built ones, or print their bills of materials.

    python3 -m e2e.images build [NAME…]     build missing images; prints one line per image: REFERENCE ARCHIVE KEY
    python3 -m e2e.images list              print the same lines for the images that are built
    python3 -m e2e.images sbom NAME…        print the bill of materials (CycloneDX) of built images

BASE names another base image, TORCH_INDEX another index for torch, BUILDER one of docker and buildah.
APT_SNAPSHOT names a state of Debian's archive (snapshot.debian.org), for example 20261120T000000Z.
With CLUSTER=current, instructions for loading the images into a cluster are printed, too.
"""

import argparse
import fcntl
import json
import os
import shutil
import sys
from collections.abc import Sequence

from e2e.cluster.say import LabError, say, step
from e2e.images.bom import read_bom
from e2e.images.builder import Builder, choose
from e2e.images.catalog import CATALOG, Version, folder, versions

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


def _explain_current(built: Sequence[Version]) -> None:
    say("CLUSTER=current: load these images into your cluster. With kind:")
    for version in built:
        say(f"  kind load image-archive {version.archive}")
    say("With another cluster: push them to a registry that it can pull from, and set the chart's image values.")


def main() -> None:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=("build", "list", "sbom"))
    parser.add_argument("names", nargs="*", metavar="NAME")
    args = parser.parse_args()
    unknown = set(args.names) - {image.name for image in CATALOG}
    if unknown:
        parser.error(f"no image has the name {', '.join(sorted(unknown))}; the images are {', '.join(i.name for i in CATALOG)}")
    try:
        if args.command == "build":
            found = build(args.names)
        else:
            found = [version for version in versions(choose().base, args.names) if version.archive.exists()]
        lines = [json.dumps(read_bom(version.archive)) if args.command == "sbom" else str(version) for version in found]
    except LabError as error:
        say(f"error: {error}")
        sys.exit(1)
    print("\n".join(lines))
    if os.environ.get("CLUSTER") == "current":
        _explain_current(found)


if __name__ == "__main__":
    main()
