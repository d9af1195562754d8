"""Base of the custom resource's models, and how CEL rules are written beside the fields they check."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict, Field
from pydantic.alias_generators import to_camel

CEL = "x-kubernetes-validations"
PRESERVE = "x-kubernetes-preserve-unknown-fields"

QUANTITY = r"^[0-9]+(\.[0-9]+)?(m|k|M|G|T|P|Ki|Mi|Gi|Ti|Pi)?$"
"""Kubernetes quantities as people write them: ``16Gi``, ``500m``, ``0.5``."""

ANY_QUANTITY = r"^[+-]?([0-9]+(\.[0-9]*)?|\.[0-9]+)([KMGTPE]i|[numkMGTPE]|[eE][+-]?[0-9]+)?$"
"""All that Kubernetes takes for a quantity, as far as it is a string."""


class ApiModel(BaseModel):
    """Base of all parts of the custom resource: camelCase in YAML, immutable in Python.

    Unknown fields are ignored here, because the API server has refused or pruned them already, and because an older
    operator must be able to read an object that a newer release wrote.
    """

    model_config = ConfigDict(
        alias_generator=to_camel,
        populate_by_name=True,
        extra="ignore",
        frozen=True,
        use_attribute_docstrings=True,
        # pydantic reserves the prefix "model_"; spec.model is what everybody calls it.
        protected_namespaces=(),
    )


def rule(expression: str, message: str, *, field: str | None = None) -> dict[str, str]:
    """Return one CEL rule; ``message`` is the sentence a user reads, ``field`` names the offending field of an object.

    No ``messageExpression``: the API server cannot bound the cost of joined strings and refuses the whole definition.
    """
    made = {"rule": expression, "message": message}
    if field:
        made["fieldPath"] = field
    return made


def rules(*made: dict[str, str]) -> dict[str, Any]:
    """Return the schema extension that carries CEL rules."""
    return {CEL: list(made)}


def refuse_flags(flags: tuple[str, ...], message: str) -> dict[str, str]:
    """Return a rule for one command-line argument: it must not be one of ``flags``, also not as ``--flag=value``, nor
    abbreviated, which argparse takes as well."""
    return rule(f"self.size() < 3 || !self.startsWith('--') || !{list(flags)}.exists(f, f.startsWith(self.split('=')[0]))", message)


def refuse_flags_like(*beginnings: str, message: str) -> dict[str, str]:
    """Return a rule for one command-line argument: it must not begin like one of these families of flags."""
    return rule(" && ".join(f"!self.startsWith('{beginning}')" for beginning in beginnings), message)


def argument(flags: tuple[str, ...], message: str, *more: dict[str, str]) -> Any:
    """Return the field of one command-line argument that is none of ``flags``, and keeps ``more`` rules."""
    return Field(min_length=1, max_length=2048, json_schema_extra=rules(refuse_flags(flags, message), *more))
