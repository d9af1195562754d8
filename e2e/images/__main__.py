"""Build the images, list the built ones, or print their bills of materials.

    python3 -m e2e.images build [NAME…]     build missing images; prints one line per image: REFERENCE ARCHIVE KEY
    python3 -m e2e.images list              print the same lines for the images that are built
    python3 -m e2e.images push REGISTRY     build missing images, push all of them and the chart, and print how to install them
    python3 -m e2e.images sbom NAME…        print the bill of materials (CycloneDX) of built images

BASE names another base image, TORCH_INDEX another index for torch, BUILDER one of docker and buildah.
PLAIN_HTTP=1 says that the registry of a push has no TLS; a registry on this machine needs no word.
APT_SNAPSHOT names a state of Debian's archive (snapshot.debian.org), for example 20261120T000000Z.
With CLUSTER=current, instructions for loading the images into a cluster are printed, too.
"""

import argparse
import json
import os
import shlex
import sys
from collections.abc import Sequence

from e2e.cluster.say import LabError, say
from e2e.images.archives import build
from e2e.images.bom import read_bom
from e2e.images.builder import choose
from e2e.images.catalog import CATALOG, Place, Version, versions
from e2e.images.push import helm_command, publish


def _explain_current(built: Sequence[Version]) -> None:
    say("CLUSTER=current: load these images into your cluster. With kind:")
    for version in built:
        say(f"  kind load image-archive {version.archive}")
    say("With another cluster: make push REGISTRY=registry.example.org/rollout")


def _explain_push(place: Place) -> None:
    say("\nInstall the operator, or upgrade it:")
    print(shlex.join(helm_command(place)), flush=True)
    say(f"Engines without GPUs: engine.image {place.reference('engine-cpu')}")
    say(f"All of it, with a fleet and a trainer: CLUSTER=current REGISTRY={place.registry} make demo")


def _run(command: str, names: Sequence[str]) -> None:
    if command == "push":
        if len(names) != 1:
            raise LabError("Name the registry: make push REGISTRY=registry.example.org/rollout")
        _explain_push(publish(names[0]))
        return
    if unknown := set(names) - {image.name for image in CATALOG}:
        raise LabError(f"No image has the name {', '.join(sorted(unknown))}; the images are {', '.join(image.name for image in CATALOG)}")
    existing = (version for version in versions(choose().base, names) if version.archive.exists())
    found = build(names) if command == "build" else list(existing)
    print("\n".join(json.dumps(read_bom(version.archive)) if command == "sbom" else str(version) for version in found))
    if os.environ.get("CLUSTER") == "current":
        _explain_current(found)


def main() -> None:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=("build", "list", "push", "sbom"))
    parser.add_argument("names", nargs="*", metavar="NAME", help="names of images; of a push the registry")
    args = parser.parse_args()
    try:
        _run(args.command, args.names)
    except LabError as error:
        say(f"error: {error}")
        sys.exit(1)


if __name__ == "__main__":
    main()
