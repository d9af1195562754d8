"""The CRD matches the models, is complete, and has a structural schema."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner

from sglang_rollout.api import crdgen
from sglang_rollout.api.crdgen import structural
from sglang_rollout.api.status import ConditionType, Finding, Reason, conditions
from sglang_rollout.api.v1alpha1 import SGLangRollout
from tests.support.paths import REPOSITORY

ROOT = REPOSITORY


@pytest.mark.parametrize("path", crdgen.generated(), ids=str)
def test_generated_files_are_up_to_date(path: Path) -> None:
    assert (ROOT / path).read_text() == crdgen.generated()[path], "run: python -m sglang_rollout.api.crdgen"


def test_check_names_stale_files_and_the_command(tmp_path: Path) -> None:
    stale = CliRunner().invoke(crdgen.main, ["--check", "--root", str(tmp_path)])
    assert stale.exit_code == 1
    assert "Run: python -m sglang_rollout.api.crdgen" in stale.output
    assert CliRunner().invoke(crdgen.main, ["--root", str(tmp_path)]).exit_code == 0
    assert CliRunner().invoke(crdgen.main, ["--check", "--root", str(tmp_path)]).exit_code == 0


def test_command_prints_the_definition() -> None:
    assert yaml.safe_load(CliRunner().invoke(crdgen.command).output) == crdgen.crd()


def walk(node: dict[str, Any], path: str) -> Iterator[tuple[str, dict[str, Any]]]:
    yield path, node
    for name, child in node.get("properties", {}).items():
        yield from walk(child, f"{path}.{name}")
    for key in ("items", "additionalProperties"):
        if isinstance(node.get(key), dict):
            yield from walk(node[key], f"{path}[]")


NODES = dict(walk(crdgen.schema(), ""))


@pytest.mark.parametrize("path", [path for path in NODES if path and path != ".metadata" and not path.endswith("[]")])
def test_every_field_has_a_description(path: str) -> None:
    assert NODES[path].get("description")


@pytest.mark.parametrize("path", [path for path, node in NODES.items() if node.get("type") == "array"])
def test_every_list_has_a_limit(path: str) -> None:
    assert NODES[path]["maxItems"], "the API server must be able to bound the cost of rules"


def test_definition_is_small() -> None:
    stored = json.dumps(crdgen.crd(), separators=(",", ":"))
    assert len(stored) < 180_000, "kubectl apply keeps a copy in an annotation of at most 256 kB"


def test_union_is_refused() -> None:
    with pytest.raises(ValueError, match="union"):
        structural({"properties": {"x": {"anyOf": [{"type": "string"}, {"type": "boolean"}]}}})


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ({"type": "object", "additionalProperties": True}, {"type": "object", "x-kubernetes-preserve-unknown-fields": True}),
        ({"anyOf": [{"type": "string"}, {"type": "null"}], "default": None}, {"type": "string"}),
    ],
)
def test_conversion_to_a_structural_schema(before: dict[str, Any], after: dict[str, Any]) -> None:
    assert structural({"type": "object", "properties": {"x": before}})["properties"]["x"] == after


@pytest.mark.parametrize("path", sorted((ROOT / "examples").glob("rollout*.yaml")), ids=lambda path: path.stem)
def test_examples_are_valid(path: Path) -> None:
    assert SGLangRollout.model_validate(yaml.safe_load(path.read_text())).spec.replicas > 0


def test_condition_keeps_its_time_while_its_status_does_not_change() -> None:
    finding = Finding(ConditionType.READY, "True", Reason.ALL_SERVING, "m")
    first = conditions([finding], [], generation=1, now="t1")
    second = conditions([finding], [one.model_dump(by_alias=True) for one in first], generation=2, now="t2")
    assert (second[0].last_transition_time, second[0].observed_generation) == ("t1", 2)
    changed = Finding(ConditionType.READY, "False", Reason.UPDATING, "m")
    third = conditions([changed], [one.model_dump(by_alias=True) for one in second], generation=2, now="t3")
    assert third[0].last_transition_time == "t3"
