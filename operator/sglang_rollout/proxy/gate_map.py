"""The map through which an agent configures its gate. Pure.

The agent writes the entries over the stats socket before it opens the gate. The gate reads them for each request.
"""

from __future__ import annotations

from urllib.parse import quote

VERSION_KEY = "version"
"""Key of the engine's version label, URL-encoded."""
NO_VERSION = "?"
"""Value of an entry that the agent has not written; an encoded label contains no question mark."""

TOKENIZER_KEY = "tokenizer"
"""Key of an entry that is ``no`` for an engine without a tokenizer."""
GENERATES_KEY = "generates"
"""Key of an entry that is ``no`` for a model of embeddings or rewards, because a request for tokens ends such an SGLang."""
UNSET = "".join(f"{key} {NO_VERSION}\n" for key in (VERSION_KEY, TOKENIZER_KEY, GENERATES_KEY))
"""Content of the map's file when haproxy starts."""


def version_map_path(socket: str) -> str:
    """Return the path of a gate's map: its name for haproxy, and a file that must exist when haproxy starts."""
    return f"{socket}.version"


def encode_label(label: str) -> str:
    """Return a label as the map stores it. Characters that an ASCII header cannot contain become question marks."""
    line = " ".join(label.split()).encode("ascii", "replace").decode("ascii")
    return quote("".join(character if character.isprintable() else "?" for character in line), safe="") or NO_VERSION


def gate_entries(*, label: str, has_tokenizer: bool, generates: bool) -> dict[str, str]:
    """Return the entries of the gate's map, by which the gate labels answers and refuses requests.

    Args:
        label: Version label in the header of every answer. Empty: no header.
        has_tokenizer: False to refuse requests that need a tokenizer.
        generates: False to refuse requests for tokens.
    """
    return {
        VERSION_KEY: encode_label(label),
        TOKENIZER_KEY: "yes" if has_tokenizer else "no",
        GENERATES_KEY: "yes" if generates else "no",
    }
