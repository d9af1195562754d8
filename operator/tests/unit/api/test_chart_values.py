"""The chart's generated files match values.yaml and the code."""

from __future__ import annotations

import importlib.util
import sys
from types import ModuleType

import pytest

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
