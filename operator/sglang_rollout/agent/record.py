"""Records of an agent on disk: small JSON files, replaced atomically.

They survive the agent, not the pod. They need no fsync, because the engine does not survive a crash of the machine either.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TypeVar

from pydantic import ValidationError

from sglang_rollout.agent.state import EngineRecord
from sglang_rollout.wire import Message

_Kept = TypeVar("_Kept", bound=Message)


class RecordError(Exception):
    """The record cannot be written; the message says where and why."""


class RecordFile:
    """``record.json`` in the agent's state folder: the persisted state of the engine's weights."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "record.json"

    def load(self) -> tuple[EngineRecord, str]:
        """Return the last record, and a warning if a record exists that cannot be read."""
        record, why = load(self.path, EngineRecord)
        known = "until its weights are known: after a complete update, or a restart of the engine."
        return record, f"{why}; the engine stays closed {known}" if why else ""

    def save(self, record: EngineRecord) -> None:
        """Replace the record. Raise RecordError if that fails."""
        save(self.path, record)


def load(path: Path, kept: type[_Kept]) -> tuple[_Kept, str]:
    """Return the last record, or the default one; and why an existing record cannot be read."""
    try:
        return kept.model_validate_json(path.read_bytes()), ""
    except FileNotFoundError:
        return kept(), ""
    except (OSError, ValidationError) as error:
        return kept(), f"The record {path} cannot be used ({str(error).splitlines()[0]})"


def save(path: Path, message: Message) -> None:
    """Replace a record. Raise RecordError if that fails."""
    # A record is written twice for each control call, while a trainer waits: the folder is made only when it is missing.
    temporary = f"{path}.new"
    try:
        data = message.model_dump_json().encode()
        try:
            _write(temporary, data)
        except FileNotFoundError:
            path.parent.mkdir(parents=True, exist_ok=True)
            _write(temporary, data)
        os.replace(temporary, path)
    except OSError as error:
        raise RecordError(f"The agent's record {path} cannot be written: {error.strerror}.") from error
    except ValueError as error:  # of pydantic: a text in it is half of a character
        raise RecordError(f"The agent's record {path} cannot be written: {error}.") from error


def _write(path: str, data: bytes) -> None:
    with open(path, "wb") as file:
        file.write(data)
