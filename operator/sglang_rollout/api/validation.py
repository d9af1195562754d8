"""Check an SGLangRollout as the API server does: schema, unknown fields, and the rules in CEL. Pure.

For commands that read files. The libraries of the extra ``preview`` evaluate the schema and the rules of the generated
CustomResourceDefinition, so that no second list of rules exists.
"""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from typing import Any, cast

import cel
import jsonschema

from sglang_rollout.api.crdgen import schema
from sglang_rollout.api.schema import PRESERVE
from sglang_rollout.api.v1alpha1 import API_VERSION, KIND

Schema = Mapping[str, Any]

_INT_OR_STRING = "x-kubernetes-int-or-string"
_RULES = "x-kubernetes-validations"
_METADATA = frozenset(
    {
        *("name", "generateName", "namespace", "labels", "annotations", "finalizers", "ownerReferences"),
        *("uid", "resourceVersion", "generation", "creationTimestamp", "deletionTimestamp", "deletionGracePeriodSeconds"),
        *("managedFields", "selfLink"),
    }
)
"""Fields of Kubernetes' ObjectMeta, which the schema of a CustomResourceDefinition leaves out."""
_NAMESPACE = re.compile(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?")


def find_problems(rollout: Mapping[str, Any], stored: Mapping[str, Any] | None = None) -> list[str]:
    """Return why the API server would refuse a rollout: ``field: reason``, one for each problem. Its status is ignored.

    Args:
        rollout: The object as a user writes it.
        stored: The object in the cluster, for rules about changes; None if there is none.
    """
    root = _read_schema()
    written, before = (_drop_nulls(_without_status(obj), root) for obj in (rollout, stored or {}))
    problems = [*_check_identity(written), *_check_structure(written, root)]
    if problems:
        return problems
    _set_defaults(written, root)
    _set_defaults(before, root)
    return [*_find_duplicates(written, root, ""), *_check_rules(written, root, "", before if stored else None)]


@cache
def _read_schema() -> Schema:
    root = schema()
    del root["properties"]["status"]
    return root


def _without_status(rollout: Mapping[str, Any]) -> dict[str, Any]:
    return copy.deepcopy({key: value for key, value in rollout.items() if key != "status"})


def _check_identity(rollout: Mapping[str, Any]) -> Iterator[str]:
    for key, wanted in (("apiVersion", API_VERSION), ("kind", KIND)):
        if rollout.get(key) != wanted:
            yield f"{key}: must be {wanted}, and is {json.dumps(rollout.get(key))}"
    metadata = rollout.get("metadata") or {}
    yield from (f"metadata.{name}: unknown field" for name in metadata if name not in _METADATA)
    namespace = metadata.get("namespace", "default")
    if not isinstance(namespace, str) or not _NAMESPACE.fullmatch(namespace):
        yield f"metadata.namespace: {json.dumps(namespace)} is no name of a namespace"
    for field in ("labels", "annotations"):
        for key, value in (metadata.get(field) or {}).items():
            if not isinstance(value, str):
                yield f"metadata.{field}.{key}: must be a string; write it in quotes"


def _check_structure(rollout: Mapping[str, Any], root: Schema) -> list[str]:
    # The numbers of exclusiveMinimum and exclusiveMaximum are booleans in CRDs, as in draft 4.
    validator = jsonschema.Draft4Validator(_to_json_schema(root))
    found = sorted(validator.iter_errors(rollout), key=lambda error: [str(part) for part in error.absolute_path])
    return [_describe(error) for error in found]


def _to_json_schema(node: Schema) -> dict[str, Any]:
    """Return a structural schema as JSON Schema, which refuses unknown fields as ``kubectl`` does."""
    if node.get(_INT_OR_STRING):
        return {**node, "type": ["integer", "string"]}
    converted = dict(node)
    if "properties" in node:
        converted["properties"] = {name: _to_json_schema(child) for name, child in node["properties"].items()}
        converted["additionalProperties"] = bool(node.get(PRESERVE))
    elif isinstance(node.get("additionalProperties"), Mapping):
        converted["additionalProperties"] = _to_json_schema(node["additionalProperties"])
    if "items" in node:
        converted["items"] = _to_json_schema(node["items"])
    return converted


def _describe(error: jsonschema.ValidationError) -> str:
    path = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in error.absolute_path).lstrip(".")
    if error.validator == "additionalProperties" and error.validator_value is False:
        known = (error.schema.get("properties") or {}) if isinstance(error.schema, dict) else {}
        unknown = ", ".join(f"{path}.{name}".lstrip(".") for name in cast(dict[str, Any], error.instance) if name not in known)
        return f"{unknown}: unknown field"
    if error.validator == "required":
        missing = [name for name in cast(list[str], error.validator_value) if name not in cast(dict[str, Any], error.instance)]
        return "; ".join(f"{path}.{name}".lstrip(".") + ": required" for name in missing)
    return f"{path}: {error.message}"


