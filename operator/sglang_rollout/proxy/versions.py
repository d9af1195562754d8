"""haproxy map by which an agent configures its gate: the weight version for answers, and what the engine accepts. Pure.

The agent sets the entries over the stats socket before it opens the gate. The gate reads them for each request.
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
"""Characters of that list. Of a command on the stats socket haproxy reads 15360 bytes (tune.bufsize less tune.maxrewrite); of a longer one
it reads more at times, and at others it never answers. The path of the map stands before the list."""
UNSET = "".join(f"{key} {NO_VERSION}\n" for key in (VERSION_KEY, VOCABULARY_KEY, TOKENIZER_KEY, GENERATES_KEY, ADAPTERS_KEY))
"""Content of the map's file when haproxy starts."""


def version_map_of(socket: str) -> str:
    """Return the path of a gate's map: its name for haproxy, and a file that must exist when haproxy starts."""
    return f"{socket}.version"


def encoded(label: str) -> str:
    """Return a label as the map stores it. Characters that an ASCII header cannot contain become question marks."""
    line = " ".join(label.split()).encode("ascii", "replace").decode("ascii")
    return quote("".join(character if character.isprintable() else "?" for character in line), safe="") or NO_VERSION


def listed(names: Collection[str]) -> str:
    """Return names of adapters as the map stores them: each URL-encoded, with a comma before and after."""
    return "".join(f",{quote(name, safe='')}" for name in sorted(names)) + ","


def guard_of(socket: str) -> str:
    """Return the path of the gate's filter against requests that would end the engine. The file must exist when haproxy starts."""
    return f"{socket}.guard.lua"
