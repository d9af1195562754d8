"""The highest term that the weight store has seen, in a file, so that a restarted store refuses an earlier coordinator."""

from __future__ import annotations

import os
from pathlib import Path

_FILE = "term"


class TermFile:
    """The highest term.

    Args:
        folder: Folder of the file. Created if it is missing.

    Raises:
        OSError: The file cannot be read.
    """

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._path = folder / _FILE
        text = self._path.read_text().strip() if self._path.exists() else ""
        self.highest = int(text) if text.isascii() and text.isdigit() else 0
        """Highest term seen."""

    def raise_to(self, term: int) -> None:
        """Record a term if it is higher. Raises OSError if the file cannot be written."""
        if term <= self.highest:
            return
        written = self._path.with_suffix(".new")
        written.write_text(str(term))
        os.replace(written, self._path)
        self.highest = term
