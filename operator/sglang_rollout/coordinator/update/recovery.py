"""What a restarted coordinator may prove, as a function of the record and the agents' statuses. Pure.

Three things prove a commit:

* the record (it is written after the last acknowledgement and before any gate opens),
* a complete cohort: every engine of the update says that it holds this version, of this cohort, completely (the API
  server was away, or the coordinator died between the last acknowledgement and the record),
* an agent that was told: a coordinator tells only what has been committed.

Anything else, above all an open update, is not proved and is given up. *base* needs no proof when nothing higher has
one, but it may be concluded only after every agent that could know better has answered (see ``complete``).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from sglang_rollout.coordinator.update.progress import Group
from sglang_rollout.coordinator.update.versions import key, newest
from sglang_rollout.wire.agent import AgentStatus
from sglang_rollout.wire.record import Record
from sglang_rollout.wire.weights import BASE, EngineState, Version


@dataclass(frozen=True)
class Rebuilt:
    """What was proved."""

    committed: Version
    burned: Version | None
    """Highest version that an engine holds and that was not committed."""
    groups: Mapping[str, Group]
    give_up: tuple[str, ...]
    """Engines that are in the middle of something that this coordinator did not start."""


def rebuild(record: Record | None, statuses: Sequence[AgentStatus]) -> Rebuilt:
    """Prove what can be proved."""
    committed = prove(record, statuses)
    held = [status.version for status in statuses if status.version is not None]
    return Rebuilt(
        committed=committed,
        burned=newest(*(version for version in held if key(version) > key(committed))),
        groups=_groups(record, statuses),
        give_up=tuple(status.name for status in statuses if in_the_middle(status)),
    )


def prove(record: Record | None, statuses: Sequence[AgentStatus]) -> Version:
    """The highest version that is proved to be committed."""
    proofs = [BASE]
    if record is not None:
        proofs.append(record.committed)
    proofs += [status.committed for status in statuses if status.committed is not None]
    proofs += complete_cohorts(statuses)
    return max(proofs, key=key)


def complete_cohorts(statuses: Iterable[AgentStatus]) -> list[Version]:
    """Versions that every engine of their own cohort holds, and says so of the same cohort."""
    holders: dict[tuple[int, int, tuple[str, ...]], set[str]] = {}
    versions: dict[tuple[int, int, tuple[str, ...]], Version] = {}
    for status in statuses:
        if status.state is EngineState.CLEAN and status.version is not None and status.cohort:
            token = (*key(status.version), tuple(sorted(set(status.cohort))))
            holders.setdefault(token, set()).add(status.name)
            versions[token] = status.version
    return [versions[token] for token, names in holders.items() if names >= set(token[2])]


def in_the_middle(status: AgentStatus) -> bool:
    """Whether the engine is paused or in a session: somebody must end that."""
    return status.boot_id is not None and (status.session or status.paused)


def complete(addressed: Iterable[str], heard: Iterable[str]) -> bool:
    """Whether every engine that could hold a proof has been heard.

    An engine without an address has no pod that runs, so it holds nothing.
    """
    return set(addressed) <= set(heard)


def _groups(record: Record | None, statuses: Sequence[AgentStatus]) -> dict[str, Group]:
    """Groups of the record whose members are all the processes that joined, and say so."""
    if record is None:
        return {}
    seen = {status.name: status for status in statuses}
    found: dict[str, Group] = {}
    for row in record.joined:
        members: dict[str, str] = {}
        for engine in record.members(row):
            boot, status = engine.boot_id, seen.get(engine.name)
            if boot is not None and status is not None and status.boot_id == boot and row.name in status.groups:
                members[engine.name] = boot
        if members and len(members) == len(row.places):
            found[row.name] = Group(row.name, row.epoch, row.world_size, row.master, row.backend, members)
    return found
