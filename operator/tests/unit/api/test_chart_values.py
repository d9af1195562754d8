"""The chart's generated files match values.yaml and the code."""

from __future__ import annotations

import importlib.util
import sys
from types import ModuleType

import jsonschema
import pytest
import yaml

from tests.support.paths import CHARTS


@pytest.fixture(scope="module")
def generate() -> ModuleType:
    spec = importlib.util.spec_from_file_location("chart_generate", CHARTS / "generate.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["chart_generate"] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def test_generated_files_are_up_to_date(generate: ModuleType) -> None:
    for path, text in generate.generated().items():
        assert path.read_text() == text, "run: python charts/generate.py"


def test_value_without_a_comment_is_refused(generate: ModuleType) -> None:
    with pytest.raises(ValueError, match=r"a\.b has no comment"):
        generate.read("a:\n  b: 1\n")


def test_schema_has_enums_and_refuses_unknown_values(generate: ModuleType) -> None:
    made = generate.schema(generate.read("# What.\n# @enum x, y\na: x\n"))
    assert made["properties"]["a"] == {"type": "string", "description": "What.", "enum": ["x", "y"]}
    assert made["additionalProperties"] is False


@pytest.mark.parametrize(
    "values",
    [
        {"podAnnotations": {"x": True}},
        {"podAnnotations": {"x": 1}},
        {"podLabels": {"x": True}},
        {"podLabels": {"x": "a b"}},
        {"serviceAccount": {"annotations": {"x": 1}}},
        {"serviceAccount": {"name": "A_b"}},
        {"nodeSelector": {"gpu": True}},
        {"tolerations": [{"key": True}]},
        {"tolerations": [{"kye": "x"}]},
        {"tolerations": [{"key": "x", "effect": "Never"}]},
        {"affinity": {"nodeAfinity": {}}},
        {"resources": {"limits": {"cpu": True}}},
        {"resources": {"limit": {"cpu": 1}}},
        {"metrics": {"port": 0}},
        {"health": {"port": 70000}},
        {"priorityClassName": "A b"},
        {"watchNamespaces": ["A"]},
        {"images": {"pullSecrets": ["A b"]}},
    ],
    ids=str,
)
def test_values_that_the_api_server_refuses_are_refused(generate: ModuleType, values: dict[str, object]) -> None:
    made = generate.schema(generate.read((CHARTS / "sglang-rollout-operator/values.yaml").read_text()))
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.Draft7Validator(made).validate(values)


def test_usual_values_are_accepted(generate: ModuleType) -> None:
    made = generate.schema(generate.read((CHARTS / "sglang-rollout-operator/values.yaml").read_text()))
    values = {
        "podAnnotations": {"x": "true", "text": "any text: it may be long"},
        "podLabels": {"app.kubernetes.io/part-of": "rl", "empty": ""},
        "nodeSelector": {"kubernetes.io/arch": "amd64"},
        "tolerations": [{"key": "x", "operator": "Exists", "effect": "NoSchedule", "tolerationSeconds": 3}],
        "affinity": {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": []}}},
        "resources": {"requests": {"cpu": 1, "memory": "1Gi"}, "limits": {"memory": "1Gi"}},
        "serviceAccount": {"name": "", "annotations": {"eks.amazonaws.com/role-arn": "arn:aws:iam::1:role/x"}},
        "priorityClassName": "system-cluster-critical",
        "watchNamespaces": ["ml"],
    }
    jsonschema.Draft7Validator(made).validate(values)
    jsonschema.Draft7Validator(made).validate(yaml.safe_load((CHARTS / "sglang-rollout-operator/values.yaml").read_text()))
