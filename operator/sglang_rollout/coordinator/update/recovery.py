"""What a restarted coordinator may prove, as a function of the record and the statuses of agents. Pure.

Three things prove a commit:

* the record, because it is written after the last acknowledgement and before any gate opens,
* a complete cohort: every engine of the update says that it holds this version, of this cohort, completely (the API server was away, or
  the coordinator died between the last acknowledgement and the record),
* an agent that received it: a coordinator sends only what has been committed.

Anything else, above all an open update, is not proved and is given up. *base* needs no proof if nothing higher has one, but it may be
concluded only after every agent that could know better has answered (:func:`is_everyone_heard`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from sglang_rollout.coordinator.update.progress import Group
from sglang_rollout.coordinator.update.versions import newest, order_key
from sglang_rollout.wire.agent import AgentStatus
from sglang_rollout.wire.record import Record
from sglang_rollout.wire.states import BASE, EngineState, Version


@dataclass(frozen=True)
class Rebuilt:
    """What was proved."""

    committed: Version
    reserved: Version | None
    """Highest version that an engine holds and that was not committed."""
    groups: Mapping[str, Group]
    give_up: tuple[str, ...]
    """Engines in a pause or session that this coordinator did not begin."""


def rebuild(record: Record | None, statuses: Sequence[AgentStatus]) -> Rebuilt:
    """Prove what can be proved."""
    committed = prove_version(record, statuses)
    held = [status.version for status in statuses if status.version is not None]
    return Rebuilt(
        committed=committed,
        reserved=newest(*(version for version in held if order_key(version) > order_key(committed))),
        groups=_surviving_groups(record, statuses),
        give_up=tuple(status.name for status in statuses if is_interrupted(status)),
    )


def prove_version(record: Record | None, statuses: Sequence[AgentStatus]) -> Version:
    """Return the highest version that is proved to be committed."""
    proofs = [BASE]
    if record is not None:
        proofs.append(record.committed)
    proofs += [status.committed for status in statuses if status.committed is not None]
    proofs += complete_cohorts(statuses)
    return max(proofs, key=order_key)


def complete_cohorts(statuses: Iterable[AgentStatus]) -> list[Version]:
    """Return the versions that every engine of their own cohort holds, of the same cohort."""
    holders: dict[tuple[int, int, tuple[str, ...]], set[str]] = {}
    versions: dict[tuple[int, int, tuple[str, ...]], Version] = {}
    for status in statuses:
        if status.state is EngineState.CLEAN and status.version is not None and status.cohort:
            token = (*order_key(status.version), tuple(sorted(set(status.cohort))))
            holders.setdefault(token, set()).add(status.name)
            versions[token] = status.version
    return [versions[token] for token, names in holders.items() if names >= set(token[2])]


def is_interrupted(status: AgentStatus) -> bool:
    """Return True if the engine is paused or in a session, which must end."""
    return status.boot_id is not None and (status.session or status.paused)


def is_everyone_heard(addressed: Iterable[str], heard: Iterable[str]) -> bool:
    """Return True if every engine that could hold a proof has been heard. An engine without an address has no running pod."""
    return set(addressed) <= set(heard)


def _surviving_groups(record: Record | None, statuses: Sequence[AgentStatus]) -> dict[str, Group]:
    """Return the process groups of the record whose members all run in the boot that joined, and whose agents confirm it."""
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
