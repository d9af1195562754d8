"""Archives of compiled kernels: which files are packed, that an unpacked cache equals the packed one, and what is refused."""

from __future__ import annotations

import io
import os
import tarfile
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from sglang_rollout.agent.kernels import archive
from sglang_rollout.agent.kernels.archive import FOLDERS, ArchiveError, fingerprint, list_kernels, measure, pack, unpack
from sglang_rollout.agent.kernels.key import kernels_key, read_hardware
from sglang_rollout.api.network_spec import CACHE_VARIABLES

LATER = 60.0


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    """The cache of an engine: two kernels."""
    root = tmp_path / "cache"
    write(root / "triton/AB/kernel.cubin", b"\x7fELF" * 1000)
    write(root / ".cache/flashinfer/0.6/90a/op.so", b"code", mode=0o755)
    return root


def write(file: Path, data: bytes = b"x", *, mode: int = 0o644) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(data)
    file.chmod(mode)
    os.utime(file, (1_700_000_000, 1_700_000_000))


def names(root: Path) -> list[str]:
    return [file.name for file in list_kernels(root)]


def packed(root: Path, to: Path) -> Path:
    to.write_bytes(b"".join(pack(root, list_kernels(root))))
    return to


def test_an_unpacked_cache_has_the_same_files_and_every_user_may_write_them(cache: Path, tmp_path: Path) -> None:
    target = tmp_path / "target"
    assert unpack(packed(cache, tmp_path / "a.tar"), target, time.monotonic() + LATER) == 2
    assert list_kernels(target) == list_kernels(cache), "names, sizes, times and the permission to execute"
    assert (target / "triton/AB/kernel.cubin").read_bytes() == b"\x7fELF" * 1000
    modes = {str(path.relative_to(target)): path.stat().st_mode & 0o777 for path in target.rglob("*")}
    assert modes["triton/AB"] == modes["triton"] == 0o777
    assert modes["triton/AB/kernel.cubin"] == 0o666
    assert modes[".cache/flashinfer/0.6/90a/op.so"] == 0o777


def test_the_same_files_give_the_same_bytes(cache: Path) -> None:
    files = list_kernels(cache)
    assert measure(pack(cache, files)) == measure(pack(cache, files))
    assert measure(pack(cache, files))[0] == len(b"".join(pack(cache, files)))


def test_what_is_no_kernel_stays_in_the_pod(cache: Path, tmp_path: Path) -> None:
    before = names(cache)
    write(tmp_path / "secret/token", b"secret")
    write(cache / "gpu_p2p_access_cache_for_0,1.json")
    write(cache / "ple/model/table")
    write(cache / "torch_extensions/ext/lock")
    (cache / "triton/link").symlink_to(tmp_path / "secret/token")
    (cache / "inductor").symlink_to(tmp_path / "secret")
    (cache / "triton/folder").symlink_to(tmp_path / "secret")
    os.mkfifo(cache / "triton/pipe")
    write(Path(os.fsdecode(os.fsencode(cache) + b"/triton/\xff")))
    assert names(cache) == before == [".cache/flashinfer/0.6/90a/op.so", "triton/AB/kernel.cubin"]


def replace_folder(cache: Path, outside: Path) -> None:
    write(outside / "AB/kernel.cubin", b"\x7fELF" * 1000)
    (cache / "triton").rename(cache / "old")
    (cache / "triton").symlink_to(outside)


def replace_file(cache: Path, outside: Path) -> None:
    write(outside / "file", b"\x7fELF" * 1000)
    (cache / "triton/AB/kernel.cubin").unlink()
    (cache / "triton/AB/kernel.cubin").symlink_to(outside / "file")


def make_pipe(cache: Path, _: Path) -> None:
    (cache / "triton/AB/kernel.cubin").unlink()
    os.mkfifo(cache / "triton/AB/kernel.cubin")


def grow(cache: Path, _: Path) -> None:
    write(cache / "triton/AB/kernel.cubin", b"longer" * 1000)


def delete(cache: Path, _: Path) -> None:
    (cache / "triton/AB/kernel.cubin").unlink()


@pytest.mark.parametrize("change", [replace_folder, replace_file, make_pipe, grow, delete])
def test_a_file_that_is_replaced_after_it_was_listed_is_not_packed(
    cache: Path, tmp_path: Path, change: Callable[[Path, Path], None]
) -> None:
    files = list_kernels(cache)
    change(cache, tmp_path / "outside")
    with pytest.raises(ArchiveError, match="kernel"):
        list(pack(cache, files))


def test_a_change_of_a_file_changes_the_fingerprint(cache: Path) -> None:
    before = fingerprint(list_kernels(cache))
    assert fingerprint(list_kernels(cache)) == before
    os.utime(cache / "triton/AB/kernel.cubin", (1_700_000_001, 1_700_000_001))
    assert fingerprint(list_kernels(cache)) != before


