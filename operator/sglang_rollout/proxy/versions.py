"""What gate and agent agree on: a haproxy map that tells the version of the weights, for the answers, and what the engine can read. Pure.

The agent sets the entries over the stats socket before it opens the gate; the gate reads them when a request comes in.
"""

from __future__ import annotations

from collections.abc import Collection
from urllib.parse import quote

VERSION_KEY = "version"
"""The entry: the label of what the engine holds, URL-encoded."""
NO_VERSION = "?"
"""Its value before the agent has written one; an encoded label holds no question mark."""

VOCABULARY_KEY = "vocabulary"
"""The entry that tells how many tokens the engine's model knows; ``NO_VERSION`` while nobody has found out."""
TOKENIZER_KEY = "tokenizer"
"""The entry that is ``no`` for an engine without a tokenizer."""
GENERATES_KEY = "generates"
"""The entry that is ``no`` for an engine whose model gives embeddings or rewards: a request for tokens ends such an SGLang."""
ADAPTERS_KEY = "adapters"
"""The entry that lists the adapters that the engine has loaded; ``NO_VERSION`` for an engine that takes none, or whose are not known."""
ADAPTERS_LONGEST = 15000
"""Characters of that list. Of a command on the stats socket haproxy reads 15360 bytes (tune.bufsize less tune.maxrewrite); of a longer one
it reads more at times, and at others it never answers. The path of the map stands before the list."""
UNSET = "".join(f"{key} {NO_VERSION}\n" for key in (VERSION_KEY, VOCABULARY_KEY, TOKENIZER_KEY, GENERATES_KEY, ADAPTERS_KEY))
"""The map's file when haproxy starts."""


def version_map_of(socket: str) -> str:
    """Path of the map of the gate with this stats socket: its name to haproxy, and a file that must exist when haproxy starts."""
    return f"{socket}.version"


def encoded(label: str) -> str:
    """A label as the map holds it. A header is one line of ASCII to every client, so what does not fit becomes a question mark."""
    line = " ".join(label.split()).encode("ascii", "replace").decode("ascii")
    return quote("".join(character if character.isprintable() else "?" for character in line), safe="") or NO_VERSION


def listed(names: Collection[str]) -> str:
    """Names of adapters as the map holds them: each URL-encoded, a comma before and after each."""
    return "".join(f",{quote(name, safe='')}" for name in sorted(names)) + ","


def guard_of(socket: str) -> str:
    """Path of the gate's filter against requests that would end the engine; the file must exist when haproxy starts."""
    return f"{socket}.guard.lua"
