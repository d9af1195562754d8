"""Find the version that a person names: by its label, by ``run/step``, or by the ID of its update. Pure."""

from __future__ import annotations

from collections.abc import Mapping

from sglang_rollout.wire.reasons import quote_value
from sglang_rollout.wire.states import Version


class NoSuchVersionError(Exception):
    """No version has this name, or several have. The message is a sentence with the names that there are."""


MAX_NAMED = 20
"""Versions that a message names."""


def choose_version(name: str, versions: Mapping[str, Version | None]) -> str:
    """Return the ID of the update that sent the version with this name.

    Args:
        name: Label, ``run/step``, or ID of the update.
        versions: Complete versions by the ID of their update; None: its number is not known.

    Raises:
        NoSuchVersionError: No version has this name, or several have.
    """
    if name in versions:
        return name
    found = [update for update, version in versions.items() if version is not None and name in (str(version), version.label)]
    if len(found) == 1:
        return found[0]
    newest = sorted(found or versions, key=lambda update: _order(versions[update]), reverse=True)[:MAX_NAMED]
    named = ", ".join(_describe(update, versions[update]) for update in newest) or "none"
    if found:
        raise NoSuchVersionError(f"Several versions are called {quote_value(name)}: {named}. Name one by its run/step, or by its update.")
    raise NoSuchVersionError(f"There is no version {quote_value(name)} here. There are: {named}.")


def _order(version: Version | None) -> tuple[int, int]:
    return (version.run, version.step) if version is not None else (-1, -1)


def _describe(update: str, version: Version | None) -> str:
    return f"{version} (label {version.label}, update {update})" if version is not None else f"update {update}"
