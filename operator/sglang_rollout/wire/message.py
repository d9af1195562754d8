"""Base of the messages between the parts, as pydantic models.

Field names are snake_case on the wire, as in SGLang's own API. Unknown fields are ignored, so that neighbouring releases
understand each other; a model only ever gains fields with defaults.
"""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class Message(BaseModel):
    """Base of all messages: immutable, tolerant of fields that a newer peer adds."""

    model_config = ConfigDict(frozen=True, extra="ignore", use_attribute_docstrings=True)
