"""One logging set-up for all processes: lines to stderr, as text for people or JSON for collectors.

Lines about refused calls are limited by address, so that a flood fills no log.
"""

from __future__ import annotations

import json
import logging
import sys
from collections import Counter
from collections.abc import Callable
from typing import Any

import click

FORMATS = ("text", "json")
WINDOW_SECONDS = 60.0
"""Time for which refused calls are counted."""
MAX_REFUSED_LINES = 20
"""Lines in that time about refused calls from one address."""
MAX_ADDRESSES = 100
"""Addresses that are counted one by one. All other addresses are counted together."""
OTHERS = "others"
_TEXT = "%(asctime)s %(levelname)-7s %(message)s"


_INDENT = "    "


def _escape(text: str) -> str:
    """Return a text without line ends, control characters and other invisible characters."""
    if text.isprintable():
        return text
    return "".join(each if each.isprintable() else each.encode("unicode_escape").decode() for each in text)


class TextFormatter(logging.Formatter):
    """One line per message, and indented lines after an exception.

    Messages quote trainers, engines and the API server, whose text must not look like a line of its own.
    """

    def __init__(self) -> None:
        super().__init__(_TEXT)

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 (a method of logging.Formatter)
        """Return the line of a message."""
        return _escape(super().formatMessage(record))

    def formatException(self, ei: Any) -> str:  # noqa: N802 (a method of logging.Formatter)
        """Return the lines of a traceback."""
        return "\n".join(_INDENT + _escape(line) for line in super().formatException(ei).split("\n"))

    def formatStack(self, stack_info: str) -> str:  # noqa: N802 (a method of logging.Formatter)
        """Return the lines of a stack."""
        return "\n".join(_INDENT + _escape(line) for line in stack_info.split("\n"))


class JsonFormatter(logging.Formatter):
    """One JSON object per line: ``timestamp``, ``severity``, ``logger``, ``message`` and, after an exception, ``traceback``."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the line of a log record."""
        fields = {
            "timestamp": self.formatTime(record, "%Y-%m-%dT%H:%M:%S") + f".{int(record.msecs):03d}",
            "severity": record.levelname,
            "logger": record.name,
            "message": record.getMessage(),
        }
        if record.exc_info:
            fields["traceback"] = self.formatException(record.exc_info)
        return json.dumps(fields, ensure_ascii=False)


def make_formatter(log_format: str) -> logging.Formatter:
    """Return the formatter for ``text`` or ``json``."""
    return JsonFormatter() if log_format == "json" else TextFormatter()


def configure_logging(level: str = "INFO", log_format: str = "text") -> None:
    """Send the log of this process to stderr."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(make_formatter(log_format))
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)


def logging_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add ``--log-level`` and ``--log-format`` to a command."""
    levels = click.Choice(["DEBUG", "INFO", "WARNING", "ERROR"], case_sensitive=False)
    command = click.option(
        "--log-format",
        type=click.Choice(FORMATS),
        default="text",
        show_default=True,
        envvar="SGLANG_ROLLOUT_LOG_FORMAT",
        help="Format of the log on stderr.",
    )(command)
    return click.option(
        "--log-level",
        type=levels,
        default="info",
        show_default=True,
        envvar="SGLANG_ROLLOUT_LOG_LEVEL",
        help="Lowest level that is logged.",
    )(command)


class RefusedCalls:
    """Counts refused calls by address."""

    def __init__(self) -> None:
        self._counts: Counter[str] = Counter()

    def count(self, address: str) -> bool:
        """Count a call. Returns True if it gets a line of its own."""
        key = address if address in self._counts or len(self._counts) < MAX_ADDRESSES else OTHERS
        self._counts[key] += 1
        return self._counts[key] <= MAX_REFUSED_LINES

    def take_omitted(self) -> dict[str, int]:
        """Return the number of calls without a line by address, and start again from zero."""
        omitted = {address: count - MAX_REFUSED_LINES for address, count in self._counts.items() if count > MAX_REFUSED_LINES}
        self._counts.clear()
        return omitted