def test_too_much_is_not_packed(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(archive, "MAX_FILES", 1)
    with pytest.raises(ArchiveError, match="more than 1 files"):
        list_kernels(cache)
    monkeypatch.setattr(archive, "MAX_FILES", 10)
    monkeypatch.setattr(archive, "MAX_ARCHIVE_BYTES", 4000)
    with pytest.raises(ArchiveError, match="4000 bytes"):
        list_kernels(cache)


def entry(name: str, **fields: object) -> tarfile.TarInfo:
    info = tarfile.TarInfo(name)
    for field, value in fields.items():
        setattr(info, field, value)
    return info


HOSTILE = {
    "a path above the folder": [entry("triton/../../outside")],
    "an absolute path": [entry("/triton/outside")],
    "an unknown folder": [entry("bin/sh")],
    "a file beside the folders": [entry("triton")],
    "a symbolic link": [entry("triton/link", type=tarfile.SYMTYPE, linkname="/etc/passwd")],
    "a hard link": [entry("triton/link", type=tarfile.LNKTYPE, linkname="triton/other")],
    "a device": [entry("triton/null", type=tarfile.CHRTYPE, devmajor=1, devminor=3)],
    "a pipe": [entry("triton/pipe", type=tarfile.FIFOTYPE)],
    "a folder": [entry("triton/folder", type=tarfile.DIRTYPE)],
    "a file twice": [entry("triton/a"), entry("triton/a")],
    "a file below a file": [entry("triton/a"), entry("triton/a/b")],
    "an empty part": [entry("triton//a")],
}


@pytest.mark.parametrize("entries", HOSTILE.values(), ids=HOSTILE.keys())
def test_an_archive_with_anything_but_new_files_of_known_folders_is_refused(entries: list[tarfile.TarInfo], tmp_path: Path) -> None:
    with tarfile.open(tmp_path / "a.tar", "w") as tar:
        for info in entries:
            tar.addfile(info, io.BytesIO())
    with pytest.raises((ArchiveError, OSError)):
        unpack(tmp_path / "a.tar", tmp_path / "target", time.monotonic() + LATER)
    assert not (tmp_path / "outside").exists()


def test_an_archive_that_is_cut_off_damaged_too_large_or_too_late_is_refused(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = packed(cache, tmp_path / "a.tar")
    with pytest.raises(ArchiveError, match="in time"):
        unpack(whole, tmp_path / "late", time.monotonic() - 1)
    cut = tmp_path / "cut.tar"
    cut.write_bytes(whole.read_bytes()[:2000])
    with pytest.raises(ArchiveError, match="damaged"):
        unpack(cut, tmp_path / "cut", time.monotonic() + LATER)
    cut.write_bytes(b"no archive" * 100)
    with pytest.raises(ArchiveError, match="damaged"):
        unpack(cut, tmp_path / "none", time.monotonic() + LATER)
    monkeypatch.setattr(archive, "MAX_ARCHIVE_BYTES", 4000)
    with pytest.raises(ArchiveError, match="4000 bytes"):
        unpack(whole, tmp_path / "large", time.monotonic() + LATER)


def test_every_folder_of_a_variable_is_packed() -> None:
    assert {folder.strip("/") for folder in CACHE_VARIABLES.values() if folder} <= set(FOLDERS)


def make_node(proc: Path, gpu: str, flags: str) -> Path:
    write(proc / "driver/nvidia/gpus/0000:00:01.0/information", f"Model: \t\t {gpu}\nIRQ:   \t 12\n".encode())
    write(proc / "driver/nvidia/gpus/0000:00:02.0/information", f"Model: \t\t {gpu}\nIRQ:   \t 13\n".encode())
    write(proc / "driver/nvidia/version", b"NVRM version: 580.1\nGCC version: 12\n")
    write(proc / "cpuinfo", f"model name\t: CPU\nflags\t\t: {flags}\nmodel name\t: CPU\n".encode())
    return proc


def test_only_pods_with_the_same_spec_gpus_and_processor_have_the_same_key(tmp_path: Path) -> None:
    here = read_hardware(make_node(tmp_path / "a", "NVIDIA H100", "fpu avx2"))
    assert here[0] == "NVIDIA H100"
    assert "NVRM version: 580.1" in here
    key = kernels_key("spec", here)
    assert kernels_key("spec", read_hardware(make_node(tmp_path / "b", "NVIDIA H100", "fpu avx2"))) == key
    others = [
        kernels_key("other", here),
        kernels_key("spec", read_hardware(make_node(tmp_path / "c", "NVIDIA A100", "fpu avx2"))),
        kernels_key("spec", read_hardware(make_node(tmp_path / "d", "NVIDIA H100", "fpu avx2 avx512f"))),
        kernels_key("spec", read_hardware(tmp_path / "empty")),
    ]
    assert len({key, *others}) == 5
