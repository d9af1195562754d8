"""A folder with a Hugging Face model: which files SGLang reads, and the headers of these files. Never reads tensors.

SGLang reads the files named in ``model.safetensors.index.json``, or every ``*.safetensors`` file of a folder without one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sglang_rollout.checkpoints.format import LENGTH_BYTES, FormatError, Header, TensorEntry, header_length, parse_header
from sglang_rollout.json_text import load_json

CONFIG = "config.json"
ADAPTER_CONFIG = "adapter_config.json"
INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
MAX_JSON_BYTES = 256 * 1024 * 1024
MAX_PROBLEMS = 20
"""Maximum problems in one report; a wrong model has thousands."""
_OTHER_FORMATS = (".bin", ".pt", ".pth", ".ckpt", ".gguf")

CancelCheck = Callable[[], None]
"""Called between files or chunks. Raises an exception to stop work whose result is no longer needed."""


class ProblemsError(Exception):
    """A folder cannot be loaded, for a list of reasons."""

    def __init__(self, problems: list[str]) -> None:
        super().__init__(" ".join(problems))
        self.problems = problems


@dataclass(frozen=True, slots=True)
class Model:
    """A folder whose weights files are complete."""

    path: Path
    config: dict[str, Any]
    files: dict[str, Header]
    """Header of each weights file, by name."""

    @property
    def tensors(self) -> dict[str, tuple[str, TensorEntry]]:
        """File name and entry of each tensor, by the name of the tensor."""
        return {name: (file, entry) for file, header in self.files.items() for name, entry in header.tensors.items()}

    @property
    def bytes(self) -> int:
        """Bytes of all tensors."""
        return sum(header.file_bytes - header.data_start for header in self.files.values())


def read_model(path: Path, *, check_cancelled: CancelCheck = lambda: None) -> Model:
    """Read config, index and all headers.

    Raises:
        ProblemsError: A file is missing, truncated or contradicts another file.
    """
    if not path.is_dir():
        raise ProblemsError([_describe_missing_folder(path)])
    config = read_json(path / CONFIG)
    index = read_json(path / INDEX) if (path / INDEX).exists() else None
    names = _weights_files(path, index)
    files: dict[str, Header] = {}
    problems: list[str] = []
    for name in names:
        check_cancelled()
        try:
            files[name] = read_header(path / name)
        except ProblemsError as error:
            problems += error.problems
    problems += _find_duplicates(path, files)
    if index is not None and not problems:
        problems += _find_index_errors(path, index, files)
    if problems:
        raise ProblemsError(shorten_problems(problems))
    return Model(path, config, files)


def read_adapter(path: Path) -> Model:
    """Read the config and all headers of a LoRA adapter.

    Raises:
        ProblemsError: A file is missing or truncated, or the weights are no safetensors files.
        OSError: The folder cannot be listed.
    """
    if not path.is_dir():
        raise ProblemsError([_describe_missing_folder(path)])
    config = read_json(path / ADAPTER_CONFIG)
    names = sorted(entry.name for entry in path.iterdir() if entry.name.endswith(".safetensors"))
    if not names:
        raise ProblemsError([f"{path} has no safetensors file: other files can run code when read. Save the adapter as safetensors."])
    return Model(path, config, {name: read_header(path / name) for name in names})


def read_header(path: Path) -> Header:
    """Read the header of one file, and check the length of the file.

    Raises:
        ProblemsError: The file cannot be read, is truncated, or is not a safetensors file.
    """
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
        raise ProblemsError([f"{path} is truncated: it ends within its header, after {size} bytes."])
    try:
        header = parse_header(data)
    except FormatError as error:
        raise ProblemsError([f"{path} {error}."]) from None
    if size != header.file_bytes:
        problem = "it is truncated" if size < header.file_bytes else "it has extra bytes after its tensors"
        raise ProblemsError([f"{path} is {size} bytes long, but its header describes {header.file_bytes}: {problem}."])
    return header


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object from a file.

    Raises:
        ProblemsError: The file cannot be read, or is not a JSON object.
    """
    try:
        if path.stat().st_size > MAX_JSON_BYTES:
            raise ProblemsError([f"{path} is larger than {MAX_JSON_BYTES >> 20} MiB, so it is not a {path.name}."])
        document = load_json(path.read_bytes())
    except FileNotFoundError:
        raise ProblemsError([f"{path} is missing."]) from None
    except OSError as error:
        raise ProblemsError([f"{path} cannot be read here: {error.strerror or error}."]) from None
    except ValueError as error:
        raise ProblemsError([f"{path} is not JSON ({error})."]) from None
    if not isinstance(document, dict):
        raise ProblemsError([f"{path} is not a JSON object."])
    return document


