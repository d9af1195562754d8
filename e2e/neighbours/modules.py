"""Programs of other projects, built from their Go modules into the cache."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Sequence
from pathlib import Path

from e2e.cluster.paths import cache_root
from e2e.cluster.say import LabError, step


def folder(program: str, version: str) -> Path:
    """Return the cache folder of one version of a program."""
    return cache_root() / "neighbours" / f"{program}-{version}"


def find_program(program: str, version: str) -> Path:
    """Return a built program. Raises LabError if it is missing."""
    found = folder(program, version) / program
    if not found.exists():
        raise LabError(f"{program} is not built: make test-neighbours")
    return found


def download(module: str, version: str, where: Path, *, checksum: str = "") -> Path:
    """Download a module and return the folder of its source.

    Args:
        module: Path of the module.
        version: Exact version.
        where: A folder without a go.mod, so that Go does not use or change ours.
        checksum: The module's hash in the format of go.sum, for a module that the checksum database does not list.

    Raises:
        LabError: The module cannot be downloaded, or has another hash.
    """
    where.mkdir(parents=True, exist_ok=True)
    command = ["go", "mod", "download", "-json", f"{module}@{version}"]
    environment = os.environ | ({"GONOSUMDB": module} if checksum else {})
    found = subprocess.run(command, cwd=where, env=environment, capture_output=True, text=True, check=False)
    if found.returncode:
        raise LabError(f"{' '.join(command)} failed: {found.stderr.strip()[-1000:]}")
    description = json.loads(found.stdout)
    if checksum and description["Sum"] != checksum:
        raise LabError(f"{module}@{version} has the hash {description['Sum']}, not {checksum}")
    return Path(description["Dir"])


def build(source: Path, package: str, program: Path, flags: Sequence[str] = ()) -> None:
    """Build a package of a module, with the dependencies of the module's own go.sum. Raises LabError, quoting Go."""
    part = program.with_suffix(".part")
    command = ["go", "build", "-C", str(source), *flags, "-trimpath", "-ldflags", "-s -w", "-o", str(part), package]
    with step(f"go build {program.name}"):
        done = subprocess.run(command, env=os.environ | {"CGO_ENABLED": "0"}, capture_output=True, text=True, check=False)
    if done.returncode:
        raise LabError(f"{' '.join(command)} failed: {done.stderr.strip()[-1000:]}")
    part.rename(program)
