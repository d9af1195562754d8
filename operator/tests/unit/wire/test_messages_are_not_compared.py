"""Programs compare reason codes. Messages are for people, so no product code looks into a message."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import sglang_rollout
import sglang_rollout.wire.trainer
from sglang_rollout import wire

PACKAGE = Path(sglang_rollout.__file__).parent

ALLOWED = {
    "coordinator/update/process_groups.py": "SGLang answers HTTP 400 without a code when it does not know a process group",
    "kube/errors.py": "the API server gives no code when its storage fails",
}
"""Files that may look into a message, and why."""

LOOKS_INTO = {"startswith", "endswith", "removeprefix", "removesuffix", "find", "index", "partition", "match", "search", "fullmatch"}
PASSES_ON = {"str", "get", "strip", "rstrip", "lower"}
"""Calls whose result is still the message."""


def comparisons(source: str) -> list[int]:
    """Return the lines on which a message is compared, searched or taken apart."""
    found = []
    for function in _scopes(ast.parse(source)):
        names = {
            target.id
            for node in _nodes(function)
            for target, value in _assignments(node)
            if isinstance(target, ast.Name) and _is_message(value, set())
        }
        found += [node.lineno for node in _nodes(function) if _looks_into(node, names)]
    return found


def _scopes(tree: ast.Module) -> Iterator[ast.AST]:
    yield tree
    yield from (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))


def _nodes(scope: ast.AST) -> Iterator[ast.expr | ast.stmt]:
    """Yield the nodes of a scope without those of the functions in it."""
    for node in ast.iter_child_nodes(scope):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        if isinstance(node, ast.expr | ast.stmt):
            yield node
        yield from _nodes(node)


def _assignments(node: ast.AST) -> Iterator[tuple[ast.expr, ast.expr]]:
    if not isinstance(node, ast.Assign):
        return
    for target in node.targets:
        if isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple):
            yield from zip(target.elts, node.value.elts, strict=True)
        else:
            yield target, node.value


def _looks_into(node: ast.AST, names: set[str]) -> bool:
    if isinstance(node, ast.Compare):
        operands = [node.left, *node.comparators]
        if not any(isinstance(op, ast.Eq | ast.NotEq | ast.In | ast.NotIn) for op in node.ops):
            return False
        # Two messages may be compared with each other, to see whether something changed.
        return any(_is_message(operand, names) for operand in operands) and not all(_is_message(operand, names) for operand in operands)
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in LOOKS_INTO:
        return any(_is_message(operand, names) for operand in (node.func.value, *node.args))
    return False


def _is_message(node: ast.expr, names: set[str]) -> bool:
    match node:
        case ast.Attribute(attr="message"):
            return True
        case ast.Subscript(slice=ast.Constant(value="message")):
            return True
        case ast.Name(id=name):
            return name in names
        case ast.Call(func=ast.Attribute(attr="get"), args=[ast.Constant(value="message"), *_]):
            return True
        case ast.Call(func=ast.Name(id=name), args=[argument]) if name in PASSES_ON:
            return _is_message(argument, names)
        case ast.Call(func=ast.Attribute(value=value, attr=name)) if name in PASSES_ON:
            return _is_message(value, names)
        case ast.BoolOp(values=values):
            return any(_is_message(value, names) for value in values)
        case ast.IfExp(body=body, orelse=orelse):
            return _is_message(body, names) or _is_message(orelse, names)
        case _:
            return False


def test_no_product_code_looks_into_a_message() -> None:
    found = {str(path.relative_to(PACKAGE)): comparisons(path.read_text()) for path in PACKAGE.rglob("*.py")}
    surprising = {path: lines for path, lines in found.items() if lines and path not in ALLOWED}
    assert not surprising, f"compare the reason code instead: {surprising}"


def test_a_field_named_reason_is_a_code() -> None:
    for module in (wire.agent, wire.record, wire.trainer):
        messages = [each for each in vars(module).values() if isinstance(each, type) and issubclass(each, wire.Message)]
        assert [each for each in messages if "reason" in each.model_fields and each.model_fields["reason"].annotation is str] == []


def test_every_exception_is_still_needed() -> None:
    assert [path for path in ALLOWED if not (PACKAGE / path).exists() or not comparisons((PACKAGE / path).read_text())] == []


@pytest.mark.parametrize(
    "code",
    [
        'row.message == "A weight update is in progress."',
        'row.message.startswith("The engine")',
        '"quota" in condition["message"]',
        'status.get("message", "") != ""',
        "def f(row):\n    name, said = row.name, row.message\n    return said == name",
        'def f(row):\n    said = str(row.message)\n    return "is not up" in said',
        'def f(row):\n    said = row.message if row else ""\n    return said.endswith("x")',
        're.search("x", answer.message)',
    ],
)
def test_a_comparison_is_found(code: str) -> None:
    assert comparisons(code)


@pytest.mark.parametrize(
    "code",
    ["row.reason is GateReason.DIRTY", "old.message != new.message", "refused is None", 'f"{row.message} Try again."', "row.message[:200]"],
)
def test_other_uses_of_messages_are_allowed(code: str) -> None:
    assert not comparisons(code)
