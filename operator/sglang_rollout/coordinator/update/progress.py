"""What is under way on a fleet: its open groups, a pause, the open update, and where the transaction stands."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from sglang_rollout.wire.record import FleetGroup, GroupRow


@dataclass(frozen=True)
class Group:
    """A weight-update group that engines have joined."""

    name: str
    epoch: int
    world_size: int
    master: str
    backend: str
    boots: Mapping[str, str]
    """Members, in rank order, and the life of each that joined: a new process of the same engine is no member."""

    def shown(self) -> FleetGroup:
        """The group in the discovery document."""
        return FleetGroup(members=list(self.boots), **self._facts())

    def row(self, places: Mapping[str, int]) -> GroupRow:
        """The group in the record, where its engines have these places."""
        return GroupRow(places=[places[name] for name in self.boots], **self._facts())

    def _facts(self) -> dict[str, Any]:
        return {"name": self.name, "epoch": self.epoch, "world_size": self.world_size, "master": self.master, "backend": self.backend}


@dataclass
class Update:
    """An update whose boundary has been crossed: engines have been told and are dirty until it is complete."""

    boots: dict[str, str]
    """The engines that were told, and in which life."""
    started: float
    label: str | None = None
    trainer_session: bool = False
    """True if the trainer opened the session, and ends it; False if the coordinator did for a trainer that knows no sessions."""
    data: set[str] = field(default_factory=set)
    """Groups that have brought tensors."""
    fed: set[str] = field(default_factory=set)
    """Engines that have taken tensors."""
    flushed: set[str] = field(default_factory=set)
    """Engines that flushed their cache with the last tensors: paused since, they have computed nothing."""
    ended: set[str] = field(default_factory=set)
    """Engines whose session has ended before those of the others: their trainer has brought all that it has for them."""
    slowest_end: float = 0.0
    """Seconds that the longest of those took."""
    checksums: Mapping[int, tuple[str, ...]] = field(default_factory=dict)
    """What the trainer says that its weights are, if it does: by the number of an engine's ranks."""
    trusted: set[str] = field(default_factory=set)
    """Engines that held the committed version when they were told."""
    from_base: set[str] = field(default_factory=set)
    """Engines that held what ``model.path`` holds when they were told."""
    blank: set[str] = field(default_factory=set)
    """Engines of which no tensor was known when they were told: their weights had been released."""
    model: frozenset[str] = frozenset()
    """The tensors of the engines' model, if some engine is blank and its pod can read them."""
    tensors: dict[tuple[str, ...], set[str]] = field(default_factory=dict)
    """Names of the tensors that came, by the engines that took them."""
    opaque: bool = False
    """Nobody knows which tensors come: they come as handles, or all of them from a checkpoint."""
    checkpoint: frozenset[str] | None = None
    """The tensors of the checkpoint that is loaded, if they are known."""
    dropped: dict[str, str] = field(default_factory=dict)
    """Engines that will not hold the version, and why: they are fenced."""

    def standing(self) -> list[str]:
        """Engines that were told and may still commit."""
        return [name for name in self.boots if name not in self.dropped]
