"""A folder with a Hugging Face model: which files SGLang would read, and what their headers say. Reads headers, never tensors.

SGLang reads the files named in ``model.safetensors.index.json``, or every ``*.safetensors`` file of a folder without one.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sglang_rollout.checkpoints.format import LENGTH_BYTES, FormatError, Header, TensorEntry, header_length, parse_header

CONFIG = "config.json"
INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
_LONGEST_JSON = 256 * 1024 * 1024
_MOST_PROBLEMS = 20
"""So many sentences are enough to understand what is wrong; a wrong model has thousands."""
_OTHER_FORMATS = (".bin", ".pt", ".pth", ".ckpt", ".gguf")

Alive = Callable[[], None]
"""Called between files; raises to end a reading that nobody waits for any more."""


class ProblemsError(Exception):
    """The folder cannot be loaded. Each problem is a sentence."""

    def __init__(self, problems: list[str]) -> None:
        super().__init__(" ".join(problems))
        self.problems = problems


@dataclass(frozen=True, slots=True)
class Model:
    """A folder whose files are whole."""

    path: Path
    config: dict[str, Any]
    files: dict[str, Header]
    """Header of each weights file, by name."""

    @property
    def tensors(self) -> dict[str, tuple[str, TensorEntry]]:
        """File and entry of each tensor, by name."""
        return {name: (file, entry) for file, header in self.files.items() for name, entry in header.tensors.items()}

    @property
    def bytes(self) -> int:
        """Bytes of all tensors."""
        return sum(header.file_bytes - header.data_start for header in self.files.values())


def read_model(path: Path, *, alive: Alive = lambda: None) -> Model:
    """Read config, index and every header. Raises ProblemsError when something is missing, torn or contradicts itself."""
    if not path.is_dir():
        raise ProblemsError([_absent(path)])
    config = read_json(path / CONFIG)
    index = read_json(path / INDEX) if (path / INDEX).exists() else None
    names = _weights_files(path, index)
    files: dict[str, Header] = {}
    problems: list[str] = []
    for name in names:
        alive()
        try:
            files[name] = read_header(path / name)
        except ProblemsError as error:
            problems += error.problems
    problems += _twice(path, files)
    if index is not None and not problems:
        problems += _index_problems(path, index, files)
    if problems:
        raise ProblemsError(limited(problems))
    return Model(path, config, files)


def read_header(path: Path) -> Header:
    """The header of one file, checked against the file's length. Raises ProblemsError."""
    try:
        with path.open("rb") as file:
            length = header_length(file.read(LENGTH_BYTES))
            data = file.read(length)
            size = file.seek(0, 2)
    except FormatError as error:
        raise ProblemsError([f"{path} {error}."]) from None
    except OSError as error:
        raise ProblemsError([f"{path} cannot be read here: {error.strerror or error}."]) from None
    if len(data) < length:
        raise ProblemsError([f"{path} ends within its header, after {size} bytes: it is truncated."])
    try:
        header = parse_header(data)
    except FormatError as error:
        raise ProblemsError([f"{path} {error}."]) from None
    if size != header.file_bytes:
        what = "it is truncated" if size < header.file_bytes else "something follows its tensors"
        raise ProblemsError([f"{path} is {size} bytes long, but its header describes {header.file_bytes}: {what}."])
    return header


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object. Raises ProblemsError."""
    try:
        if path.stat().st_size > _LONGEST_JSON:
            raise ProblemsError([f"{path} is larger than {_LONGEST_JSON >> 20} MiB: that is no {path.name}."])
        document = json.loads(path.read_bytes())
    except FileNotFoundError:
        raise ProblemsError([f"{path} is missing."]) from None
    except OSError as error:
        raise ProblemsError([f"{path} cannot be read here: {error.strerror or error}."]) from None
    except (ValueError, RecursionError) as error:
        raise ProblemsError([f"{path} is no JSON ({error})."]) from None
    if not isinstance(document, dict):
        raise ProblemsError([f"{path} is no JSON object."])
    return document


def limited(problems: list[str]) -> list[str]:
    """The first problems and how many more there are."""
    if len(problems) <= _MOST_PROBLEMS:
        return problems
    return [*problems[:_MOST_PROBLEMS], f"And {len(problems) - _MOST_PROBLEMS} more problems."]


def _absent(path: Path) -> str:
    if path.exists():
        return f"{path} is a file: name the folder that holds it."
    return (
        f"There is no {path} in this engine's pod. Put the checkpoint on a volume and mount it at the same path in every engine "
        "(spec.podTemplate, container engine)."
    )


def _weights_files(path: Path, index: dict[str, Any] | None) -> list[str]:
    if index is not None:
        return _indexed(path, index)
    try:
        present = sorted(entry.name for entry in path.iterdir())
    except OSError as error:
        raise ProblemsError([f"{path} cannot be listed here: {error.strerror or error}."]) from None
    if SINGLE in present:
        # All of them: without an index SGLang reads every one, but for the second copy that Mistral's repositories bring.
        found = [name for name in present if name.endswith(".safetensors")]
        return [SINGLE] if found == ["consolidated.safetensors", SINGLE] else found
    other = next((name for name in present if name.endswith(_OTHER_FORMATS)), None)
    if other is not None and not any(name.endswith(".safetensors") for name in present):
        raise ProblemsError([f"{path} holds weights only as {other}: such files can run code when read. Save the model as safetensors."])
    raise ProblemsError([f"{path} holds neither {SINGLE} nor {INDEX}: it is no complete model, or is still being written."])


def _indexed(path: Path, index: dict[str, Any]) -> list[str]:
    weights = index.get("weight_map")
    if not isinstance(weights, dict) or not weights or not all(isinstance(file, str) for file in weights.values()):
        raise ProblemsError([f"{path / INDEX} has no weight_map that names a file for each tensor."])
    names = sorted(set(weights.values()))
    strange = [name for name in names if Path(name).name != name or not name.endswith(".safetensors")]
    if strange:
        raise ProblemsError([f"{path / INDEX} names {strange[0]!r}, which is no safetensors file of this folder."])
    missing = [name for name in names if not (path / name).is_file()]
    if missing:
        raise ProblemsError(limited([f"{path / name} is missing, though {INDEX} lists it." for name in missing]))
    return names


def _twice(path: Path, files: dict[str, Header]) -> list[str]:
    seen: dict[str, str] = {}
    problems = []
    for file, header in files.items():
        for name in header.tensors:
            if name in seen:
                problems.append(f"Tensor {name} is both in {path / seen[name]} and in {path / file}: which one counts is not defined.")
            seen[name] = file
    return problems


def _index_problems(path: Path, index: dict[str, Any], files: dict[str, Header]) -> list[str]:
    listed: dict[str, str] = index["weight_map"]
    problems = [
        f"{path / file} does not hold tensor {name}, though {INDEX} says so."
        for name, file in listed.items()
        if name not in files[file].tensors
    ]
    for file, header in files.items():
        problems += [f"{path / file} holds tensor {name}, which {INDEX} does not list." for name in header.tensors if name not in listed]
    return problems
