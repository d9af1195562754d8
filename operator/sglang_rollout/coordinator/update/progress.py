"""What is open on a fleet: process groups, and the update."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from sglang_rollout.wire.record import FleetGroup, GroupRow


@dataclass(frozen=True)
class Group:
    """A weight-update process group that engines have joined."""

    name: str
    epoch: int
    world_size: int
    master: str
    backend: str
    boots: Mapping[str, str]
    """Members in rank order, and the boot ID with which each joined. A new process of the same engine is no member."""

    def shown(self) -> FleetGroup:
        """Return the process group for the discovery document."""
        return FleetGroup(members=list(self.boots), **self._facts())

    def row(self, places: Mapping[str, int]) -> GroupRow:
        """Return the process group for the record, where its engines have these places."""
        return GroupRow(places=[places[name] for name in self.boots], **self._facts())

    def _facts(self) -> dict[str, Any]:
        return {"name": self.name, "epoch": self.epoch, "world_size": self.world_size, "master": self.master, "backend": self.backend}


@dataclass
class Update:
    """An open update: engines have received its first call and are dirty until it is complete."""

    boots: dict[str, str]
    """The engines that take part, and their boot IDs."""
    started: float
    label: str | None = None
    trainer_session: bool = False
    """True if the trainer opened the session, and ends it; False if the coordinator did for a trainer that knows no sessions."""
    data: set[str] = field(default_factory=set)
    """Process groups that have sent tensors."""
    received: set[str] = field(default_factory=set)
    """Engines that have received tensors."""
    flushed: set[str] = field(default_factory=set)
    """Engines that flushed their cache with the last tensors. Paused since, they have computed nothing."""
    ended: set[str] = field(default_factory=set)
    """Engines whose session ended before those of the others, because they have all of their tensors."""
    slowest_end: float = 0.0
    """Seconds that the slowest of those took to end its session."""
    checksums: Mapping[int, tuple[str, ...]] = field(default_factory=dict)
    """What the trainer says its weights are, by the number of an engine's ranks; empty if it says nothing."""
    held_committed: set[str] = field(default_factory=set)
    """Engines that held the committed version when they joined the update."""
    held_base: set[str] = field(default_factory=set)
    """Engines that held what ``model.path`` holds when they joined the update."""
    blank: set[str] = field(default_factory=set)
    """Engines of which no tensor was known when they joined: their weights had been released."""
    model: frozenset[str] = frozenset()
    """The tensors of the model, if an engine is blank and its pod can read the model."""
    tensors: dict[tuple[str, ...], set[str]] = field(default_factory=dict)
    """Names of the tensors that came, by the engines that received them."""
    names_unknown: bool = False
    """True if no names are known: tensors come as handles, or all of them from a checkpoint."""
    checkpoint: frozenset[str] | None = None
    """The tensors of the checkpoint that is loaded, if they are known."""
    dropped: dict[str, str] = field(default_factory=dict)
    """Engines that will not hold the version, and why. They are fenced."""

    def remaining(self) -> list[str]:
        """Return the engines that take part and may still commit."""
        return [name for name in self.boots if name not in self.dropped]
