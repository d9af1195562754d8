"""Code blocks of the pages, and what runs each of them. docs/develop/documentation.md lists the words of a fence.

Reads pages only. Blocks are run by operator/tests/contract/fleet/test_pages.py (SHELL, SERVER, PYTHON), e2e/cases/test_docs.py (CLUSTER)
and operator/tests/integration/test_crd.py (YAML).
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path

from e2e.cluster.paths import REPOSITORY


class Runner(StrEnum):
    """Where a block runs."""

    SHELL = "shell"
    """On this machine, beside a fleet of stand-in engines."""
    SERVER = "server"
    """On this machine: commands that run until they are stopped."""
    PYTHON = "python"
    """On this machine, against a fleet of stand-in engines."""
    CLUSTER = "cluster"
    """Against the fleet of the end-to-end cases."""
    YAML = "yaml"
    """Applied to an API server."""


NOT_RUN = {
    "minutes": "runs for minutes or longer; continuous integration runs the same make targets",
    "install": "downloads or installs software",
    "own-cluster": "creates a cluster, or removes what other cases use",
    "gpus": "needs GPUs and the reader's registry",
    "other-software": "needs software of another project",
    "other-fleet": "shows the output of another fleet than the tests have",
}
"""Values of ``skip=``: why no test runs a block, or compares an output."""
_IMPLIED = {"python": Runner.PYTHON, "yaml": Runner.YAML}
_NO_COMMANDS = frozenset({"text"})
_FENCE = re.compile(r"^(?P<indent> *)```(?P<info>[^\n`]*)\n(?P<text>.*?)^(?P=indent)```$", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True)
class Block:
    """A fenced block of a page."""

    page: str
    """Path in the repository."""
    line: int
    language: str
    text: str
    words: dict[str, str] = field(default_factory=dict)
    """Words after the language: ``test``, ``skip``, ``covered``."""
    output: str | None = None
    """The ``text`` block that follows directly, unless it has a word."""

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"

    @property
    def runner(self) -> Runner | None:
        """What runs the block; None if no test runs it.

        Raises:
            ValueError: The fence does not say what runs the block.
        """
        match list(self.words.items()):
            case [] if self.language in _IMPLIED:
                return _IMPLIED[self.language]
            case [] if self.language in _NO_COMMANDS:
                return None
            case [("test", value)] if self.language == "sh" and value in {Runner.SHELL, Runner.SERVER, Runner.CLUSTER}:
                return Runner(value)
            case [("skip", value)] if value in NOT_RUN:
                return None
            case [("covered", value)] if "::" in value:
                return None
        raise ValueError(f"{self}: the fence does not say what runs the block; see docs/develop/documentation.md")


def pages() -> list[Path]:
    """Return the pages whose blocks are run."""
    written = (page for page in (REPOSITORY / "docs").rglob("*.md") if not {"_generated", "_build"} & set(page.parts))
    return [REPOSITORY / "README.md", REPOSITORY / "CONTRIBUTING.md", *sorted(written)]


def read_blocks() -> list[Block]:
    """Return all blocks of all pages."""
    return [block for page in pages() for block in parse_blocks(page.read_text(), str(page.relative_to(REPOSITORY)))]


def blocks_for(runner: Runner) -> list[Block]:
    """Return the blocks that a runner runs."""
    return [block for block in read_blocks() if block.runner is runner]


def parse_blocks(text: str, page: str) -> Iterator[Block]:
    """Yield the blocks of a page, without the directives of Sphinx, whose information begins with a brace."""
    fences = [fence for fence in _FENCE.finditer(text) if not fence["info"].startswith("{")]
    for fence, following in itertools.zip_longest(fences, fences[1:]):
        language, *words = fence["info"].split() or [""]
        is_answered = following and following["info"] == "text" and not text[fence.end() : following.start()].strip()
        yield Block(
            page=page,
            line=text.count("\n", 0, fence.start()) + 1,
            language=language,
            text=_read_text(fence),
            words={name: value for name, _, value in (word.partition("=") for word in words)},
            output=_read_text(following) if is_answered else None,
        )


def _read_text(fence: re.Match[str]) -> str:
    """Return what is between the lines of a fence, without the fence's indent."""
    return re.sub(rf"^{fence['indent']}", "", fence["text"], flags=re.MULTILINE)


_WILD = re.compile(r"(?P<any>\.\.\.|…)|(?P<temporary>/tmp/[\w.-]+)|(?P<duration>(?:\d+[dhms])+\b)|(?P<number>\d+)|(?P<space>\s+)")
_PATTERNS = {"any": ".*?", "temporary": r"/tmp/[\w.-]+", "duration": r"(?:\d+[dhms])+", "number": r"\d+", "space": r"\s+"}


def is_like(output: str, shown: str) -> bool:
    """Return whether an output is what a page shows, apart from numbers, durations, white space, names in /tmp, and ``...``."""
    pattern, at = "", 0
    shown = shown.strip()
    for wild in _WILD.finditer(shown):
        pattern += re.escape(shown[at : wild.start()]) + _PATTERNS[wild.lastgroup or ""]
        at = wild.end()
    return re.fullmatch(pattern + re.escape(shown[at:]), output.strip(), re.DOTALL) is not None


SHELL_RULES = """
set -euo pipefail
trap 'kill $(jobs -p) 2> /dev/null || true' EXIT
curl() { command curl --fail-with-body --retry 20 --retry-delay 1 --retry-connrefused "$@"; }
"""
"""Begin of each script: an HTTP error is an error, a command may listen a moment after it started, and background jobs end."""
