"""Bills of materials and pinned packages of the images, without building one."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

from e2e.cluster.archive import pack
from e2e.cluster.paths import IMAGES
from e2e.cluster.say import LabError
from e2e.images import builder, catalog
from e2e.images.bom import FILE, read_bom

OURS = ("operator", "coordinator", "router")
OS_RELEASE = 'ID=debian\nVERSION_ID="13"\nVERSION_CODENAME=trixie\n'


def run_sbom(tmp_path: Path, listing: str) -> dict[str, object]:
    """Run the generator with a dpkg-query that prints ``listing``."""
    programs = tmp_path / "bin"
    programs.mkdir(exist_ok=True)
    (programs / "dpkg-query").write_text(f"#!/bin/sh\nprintf '{listing}'\n")
    (programs / "dpkg-query").chmod(0o755)
    environment = {**os.environ, "PATH": f"{programs}:{os.environ['PATH']}"}
    file = tmp_path / "sbom.json"
    subprocess.run([sys.executable, str(IMAGES / "sbom.py"), "operator", str(file)], env=environment, check=True, timeout=60)
    found: dict[str, object] = json.loads(file.read_text())
    return found


def test_bill_of_materials_lists_debian_packages_and_python_distributions(tmp_path: Path) -> None:
    line = r"libc6:amd64\t2.41-12+deb13u1\tamd64\tglibc\t2.41-12+deb13u1\n"
    bom = run_sbom(tmp_path, line)
    assert (bom["bomFormat"], bom["specVersion"]) == ("CycloneDX", "1.6")
    components = {component["name"]: component for component in bom["components"]}  # type: ignore[attr-defined]
    assert components["libc6"]["purl"].startswith("pkg:deb/debian/libc6@2.41-12%2Bdeb13u1?arch=amd64&distro=")
    assert components["libc6"]["purl"].endswith("&upstream=glibc%402.41-12%2Bdeb13u1")
    assert components["pyyaml"]["purl"].startswith("pkg:pypi/pyyaml@")
    assert components["pyyaml"]["licenses"]
    assert components["python"]["version"] == ".".join(map(str, sys.version_info[:3]))
    assert run_sbom(tmp_path, line) == bom, "equal images have equal files"


@pytest.mark.parametrize("name", OURS)
def test_dockerfile_pins_packages_and_writes_the_bill_of_materials(name: str) -> None:
    text = (IMAGES / name / "Dockerfile").read_text()
    assert "apt-get" not in text, "install-packages pins the archive"
    assert f"build/sbom.py {name} /{FILE}\n" in text
    assert "ARG APT_SNAPSHOT=\n" in text
    assert text.index("RUN /opt/sglang-rollout/build/install-packages") < text.index("build/sbom.py " + name), "all packages are listed"
    assert (IMAGES / "install-packages").stat().st_mode & 0o111


@pytest.mark.parametrize("snapshot", ["", "20261120T000000Z"])
def test_packages_come_from_a_snapshot_of_the_archive(snapshot: str, tmp_path: Path) -> None:
    etc, calls = tmp_path / "apt", tmp_path / "calls"
    (etc / "sources.list.d").mkdir(parents=True)
    (etc / "sources.list.d/debian.sources").write_text("URIs: http://deb.debian.org/debian\n")
    for program in ("apt-get", "rm"):
        file = tmp_path / "bin" / program
        file.parent.mkdir(exist_ok=True)
        real = f'case "$*" in *{etc}*) exec /bin/rm "$@";; esac' if program == "rm" else f'echo "$@" >> {calls}'
        file.write_text(f"#!/bin/sh\n{real}\n")
        file.chmod(0o755)
    environment = {"PATH": f"{tmp_path}/bin:/usr/bin:/bin", "APT_ETC": str(etc), "APT_SNAPSHOT": snapshot}
    subprocess.run([str(IMAGES / "install-packages"), "haproxy=3.0.*", "tini"], env=environment, check=True, timeout=60)
    assert calls.read_text() == "update -q\ninstall -q -y --no-install-recommends haproxy=3.0.* tini\n"
    sources = [path.read_text() for path in [*etc.glob("sources.list"), *etc.glob("sources.list.d/*")]]
    assert len(sources) == 1
    if snapshot:
        assert all(f"/{snapshot} " in line and "signed-by=" in line for line in sources[0].splitlines())
        assert len(sources[0].splitlines()) == 3
    else:
        assert "deb.debian.org" in sources[0]


def test_snapshot_is_an_argument_of_the_build_and_changes_the_key(monkeypatch: pytest.MonkeyPatch) -> None:
    image = catalog.CATALOG[0]
    key, words = image.key("base"), builder._arguments("base")
    monkeypatch.setenv("APT_SNAPSHOT", "20261120T000000Z")
    assert image.key("base") != key
    assert builder._arguments("base") == [*words, "--build-arg", "APT_SNAPSHOT=20261120T000000Z"]


def test_bill_of_materials_is_read_from_an_archive(tmp_path: Path) -> None:
    program = tmp_path / "pause"
    program.write_text("x")
    pack(program, "example.org/x:1", tmp_path / "none.tar")
    with pytest.raises(LabError, match="no bill of materials"):
        read_bom(tmp_path / "none.tar")
    layers = []
    for number, content in enumerate(({"version": 1}, {"version": 2}, None)):
        layer = io.BytesIO()
        with tarfile.open(fileobj=layer, mode="w:gz") as tar:
            add(tar, FILE if content else "other", json.dumps(content).encode())
        layers.append((f"blobs/sha256/{number}", layer.getvalue()))
    with tarfile.open(tmp_path / "image.tar", "w") as image:
        for name, data in layers:
            add(image, name, data)
        add(image, "manifest.json", json.dumps([{"Layers": [name for name, _ in layers]}]).encode())
    assert read_bom(tmp_path / "image.tar") == {"version": 2}


def add(tar: tarfile.TarFile, name: str, data: bytes) -> None:
    entry = tarfile.TarInfo(name)
    entry.size = len(data)
    tar.addfile(entry, io.BytesIO(data))
