"""Records of an agent on disk: small JSON files, replaced atomically.

The records survive the agent, not the pod. No fsync is needed, because the engine does not survive a crash of the machine either.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TypeVar

from pydantic import ValidationError

from sglang_rollout.agent.state import EngineRecord
from sglang_rollout.wire import Message

_Record = TypeVar("_Record", bound=Message)


class RecordError(Exception):
    """The record cannot be written; the message says where and why."""


class RecordFile:
    """``record.json`` in the agent's state folder: the persisted state of the engine."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "record.json"

    def load(self) -> tuple[EngineRecord, str]:
        """Return the last record, and a warning if a record exists that cannot be read."""
        record, problem = load(self.path, EngineRecord)
        end = "until its weights are known: after a complete update, or a restart of the engine."
        return record, f"{problem}; the engine stays closed {end}" if problem else ""

    def save(self, record: EngineRecord) -> None:
        """Replace the record. Raise RecordError if that fails."""
        save(self.path, record)


def load(path: Path, model: type[_Record]) -> tuple[_Record, str]:
    """Return the last record, or the default one; and why an existing record cannot be read."""
    try:
        return model.model_validate_json(path.read_bytes()), ""
    except FileNotFoundError:
        return model(), ""
    except (OSError, ValidationError) as error:
        return model(), f"The record {path} cannot be used ({str(error).splitlines()[0]})"


def save(path: Path, record: Message) -> None:
    """Replace a record. Raise RecordError if that fails."""
    new = Path(f"{path}.new")
    try:
        data = record.model_dump_json().encode()
        # The agent writes twice for each control call, while a trainer waits: it makes the folder only when it is missing.
        try:
            new.write_bytes(data)
        except FileNotFoundError:
            path.parent.mkdir(parents=True, exist_ok=True)
            new.write_bytes(data)
        os.replace(new, path)
    except OSError as error:
        raise RecordError(f"The agent's record {path} cannot be written: {error.strerror}.") from error
    except ValueError as error:  # from pydantic: a text with a lone surrogate
        raise RecordError(f"The agent's record {path} cannot be written: {error}.") from error
