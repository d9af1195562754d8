"""Images are rebuilt when their content changes."""

from __future__ import annotations

from pathlib import Path

import pytest

from e2e.cluster.paths import REPOSITORY
from e2e.images import catalog
from e2e.images.catalog import CATALOG, Image


@pytest.fixture
def image(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Image:
    monkeypatch.setattr(catalog, "IMAGES", tmp_path)
    (tmp_path / "x").mkdir()
    (tmp_path / "x/Dockerfile").write_text("FROM scratch")
    (tmp_path / "x/README.md").write_text("read me")
    return Image("x", ())


def test_only_content_of_the_image_changes_its_key(image: Image, monkeypatch: pytest.MonkeyPatch) -> None:
    key = image.key("base")
    (image.dockerfile.parent / "README.md").write_text("read me again")
    assert image.key("base") == key, "a rebuild of the engine's image takes many minutes"
    image.dockerfile.write_text("FROM base")
    keys = {key, image.key("base"), image.key("other")}
    monkeypatch.setenv("TORCH_INDEX", "https://example.org")
    assert len({*keys, image.key("base")}) == 4


def test_files_outside_of_the_key_are_not_sent_to_the_build() -> None:
    lines = (REPOSITORY / ".dockerignore").read_text().splitlines()
    assert "**/*.md" in lines
    assert lines.index("**/*.md") > max(number for number, line in enumerate(lines) if line.startswith("!")), "later lines win"


@pytest.mark.parametrize("image", CATALOG, ids=lambda image: image.name)
def test_catalog_has_every_file_that_a_dockerfile_copies(image: Image) -> None:
    assert image.dockerfile.is_file()
    assert all(path.exists() for path in image.files)
    lines = [line.split() for line in image.dockerfile.read_text().splitlines() if line.startswith("COPY ") and "--from=" not in line]
    copied = [REPOSITORY / word for words in lines for word in words[1:-1]]
    known = [image.dockerfile.parent, *catalog._SHARED, *image.files]
    assert copied
    assert [path for path in copied if not any(path.is_relative_to(root) for root in known)] == [], "the key does not depend on these files"
