"""Pydantic's JSON schema → the structural schema that Kubernetes asks of a CustomResourceDefinition. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from sglang_rollout.api.schema import PRESERVE

Schema = dict[str, Any]

_INT_OR_STRING = "x-kubernetes-int-or-string"
_DROPPED = ("title", "$defs", "anyOf", "allOf", "$ref", "discriminator")


def structural(schema: Schema) -> Schema:
    """Return ``schema`` without references, unions and everything else that an API server refuses in a CRD."""
    return _convert(schema, schema.get("$defs", {}))


def _convert(node: Schema, defs: Mapping[str, Schema]) -> Schema:
    node = _without_null(_without_reference(node, defs), defs)
    made = {key: value for key, value in node.items() if key not in _DROPPED}
    if "description" in made:
        made["description"] = re.sub(r"\s+", " ", made["description"]).strip()
    if made.get(_INT_OR_STRING):
        made.pop("type", None)
        return made
    if "const" in made:
        made["enum"] = [made.pop("const")]
    _exclusive_bounds(made)
    if "properties" in made:
        # additionalProperties beside properties is refused; pruning does what "false" means, PRESERVE what "true"
        # means.
        made.pop("additionalProperties", None)
        made["properties"] = {name: _property(child, defs) for name, child in made["properties"].items()}
    elif "additionalProperties" in made:
        _free_keys(made, defs)
    if "items" in made:
        made["items"] = _convert(made["items"], defs)
    return made


def _property(node: Schema, defs: Mapping[str, Schema]) -> Schema:
    made = _convert(node, defs)
    if made.get("type") == "object" and isinstance(made.get("default"), dict):
        # The defaults stand beside the fields themselves; the API server fills an empty object from there.
        made["default"] = {}
    if "default" in made and made["default"] is None:
        del made["default"]
    return made


def _without_reference(node: Schema, defs: Mapping[str, Schema]) -> Schema:
    while "$ref" in node:
        target = defs[node["$ref"].rsplit("/", 1)[-1]]
        node = {**target, **{key: value for key, value in node.items() if key != "$ref"}}
    return node


def _without_null(node: Schema, defs: Mapping[str, Schema]) -> Schema:
    """``X | None`` is an optional X: absent means None."""
    branches = [branch for branch in node.get("anyOf", []) if branch.get("type") != "null"]
    if not branches or node.get(_INT_OR_STRING):
        return node
    if len(branches) > 1:
        raise ValueError(f"a union of {len(branches)} types cannot be a structural schema: {node.get('description')}")
    rest = {key: value for key, value in node.items() if key != "anyOf"}
    return {**_without_reference(branches[0], defs), **rest}


def _exclusive_bounds(made: Schema) -> None:
    """JSON schema 2020 has numbers where v1 of the CRD schema has booleans."""
    for exclusive, bound in (("exclusiveMinimum", "minimum"), ("exclusiveMaximum", "maximum")):
        if isinstance(made.get(exclusive), int | float) and not isinstance(made.get(exclusive), bool):
            made[bound] = made[exclusive]
            made[exclusive] = True


def _free_keys(made: Schema, defs: Mapping[str, Schema]) -> None:
    values = made.pop("additionalProperties")
    if values is True:
        made[PRESERVE] = True
    elif isinstance(values, dict):
        made["additionalProperties"] = _convert(values, defs)