def _drop_nulls(value: Any, node: Schema) -> Any:
    """Return the value without fields that are null and may not be, which the API server drops."""
    if isinstance(value, dict):
        fields = ((name, child, _child(node, name)) for name, child in value.items())
        return {name: _drop_nulls(child, below) for name, child, below in fields if child is not None or not below or below.get("nullable")}
    return [_drop_nulls(child, node.get("items") or {}) for child in value] if isinstance(value, list) else value


def _child(node: Schema, name: str) -> Schema:
    """Return the schema of a field; empty if the field may hold anything."""
    found = (node.get("properties") or {}).get(name, node.get("additionalProperties"))
    return found if isinstance(found, Mapping) else {}


def _set_defaults(value: Any, node: Schema) -> None:
    if isinstance(value, dict):
        for name, child in (node.get("properties") or {}).items():
            if value.get(name) is None and "default" in child:
                value[name] = copy.deepcopy(child["default"])
        for name, child in value.items():
            _set_defaults(child, _child(node, name))
    elif isinstance(value, list):
        for child in value:
            _set_defaults(child, node.get("items") or {})


def _find_duplicates(value: Any, node: Schema, path: str) -> Iterator[str]:
    for step, child, below in _walk(value, node):
        yield from _find_duplicates(child, below, f"{path}{step}")
    if isinstance(value, list) and node.get("x-kubernetes-list-type") in {"map", "set"}:
        keys = node.get("x-kubernetes-list-map-keys")
        identities = [json.dumps([item.get(key) for key in keys] if keys else item) for item in value]
        for index, identity in enumerate(identities):
            if identity in identities[:index]:
                yield f"{path.lstrip('.')}[{index}]: duplicate of an earlier item"


def _check_rules(value: Any, node: Schema, path: str, old: Any) -> Iterator[str]:
    """Yield the violated rules of a value and below it. ``old`` is the stored value; None if there is none."""
    for rule in node.get(_RULES) or ():
        if "oldSelf" in rule["rule"] and old is None:
            continue
        if not _holds(rule["rule"], value, old):
            yield f"{(path + rule.get('fieldPath', '')).lstrip('.') or 'spec'}: {_read_message(rule, value, old)}"
    for step, child, below in _walk(value, node):
        before = old.get(step.removeprefix(".")) if isinstance(old, dict) else None
        yield from _check_rules(child, below, f"{path}{step}", before)


def _holds(rule: str, value: Any, old: Any) -> bool:
    return bool(_evaluate(rule, value, old))


def _read_message(rule: Mapping[str, str], value: Any, old: Any) -> str:
    """Return the message of a violated rule, as the API server shows it."""
    expression = rule.get("messageExpression")
    found = _evaluate(expression, value, old) if expression else ""
    return found if found and "\n" not in found else rule["message"]


def _evaluate(expression: str, value: Any, old: Any) -> Any:
    names = {"self": value} if old is None else {"self": value, "oldSelf": old}
    return _compile(expression).execute(cel.Context(names, {"split": str.split}))


@cache
def _compile(rule: str) -> cel.Program:
    return cel.compile(rule)


def _walk(value: Any, node: Schema) -> Sequence[tuple[str, Any, Schema]]:
    """Return the fields or items of a value: path step, value and schema."""
    if isinstance(value, dict):
        return [(f".{name}", child, _child(node, name)) for name, child in value.items() if child is not None]
    if isinstance(value, list):
        return [(f"[{index}]", child, node.get("items") or {}) for index, child in enumerate(value)]
    return []
