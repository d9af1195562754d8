"""Run docker or buildah. buildah needs no daemon: it isolates with chroot, and stores images below the cache."""

import json
import os
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from e2e.cluster.paths import REPOSITORY, cache_root, content_key
from e2e.cluster.say import LabError, step
from e2e.images.catalog import BUILD_ARGUMENTS, PREFIX, Image, folder

_REGISTRY_BASES = {"trixie": "python:3.13-slim-trixie", "bookworm": "python:3.11-slim-bookworm"}
_MIRROR = "http://deb.debian.org/debian"
_BASE_PACKAGES = ("ca-certificates", "python3", "python3-venv")
_BASE_UNUSED = ("var/cache/apt/*", "var/lib/apt/lists/*", "var/log/*", "usr/share/doc/*", "usr/share/man/*", "usr/share/locale/*")
_BASE_PATH = "PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
_CERTIFICATES = Path("/etc/ssl/certs/ca-certificates.crt")


class Builder(Protocol):
    """Builds archives in docker's format, which ``docker load``, ``kind load image-archive`` and containerd read."""

    def base(self, suite: str) -> str:
        """Return the name of the base image with a Debian release, after building it if necessary."""
        ...

    def build(self, image: Image, base: str, archive: Path) -> None:
        """Build ``image`` on ``base`` into ``archive``."""
        ...

    def push(self, image: Image, archive: Path, reference: str, *, plain_http: bool) -> None:
        """Push the image of ``archive`` to a registry under the name ``reference``."""
        ...


def run(command: Sequence[str], log: Path) -> None:
    """Run a program with its output in ``log``. A failure raises LabError with the end of the log."""
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("ab") as out:
        done = subprocess.run(command, stdout=out, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, cwd=REPOSITORY, check=False)
    if done.returncode:
        tail = "\n".join(log.read_text(errors="replace").splitlines()[-20:])
        raise LabError(f"{command[0]} ended with code {done.returncode}; the end of {log}:\n{tail}")


def push_log(image: Image) -> Path:
    """Return the log of pushes of an image."""
    return folder() / f"{image.name}-push.log"


def _arguments(base: str) -> list[str]:
    named = {name: os.environ[name] for name in BUILD_ARGUMENTS if os.environ.get(name)}
    return [word for name, value in {"BASE": base, **named}.items() for word in ("--build-arg", f"{name}={value}")]


@dataclass(frozen=True)
class Docker:
    """docker, with the daemon that it is configured for."""

    def base(self, suite: str) -> str:
        """Return the environment variable BASE, or the name of the default base image in a registry."""
        return os.environ.get("BASE", _REGISTRY_BASES[suite])

    def build(self, image: Image, base: str, archive: Path) -> None:
        """Build, then save."""
        log = folder() / f"{image.name}.log"
        run(["docker", "build", *_arguments(base), "-f", str(image.dockerfile), "-t", image.reference, "."], log)
        run(["docker", "save", "-o", str(archive), image.reference], log)

    def push(self, image: Image, archive: Path, reference: str, *, plain_http: bool) -> None:
        """Load, tag, push. The daemon itself decides which registries may use plain HTTP."""
        log = push_log(image)
        run(["docker", "load", "-q", "-i", str(archive)], log)
        run(["docker", "tag", image.reference, reference], log)
        run(["docker", "push", "-q", reference], log)


