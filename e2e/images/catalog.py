"""The images, their source files, and the keys that change with the content of these files."""

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from e2e.cluster.paths import IMAGES, REPOSITORY, cache_root, content_key, files_below

BUILD_ARGUMENTS = ("TORCH_INDEX", "APT_SNAPSHOT")
"""Environment variables that become arguments of a build."""
PREFIX = "localhost/sglang-rollout"


@dataclass(frozen=True)
class Place:
    """Where pods find all images: a registry with a path, and one tag."""

    registry: str
    tag: str

    def reference(self, name: str) -> str:
        """Return the reference of the image with a short name, for example ``operator``."""
        return f"{self.registry}/{name}:{self.tag}"


LOCAL = Place(PREFIX, "dev")
"""Images that are loaded into the cluster: the prefix ``localhost/`` means that no registry has them."""
_PACKAGE = REPOSITORY / "operator" / "sglang_rollout"
_LOCKS = REPOSITORY / "requirements"
_SHARED = (REPOSITORY / ".dockerignore", _LOCKS / "uv.lock")
_OURS = (IMAGES / "sglang-rollout", IMAGES / "install-packages", IMAGES / "sbom.py", REPOSITORY / "LICENSE", _PACKAGE)


@dataclass(frozen=True)
class Image:
    """One image: its short name, the files that its Dockerfile copies besides the shared ones, and its Debian release."""

    name: str
    files: tuple[Path, ...]
    suite: str = "trixie"

    @property
    def dockerfile(self) -> Path:
        """Path of the Dockerfile. Its context is the repository's root."""
        return IMAGES / self.name / "Dockerfile"

    @property
    def reference(self) -> str:
        """Image reference of a build on this machine."""
        return LOCAL.reference(self.name)

    def key(self, base: str) -> str:
        """Return the hash of the image's content and of the base image's name.

        Markdown files do not count, because ``.dockerignore`` excludes them.
        """
        files = [path for path in files_below(IMAGES / self.name, *_SHARED, *self.files) if path.suffix != ".md"]
        arguments = ",".join(os.environ[name] for name in BUILD_ARGUMENTS if os.environ.get(name))
        return content_key(files, base, arguments, os.uname().machine)


CATALOG = (
    Image("operator", (*_OURS, _LOCKS / "operator.lock")),
    Image("coordinator", (*_OURS, _LOCKS / "coordinator.lock")),
    Image("router", (*_OURS, _LOCKS / "router.lock")),
    # Large, so it must not depend on our code. Python 3.11 of Debian 12, as in the environment of engines without containers.
    Image("engine-cpu", (_LOCKS / "engine-torch.lock", _LOCKS / "engine-cpu.lock"), suite="bookworm"),
)


@dataclass(frozen=True)
class Version:
    """An image with its base and current content. The key is computed once, because sources may change during a build."""

    image: Image
    base: str
    key: str

    @property
    def archive(self) -> Path:
        """Path of the archive with this content, built or not."""
        return folder() / f"{self.image.name}-{self.key}.tar"

    def __str__(self) -> str:
        return f"{self.image.reference} {self.archive} {self.key}"


def versions(base_of: Callable[[str], str], names: Sequence[str] = ()) -> list[Version]:
    """Return the current versions of the images with these names, or of all images.

    Args:
        base_of: Returns the name of the base image with a Debian release.
        names: Names of images; empty for all.
    """
    wanted = [image for image in CATALOG if not names or image.name in names]
    bases = {suite: base_of(suite) for suite in sorted({image.suite for image in wanted})}
    return [Version(image, bases[image.suite], image.key(bases[image.suite])) for image in wanted]


def folder() -> Path:
    """Return the folder of the archives."""
    return cache_root() / "images"
