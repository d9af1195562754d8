"""Which images there are, what each is made of, and the key that says when it has to be made again."""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from e2e.cluster.paths import IMAGES, REPOSITORY, cache_root, content_key, files_below

PREFIX = "localhost/sglang-rollout"
TAG = "dev"
_PACKAGE = REPOSITORY / "operator" / "sglang_rollout"
_LOCKS = REPOSITORY / "requirements"
_SHARED = (REPOSITORY / ".dockerignore", _LOCKS / "uv.lock")
_OURS = (IMAGES / "sglang-rollout", REPOSITORY / "LICENSE", _PACKAGE)


@dataclass(frozen=True)
class Image:
    """One image: its short name and the files, besides those of every image, that its Dockerfile copies."""

    name: str
    files: tuple[Path, ...]

    @property
    def dockerfile(self) -> Path:
        """The Dockerfile; its context is the repository's root."""
        return IMAGES / self.name / "Dockerfile"

    @property
    def reference(self) -> str:
        """The name under which pods ask for it. ``localhost/`` makes clear that no registry is meant."""
        return f"{PREFIX}/{self.name}:{TAG}"

    def key(self, base: str) -> str:
        """Return the hash of everything that goes into the image, the base image's name included. Not of texts for people:
        ``.dockerignore`` leaves them out too."""
        files = [path for path in files_below(IMAGES / self.name, *_SHARED, *self.files) if path.suffix != ".md"]
        return content_key(files, base, os.environ.get("TORCH_INDEX", ""), os.uname().machine)


CATALOG = (
    Image("operator", (*_OURS, _LOCKS / "operator.lock")),
    Image("coordinator", (*_OURS, _LOCKS / "coordinator.lock")),
    Image("router", (*_OURS, _LOCKS / "router.lock")),
    Image("engine-cpu", (_LOCKS / "engine-torch.lock", _LOCKS / "engine-cpu.lock")),  # large: must not depend on our code
)


@dataclass(frozen=True)
class Version:
    """An image with the content it has now. Computed once for a run: sources may be edited while a build is under way."""

    image: Image
    key: str

    @property
    def archive(self) -> Path:
        """Where the archive with this content lies once it is built."""
        return folder() / f"{self.image.name}-{self.key}.tar"

    def __str__(self) -> str:
        return f"{self.image.reference} {self.archive} {self.key}"


def versions(base: str, names: Sequence[str] = ()) -> list[Version]:
    """Return the present version of the images called ``names`` (all if empty)."""
    return [Version(image, image.key(base)) for image in CATALOG if not names or image.name in names]


def folder() -> Path:
    """Return the folder of the archives."""
    return cache_root() / "images"
