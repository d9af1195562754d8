"""Notice clients that keep changing what the operator applies, and restore it less and less often. Pure.

The first restores follow at once, because most changes are single mistakes. Then each restore doubles the delay before the next, so
that a fight between two controllers does not roll the router with each round.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from sglang_rollout.controller.decide.drift import Ownership
from sglang_rollout.controller.decide.times import seconds_since
from sglang_rollout.controller.render.names import FIELD_MANAGER
from sglang_rollout.json_text import load_json
from sglang_rollout.kube.resources import Object

Key = tuple[str, str]
"""Kind and name of a child."""

FREE_RESTORES = 3
"""Restores without a delay. More within :data:`QUIET_SECONDS` are a fight."""
LAST_DELAY_SECONDS = 300.0
"""Longest delay: a rolled router per five minutes, and a child that heals five minutes after the other client has stopped."""
QUIET_SECONDS = 900.0
"""A fight is over if nothing had to be restored for this time. Longer than the resync of most controllers and GitOps tools."""


@dataclass(frozen=True)
class Rival:
    """Another client that changed a child."""

    manager: str
    """Its field manager."""
    path: str
    """The field that it changed; empty if the field is not known, for example if the client removed it."""


@dataclass(frozen=True)
class Restores:
    """How often a child was applied again although the operator wanted the same as before."""

    digest: str
    """What the operator applied."""
    last: str
    """Time of the last apply (RFC 3339)."""
    count: int = 0
    rival: Rival | None = None
    """Who made the last restore necessary; None if it is not known."""


@dataclass
class Memory:
    """What the operator remembers of its applies to one rollout."""

    ownership: Ownership = field(default_factory=dict)
    restores: dict[Key, Restores] = field(default_factory=dict)


def note_apply(before: Restores | None, digest: str, now: str, rival: Rival | None) -> Restores:
    """Return what is known of a child after an apply: an apply of something new, or of the same as before."""
    if before is None or before.digest != digest or seconds_since(before.last, now) >= QUIET_SECONDS:
        return Restores(digest, now)
    return Restores(digest, now, before.count + 1, rival)


def seconds_until_restore(restores: Restores | None, digest: str, now: str) -> float:
    """Return how long the operator leaves a child as another client changed it; 0 or less: restore it now."""
    if restores is None or restores.digest != digest or restores.count < FREE_RESTORES:
        return 0.0
    delay = min(2.0 ** min(restores.count - FREE_RESTORES, 30), LAST_DELAY_SECONDS)
    return delay - seconds_since(restores.last, now)


def find_contests(restores: Mapping[Key, Restores], now: str) -> list[tuple[Key, Restores]]:
    """Return the children that other clients keep changing, the most contested first."""
    found = [(key, each) for key, each in restores.items() if each.count >= FREE_RESTORES and _seconds_until_quiet(each, now) > 0]
    return sorted(found, key=lambda item: (-item[1].count, item[0]))


def seconds_until_peace(restores: Mapping[Key, Restores], now: str) -> float | None:
    """Return the seconds until a fight may be over; None if there is none."""
    return min((_seconds_until_quiet(each, now) for _, each in find_contests(restores, now)), default=None)


def describe_contests(contests: Sequence[tuple[Key, Restores]]) -> str:
    """Return who changes what, and what to do, as sentences."""
    (kind, name), restores = contests[0]
    others = f" So do {len(contests) - 1} other objects." if len(contests) > 1 else ""
    advice = (
        "The operator restores it less and less often. Take the object away from the other client, or set the field in the SGLangRollout."
    )
    rival = restores.rival
    if rival is None:
        return f"{kind} {name} is changed again and again by another client, perhaps by a second operator.{others} {advice}"
    what = f"{rival.path} of {kind} {name}" if rival.path else f"{kind} {name}"
    return f"{what} is changed again and again by another client, the field manager {rival.manager}.{others} {advice}"


def find_rival(wanted: Object, live: Object) -> Rival | None:
    """Return the newest other field manager that set a field which the operator wants to be different.

    If no manager has such a field, a client removed it: return the last manager that wrote the object.
    """
    entries = [
        entry
        for entry in live["metadata"].get("managedFields") or []
        if entry.get("manager") != FIELD_MANAGER and not entry.get("subresource")
    ]
    entries.sort(key=lambda entry: str(entry.get("time")), reverse=True)
    for entry in entries:
        if path := next(_find_changes(entry.get("fieldsV1") or {}, wanted, live), ""):
            return Rival(str(entry.get("manager")), path.lstrip("."))
    return Rival(str(entries[0].get("manager")), "") if entries else None


def _seconds_until_quiet(restores: Restores, now: str) -> float:
    return QUIET_SECONDS - seconds_since(restores.last, now)


def _find_changes(fields: Mapping[str, Any], wanted: Any, live: Any) -> Iterator[str]:
    """Yield the paths of ``fieldsV1`` that ``wanted`` has with another value than ``live``."""
    for key, below in fields.items():
        step, mine, theirs = _take_step(key, wanted, live)
        if mine is None:
            continue
        if any(name != "." for name in below):
            yield from (f"{step}{path}" for path in _find_changes(below, mine, theirs))
        elif mine != theirs:
            yield step


def _take_step(key: str, wanted: Any, live: Any) -> tuple[str, Any, Any]:
    """Return a step of a path and both values below it; None as the wanted value if the operator wants none there."""
    kind, _, name = key.partition(":")
    if kind == "f" and isinstance(wanted, dict):
        return f".{name}", wanted.get(name), (live or {}).get(name)
    if kind == "k" and isinstance(wanted, list):
        identity = load_json(name)
        mine, theirs = (next((item for item in items if identity.items() <= item.items()), None) for items in (wanted, live or []))
        return f"[{', '.join(str(value) for value in identity.values())}]", mine, theirs
    return "", None, None
