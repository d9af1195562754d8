"""Which images there are, what each is made of, and the key that says when it has to be made again."""

import os
from dataclasses import dataclass
from pathlib import Path

from e2e.cluster.paths import IMAGES, REPOSITORY, cache_root, content_key, files_below

PREFIX = "localhost/sglang-rollout"
TAG = "dev"
_PACKAGE = REPOSITORY / "operator" / "sglang_rollout"
_LOCKS = REPOSITORY / "requirements"
_SHARED = (IMAGES / "sglang-rollout", REPOSITORY / "LICENSE", REPOSITORY / ".dockerignore", _LOCKS / "uv.lock", _PACKAGE)


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
        """Return the hash of everything that goes into the image, the base image's name included."""
        files = files_below(IMAGES / self.name, *_SHARED, *self.files)
        return content_key(files, base, os.environ.get("TORCH_INDEX", ""), os.uname().machine)

    def archive(self, base: str) -> Path:
        """Return where the archive with this content lies once it is built."""
        return folder() / f"{self.name}-{self.key(base)}.tar"


CATALOG = (
    Image("operator", (_LOCKS / "operator.lock",)),
    Image("fleet", (_LOCKS / "fleet.lock",)),
    Image("router", (_LOCKS / "router.lock",)),
    Image("engine-cpu", (_LOCKS / "engine-torch.lock", _LOCKS / "engine-cpu.lock", REPOSITORY / "examples")),
)


def folder() -> Path:
    """Return the folder of the archives."""
    return cache_root() / "images"
