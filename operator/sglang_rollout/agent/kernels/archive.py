"""Archives of compiled kernels: list the files of an engine's cache, pack them, and unpack an archive.

The engine's container writes the cache, and model code runs there. So no link is followed, and only regular files are packed.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import stat
import tarfile
import time
from collections.abc import Iterable, Iterator
from itertools import chain
from pathlib import Path
from typing import NamedTuple

from sglang_rollout.wire.kernels import MAX_ARCHIVE_BYTES, MAX_FILES

FOLDERS = (
    *("jit", "triton", "inductor", "torch_extensions", "nv", "tilelang"),
    # FlashInfer appends this folder to its workspace.
    ".cache",
    # SGLang 0.5.23 derives these folders from SGLANG_CACHE_DIR.
    *("deep_gemm", "cute_aot", "torch_compile_cache", "flashinfer"),
)
"""Folders of the cache whose files are packed.

SGLang keeps other things beside them, which belong to one node or are as large as weights: the access of GPUs to each other
(``gpu_p2p_access_cache_for_*``), ``ple`` and ``model_streamer``.
"""
_LOCK = "lock"
"""File by which torch's extensions mark a build that runs. A process that finds it waits for that build, without limit."""
_OPEN_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW
_MAX_DEPTH = 32
"""Folders inside each other. Deeper ones are left out."""
_READ_BYTES = 2**20
_WRITABLE_FOLDER = 0o777
_WRITABLE_FILE = 0o666
_EXECUTABLE = 0o111


class ArchiveError(Exception):
    """The kernels cannot be packed or unpacked; the message says why."""


class KernelFile(NamedTuple):
    """One file of the cache."""

    name: str
    """Path below the cache's folder, with slashes."""
    size: int
    modified: int
    """Time of the last change in nanoseconds since 1970."""
    executable: bool


def list_kernels(root: Path) -> list[KernelFile]:
    """Return the files to pack, sorted by name. Files that this process may not read are left out.

    Raises:
        ArchiveError: There are too many files, or too many bytes.
    """
    found: list[KernelFile] = []
    size = 0
    folder = _open_root(root)
    try:
        for file in chain.from_iterable(_walk(folder, top) for top in FOLDERS):
            found.append(file)
            size += file.size
            if len(found) > MAX_FILES or size > MAX_ARCHIVE_BYTES:
                raise ArchiveError(f"more than {MAX_FILES} files or {MAX_ARCHIVE_BYTES} bytes of compiled kernels are not shared")
    finally:
        os.close(folder)
    return sorted(found)


def fingerprint(files: Iterable[KernelFile]) -> str:
    """Return a hash that changes when a file is added, removed or changed."""
    return hashlib.sha256(repr(list(files)).encode()).hexdigest()


def pack(root: Path, files: Iterable[KernelFile]) -> Iterator[bytes]:
    """Yield the parts of the archive. The same files give the same bytes.

    Raises:
        ArchiveError: A file is gone or has another size.
    """
    folder = _open_root(root)
    try:
        for file in files:
            info = tarfile.TarInfo(file.name)
            info.size, info.mtime, info.mode = file.size, file.modified // 10**9, 0o755 if file.executable else 0o644
            yield info.tobuf(tarfile.PAX_FORMAT)
            yield from _read(folder, file)
            yield bytes(-file.size % tarfile.BLOCKSIZE)
    finally:
        os.close(folder)
    yield bytes(2 * tarfile.BLOCKSIZE)


def measure(parts: Iterable[bytes]) -> tuple[int, str]:
    """Return the number of bytes and their SHA-256."""
    size, digest = 0, hashlib.sha256()
    for part in parts:
        size += len(part)
        digest.update(part)
    return size, digest.hexdigest()


def unpack(archive: Path, target: Path, deadline: float) -> int:
    """Unpack an archive into a new folder, and return the number of files.

    Every user may write the files, because the user of the engine is not known. The volume belongs to this pod alone.

    Args:
        archive: The tar file.
        target: The folder.
        deadline: Time by the monotonic clock at which the archive must be unpacked.

    Raises:
        ArchiveError: The archive holds something else than regular files of the known folders, is too large, or the time is over.
        OSError: The archive holds a file twice, or a file cannot be written.
    """
    target.mkdir()
    files = size = 0
    try:
        with tarfile.open(archive, "r:") as tar:
            for member in tar:
                files, size = files + 1, size + member.size
                if files > MAX_FILES or size > MAX_ARCHIVE_BYTES:
                    raise ArchiveError(f"the archive has more than {MAX_FILES} files or {MAX_ARCHIVE_BYTES} bytes")
                if time.monotonic() > deadline:
                    raise ArchiveError("the archive could not be unpacked in time")
                _extract(tar, member, target)
    except (tarfile.TarError, EOFError, OverflowError) as error:
        raise ArchiveError(f"the archive is damaged: {error}") from error
    for folder, _, _ in os.walk(target):
        os.chmod(folder, _WRITABLE_FOLDER)
    return files


