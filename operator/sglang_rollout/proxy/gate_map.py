"""The map through which an agent configures its gate. Pure.

The agent writes the entries over the stats socket before it opens the gate. The gate reads them for each request.
"""

from __future__ import annotations

from collections.abc import Collection
from urllib.parse import quote

VERSION_KEY = "version"
"""Key of the engine's version label, URL-encoded."""
NO_VERSION = "?"
"""Value of an entry that the agent has not written; an encoded label contains no question mark."""

VOCABULARY_KEY = "vocabulary"
"""Key of the size of the model's vocabulary; ``NO_VERSION`` while it is unknown."""
TOKENIZER_KEY = "tokenizer"
"""Key of an entry that is ``no`` for an engine without a tokenizer."""
GENERATES_KEY = "generates"
"""Key of an entry that is ``no`` for a model of embeddings or rewards, because a request for tokens ends such an SGLang."""
ADAPTERS_KEY = "adapters"
"""Key of the list of loaded adapters; ``NO_VERSION`` for an engine without adapters, or if they are unknown."""
ADAPTERS_LONGEST = 15000
"""Maximum characters of the list of adapters. haproxy reads 15360 bytes of a command on the stats socket (tune.bufsize less
tune.maxrewrite). To a longer command it may never answer. The command also contains the path of the map."""
UNSET = "".join(f"{key} {NO_VERSION}\n" for key in (VERSION_KEY, VOCABULARY_KEY, TOKENIZER_KEY, GENERATES_KEY, ADAPTERS_KEY))
"""Content of the map's file when haproxy starts."""


def version_map_path(socket: str) -> str:
    """Return the path of a gate's map: its name for haproxy, and a file that must exist when haproxy starts."""
    return f"{socket}.version"


def encode_label(label: str) -> str:
    """Return a label as the map stores it. Characters that an ASCII header cannot contain become question marks."""
    line = " ".join(label.split()).encode("ascii", "replace").decode("ascii")
    return quote("".join(character if character.isprintable() else "?" for character in line), safe="") or NO_VERSION


def encode_adapters(names: Collection[str]) -> str:
    """Return names of adapters as the map stores them: each URL-encoded, with a comma before and after."""
    return "".join(f",{quote(name, safe='')}" for name in sorted(names)) + ","


def gate_entries(
    *, label: str, vocabulary: int | None, has_tokenizer: bool, adapters: Collection[str] | None, generates: bool
) -> dict[str, str]:
    """Return the entries of the gate's map, by which the gate labels answers and refuses requests.

    Args:
        label: Version label in the header of every answer. Empty: no header.
        vocabulary: Number of the model's tokens; requests with other tokens are refused. None if it is not known.
        has_tokenizer: False to refuse requests that need a tokenizer.
        adapters: Adapters that requests may name; None if SGLang decides.
        generates: False to refuse requests for tokens.
    """
    size = {} if vocabulary is None else {VOCABULARY_KEY: str(vocabulary)}
    return {
        VERSION_KEY: encode_label(label),
        **size,
        TOKENIZER_KEY: "yes" if has_tokenizer else "no",
        ADAPTERS_KEY: NO_VERSION if adapters is None else encode_adapters(adapters),
        GENERATES_KEY: "yes" if generates else "no",
    }
