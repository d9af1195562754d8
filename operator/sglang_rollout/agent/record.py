"""What an agent keeps on disk: small JSON files, replaced atomically.

They outlive the agent, not the pod: no fsync, because a machine that goes down takes the engine with it.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TypeVar

from pydantic import ValidationError

from sglang_rollout.agent.state import Memory
from sglang_rollout.wire.message import Message

_Kept = TypeVar("_Kept", bound=Message)


class RecordError(Exception):
    """The record cannot be written; the message says where and why."""


class RecordFile:
    """``record.json`` in the agent's state folder: what is known about the engine's weights."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "record.json"

    def load(self) -> tuple[Memory, str]:
        """What was written last, and a sentence if there was something that cannot be used."""
        memory, why = load(self.path, Memory)
        known = "until its weights are known: after a complete update, or a restart of the engine."
        return memory, f"{why}; the engine stays closed {known}" if why else ""

    def save(self, memory: Memory) -> None:
        """Replace the record. Returns when it is in place; raises RecordError otherwise."""
        save(self.path, memory)


def load(path: Path, kept: type[_Kept]) -> tuple[_Kept, str]:
    """What was written last, or what there is without a record; and why if there was one that cannot be used."""
    try:
        return kept.model_validate_json(path.read_bytes()), ""
    except FileNotFoundError:
        return kept(), ""
    except (OSError, ValidationError) as error:
        return kept(), f"The record {path} cannot be used ({str(error).splitlines()[0]})"


def save(path: Path, message: Message) -> None:
    """Replace a record. Returns when it is in place; raises RecordError otherwise."""
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
