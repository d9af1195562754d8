"""Credentials of the calls between the fleet's own processes.

The coordinator has the rollout's key. Each engine has a credential that is derived from the key and its name, and proves that engine only.
"""

from __future__ import annotations

import hmac
import logging
from pathlib import Path

log = logging.getLogger(__name__)


class Credentials:
    """Credentials of one side: the first is sent, all are accepted.

    So a new one can be added everywhere before the first process sends it, and a rotation refuses no call.
    """

    def __init__(self, *lines: str) -> None:
        self._lines = tuple(lines)

    def lines(self) -> tuple[str, ...]:
        """Return all credentials that are accepted now."""
        return self._lines

    def derive(self, engine: str) -> Credentials:
        """Return the credentials of an engine, one for each line of the rollout's key. They do not reveal the key."""
        return Credentials(
            *(hmac.new(line.encode(), engine.encode("utf-8", "surrogateescape"), "sha256").hexdigest() for line in self.lines())
        )

    @property
    def sent(self) -> str:
        """The credential to send."""
        return self.lines()[0]

    @property
    def header(self) -> dict[str, str]:
        """The header that sends it."""
        return {"Authorization": f"Bearer {self.sent}"}

    def accept(self, given: str) -> bool:
        """Compare with each credential, in constant time."""
        # Bytes that are not ASCII arrive as lone surrogates.
        known = given.encode("utf-8", "surrogateescape")
        return any(hmac.compare_digest(known, line.encode()) for line in self.lines())


class CredentialFile(Credentials):
    """Credentials in a file, one a line, read again when the file changes, as the kubelet changes the file of a Secret.

    The last credentials stay in effect while the file is empty or cannot be read.
    """

    def __init__(self, path: Path) -> None:
        super().__init__()
        self._path = path
        self._stamp: tuple[int, int, int] | None = None
        self._read()

    def lines(self) -> tuple[str, ...]:
        """Return the lines of the file."""
        try:
            self._read()
        except (OSError, ValueError) as error:
            log.debug("%s; the last credentials stay in effect", error)
        return self._lines

    def _read(self) -> None:
        """Read a changed file. Raises OSError, or ValueError if it has no line."""
        found = self._path.stat()
        stamp = (found.st_mtime_ns, found.st_ino, found.st_size)
        if stamp == self._stamp:
            return
        lines = tuple(self._path.read_text().split())
        if not lines:
            raise ValueError(f"the file {self._path} has no credential")
        self._lines, self._stamp = lines, stamp
