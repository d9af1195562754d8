"""Reports by which the plug-in proves that it is active. Its hooks write them; agents read them and believe no more than they have to.

A run of the engine has one folder ``<reports>/<run>/``:

- ``requests.json``: by the hook on requests, at the first request.
- ``scheduler-<process>.json``: by the hooks in each scheduler, at its first request.
- ``names-<process>.json``: by each scheduler, at its start: the tensors of the checkpoint.

A file that ``register`` wrote would prove too little: SGLang serves without a hook whose target is missing.
"""

from __future__ import annotations

import hashlib
import json
import os
import stat
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

REQUESTS_FILE = "requests.json"
_SCHEDULER, _NAMES = "scheduler-", "names-"
_LARGEST_REPORT = 64 * 1024
_LARGEST_NAMES = 128 * 2**20
"""Bytes of a list of names. A checkpoint of 100,000 tensors needs about 10 MB."""
MOST_FILES = 4096
"""Files or folders that are read of one folder."""
_MOST_TENSORS = 1_000_000
LONGEST_TEXT = 1024
"""Characters of a text or a name in a report."""
_MOST_SAMPLING_PARAMS = 1000

CACHE_KEY, NAMES = "cache_key", "names"
"""Hooks in a scheduler, as its report lists them."""


def process_label(dp: int, pp: int, tp: int) -> str:
    """Return the part of file names that tells a scheduler from all others of one engine."""
    return f"{dp}-{pp}-{tp}"


def scheduler_file(label: str) -> str:
    """Return the name of a scheduler's report."""
    return f"{_SCHEDULER}{label}.json"


def names_file(label: str) -> str:
    """Return the name of the list of tensors that a scheduler read."""
    return f"{_NAMES}{label}.json"


def write_report(folder: str, name: str, content: Mapping[str, Any]) -> None:
    """Replace a report atomically. Raises OSError."""
    os.makedirs(folder, exist_ok=True)
    new = os.path.join(folder, f".{name}.{os.getpid()}.new")
    with open(new, "w", encoding="utf-8") as file:
        json.dump(content, file, separators=(",", ":"))
    os.replace(new, os.path.join(folder, name))


@dataclass(frozen=True)
class RequestsReport:
    """What the process that answers requests reports."""

    release: str
    pid: int
    port: int
    seed: int
    host: str = ""
    """Name of the host whose port it is."""
    sampling_params: tuple[str, ...] = ()
    """Names of the sampling parameters that a request may set in this release; empty if they are not known."""


@dataclass(frozen=True)
class SchedulerReport:
    """What one scheduler reports."""

    release: str
    pid: int
    rank: int
    """Rank of the process among the tensor and pipeline ranks of its replica."""
    dp: int
    pp: int
    tp: int
    port: int
    seed: int
    hooks: tuple[str, ...]
    names: str
    """File with the tensors of the checkpoint; empty if there is none."""
    unchecked: str
    """Why there is no such file: a clause that names the loader; empty if there is one."""
    updates_refused: str = ""
    """Why SGLang refuses updates of the weights, in its own sentences; empty if it does not."""


@dataclass(frozen=True)
class Tensor:
    """One tensor of the checkpoint: the whole tensor, not a rank's part."""

    name: str
    shape: tuple[int, ...]
    dtype: str


@dataclass(frozen=True)
class NamesReport:
    """The tensors that an engine read at its start. Without a list, ``unchecked`` is a clause that says why."""

    tensors: tuple[Tensor, ...] = ()
    unchecked: str = ""
    tied: bool = False
    """The output layer is the embedding, so that a push need not have it."""


@dataclass(frozen=True)
class Reports:
    """All reports of one run in one folder."""

    requests: RequestsReport | None = None
    schedulers: tuple[SchedulerReport, ...] = ()
    problems: tuple[str, ...] = ()
    """Sentences about files that cannot be read."""
    folder: Path = field(default=Path(), repr=False)

    def missing(self, schedulers: int, *, requests: bool = True, cache_key: bool = True) -> str | None:
        """Return which part of the proof is missing, as a sentence; None if the proof is complete.

        Args:
            schedulers: Number of schedulers of this pod.
            requests: True if this pod answers requests: it is the engine's only pod or its head pod.
            cache_key: True if each version has a prefix cache of its own.
        """
        if self.problems:
            return self.problems[0]
        if requests and self.requests is None:
            return "The plug-in has not seen a request in the process that answers requests."
        if len(self.schedulers) < schedulers:
            return f"The plug-in has seen a request in {len(self.schedulers)} of {schedulers} schedulers."
        for one in self.schedulers:
            if cache_key and CACHE_KEY not in one.hooks:
                where = f"The scheduler {process_label(one.dp, one.pp, one.tp)} of SGLang {one.release}"
                return f"{where} sets no cache key of the version, which engine.prefixCache: PerVersion needs."
        return None

    @property
    def sampling_params(self) -> tuple[str, ...]:
        """Names of the sampling parameters that a request may set; empty if they are not known."""
        return self.requests.sampling_params if self.requests is not None else ()

    @property
    def updates_refused(self) -> str:
        """Why SGLang refuses updates of the weights, in its own sentences; empty if it does not. Its ranks agree."""
        return next(filter(None, (one.updates_refused for one in self.schedulers)), "")

    def names(self) -> NamesReport:
        """Return the tensors that any scheduler of this pod read at its start. Reads files: 10 MB for 100,000 tensors."""
        for one in self.schedulers:
            if one.unchecked or not one.names:
                return NamesReport(unchecked=one.unchecked or "the plug-in did not see the load of the model")
        try:
            return _unite(self.folder, {one.names for one in self.schedulers})
        except _WrongReport as error:
            return NamesReport(unchecked=str(error))