def shorten_problems(problems: list[str]) -> list[str]:
    """Return the first problems, and a sentence with the number of further problems."""
    if len(problems) <= MAX_PROBLEMS:
        return problems
    return [*problems[:MAX_PROBLEMS], f"And {len(problems) - MAX_PROBLEMS} more problems."]


def _describe_missing_folder(path: Path) -> str:
    if path.exists():
        return f"{path} is a file. Name the folder that contains it."
    return (
        f"There is no {path} in this engine's pod. Put the checkpoint on a volume and mount it at the same path in every engine "
        "(spec.podTemplate, container engine)."
    )


def _weights_files(path: Path, index: dict[str, Any] | None) -> list[str]:
    if index is not None:
        return _files_of_index(path, index)
    try:
        present = sorted(entry.name for entry in path.iterdir())
    except OSError as error:
        raise ProblemsError([f"{path} cannot be listed here: {error.strerror or error}."]) from None
    if SINGLE in present:
        # Without an index SGLang reads every file, except the second copy that Mistral's repositories contain.
        found = [name for name in present if name.endswith(".safetensors")]
        return [SINGLE] if found == ["consolidated.safetensors", SINGLE] else found
    other = next((name for name in present if name.endswith(_OTHER_FORMATS)), None)
    if other is not None and not any(name.endswith(".safetensors") for name in present):
        raise ProblemsError([f"{path} has weights only as {other}: such files can run code when read. Save the model as safetensors."])
    raise ProblemsError([f"{path} has neither {SINGLE} nor {INDEX}: the model is not complete, or is still being written."])


def _files_of_index(path: Path, index: dict[str, Any]) -> list[str]:
    weights = index.get("weight_map")
    if not isinstance(weights, dict) or not weights or not all(isinstance(file, str) for file in weights.values()):
        raise ProblemsError([f"{path / INDEX} has no weight_map that names a file for each tensor."])
    names = sorted(set(weights.values()))
    invalid = [name for name in names if Path(name).name != name or not name.endswith(".safetensors")]
    if invalid:
        raise ProblemsError([f"{path / INDEX} names {invalid[0]!r}, which is not a safetensors file of this folder."])
    missing = [name for name in names if not (path / name).is_file()]
    if missing:
        raise ProblemsError(shorten_problems([f"{path / name} is missing, but {INDEX} lists it." for name in missing]))
    return names


def _find_duplicates(path: Path, files: dict[str, Header]) -> list[str]:
    seen: dict[str, str] = {}
    problems = []
    for file, header in files.items():
        for name in header.tensors:
            if name in seen:
                problems.append(f"Tensor {name} is both in {path / seen[name]} and in {path / file}: it is not defined which one is used.")
            seen[name] = file
    return problems


def _find_index_errors(path: Path, index: dict[str, Any], files: dict[str, Header]) -> list[str]:
    listed: dict[str, str] = index["weight_map"]
    problems = [
        f"{path / file} does not contain tensor {name}, but {INDEX} lists it there."
        for name, file in listed.items()
        if name not in files[file].tensors
    ]
    for file, header in files.items():
        problems += [f"{path / file} contains tensor {name}, which {INDEX} does not list." for name in header.tensors if name not in listed]
    return problems
