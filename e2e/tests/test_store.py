"""Names of images, and errors of `load`."""

from __future__ import annotations

import json
import tarfile
from contextlib import nullcontext
from pathlib import Path

import pytest

from e2e.cluster import archive, nodeconf, nodes, store
from e2e.cluster.say import LabError
from e2e.cluster.store import Image, full_name, loaded, parse


def test_images_are_parsed_from_three_words_each() -> None:
    assert parse(["x:1", "/x.tar", "key", "y:2", "/y.tar", "other"]) == [
        Image("x:1", Path("/x.tar"), "key"),
        Image("y:2", Path("/y.tar"), "other"),
    ]
    assert parse([]) == []
    with pytest.raises(LabError, match="three words for each image"):
        parse(["x:1", "/x.tar"])


@pytest.mark.parametrize(
    ("reference", "name"),
    [
        ("busybox", "docker.io/library/busybox:latest"),
        ("busybox:1", "docker.io/library/busybox:1"),
        ("lmsysorg/sglang:v0.5.23", "docker.io/lmsysorg/sglang:v0.5.23"),
        ("localhost/sglang-rollout/coordinator:dev", "localhost/sglang-rollout/coordinator:dev"),
        ("registry.example.org/a/b", "registry.example.org/a/b:latest"),
        ("registry:5000/a", "registry:5000/a:latest"),
        ("registry:5000/a@sha256:00", "registry:5000/a@sha256:00"),
    ],
)
def test_full_name_is_the_one_of_the_kubelet(reference: str, name: str) -> None:
    assert full_name(reference) == name


def test_errors_without_cluster_or_archive_name_the_remedy(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(nodes, "running", dict)
    with pytest.raises(LabError, match="Run: make cluster-up"):
        store.load([])
    monkeypatch.setattr(nodes, "running", lambda: {0: 1})
    with pytest.raises(LabError, match=r"no archive .*/x.tar for x:1; build the images again"):
        store.load([Image("x:1", tmp_path / "x.tar", "key")])


def test_node_without_a_record_has_no_images(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(nodeconf, "store_folder", lambda _: tmp_path)
    assert loaded(0) == {}
    (tmp_path / "loaded.json").write_text('{"x:1": "key"}')
    assert loaded(0) == {"x:1": "key"}


@pytest.mark.parametrize(("trouble", "tries"), [("parent snapshot sha256:70 does not exist: not found", 2), ("no space left on device", 1)])
def test_import_is_repeated_if_a_layer_was_deleted_meanwhile(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, trouble: str, tries: int
) -> None:
    image, calls = Image("localhost/x:1", tmp_path / "x.tar", "key"), []

    def ctr(node: int, *words: str, stdin: Path | None = None) -> str:
        calls.append(words)
        if len(calls) == 1:
            raise LabError(f"node0: ctr images import - failed: ctr: failed to prepare extraction snapshot: {trouble}")
        return "unpacking localhost/x:1 (sha256:00)...done\n"

    monkeypatch.setattr(store, "_ctr", ctr)
    monkeypatch.setattr(nodeconf, "store_folder", lambda _: tmp_path)
    with nullcontext() if tries > 1 else pytest.raises(LabError, match=trouble):
        store._import(0, image)
    assert len(calls) == tries


def test_packed_program_is_an_archive_for_docker_load(tmp_path: Path) -> None:
    program = tmp_path / "pause"
    program.write_bytes(b"\x7fELF")
    archive.pack(program, "sgr.local/pause:1", tmp_path / "pause.tar")
    with tarfile.open(tmp_path / "pause.tar") as tar:
        (manifest,) = json.loads(_read(tar, "manifest.json"))
        config = json.loads(_read(tar, manifest["Config"]))
        (layer,) = manifest["Layers"]
        assert manifest["RepoTags"] == ["sgr.local/pause:1"]
        assert config["config"]["Entrypoint"] == ["/pause"]
        assert config["rootfs"]["diff_ids"] == [f"sha256:{layer.removesuffix('/layer.tar')}"]
        assert layer in tar.getnames()
    first = (tmp_path / "pause.tar").read_bytes()
    archive.pack(program, "sgr.local/pause:1", tmp_path / "pause.tar")
    assert (tmp_path / "pause.tar").read_bytes() == first, "the same program is the same archive"


def _read(tar: tarfile.TarFile, name: str) -> bytes:
    found = tar.extractfile(name)
    assert found is not None
    return found.read()
