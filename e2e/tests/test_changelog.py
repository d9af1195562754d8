"""Fragments in changelog.d have names that towncrier reads, and hold one sentence."""

from __future__ import annotations

import re
import tomllib

from e2e.cluster.paths import REPOSITORY

CONFIGURATION = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["tool"]["towncrier"]
TYPES = [kind["directory"] for kind in CONFIGURATION["type"]]
FRAGMENT = re.compile(rf"(\d+|\+[a-z0-9-]+)\.({'|'.join(TYPES)})\.md")
FRAGMENTS = [path for path in (REPOSITORY / CONFIGURATION["directory"]).iterdir() if path.name != "README.md"]


def test_names_have_an_issue_or_a_plus_and_a_type() -> None:
    assert [path.name for path in FRAGMENTS if not FRAGMENT.fullmatch(path.name)] == []


def test_each_fragment_is_one_sentence_on_one_line() -> None:
    assert [path.name for path in FRAGMENTS if not re.fullmatch(r"[^\n]{1,300}\.\n", path.read_text())] == []


def test_the_readme_names_every_type() -> None:
    readme = (REPOSITORY / "changelog.d" / "README.md").read_text()
    assert [kind for kind in TYPES if f"`{kind}`" not in readme] == []
