"""Build the images, or say what is built.

    python3 -m e2e.images build [NAME…]     make what is missing; one line per image: REFERENCE ARCHIVE KEY
    python3 -m e2e.images list              the same lines for what is built already

BASE names another base image, TORCH_INDEX another index for torch, BUILDER one of docker and buildah.
With CLUSTER=current it also says how such a cluster gets the images.
"""

import argparse
import os
import shutil
import sys
from collections.abc import Sequence

from e2e.cluster.say import LabError, say, step
from e2e.images.builder import Builder, choose
from e2e.images.catalog import CATALOG, Image, folder

_NEEDED_GB = 25  # engine image: build storage, archive, and one copy in the cluster's own store


def build(names: Sequence[str]) -> list[str]:
    """Build the images called ``names`` (all if empty) and return their lines."""
    builder = choose()
    folder().mkdir(parents=True, exist_ok=True)
    base = builder.base()
    wanted = [image for image in CATALOG if not names or image.name in names]
    missing = [image for image in wanted if not image.archive(base).exists()]
    free = shutil.disk_usage(folder()).free / 1e9
    if any(image.name == "engine-cpu" for image in missing) and free < _NEEDED_GB:
        raise LabError(f"The images need about {_NEEDED_GB} GB of disk; {folder()} has {free:.1f} GB free")
    for image in missing:
        _build_one(builder, image, base)
    return [_line(image, base) for image in wanted]


def _build_one(builder: Builder, image: Image, base: str) -> None:
    archive = image.archive(base)
    part = archive.with_suffix(".part")
    part.unlink(missing_ok=True)
    (folder() / f"{image.name}.log").unlink(missing_ok=True)
    with step(f"image {image.name} (log: {folder()}/{image.name}.log)"):
        builder.build(image, base, part)
    for old in folder().glob(f"{image.name}-[0-9a-f]*.tar"):  # only the newest content is kept: they are large
        old.unlink()
    part.rename(archive)


def _line(image: Image, base: str) -> str:
    return f"{image.reference} {image.archive(base)} {image.key(base)}"


def _explain_current(lines: Sequence[str]) -> None:
    say("CLUSTER=current: your cluster has to get these images. With kind:")
    for line in lines:
        say(f"  kind load image-archive {line.split()[1]}")
    say("With any other: push them to a registry it can pull from and set the chart's image values.")


def main() -> None:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=("build", "list"))
    parser.add_argument("names", nargs="*", metavar="NAME")
    args = parser.parse_args()
    unknown = set(args.names) - {image.name for image in CATALOG}
    if unknown:
        parser.error(f"no image is called {', '.join(sorted(unknown))}; there are {', '.join(i.name for i in CATALOG)}")
    try:
        if args.command == "build":
            lines = build(args.names)
        else:
            base = choose().base()
            lines = [_line(image, base) for image in CATALOG if image.archive(base).exists()]
    except LabError as error:
        say(f"error: {error}")
        sys.exit(1)
    print("\n".join(lines))
    if os.environ.get("CLUSTER") == "current":
        _explain_current(lines)


if __name__ == "__main__":
    main()
