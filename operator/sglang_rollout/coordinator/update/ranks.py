"""Process groups: which engine gets which ranks, the check of a trainer's request, and the group once it is open. Pure.

The trainer is rank 0 and hosts the store. Engine *i* takes ``tensor_size_i`` consecutive ranks after those of the engines before it,
because SGLang computes ``rank = rank_offset + tp_rank`` and every tensor-parallel rank joins.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from sglang_rollout.coordinator.update.store import STORE
from sglang_rollout.wire.reasons import Refusal, RefusalCode, RefusedError, quote_value
from sglang_rollout.wire.record import FleetGroup, GroupRow

TRAINER_RANKS = 1
"""Ranks of the trainer: it is rank 0, alone."""
DEFAULT_GROUP_NAME = "weight_update_group"
"""SGLang's own default."""
MAX_GROUP_NAME_CHARACTERS = 200
HIGHEST_PORT = 65535


@dataclass(frozen=True)
class GroupSpec:
    """A checked request of a trainer to open a process group."""

    name: str
    host: str
    port: int
    world_size: int
    backend: str | None
    """None: the trainer named none, so the policy decides."""
    extra: Mapping[str, Any] = field(default_factory=dict)
    """Fields that this project does not know. They are passed on to every engine."""


@dataclass(frozen=True)
class RankTable:
    """The ranks of one set of engines, in order."""

    names: tuple[str, ...]
    sizes: tuple[int, ...]

    @property
    def gpus(self) -> int:
        """Ranks of all engines together."""
        return sum(self.sizes)

    @property
    def world_size(self) -> int:
        """Size of a process group over these engines: the trainer and all of their ranks."""
        return TRAINER_RANKS + self.gpus

    def offsets(self) -> dict[str, int]:
        """First rank of each engine."""
        table, offset = {}, TRAINER_RANKS
        for name, size in zip(self.names, self.sizes, strict=True):
            table[name] = offset
            offset += size
        return table


def rank_table(engines: Iterable[tuple[str, int]]) -> RankTable:
    """Return the rank table of engines, each a name and a tensor parallel size, in the order in which they are given."""
    members = tuple(engines)
    return RankTable(tuple(name for name, _ in members), tuple(size for _, size in members))


def check_group(body: Mapping[str, Any], table: RankTable) -> GroupSpec:
    """Check the body of ``/init_weights_update_group`` against the fleet, before any engine receives it.

    Raises:
        RefusedError: with a message that names the number to use instead.
    """
    name = _group_name(body)
    host = _host(body)
    port = _integer(body, "master_port")
    if not 1 <= port <= HIGHEST_PORT:
        raise RefusedError(f"master_port {port} is not a TCP port: use 1 to {HIGHEST_PORT}.")
    world_size = _integer(body, "world_size")
    offset = _integer(body, "rank_offset")
    if not table.gpus:
        raise RefusedError("This fleet has no engines yet, so no process group can be opened. Try again.", status=503)
    _check_ranks(world_size, offset, table)
    backend = body.get("backend")
    if backend is not None and (not isinstance(backend, str) or not backend.strip()):
        raise RefusedError(f"backend {quote_value(backend)} is not a torch.distributed backend: use nccl or gloo, or leave it out.")
    known = {"master_address", "master_port", "rank_offset", "world_size", "group_name", "backend", "nccl"}
    extra = {key: value for key, value in body.items() if key not in known}
    return GroupSpec(name, host, port, world_size, backend, extra)


def _check_ranks(world_size: int, offset: int, table: RankTable) -> None:
    right = table.world_size
    if table.names == (STORE,) and (offset, world_size) != (TRAINER_RANKS, right):
        raise _mismatch(
            f"rank_offset {offset} and world_size {world_size} do not fit this fleet: a process group has two ranks, the trainer and the"
            f" weight store (weights.transport: Staged). Use rank_offset={TRAINER_RANKS} and world_size={right}."
        )
    if offset != TRAINER_RANKS:
        raise _mismatch(
            f"rank_offset {offset} does not fit this fleet: the trainer is rank 0, the engines take ranks from 1 on."
            f" Use rank_offset=1 and world_size={right}."
        )
    if world_size != right:
        sizes = list(table.sizes)
        raise _mismatch(
            f"world_size {world_size} does not fit this fleet: rank_offset {offset} + {_count(table.gpus, 'GPU')}"
            f" on {_count(len(sizes), 'engine')} {_show_sizes(sizes)} = {right}. Use world_size={right}."
        )


def _mismatch(message: str) -> RefusedError:
    return RefusedError(Refusal(RefusalCode.WORLD_SIZE_MISMATCH, message))


def _show_sizes(sizes: Sequence[int], limit: int = 16) -> str:
    """Return a short list of sizes: the message goes into an HTTP reason phrase."""
    if len(sizes) <= limit:
        return str(list(sizes))
    return f"[{', '.join(map(str, sizes[:limit]))}, …]"


def _count(number: int, word: str) -> str:
    return f"{number} {word}" if number == 1 else f"{number} {word}s"


def _group_name(body: Mapping[str, Any]) -> str:
    # An empty name fails an assertion in SGLang and ends its process.
    name = body.get("group_name", DEFAULT_GROUP_NAME)
    if not isinstance(name, str) or not name.strip():
        raise RefusedError(f"group_name {name!r} is not a name: use a non-empty string, a new one for each process group.")
    if len(name) > MAX_GROUP_NAME_CHARACTERS:
        raise RefusedError(f"group_name is {len(name)} characters long: use at most {MAX_GROUP_NAME_CHARACTERS}.")
    return name


def _host(body: Mapping[str, Any]) -> str:
    host = body.get("master_address")
    if not isinstance(host, str) or not host.strip():
        raise RefusedError("master_address is missing: name the host on which the trainer's rank 0 listens.")
    if host in {"0.0.0.0", "::", "[::]"}:  # noqa: S104 - compared with, not bound
        raise RefusedError(f"master_address {host} is not an address to connect to: use the trainer's own IP or name.")
    return host


def _integer(body: Mapping[str, Any], key: str) -> int:
    """Return an integer field. Several trainers send numbers as strings."""
    value = body.get(key)
    if value is None:
        raise RefusedError(f"{key} is missing: it must be a number.")
    if isinstance(value, str) and value.strip().isascii() and value.strip().isdigit():
        return int(value.strip()[:20])
    if isinstance(value, bool) or not isinstance(value, int):
        raise RefusedError(f"{key} {quote_value(value)} is not a whole number.")
    return value


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
    author: str = ""
    """Caller that opened it; empty: not known."""

    def shown(self) -> FleetGroup:
        """Return the process group for the discovery document."""
        return FleetGroup(members=list(self.boots), **self._facts())

    def row(self, places: Mapping[str, int]) -> GroupRow:
        """Return the process group for the record, where its engines have these places."""
        joined = [places[name] for name in self.boots if name != STORE]
        return GroupRow(places=joined, author=self.author, store=self.boots.get(STORE, ""), **self._facts())

    def _facts(self) -> dict[str, Any]:
        return {"name": self.name, "epoch": self.epoch, "world_size": self.world_size, "master": self.master, "backend": self.backend}