def _extract(tar: tarfile.TarFile, member: tarfile.TarInfo, target: Path) -> None:
    """Write one file. The checks are stricter than tarfile's filter ``data``, which Python 3.11.3 and earlier lack."""
    parts = member.name.split("/")
    is_regular = member.type == tarfile.REGTYPE and not member.issparse() and member.size >= 0
    content = tar.extractfile(member) if is_regular else None
    if content is None or len(parts) < 2 or parts[0] not in FOLDERS or {"", ".", ".."} & set(parts):
        raise ArchiveError(f"the archive has an entry that is no regular file of a known folder: {member.name!r}")
    path = target / member.name
    path.parent.mkdir(parents=True, exist_ok=True)
    with content, path.open("xb") as opened:
        shutil.copyfileobj(content, opened, _READ_BYTES)
    path.chmod(_WRITABLE_FILE | (_EXECUTABLE if member.mode & _EXECUTABLE else 0))
    # ninja builds an extension again whose sources are newer than its objects.
    os.utime(path, (member.mtime, member.mtime))


def _open_root(root: Path) -> int:
    try:
        return os.open(root, _OPEN_FOLDER)
    except OSError as error:
        raise ArchiveError(f"the folder {root} cannot be read: {error.strerror}") from error


def _walk(parent: int, path: str) -> Iterator[KernelFile]:
    """Yield the files below the last folder of ``path``, which is in the open folder ``parent``."""
    try:
        folder = os.open(path.rpartition("/")[2], _OPEN_FOLDER, dir_fd=parent)
    except OSError:
        return  # it does not exist, is no folder, or belongs to another user
    try:
        for name in os.listdir(folder):
            yield from _examine(folder, f"{path}/{name}", name)
    finally:
        os.close(folder)


def _examine(folder: int, path: str, name: str) -> Iterator[KernelFile]:
    """Yield one entry of an open folder, or the files below it."""
    try:
        found = os.stat(name, dir_fd=folder, follow_symlinks=False)
        is_readable = os.access(name, os.R_OK, dir_fd=folder)
    except FileNotFoundError:
        return  # deleted at this moment
    if not is_readable or name == _LOCK or not _is_text(path):
        return
    if stat.S_ISDIR(found.st_mode) and path.count("/") < _MAX_DEPTH:
        yield from _walk(folder, path)
    elif stat.S_ISREG(found.st_mode):
        yield KernelFile(path, found.st_size, found.st_mtime_ns, bool(found.st_mode & _EXECUTABLE))


def _is_text(path: str) -> bool:
    """Return False for a name with bytes that are not UTF-8, which arrive as lone surrogates."""
    try:
        path.encode()
    except UnicodeEncodeError:
        return False
    return True


def _read(root: int, file: KernelFile) -> Iterator[bytes]:
    """Yield the content of a file."""
    try:
        descriptor = _open_file(root, file.name)
    except OSError as error:
        raise ArchiveError(f"{file.name} cannot be read: {error.strerror}") from error
    with os.fdopen(descriptor, "rb", buffering=0) as opened:
        found, missing = os.fstat(descriptor), file.size
        if not stat.S_ISREG(found.st_mode) or found.st_size != file.size:
            raise ArchiveError(f"{file.name} has changed while it was packed")
        while missing:
            part = opened.read(min(missing, _READ_BYTES))
            if not part:
                raise ArchiveError(f"{file.name} has changed while it was packed")
            missing -= len(part)
            yield part


def _open_file(root: int, name: str) -> int:
    """Return the descriptor of a file below an open folder. No part of its path may be a link. Raises OSError."""
    *folders, last = name.split("/")
    folder = os.dup(root)
    try:
        for part in folders:
            inner = os.open(part, _OPEN_FOLDER, dir_fd=folder)
            os.close(folder)
            folder = inner
        return os.open(last, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=folder)
    finally:
        os.close(folder)