@dataclass(frozen=True)
class Buildah:
    """buildah as root. Without the environment variable BASE, debootstrap builds the base image, so that no registry is needed."""

    def _command(self, *words: str) -> list[str]:
        root = cache_root() / "buildah"
        # In its own mount namespace, so that a killed build leaves no mount.
        return [
            "unshare",
            "--mount",
            "--propagation",
            "private",
            "buildah",
            "--root",
            str(root / "root"),
            "--runroot",
            str(root / "run"),
            "--storage-driver",
            "overlay",
            *words,
        ]

    def base(self, suite: str) -> str:
        """Return the environment variable BASE, or the name of a Debian with Python. The first build of this base takes about a minute."""
        named = os.environ.get("BASE")
        if named:
            return named
        key = content_key([], suite, _MIRROR, *_BASE_PACKAGES)
        reference = f"{PREFIX}/base:{key}"
        if subprocess.run(self._command("inspect", "--type", "image", reference), capture_output=True, check=False).returncode:
            with step(f"base image: debootstrap {suite} with Python"):
                self._debootstrap(reference, suite, folder() / f"base-{key}")
        return reference

    def _debootstrap(self, reference: str, suite: str, root: Path) -> None:
        log = folder() / "base.log"
        if not root.exists():
            part = root.with_suffix(".part")
            shutil.rmtree(part, ignore_errors=True)
            run(["debootstrap", "--variant=minbase", f"--include={','.join(_BASE_PACKAGES)}", suite, str(part), _MIRROR], log)
            part.rename(root)
        for path in (path for pattern in _BASE_UNUSED for path in root.glob(pattern)):
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                path.unlink()
        container = subprocess.run(self._command("from", "scratch"), capture_output=True, text=True, check=True).stdout.strip()
        run(self._command("add", container, str(root), "/"), log)
        run(self._command("config", "--cmd", "/bin/sh", "--env", _BASE_PATH, container), log)
        run(self._command("commit", "--rm", "--quiet", container, reference), log)
        shutil.rmtree(root)

    def build(self, image: Image, base: str, archive: Path) -> None:
        """Build with cached layers, then write the archive."""
        log = folder() / f"{image.name}.log"
        words = [
            "bud",
            "--isolation",
            "chroot",
            "--layers",
            "--pull-never" if base.startswith(PREFIX) else "--pull",
            *_arguments(base),
            "-f",
            str(image.dockerfile),
            "-t",
            image.reference,
        ]
        if _CERTIFICATES.exists():  # this machine's list may contain the authority of a company
            words += ["-v", f"{_CERTIFICATES}:{_CERTIFICATES}:ro"]
        cache = _uv_cache()
        cache.mkdir(parents=True, exist_ok=True)
        words += ["-v", f"{cache}:/root/.cache/uv"]  # a second build downloads nothing
        run(self._command(*words, "."), log)
        run(self._command("push", "--quiet", image.reference, f"docker-archive:{archive}:{image.reference}"), log)

    def push(self, image: Image, archive: Path, reference: str, *, plain_http: bool) -> None:
        """Read the archive, because the store of layers may have been cleaned since the build, and push it."""
        log = push_log(image)
        run(self._command("pull", "--quiet", f"docker-archive:{archive}"), log)
        run(self._command("push", "--quiet", f"--tls-verify={str(not plain_http).lower()}", image.reference, f"docker://{reference}"), log)


def _uv_cache() -> Path:
    named = os.environ.get("UV_CACHE_DIR")
    return Path(named) if named else Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "uv"


def choose() -> Builder:
    """Return docker if its daemon answers, otherwise buildah. Raises LabError if neither can be used."""
    wanted = os.environ.get("BUILDER", "")
    if wanted not in ("", "docker", "buildah"):
        raise LabError(f"BUILDER={wanted} is neither docker nor buildah")
    if wanted != "buildah" and shutil.which("docker"):
        answer = subprocess.run(["docker", "version", "--format", "json"], capture_output=True, text=True, check=False)
        if answer.returncode == 0 and json.loads(answer.stdout).get("Server"):
            return Docker()
    if wanted == "docker":
        raise LabError("BUILDER=docker: no docker daemon answers (docker version); start it, or use BUILDER=buildah")
    if os.geteuid() != 0:
        raise LabError("No docker daemon answers, and building with buildah needs root here; start docker, or run this as root")
    for program in ("buildah", "debootstrap"):
        if not shutil.which(program):
            raise LabError(f"{program} is not on PATH; on Debian and Ubuntu: apt-get install {program}")
    return Buildah()
