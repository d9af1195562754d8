"""Snapshots in a folder, where their volume is mounted; and folders of safetensors files that SGLang and transformers read."""

from __future__ import annotations

import json
import secrets
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from sglang_rollout.checkpoints.folder import CONFIG, INDEX
from sglang_rollout.checkpoints.publish import copy_model_files, read_chunks, write_file
from sglang_rollout.checkpoints.snapshots import MANIFEST, Snapshot, list_snapshots, lock_snapshot
from sglang_rollout.staging import copies
from sglang_rollout.weights.choose import NoSuchVersionError, choose_version
from sglang_rollout.weights.fleet import Row
from sglang_rollout.wire.states import Version

_OWN_FILES = (MANIFEST, copies.MANIFEST)
"""Files of a snapshot that an exported folder does not need."""


class ExportError(Exception):
    """A version could not be exported. The message is a sentence."""


def list_folder(directory: Path) -> list[tuple[Row, Snapshot]]:
    """Return all snapshots of a directory, oldest first: those of weight stores and of clients."""
    found = []
    for each in list_snapshots(directory):
        manifest = each.manifest
        version = Version(run=manifest.run, step=manifest.step, label=manifest.label)
        row = Row(manifest.update or each.path.name, version, manifest.digest, manifest.bytes, manifest.author, ["snapshot"])
        found.append((row, each))
    return found


def find_snapshot(directory: Path, name: str) -> Snapshot:
    """Return the snapshot with this name: label, run/step, update, or name of its folder. Raises NoSuchVersionError."""
    found = {row.update: (row.version, each) for row, each in list_folder(directory)}
    by_folder = next((each for _, each in found.values() if each.path.name == name), None)
    return by_folder or found[choose_version(name, {update: version for update, (version, _) in found.items()})][1]


@contextmanager
def new_folder(target: Path, model: Path | None) -> Iterator[Path]:
    """Yield a hidden folder that becomes ``target`` when the block ends without an error; with the model's config and tokenizer.

    Raises:
        ExportError: ``target`` exists, or ``model`` is not a folder of a model.
    """
    if target.exists():
        raise ExportError(f"{target} exists. Name a folder that does not.")
    if model is not None and not (model / CONFIG).is_file():
        raise ExportError(f"{model} is not a folder with a {CONFIG}.")
    target.parent.mkdir(parents=True, exist_ok=True)
    hidden = target.with_name(f".{target.name}-{secrets.token_hex(4)}")
    hidden.mkdir()
    try:
        if model is not None:
            copy_model_files(model, hidden)
        yield hidden
        hidden.rename(target)
    finally:
        shutil.rmtree(hidden, ignore_errors=True)


def copy_snapshot(snapshot: Snapshot, folder: Path, progress: Callable[[int], None]) -> None:
    """Copy the files of a snapshot, and compare each with its digest. Files that the folder has stay. Raises ExportError."""
    done = 0
    with lock_snapshot(snapshot.path):
        for name, wanted in snapshot.manifest.files.items():
            if name in _OWN_FILES or (folder / name).exists():
                continue
            if write_file(folder / name, read_chunks(snapshot.path / name)) != wanted:
                raise ExportError(f"{snapshot.path / name} is damaged: it does not have the SHA-256 of {MANIFEST}. Export another version.")
            done += wanted.bytes
            progress(done)


def write_index(copy: copies.Copy) -> None:
    """Write the file by which SGLang and transformers find each tensor of a copy."""
    names = {tensor.name: copies.shard_file(number) for number, shard in enumerate(copy.index.shards) for tensor in shard.tensors}
    index = {"metadata": {"total_size": copy.index.bytes}, "weight_map": names}
    write_file(copy.folder / INDEX, [json.dumps(index, indent=1).encode()])


__all__ = ["ExportError", "NoSuchVersionError", "copy_snapshot", "find_snapshot", "list_folder", "new_folder", "write_index"]
