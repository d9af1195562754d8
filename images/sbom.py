"""Write the bill of materials of an image, in CycloneDX 1.6: its Debian packages and Python distributions.

    python3 sbom.py NAME FILE

Runs in the build of the image, and needs only Python and dpkg. The same packages give the same file.
"""

import importlib.metadata
import json
import platform
import re
import subprocess
import sys
from pathlib import Path
from typing import Any
from urllib.parse import quote

Component = dict[str, Any]

_FORMAT = "${binary:Package}\t${Version}\t${Architecture}\t${source:Package}\t${source:Version}\n"


def debian_packages(listing: str, release: str) -> list[Component]:
    """Return the components of a listing of ``dpkg-query``."""
    components = []
    for line in listing.splitlines():
        name, version, architecture, source, source_version = line.split("\t")
        name = name.partition(":")[0]
        qualifiers = f"arch={architecture}&distro={quote(release)}&upstream={quote(f'{source}@{source_version}', safe='')}"
        components.append(_component("deb/debian", name, version, qualifiers))
    return components


def python_distributions(folders: list[str]) -> list[Component]:
    """Return the components of the Python distributions in ``folders``."""
    components = []
    for found in importlib.metadata.distributions(path=folders):
        name = re.sub(r"[-_.]+", "-", found.metadata["Name"]).lower()
        components.append(_component("pypi", name, found.version, licenses=_licenses(found.metadata)))
    return components


def build_bom(image: str, components: list[Component]) -> Component:
    """Return the bill of materials, without time and serial number, so that equal images have equal files."""
    ordered = sorted({component["bom-ref"]: component for component in components}.values(), key=lambda component: component["bom-ref"])
    return {
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "version": 1,
        "metadata": {"component": {"type": "container", "name": image, "bom-ref": image}},
        "components": ordered,
    }


def _component(kind: str, name: str, version: str, qualifiers: str = "", licenses: list[str] | None = None) -> Component:
    purl = f"pkg:{kind}/{quote(name, safe='')}@{quote(version, safe='~')}" + (f"?{qualifiers}" if qualifiers else "")
    component: Component = {"type": "library", "bom-ref": purl, "name": name, "version": version, "purl": purl}
    return {**component, "licenses": [{"license": {"name": text}} for text in licenses]} if licenses else component


def _licenses(metadata: importlib.metadata.PackageMetadata) -> list[str]:
    """Return the licence that a distribution names: as an expression, by classifiers, or in the field License."""
    expression, words = metadata.get_all("License-Expression"), metadata.get_all("License")
    if expression:
        return expression
    classifiers = [text.rpartition(" :: ")[2] for text in metadata.get_all("Classifier") or [] if text.startswith("License :: OSI")]
    return classifiers or [text.strip().splitlines()[0] for text in words or [] if text.strip()]


def main(image: str, file: str) -> None:
    """Write the bill of materials of the system that runs this program."""
    listing = subprocess.run(["dpkg-query", "--show", f"--showformat={_FORMAT}"], capture_output=True, text=True, check=True).stdout
    release = platform.freedesktop_os_release()
    folders = sorted({*sys.path, *map(str, Path(sys.base_prefix).glob("lib/python3*/site-packages"))})
    interpreter = _component("generic", "python", platform.python_version())
    components = [
        *debian_packages(listing, f"{release['ID']}-{release['VERSION_ID']}"),
        *python_distributions([folder for folder in folders if folder.endswith("site-packages")]),
        interpreter,
    ]
    Path(file).write_text(json.dumps(build_bom(image, components), indent=1) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
