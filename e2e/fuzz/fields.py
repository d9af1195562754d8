"""Fields of SGLang's request bodies, read from its source without importing it. A new release of SGLang adds its fields by itself."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Any

from sglang_rollout.sglang.api import CHAT_COMPLETIONS, COMPLETIONS, GENERATE

_BODIES, _OPENAI = "managers/io_struct.py", "entrypoints/openai/protocol.py"
CLASSES = {
    GENERATE: (_BODIES, "GenerateReqInput"),
    CHAT_COMPLETIONS: (_OPENAI, "ChatCompletionRequest"),
    COMPLETIONS: (_OPENAI, "CompletionRequest"),
    "/classify": (_BODIES, "EmbeddingReqInput"),
    "/encode": (_BODIES, "EmbeddingReqInput"),
    "/v1/classify": (_OPENAI, "ClassifyRequest"),
    "/v1/embeddings": (_OPENAI, "EmbeddingRequest"),
    "/v1/rerank": (_OPENAI, "V1RerankReqInput"),
    "/v1/score": (_OPENAI, "ScoringRequest"),
    "/tokenize": (_OPENAI, "TokenizeRequest"),
    "/detokenize": (_OPENAI, "DetokenizeRequest"),
}
"""Source file and class of the body of each path. ``/v1/tokenize`` and ``/v1/detokenize`` have the bodies of the shorter paths."""
_SAMPLING = ("sampling/sampling_params.py", "SamplingParams")


def sglang_source(python: Path) -> Path:
    """Return the folder ``sglang/srt`` of an environment, whose interpreter is given."""
    return next(python.parents[1].glob("lib/python3*/site-packages/sglang/srt"))


def body_fields(source: Path) -> dict[str, list[str]]:
    """Return the fields of the body of each path; fields of the sampling parameters as ``sampling_params.<name>``."""
    sampling = [f"sampling_params.{name}" for name in _class_fields(source, *_SAMPLING)]
    fields = {path: _class_fields(source, *place) for path, place in CLASSES.items()}
    return {path: names + sampling if "sampling_params" in names else names for path, names in fields.items()}


def field_defaults(source: Path) -> dict[str, Any]:
    """Return the default of each field of ``/generate``, with names as :func:`body_fields` has them. Only literals: no default is None."""
    found = _class_defaults(source, *CLASSES[GENERATE])
    return found | {f"sampling_params.{name}": value for name, value in _class_defaults(source, *_SAMPLING).items()}


def _class_defaults(source: Path, file: str, name: str) -> dict[str, Any]:
    node = next(node for node in ast.parse((source / file).read_text()).body if isinstance(node, ast.ClassDef) and node.name == name)
    values = {part.target.id: part.value for part in node.body if isinstance(part, ast.AnnAssign) and isinstance(part.target, ast.Name)}
    return {name: value.value if isinstance(value, ast.Constant) else None for name, value in values.items()}


def _class_fields(source: Path, file: str, name: str) -> list[str]:
    """Return the annotated fields of a class and of its bases in the same file."""
    classes = {node.name: node for node in ast.parse((source / file).read_text()).body if isinstance(node, ast.ClassDef)}

    def fields(name: str) -> list[str]:
        node = classes[name]
        inherited = [field for base in node.bases if isinstance(base, ast.Name) and base.id in classes for field in fields(base.id)]
        return inherited + [part.target.id for part in node.body if isinstance(part, ast.AnnAssign) and isinstance(part.target, ast.Name)]

    return fields(name)
