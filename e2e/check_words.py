"""Refuse words that this project does not use, in code, tests and pages. `make lint` runs it.

`docs/concepts/glossary.md` has the words to use instead.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[1]
ADVICE = {
    r"anew": "again; recreate",
    r"for ever": "forever, or a number",
    r"counts? no more": "is ignored",
    r"told(?:_at|_by)?": "receives, reports; a sequence number",
    r"brought": "loaded, sent",
    r"(?:own|in its|in their|in \w+'s) words": "quoting the API server",
    r"at night": "operations",
    r"(?:goes|go|went|going|gone) on": "continues",
    r"lets? go": "releases",
    r"as ever": "as before",
    r"nobody|somebody|everybody|whoever": "name the process or the person",
    r"without a word": "silently",
    r"says so": "name the field or the message",
    r"for good": "forever, permanently",
    r"soiled": "dirty",
    r"lull(?:ed|s)?": "pause",
    r"wish(?:es|ed)?": "desired state",
    r"lent|lends?|lending": "release, restore",
    r"life|incarnations?": "boot ID; lifetime",
    r"burn(?:ed|t|s)?": "reserve",
    r"shut out": "fence",
    r"hearsay": "report",
}
"""What to write instead, by a pattern of whole words in any case. Underscores separate words, so names in code are checked, too."""
SUFFIXES = frozenset({".py", ".md", ".yaml", ".yml", ".toml", ".sh", ".j2", ".lua", ".tpl"})
IGNORED = (
    "e2e/check_words.py",
    "e2e/tests/test_check_words.py",
    "operator/tests/golden/out/",
    "bench/results/",
    "images/engine-cpu/stand-ins/",
)
"""The list itself and its test, and files that are generated from other checked files or that are SGLang's."""

_WORDS = re.compile("|".join(f"(?<![A-Za-z])(?:{pattern})(?![A-Za-z])" for pattern in ADVICE), re.IGNORECASE)


def find_words(text: str) -> list[tuple[int, str]]:
    """Return line number and word of each finding in a text."""
    return [(number, found[0]) for number, line in enumerate(text.splitlines(), 1) for found in _WORDS.finditer(line)]


def advice_for(word: str) -> str:
    """Return what to write instead of a word."""
    return next(advice for pattern, advice in ADVICE.items() if re.fullmatch(pattern, word, re.IGNORECASE))


def checked_files() -> list[str]:
    """Return the paths of all files to check, relative to the repository."""
    listed = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard"], cwd=REPOSITORY, capture_output=True, text=True, check=True
    ).stdout.splitlines()
    files = (name for name in listed if (REPOSITORY / name).is_file())
    return [name for name in files if (Path(name).suffix in SUFFIXES or name == "Makefile") and not name.startswith(IGNORED)]


def main() -> int:
    """Print each finding, and return 1 if there is one."""
    findings = {name: find_words((REPOSITORY / name).read_text()) for name in checked_files()}
    for name, found in findings.items():
        for number, word in found:
            print(f"{name}:{number}: {word!r}: write: {advice_for(word)}")
    return 1 if any(findings.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
