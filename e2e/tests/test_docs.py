"""Pages name only existing make targets, files, and headings."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

import pytest

from e2e.cases.security.attacks import ATTACKS, CONTROL_CALLS, Source
from e2e.cluster.paths import REPOSITORY
from sglang_rollout.batches.routes import routes as data_routes
from sglang_rollout.coordinator.http.control import routes as control_routes
from sglang_rollout.coordinator.http.info import routes as info_routes
from sglang_rollout.wire.access import POD_PATHS, PathKind, kind_of_path
from sglang_rollout.wire.ports import FLEET_CALLER, FLEET_ENGINES, FLEET_SERVING

PAGES = sorted(
    page
    for pattern in ("*.md", "docs/**/*.md", "charts/**/*.md", "examples/**/*.md", "images/**/*.md")
    for page in REPOSITORY.glob(pattern)
    if not page.is_relative_to(REPOSITORY / "docs/_generated")
)
TEST_FOLDERS = (REPOSITORY, REPOSITORY / "operator/tests")
MAKEFILE = (REPOSITORY / "Makefile").read_text()
TARGETS = set(re.findall(r"^([a-z][a-z-]*):", MAKEFILE, re.MULTILINE))


def anchors(page: Path) -> set[str]:
    """Return the anchors of a page's headings, as GitHub builds them."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^a-z0-9 _-]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(REPOSITORY)))
def test_links_have_targets(page: Path) -> None:
    broken = []
    for link in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        if not link.startswith("http") and (not target.exists() or (anchor and anchor not in anchors(target))):
            broken.append(link)
    assert broken == []


def test_code_that_pages_name_exists() -> None:
    """A path needs no leading folders. A name without a folder is checked only if it names a test."""
    code = [str(file.relative_to(REPOSITORY)) for folder in ("operator", "e2e", "bench", "charts", "docs", "examples", "images") for file in
            (REPOSITORY / folder).rglob("*.py")]  # fmt: skip
    named = {
        name for page in PAGES for name in re.findall(r"`([\w./-]+\.py)`", page.read_text()) if "/" in name or name.startswith("test_")
    }
    assert {name for name in named if not any(f"/{path}".endswith(f"/{name}") for path in code)} == set()


def test_tests_that_pages_name_exist() -> None:
    """A path begins at the repository or at ``operator/tests``."""
    named = {match for page in PAGES for match in re.findall(r"`([\w./-]+\.py)::(\w+)`", page.read_text())}
    absent = {f"{path}::{name}" for path, name in named if not any(name in functions(folder / path) for folder in TEST_FOLDERS)}
    assert absent == set()


def functions(path: Path) -> set[str]:
    """Return the names of the functions of a file; an absent file has none."""
    return set(re.findall(r"^(?:async )?def (\w+)", path.read_text(), re.MULTILINE)) if path.exists() else set()


def test_every_finding_is_fixed_with_a_test_or_documented() -> None:
    page = (REPOSITORY / "docs/operations/security-findings.md").read_text()
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in page.splitlines() if re.match(r"\| S\d+ ", line)]
    findings = [row for row in rows if row[2].startswith("fixed") or row[2] == "documented"]
    assert [row[0] for row in findings] == [f"S{number}" for number in range(1, 28)]
    assert [row[0] for row in findings if row[2].startswith("fixed") and "::test_" not in row[3]] == []
    reasons = {row[0] for row in rows if row not in findings}
    assert {row[0] for row in findings if "(#documented)" in row[3]} == reasons


def test_make_targets_that_pages_name_exist() -> None:
    named = {word for page in PAGES for word in re.findall(r"(?:`|^|CLUSTER=\w+ )make ([a-z][a-z-]+)", page.read_text(), re.MULTILINE)}
    assert {"demo", "test", "images", "golden"} <= named
    assert named - TARGETS == set()
    phony = {word for line in re.findall(r"^\.PHONY: (.*)$", MAKEFILE, re.MULTILINE) for word in line.split()}
    assert phony == TARGETS


def test_generated_tables_explain_every_row() -> None:
    pages = runpy.run_path(str(REPOSITORY / "docs/generate.py"))["PAGES"]
    texts = {name: page() for name, page in pages.items()}
    unexplained = {name: [line for line in text.splitlines() if line.endswith("|  |")] for name, text in texts.items()}
    assert {name: lines for name, lines in unexplained.items() if lines} == {}
    assert [name for name, text in texts.items() if "\\b" in text or not text] == []


def test_page_of_the_http_api_names_every_route() -> None:
    page = (REPOSITORY / "docs/reference/http-api.md").read_text()
    paths = {route.path.partition("{")[0].rstrip("/") for route in (*control_routes, *info_routes, *data_routes)}
    internal = {FLEET_CALLER, FLEET_SERVING, FLEET_ENGINES}  # calls of the batch server and the agents
    assert {path for path in paths if not re.search(f"[` ]{re.escape(path)}[`/]", page)} == internal


def test_committed_diagrams_are_those_that_the_program_draws() -> None:
    drawn = runpy.run_path(str(REPOSITORY / "docs/diagrams/draw.py"))["drawn"]
    assert [path.name for path, content in drawn() if path.read_text() != content] == []


def test_table_of_attacks_has_a_row_for_each_attack_of_the_cases() -> None:
    table = runpy.run_path(str(REPOSITORY / "docs/generate.py"))["PAGES"]["attacks.md"]()
    assert "{include} ../_generated/attacks.md" in (REPOSITORY / "docs/operations/security.md").read_text()
    assert len({attack.name for attack in ATTACKS}) == len(ATTACKS) == len(table.splitlines()) - 2
    assert {attack.source for attack in ATTACKS} == set(Source), "each source is tried"
    assert all(f"| {attack.source} | {attack.tried} |" in table for attack in ATTACKS)


def test_attacks_try_each_control_path() -> None:
    routes = {(route.method, route.path.partition("{")[0]) for route in (*control_routes, *info_routes) if is_control(route.path)}
    assert {
        (method, path) for method, path in routes if not any(each[0] == method and each[1].startswith(path) for each in CONTROL_CALLS)
    } == set()


def is_control(path: str) -> bool:
    """Return whether only trainers may call a path."""
    return kind_of_path(path) is PathKind.CONTROL and path not in POD_PATHS
