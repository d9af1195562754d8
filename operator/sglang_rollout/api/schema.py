"""Base of the custom resource's models, and the CEL rules of their fields."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict, Field
from pydantic.alias_generators import to_camel

CEL = "x-kubernetes-validations"
PRESERVE = "x-kubernetes-preserve-unknown-fields"

QUANTITY = r"^[0-9]+(\.[0-9]+)?(m|k|M|G|T|P|Ki|Mi|Gi|Ti|Pi)?$"
"""Kubernetes quantities as people write them: ``16Gi``, ``500m``, ``0.5``."""

ANY_QUANTITY = r"^[+-]?([0-9]+(\.[0-9]*)?|\.[0-9]+)([KMGTPE]i|[numkMGTPE]|[eE][+-]?[0-9]+)?$"
"""Every string that Kubernetes accepts as a quantity."""


class ApiModel(BaseModel):
    """Base of all parts of the custom resource: camelCase in YAML, immutable in Python.

    Unknown fields are ignored: the API server has refused or pruned them, and an older operator must read objects that a newer
    release has written.
    """

    model_config = ConfigDict(
        alias_generator=to_camel,
        populate_by_name=True,
        extra="ignore",
        frozen=True,
        use_attribute_docstrings=True,
        # pydantic reserves the prefix "model_", which spec.model needs.
        protected_namespaces=(),
    )


def rule(expression: str, message: str, *, field: str | None = None, message_expression: str | None = None) -> dict[str, str]:
    """Return one CEL rule.

    Args:
        expression: The CEL expression.
        message: The sentence that a user reads.
        field: Path of the offending field in the object, such as ``.nodes``.
        message_expression: The CEL expression of a sentence that quotes a value. If it fails, the user reads ``message``. The API
            server refuses the definition if it cannot bound the length of a joined string: join within ``map`` over a list, whose
            items have a limit.
    """
    content = {"rule": expression, "message": message}
    if message_expression:
        content["messageExpression"] = message_expression
    if field:
        content["fieldPath"] = field
    return content


def map_list(key: str = "name") -> dict[str, Any]:
    """Return the schema extension of a list whose items are identified by ``key``."""
    return {"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": [key]}


def rules(*items: dict[str, str]) -> dict[str, Any]:
    """Return the schema extension that carries CEL rules."""
    return {CEL: list(items)}


def with_rules(*items: dict[str, str]) -> ConfigDict:
    """Return the configuration of a model whose objects obey CEL rules."""
    return ConfigDict(json_schema_extra=rules(*items))


def plain_path(name: str) -> dict[str, Any]:
    """Return the schema extension of the path ``name``, which has no element ``.`` or ``..`` except a leading ``./``."""
    message = f"{name} must not contain the path element . or ..: the operator compares paths as text. Write the path without it."
    return rules(rule("!self.matches('(^|/)[.][.](/|$)|/[.](/|$)')", message))


def refuse_flags(flags: tuple[str, ...], message: str) -> dict[str, str]:
    """Return the rule that an argument sets none of ``flags``, also not as ``--flag=value`` or by an abbreviation."""
    return rule(f"self.size() < 3 || !self.startsWith('--') || !{list(flags)}.exists(f, f.startsWith(self.split('=')[0]))", message)


def sets_flag(*flags: str, engine: str = "self") -> str:
    """Return the CEL expression for "``args`` of ``engine`` sets one of ``flags``, also by an abbreviation"."""
    word = "a.split('=')[0]"
    matches = f"'{flags[0]}'.startsWith({word})" if len(flags) == 1 else f"{list(flags)}.exists(f, f.startsWith({word}))"
    return f"has({engine}.args) && {engine}.args.exists(a, a.size() > 2 && a.startsWith('--') && {matches})"


def refuse_flags_like(*beginnings: str, message: str) -> dict[str, str]:
    """Return the rule that an argument begins with none of ``beginnings``."""
    return rule(" && ".join(f"!self.startsWith('{beginning}')" for beginning in beginnings), message)


def argument(flags: tuple[str, ...], message: str, *more: dict[str, str]) -> Any:
    """Return the field of an argument that sets none of ``flags`` and meets the rules ``more``."""
    return Field(min_length=1, max_length=2048, json_schema_extra=rules(refuse_flags(flags, message), *more))
