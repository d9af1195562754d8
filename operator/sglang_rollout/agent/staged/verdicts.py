"""Verdicts of the loader: each rank of the engine writes one file for each attempt to load a staged version.

SGLang answers with success although a loader has refused, so only the verdicts of all ranks show what has happened. The engine's container
can write anything into their folder: nothing here follows a link, blocks, or trusts an incomplete set of verdicts.
"""

from __future__ import annotations

import itertools
import logging
import secrets
import shutil
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sglang_rollout.agent.engine import read_text
from sglang_rollout.json_text import load_json

log = logging.getLogger(__name__)

_PATTERN = "rank-*.json"
_MAX_QUOTED = 500
"""Characters of a rank's message that a message quotes."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """Verdict of one rank."""

    ok: bool
    wrote: bool
    message: str = ""
    ended: bool = True
    """False while the rank still loads."""


@dataclass(frozen=True, slots=True)
class Verdicts:
    """Verdicts of one attempt. Both properties are False if nothing is proved."""

    found: tuple[Verdict, ...]
    ranks: int
    """Ranks of the engine."""

    @property
    def is_loaded(self) -> bool:
        """True if every rank has loaded the version."""
        return self._is_complete and all(verdict.ok for verdict in self.found)

    @property
    def is_refused(self) -> bool:
        """True if every rank has refused the version before its first write."""
        return self._is_complete and not any(verdict.ok or verdict.wrote for verdict in self.found)

    @property
    def is_ended(self) -> bool:
        """True if no verdict is missing, and no rank still loads."""
        return len(self.found) >= self.ranks and all(verdict.ended for verdict in self.found)

    @property
    def message(self) -> str:
        """Why the version is not loaded, as a sentence."""
        problems = [verdict.message for verdict in self.found if not verdict.ok and verdict.message]
        if problems:
            return f"{_shorten(problems[0])} ({len(problems)} of {self.ranks} ranks)"
        return f"The engine has {self.ranks} ranks, and {sum(verdict.ok for verdict in self.found)} of them have loaded the version."

    @property
    def _is_complete(self) -> bool:
        return len(self.found) == self.ranks


def join_pods(pods: Sequence[Verdicts]) -> Verdicts:
    """Return the verdicts of all pods of one engine. A surplus in one pod does not replace what is missing in another pod."""
    found = [verdict for pod in pods for verdict in pod.found]
    if any(len(pod.found) > pod.ranks for pod in pods):
        found.append(Verdict(ok=False, wrote=True, message="A pod has more verdicts than ranks."))
    return Verdicts(tuple(found), sum(pod.ranks for pod in pods))


class VerdictFolder:
    """The folder that the engine's container can write, with one folder for each attempt."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def open_attempt(self, attempt: str | None = None) -> str:
        """Create the folder of a new attempt, delete those of earlier attempts, and return the attempt. Raises OSError.

        Args:
            attempt: The attempt that the head pod of the engine has chosen; None: choose one.
        """
        self._folder.mkdir(parents=True, exist_ok=True)
        for earlier in self._folder.iterdir():
            shutil.rmtree(earlier, onerror=_log_failure)
        attempt = secrets.token_hex(16) if attempt is None else attempt
        made = self.path(attempt)
        made.mkdir()
        made.chmod(0o1777)  # the engine may run as another user, whatever the umask is
        return attempt

    def path(self, attempt: str) -> Path:
        """Return the folder of an attempt."""
        return self._folder / attempt

    def read(self, attempt: str, ranks: int) -> Verdicts:
        """Return the verdicts of an attempt; none if its folder cannot be read."""
        try:
            files = sorted(itertools.islice(self.path(attempt).glob(_PATTERN), ranks + 1))
        except OSError as error:
            log.warning("The verdicts in %s cannot be read: %s.", self.path(attempt), error)
            files = []
        return Verdicts(tuple(_parse_all(files, attempt)), ranks)


def _parse_all(files: Iterable[Path], attempt: str) -> Iterable[Verdict]:
    for file in files:
        verdict = parse_verdict(read_text(file), attempt)
        if verdict is None:
            log.warning("%s is no verdict of this attempt, so the engine counts as changed.", file)
        yield verdict or Verdict(ok=False, wrote=True, message=f"{file.name} is no verdict of this attempt.")


def parse_verdict(text: str | None, attempt: str) -> Verdict | None:
    """Return the verdict in a file; None for anything else, and for a verdict of another attempt."""
    try:
        document: Any = load_json(text or "")
    except ValueError:
        return None
    if not isinstance(document, dict) or document.get("id") != attempt:
        return None
    ok, wrote, message = document.get("ok"), document.get("wrote"), document.get("message")
    if not isinstance(ok, bool) or not isinstance(wrote, bool):
        return None
    return Verdict(ok, wrote, message if isinstance(message, str) else "", ended=document.get("ended") is not False)


def _shorten(message: str) -> str:
    return message if len(message) <= _MAX_QUOTED else f"{message[:_MAX_QUOTED]}…"


def _log_failure(_: object, path: str, error: object) -> None:
    log.warning("The verdicts of an earlier attempt in %s cannot be deleted: %s.", path, error)
