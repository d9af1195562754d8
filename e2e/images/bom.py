"""Read the bill of materials out of an image's archive, without starting the image."""

import json
import tarfile
from pathlib import Path
from typing import Any

from e2e.cluster.say import LabError

FILE = "opt/sglang-rollout/sbom.cdx.json"
"""Path in the image. images/sbom.py writes the file during the build."""


def read_bom(archive: Path) -> dict[str, Any]:
    """Return the bill of materials (CycloneDX). Raises LabError if the image has none."""
    with tarfile.open(archive) as image:
        layers = json.load(_open(image, "manifest.json"))[0]["Layers"]
        for name in reversed(layers):  # the last layer with the file wins
            with tarfile.open(fileobj=_open(image, name)) as layer:
                if FILE in (path.removeprefix("./") for path in layer.getnames()):
                    found: dict[str, Any] = json.load(_open(layer, FILE))
                    return found
    raise LabError(f"{archive} has no bill of materials: it lacks /{FILE}")


def _open(tar: tarfile.TarFile, name: str) -> Any:
    try:
        return tar.extractfile(name)
    except KeyError:
        return tar.extractfile(f"./{name}")
