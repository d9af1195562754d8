"""The settings of the plug-in in an environment variable."""

from __future__ import annotations

import json
from dataclasses import fields
from pathlib import Path

import pytest

from sglang_rollout.api import limits_spec
from sglang_rollout.plugin.settings import (
    RUN_VARIABLE,
    SETTINGS_VARIABLE,
    Limits,
    Settings,
    dump_settings,
    name_in_json,
    parse_settings,
    read_run,
    read_settings,
)


def test_the_limits_are_those_of_the_spec() -> None:
    spec = limits_spec.Limits().model_dump(mode="json", by_alias=True)
    assert {name_in_json(one.name): getattr(Limits(), one.name) for one in fields(Limits)} == spec


def test_written_settings_are_read() -> None:
    changed = limits_spec.Limits(samples_per_prompt=7, media_urls=limits_spec.MediaUrls.ALLOWED)
    text = dump_settings(
        reports="/run/r", limits=changed.model_dump(mode="json", by_alias=True), cache_key=False, custom_logit_processors=True
    )
    limits = Limits(samples_per_prompt=7, media_urls="Allowed")
    assert parse_settings(text) == Settings("/run/r", limits, cache_key=False, custom_logit_processors=True)
    few = changed.model_dump(mode="json", by_alias=True, exclude_defaults=True)
    assert parse_settings(dump_settings(reports="", limits=few)).limits == limits
    assert parse_settings(dump_settings(reports="")) == Settings()


def test_keys_of_a_later_release_are_ignored() -> None:
    assert parse_settings('{"reports": "/r", "later": [1], "limits": {"later": 2}}') == Settings("/r")


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        "null",
        '{"limits": 5}',
        '{"limits": {"samplesPerPrompt": "many"}}',
        '{"limits": {"samplesPerPrompt": true}}',
        '{"limits": {"samplesPerPrompt": -1}}',
        '{"cacheKey": 1}',
        '{"reports": null}',
        "[" * 100_000,
    ],
)
def test_unreadable_settings_are_the_defaults_without_reports(text: str) -> None:
    settings, problem = read_settings({SETTINGS_VARIABLE: text})
    assert settings == Settings()
    assert not settings.reports
    assert problem.startswith("The variable SGLANG_ROLLOUT_PLUGIN cannot be read: ")
    assert read_settings({}) == (Settings(), "")


@pytest.mark.parametrize("run", ["", ".", "..", "a/b", "/etc", ".hidden", "a\n", "x" * 200, "ü"])
def test_a_run_is_one_file_name(run: str) -> None:
    assert read_run({RUN_VARIABLE: run}) == ""
    assert read_run({RUN_VARIABLE: "7f3c-9.b_1"}) == "7f3c-9.b_1"


def test_settings_are_one_line() -> None:
    assert "\n" not in dump_settings(reports="/run/r")
    assert json.loads(dump_settings(reports="/run/r"))["reports"] == "/run/r"


def test_the_page_says_where_each_limit_is_enforced() -> None:
    page = (Path(__file__).parents[4] / "docs" / "how-to" / "limit-requests.md").read_text()
    rows = {line.split("`")[1] for line in page.splitlines() if line.startswith("| `") and "/test_" in line}
    assert rows == {name_in_json(one.name) for one in fields(Limits)}
