"""The authorities whose certificates an agent trusts for the fleet's URL."""

from __future__ import annotations

import logging
import ssl
from pathlib import Path

log = logging.getLogger(__name__)


class Authorities:
    """Certificates of authorities in a file, which the kubelet replaces when they are renewed."""

    def __init__(self, file: Path | None = None) -> None:
        self._file = file
        self._text = ""
        self._context = _trust("")

    def context(self) -> ssl.SSLContext:
        """Return the context of a connection. Without the file, the system's authorities are trusted.

        The same context is returned until the file changes, so that connections can be used again.
        """
        text = self._read()
        if text != self._text:
            self._text = text
            try:
                self._context = _trust(text)
            except ssl.SSLError as error:
                log.warning("%s holds no certificate that can be read, and the earlier ones stay: %s", self._file, error)
        return self._context

    def _read(self) -> str:
        if self._file is None:
            return ""
        try:
            return self._file.read_text()
        except (OSError, ValueError):
            return ""


def _trust(authorities: str) -> ssl.SSLContext:
    context = ssl.create_default_context(cadata=authorities or None)
    # The default of Python 3.13 refuses certificates of many authorities of companies.
    context.verify_flags &= ~ssl.VERIFY_X509_STRICT
    return context
