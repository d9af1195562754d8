"""What the coordinator knows about the weight store of a fleet with transport Staged. Data only, no I/O."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from sglang_rollout.api.intent import WantedStore
from sglang_rollout.sglang.api import ControlCall
from sglang_rollout.wire.ports import AGENT_PREFLIGHT, STORE_LEAVE, STORE_PREFLIGHT
from sglang_rollout.wire.staged import StoreStatus
from sglang_rollout.wire.states import StagedCopy, StagedVersion

STORE = "weight store"
"""Name of the weight store among the peers that a Send calls. The blank keeps it apart from the name of every engine."""
MAX_MISSES = 3
"""A store that left this many polls in a row unanswered counts as away."""


@dataclass
class Store:
    """The weight store, and the newest facts about it."""

    wanted: WantedStore
    status: StoreStatus | None = None
    misses: int = MAX_MISSES
    """Polls in a row without an answer."""
    status_seq: int = 0
    """Sequence number of the newest status. An answer to an earlier poll is ignored."""
    fetching: str | None = None
    """The instance that copies the committed version from agents, or loads its snapshot; None: none does."""
    tries: int = 0
    """Failed attempts to copy the committed version."""
    retry_at: float = 0.0
    """When it may try to copy again."""
    note: str = ""
    """Why the last attempt to copy failed, as sentences; empty if none did."""
    is_sending_commit: bool = False
    """True while it is sent which version is committed."""
    commit_tries: int = 0
    """Failed attempts to send it."""
    commit_at: float = 0.0
    """When it may be sent again."""

    @property
    def instance(self) -> str | None:
        """Identifies the run of the store's process that was last seen."""
        return self.status.instance if self.status is not None else None

    @property
    def is_fetching(self) -> bool:
        """True while it copies the committed version. The call to an earlier instance may still wait for its deadline."""
        return self.fetching is not None and self.fetching == self.instance

    @property
    def is_new(self) -> bool:
        """True if it was asked less often than a store must be before it counts as away."""
        return self.status is None and self.misses < 2 * MAX_MISSES

    @property
    def is_up(self) -> bool:
        """True if the store can be called now."""
        return self.status is not None and self.misses < MAX_MISSES

    def find_copy(self, update: str) -> StagedCopy | None:
        """Return what the store holds of an update; None if it holds nothing."""
        copies = self.status.copies if self.status is not None else []
        return next((copy for copy in copies if copy.update == update), None)

    def holds(self, version: StagedVersion) -> bool:
        """Return True if the store has a complete copy of a version."""
        copy = self.find_copy(version.update)
        return copy is not None and copy.digest == version.digest

    @property
    def snapshot_problem(self) -> str:
        """Why the newest snapshot could not be written, as a sentence; empty if it was written, or if the store is away."""
        snapshots = self.status.snapshots if self.status is not None and self.is_up else None
        return snapshots.message if snapshots is not None else ""

    def has_snapshot(self, version: StagedVersion) -> bool:
        """Return True if the store has a usable snapshot of a version."""
        snapshots = self.status.snapshots if self.status is not None else None
        found = snapshots.find(version.update) if snapshots is not None else None
        return found is not None and found.digest == version.digest

    def take(self, status: StoreStatus, seq: int) -> None:
        """Accept a status, unless it describes an earlier state.

        Args:
            status: The status.
            seq: Sequence number of the poll. For the status in the answer to another call: a number drawn after that.
        """
        self.misses = 0
        if seq >= self.status_seq:
            self.status, self.status_seq = status, seq


def preflight_path(names: Iterable[str]) -> str:
    """Return the path at which these peers try to connect to a trainer's store."""
    return STORE_PREFLIGHT if STORE in names else AGENT_PREFLIGHT


def leave_path(names: Iterable[str]) -> str:
    """Return the path at which these peers leave a process group."""
    return STORE_LEAVE if STORE in names else ControlCall.DESTROY_GROUP.path


def describe_peer(name: str) -> str:
    """Return the name of a peer as a phrase: ``engine e0``, ``the weight store``."""
    return "the weight store" if name == STORE else f"engine {name}"
