"""What the agent remembers of each staged version: how to acknowledge it without a coordinator, after a restart of the engine."""

from __future__ import annotations

import logging
from pathlib import Path

from sglang_rollout.agent.record import RecordError, load, save
from sglang_rollout.sglang.checksums import Checksums
from sglang_rollout.wire import Message
from sglang_rollout.wire.agent import AckRequest

log = logging.getLogger(__name__)

_SUFFIX = ".json"


class SavedVersion(Message):
    """A version that a coordinator has asked to load."""

    ack: AckRequest | None = None
    """The acknowledgement, for the engine process that ran then."""
    digest: str = ""
    """Digest of the copy."""
    checksums: Checksums | None = None
    """Checksums of the engine's weights after a load; None if they are not known."""


class SavedVersions:
    """One file for each update, in a folder that only the agent can read."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def load(self, update: str) -> SavedVersion | None:
        """Return what is known of an update; None if no coordinator has asked to load it."""
        found, problem = load(self._path(update), SavedVersion)
        if problem:
            log.warning("%s; only a coordinator can load this version.", problem)
        return found if found.ack is not None else None

    def save(self, update: str, version: SavedVersion) -> None:
        """Remember an update. A failure is logged, because only a load without coordinator needs the file."""
        try:
            save(self._path(update), version)
        except RecordError as error:
            log.warning("%s Only a coordinator can load this version.", error)

    def keep(self, updates: set[str]) -> None:
        """Forget all updates but these."""
        try:
            for file in self._folder.iterdir():
                if file.name.removesuffix(_SUFFIX) not in updates:
                    file.unlink()
        except FileNotFoundError:
            return  # nothing has been saved yet
        except OSError as error:
            log.warning("%s cannot be cleaned up: %s.", self._folder, error)

    def _path(self, update: str) -> Path:
        return self._folder / f"{update}{_SUFFIX}"
