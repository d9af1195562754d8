"""What gate and agent agree on so that answers name the version of the weights: a haproxy map with one entry. Pure.

The agent sets the entry over the stats socket before it opens the gate; the gate reads it when a request comes in.
"""

from __future__ import annotations

from urllib.parse import quote

VERSION_KEY = "version"
"""The entry: the label of what the engine holds, URL-encoded."""
NO_VERSION = "?"
"""Its value before the agent has written one; an encoded label holds no question mark."""


def version_map_of(socket: str) -> str:
    """Path of the map of the gate with this stats socket: its name to haproxy, and a file that must exist when haproxy starts."""
    return f"{socket}.version"


def encoded(label: str) -> str:
    """A label as the map holds it. A header is one line of ASCII to every client, so what does not fit becomes a question mark."""
    line = " ".join(label.split()).encode("ascii", "replace").decode("ascii")
    return quote("".join(character if character.isprintable() else "?" for character in line), safe="") or NO_VERSION
