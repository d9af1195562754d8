"""The agent's record on disk: one small JSON file, replaced atomically."""

from __future__ import annotations

import os
from pathlib import Path

from pydantic import ValidationError

from sglang_rollout.agent.state import Memory


class RecordError(Exception):
    """The record cannot be written; the message says where and why."""


class RecordFile:
    """``record.json`` in the agent's state folder.

    It outlives the agent, not the pod: no fsync, because a machine that goes down takes the engine with it.
    """

    def __init__(self, folder: Path) -> None:
        self.path = folder / "record.json"

    def load(self) -> tuple[Memory, str]:
        """What was written last, and a sentence if there was something that cannot be used."""
        try:
            return Memory.model_validate_json(self.path.read_bytes()), ""
        except FileNotFoundError:
            return Memory(), ""
        except (OSError, ValidationError) as error:
            reason = str(error).splitlines()[0]
            return Memory(), f"The record {self.path} cannot be used ({reason}); the engine stays closed until its weights are known."

    def save(self, memory: Memory) -> None:
        """Replace the record. Returns when it is in place; raises RecordError otherwise."""
        temporary = self.path.with_suffix(".json.new")
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            temporary.write_text(memory.model_dump_json())
            os.replace(temporary, self.path)
        except OSError as error:
            raise RecordError(f"The agent's record {self.path} cannot be written: {error.strerror}.") from error
