"""The commands that read files refuse what the API server refuses, and nothing else."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import yaml

from sglang_rollout.api.validation import find_problems
from tests.integration.test_crd import ACCEPTED, HERE
from tests.support.paths import GOLDEN_INPUTS, REPOSITORY
from tests.unit.controller.support.worlds import cr

INVALID = sorted((HERE / "invalid").glob("*.yaml"))
"""Objects that a real API server refuses, with the message that ``integration/test_crd.py`` compares."""
VALID = sorted([*GOLDEN_INPUTS.glob("*.yaml"), *(REPOSITORY / "examples").glob("rollout*.yaml")])


@pytest.mark.parametrize("path", INVALID, ids=lambda path: path.stem)
def test_what_the_api_server_refuses_is_refused_and_names_a_field(path: Any) -> None:
    problems = find_problems(yaml.safe_load(path.read_text()))
    assert problems, "the API server refuses it"
    assert all(problem.partition(": ")[0] for problem in problems)
    expected = path.read_text().splitlines()[0].removeprefix("# expect: ")
    if "Invalid value" not in expected and expected.endswith((".", ":")):
        assert any(expected in problem for problem in problems), problems


@pytest.mark.parametrize("path", VALID, ids=lambda path: path.stem)
def test_what_the_api_server_accepts_is_accepted(path: Any) -> None:
    for document in yaml.safe_load_all(path.read_text()):
        if document["kind"] == "SGLangRollout":
            assert find_problems(document) == []


@pytest.mark.parametrize("what", ACCEPTED)
def test_valid_edge_cases_are_accepted(what: str) -> None:
    spec = ACCEPTED[what]
    rollout = {**cr(), "spec": {"model": {"path": "m"}, **spec, "engine": {"image": "i", **spec.get("engine", {})}}}
    assert find_problems(rollout) == []


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"spec": {"replica": 3}}, "spec.replica: unknown field"),
        ({"spec": {"engine": {"parallelism": {"tensr": 2}}}}, "spec.engine.parallelism.tensr: unknown field"),
        ({"metadata": {"label": {}}}, "metadata.label: unknown field"),
        ({"metadata": {"labels": {"a": True}}}, "metadata.labels.a: must be a string; write it in quotes"),
        ({"apiVersion": "rollout.sglang.io/v1"}, 'apiVersion: must be rollout.sglang.io/v1alpha1, and is "rollout.sglang.io/v1"'),
        ({"spec": {"replicas": "3"}}, "spec.replicas: '3' is not of type 'integer'"),
        ({"metadata": {"namespace": "A_b"}}, 'metadata.namespace: "A_b" is no name of a namespace'),
    ],
)
def test_typing_errors_name_their_field(change: dict[str, Any], problem: str) -> None:
    assert find_problems(merged(cr(), change)) == [problem]


@pytest.mark.parametrize(
    ("part", "args", "problem"),
    [
        ("engine", ["--dtype", "auto", "--new-flag=7"], "engine.args has --new-flag, a flag of no family that this release knows"),
        ("router", ["--tenant-header", "a"], "router.args has --tenant-header, a flag of the family 'credentials of smg'"),
        ("engine", ["--tool-server=a", "--kv-events-config"], "engine.args has --tool-server, a flag of the family 'code from requests'"),
        ("engine", ["--new\nflag"], "engine.args has a flag of no family that this release knows"),
    ],
)
def test_the_refused_flag_is_named(part: str, args: list[str], problem: str) -> None:
    rollout = cr()
    rollout["spec"].setdefault(part, {})["args"] = args
    assert any(found.startswith(f"spec.{part}.args: {problem}") for found in find_problems(rollout)), find_problems(rollout)


def test_rules_about_changes_need_the_stored_object() -> None:
    stored = cr(mode="Standalone")
    changed = merged(stored, {"spec": {"mode": "Colocated"}})
    alone = find_problems(changed)
    assert [problem for problem in find_problems(changed, stored) if problem not in alone], "spec.mode cannot change"


def test_the_argument_is_not_changed() -> None:
    rollout = cr(status={"ready": "2/2"})
    before = copy.deepcopy(rollout)
    assert find_problems(rollout) == []
    assert rollout == before


def merged(base: dict[str, Any], change: dict[str, Any]) -> dict[str, Any]:
    return {
        **base,
        **{
            key: merged(base.get(key, {}), value) if isinstance(value, dict) and isinstance(base.get(key, {}), dict) else value
            for key, value in change.items()
        },
    }
