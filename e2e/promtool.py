"""promtool, the program that tests alert rules: from PATH, or from Debian's package ``prometheus``, extracted into the cache.

The package is not installed, because it would start a Prometheus server.
"""

import shutil
import subprocess
import tarfile
import tempfile
from pathlib import Path

from e2e.cluster.paths import cache_root
from e2e.cluster.say import LabError, say, step

_PACKAGE = "prometheus"
_MEMBER = "./usr/bin/promtool"
_DOWNLOAD_SECONDS = 300


def find() -> Path:
    """Return the path of promtool.

    Raises:
        LabError: promtool is neither in PATH nor in the cache.
    """
    program = shutil.which("promtool")
    if program is not None:
        return Path(program)
    if not _cached().exists():
        raise LabError("promtool is missing. Run: make preflight (on Debian), or put Prometheus' promtool on PATH")
    return _cached()


def fetch() -> None:
    """Put promtool into the cache if this machine has none. Without Debian's tools, print that the test of the alerts is skipped."""
    if shutil.which("promtool") is not None or _cached().exists():
        return
    if not (shutil.which("apt-get") and shutil.which("dpkg-deb")):
        say("          note: promtool is not on PATH; the test of the alert rules is skipped")
        return
    with step(f"promtool from the Debian package {_PACKAGE}"), tempfile.TemporaryDirectory() as folder:
        _extract(_download(Path(folder)), _cached())


def _cached() -> Path:
    return cache_root() / "promtool" / "promtool"


def _download(folder: Path) -> Path:
    """Download the package into ``folder``. A new machine has no list of packages yet, so the list may be updated first."""
    done = _apt_get(folder, "download", _PACKAGE)
    if done.returncode:
        _apt_get(folder, "update")
        done = _apt_get(folder, "download", _PACKAGE)
    found = next(folder.glob("*.deb"), None)
    if done.returncode or found is None:
        raise LabError(f"apt-get download {_PACKAGE} failed: {done.stderr.strip()[-800:]}")
    return found


def _apt_get(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    command = ["apt-get", "-qq", *words]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False, timeout=_DOWNLOAD_SECONDS)


def _extract(package: Path, target: Path) -> None:
    """Extract promtool to a temporary name and rename it, so that an interrupted run leaves no incomplete program."""
    target.parent.mkdir(parents=True, exist_ok=True)
    part = target.with_suffix(".part")
    with subprocess.Popen(["dpkg-deb", "--fsys-tarfile", str(package)], stdout=subprocess.PIPE) as files:
        with tarfile.open(fileobj=files.stdout, mode="r|") as archive:
            member = next((entry for entry in archive if entry.name == _MEMBER), None)
            content = archive.extractfile(member) if member is not None else None
            if content is None:
                raise LabError(f"The package {package.name} has no {_MEMBER.removeprefix('.')}. Put Prometheus' promtool on PATH")
            with part.open("wb") as file:
                shutil.copyfileobj(content, file)
        files.kill()
    part.chmod(0o755)
    part.rename(target)