class _WrongReport(Exception):
    """A file is no report; the text is a clause that names the file."""


def read_reports(folder: Path, run: str) -> Reports:
    """Return the reports of one run. Files that are missing are missing in the result; links are not followed.

    Args:
        folder: Folder of all runs.
        run: ID of the run: one file name.
    """
    place = folder / run
    requests, schedulers, problems = None, [], []
    for name in _list(place):
        try:
            if name == REQUESTS_FILE:
                requests = _requests_report(_read(place, name, _LARGEST_REPORT)[0])
            elif name.startswith(_SCHEDULER):
                schedulers.append(_scheduler_report(_read(place, name, _LARGEST_REPORT)[0]))
        except _WrongReport as error:
            problems.append(f"A report of the plug-in cannot be used: {error}.")
    labels = {process_label(one.dp, one.pp, one.tp): one for one in schedulers}
    return Reports(requests, tuple(labels[label] for label in sorted(labels)), tuple(problems), place)


def _list(folder: Path) -> list[str]:
    """Return the names of the files of a folder, sorted; none if it is missing or no folder."""
    try:
        if not stat.S_ISDIR(folder.lstat().st_mode):
            return []
        with os.scandir(folder) as entries:
            found = [entry.name for _, entry in zip(range(MOST_FILES), entries, strict=False)]
    except OSError:
        return []
    return sorted(name for name in found if name.endswith(".json"))


def _read(folder: Path, name: str, most: int) -> tuple[dict[str, Any], str]:
    """Return a JSON object and the digest of its file. Reads regular files only, and opens neither links nor pipes for long."""
    try:
        descriptor = os.open(folder / name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        with open(descriptor, "rb") as file:
            if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                raise _WrongReport(f"{name} is no file")
            data = file.read(most + 1)
        if len(data) > most:
            raise _WrongReport(f"{name} has more than {most} bytes")
        found = json.loads(data)
    except (OSError, ValueError, RecursionError) as error:
        raise _WrongReport(f"{name} cannot be read ({type(error).__name__})") from error
    if not isinstance(found, dict):
        raise _WrongReport(f"{name} is no object")
    return found, hashlib.sha256(data).hexdigest()


def _text(found: Mapping[str, Any], key: str) -> str:
    value = found.get(key)
    if value is None:
        return ""
    if not isinstance(value, str) or len(value) > LONGEST_TEXT or not value.isprintable():
        raise _WrongReport(f"{key} is no short text")
    return value


def _number(found: Mapping[str, Any], key: str) -> int:
    value = found.get(key)
    if not isinstance(value, int) or isinstance(value, bool) or not -(2**63) <= value < 2**63:
        raise _WrongReport(f"{key} is no number")
    return value


def _requests_report(found: Mapping[str, Any]) -> RequestsReport:
    numbers = {key: _number(found, key) for key in ("pid", "port", "seed")}
    names = _short_texts(found, "sampling_params")
    return RequestsReport(release=_text(found, "release"), host=_text(found, "host"), sampling_params=names, **numbers)


def _short_texts(found: Mapping[str, Any], key: str) -> tuple[str, ...]:
    """Return a list of texts; empty if there is none."""
    texts = found.get(key) or []
    if not isinstance(texts, list) or len(texts) > _MOST_SAMPLING_PARAMS:
        raise _WrongReport(f"{key} is no list, or too long")
    return tuple(_text({key: text}, key) for text in texts)


def _scheduler_report(found: Mapping[str, Any]) -> SchedulerReport:
    hooks, names = found.get("hooks"), _text(found, "names")
    if not isinstance(hooks, list) or len(hooks) > 100 or not all(isinstance(hook, str) for hook in hooks):
        raise _WrongReport("hooks is no list of texts")
    if names and (not names.startswith(_NAMES) or "/" in names):
        raise _WrongReport(f"names is not the name of a file that begins with {_NAMES}")
    numbers = {key: _number(found, key) for key in ("pid", "rank", "dp", "pp", "tp", "port", "seed")}
    return SchedulerReport(
        release=_text(found, "release"), hooks=tuple(hooks), names=names, unchecked=_text(found, "unchecked"),
        updates_refused=_text(found, "updates_refused"), **numbers,
    )  # fmt: skip


def _unite(folder: Path, files: set[str]) -> NamesReport:
    """Return the tensors of all files, by name. Files with equal content are parsed once."""
    found: dict[str, Tensor] = {}
    tied = False
    for content in _contents(folder, files):
        tied = tied or content.get("tied") is True
        for tensor in _tensors(content):
            found.setdefault(tensor.name, tensor)
    if not found:
        return NamesReport(unchecked="no scheduler reported its tensors")
    return NamesReport(tuple(found[name] for name in sorted(found)), tied=tied)


def _contents(folder: Path, files: set[str]) -> Iterator[dict[str, Any]]:
    digests = set()
    for name in sorted(files):
        content, digest = _read(folder, name, _LARGEST_NAMES)
        if digest not in digests:
            digests.add(digest)
            if content.get("complete") is not True:
                raise _WrongReport(f"{name} is not complete")
            yield content


def _tensors(content: Mapping[str, Any]) -> Iterator[Tensor]:
    rows = content.get("tensors")
    if not isinstance(rows, list) or len(rows) > _MOST_TENSORS:
        raise _WrongReport("tensors is no list, or too long")
    for row in rows:
        match row:
            case [str(name), list(shape), str(dtype)] if len(name) <= LONGEST_TEXT and len(shape) <= 16 and len(dtype) <= 64:
                if not all(type(size) is int and size >= 0 for size in shape):
                    raise _WrongReport("tensors has a row with a wrong shape")
                yield Tensor(name, tuple(shape), dtype)
            case _:
                raise _WrongReport("tensors has a row that is no name, shape and type")
