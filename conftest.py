"""Rules of every test run: how workers share the tests, and which skips are allowed."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

SHARED_PARTS = {
    "urls": "fleet of two SGLang servers",
    "sglang_pair": "two SGLang servers",
    "sglang_server": "SGLang server",
    "either_server": "SGLang server",
}
"""Fixtures that take half a minute to start. All tests that use one run on one worker, so that it starts once."""
SPREAD = ("operator/tests/unit/", "operator/tests/golden/", "operator/tests/properties/", "e2e/tests/")
"""Folders of tests that start nothing expensive. Any worker takes the next one."""

ALLOWED_SKIPS = {
    "this machine has no IPv6": "containers and some CI machines have none; the same tests run on IPv4",
    "no network namespaces here": "containers without the right to create them; other tests check the options of the sockets",
    "only the lab's can be": "needs the processes of the lab's containers, which CLUSTER=current does not give",
    "only on the lab can a pod's network be cut": "needs the lab's network namespaces, which CLUSTER=current does not give",
    "only on the lab may every node be tainted": "CLUSTER=current may run other people's pods",
}
"""Beginnings or parts of a skip's reason, each with why the skip is no loss. `--strict-skips` fails on any other."""


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the option that `make test` uses."""
    parser.addoption("--strict-skips", action="store_true", help="fail if a test is skipped for a reason that conftest.py does not list")


@pytest.hookimpl(tryfirst=True)  # before xdist reads the marks
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put tests that share a started part into one group; other tests that start processes are grouped by file."""
    for item in items:
        if not item.nodeid.startswith(SPREAD):
            names = getattr(item, "fixturenames", ())
            group = next((part for fixture, part in SHARED_PARTS.items() if fixture in names), item.nodeid.split("::")[0])
            item.add_marker(pytest.mark.xdist_group(group))


@pytest.hookimpl(optionalhook=True)  # a hook of xdist
def pytest_xdist_auto_num_workers() -> int:
    """Return the number of workers of `-n auto`: three for two cores, because many tests wait for processes and timers."""
    return max(1, (os.cpu_count() or 1) * 3 // 2)


def is_allowed(reason: str) -> bool:
    """Return whether a skip with this reason is on the list."""
    return any(part in reason for part in ALLOWED_SKIPS)


def _unlisted(reporter: pytest.TerminalReporter) -> Iterator[tuple[str, str]]:
    for report in reporter.stats.get("skipped", []):
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
        if not is_allowed(reason):
            yield report.nodeid, reason


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Name the skips that are not on the list."""
    if terminalreporter.config.getoption("--strict-skips"):
        for name, reason in _unlisted(terminalreporter):
            terminalreporter.write_line(f"NOT ALLOWED: {name} was skipped, and conftest.py does not list why: {reason}", red=True)


@pytest.hookimpl(tryfirst=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    """Fail a run with a skip that is not on the list."""
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    if session.config.getoption("--strict-skips") and reporter is not None and any(_unlisted(reporter)):
        session.exitstatus = pytest.ExitCode.TESTS_FAILED
