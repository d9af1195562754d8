"""Track whether the trainer is alive, and build the operations that probe its store. Pure.

Calls and heartbeats of a trainer prove that it lives. An unmodified trainer sends no heartbeats. After a silence, engine pods try to reach
the store that it hosts. A store that accepts no connection means that the process is gone. A store that accepts one proves little (a
stopped process still accepts), so silence has an absolute limit, too: ``deadlines.idleSeconds``, or ``deadlines.totalSeconds`` while
heartbeats arrive or a call of the trainer is under way.

Process groups outlive trainers, and no call tells which trainer sends it. So the stores are also probed when a trainer has just paused: a
store that accepts no connection then belongs to another trainer, and its silence later says nothing about this one.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass

from sglang_rollout.api.weights_spec import OnLoss
from sglang_rollout.coordinator.update.interruption import Cause, Interruption
from sglang_rollout.coordinator.update.model import Fleet
from sglang_rollout.coordinator.update.steps import PREFLIGHT_MARGIN_SECONDS, same_body, send
from sglang_rollout.coordinator.update.store import STORE, preflight_path
from sglang_rollout.wire.agent import PreflightRequest

PROBE_SECONDS = 2.0
"""How long an engine pod tries to reach the store. A live store is reached within milliseconds."""
WITNESSES = 2
"""How many engine pods are asked, so that one pod with a broken network does not decide alone."""
JUST_HEARD_SECONDS = 1.0
"""A trainer that was heard less than this ago is there now."""


@dataclass
class Trainer:
    """What is known about the trainer."""

    heard: float
    """When its last call arrived."""
    beat: float = float("-inf")
    """When its last heartbeat arrived."""
    reached_at: float = float("-inf")
    """When its store was last reached, or something else proved that it lives."""
    renewed: float = float("-inf")
    """When the holder of the fleet last proved that it lives. Calls of other trainers do not count."""
    left: bool = False
    """True if it closed the connection of a call that was under way."""
    waiting: bool = False
    """True while it waits for the answer to a call."""
    holder_waits: bool = False
    """True while the holder of the fleet waits for the answer to a call."""
    examined_pause: Interruption | None = None
    """The last pause for which the stores of other trainers were determined."""
    others: frozenset[str] = frozenset()
    """Stores that accepted no connection while the trainer of that pause was there. Cleared when a process group is opened."""
    probing: bool = False
    proofs: int = 0
    """How many times something proved that it lives."""
    gone: str = ""
    """Why it counts as lost, as a sentence; empty while it does not."""

    @property
    def alive(self) -> float:
        """When something last proved that it lives."""
        return max(self.heard, self.beat, self.reached_at)

    def note_alive(self, now: float) -> None:
        """Note that something proved that it lives."""
        self.reached_at, self.left, self.gone, self.proofs = now, False, "", self.proofs + 1

    def should_probe(self, fleet: Fleet) -> bool:
        """Return True if its store should be probed now."""
        silent = fleet.now - self.alive >= fleet.policy.trainer_lease.ttl_seconds
        if self.waiting and fleet.update is None and fleet.transaction.joining is None:
            return False  # no engine waits for it in a collective, and its call proves that it lives
        return not self.probing and not self.gone and (self.left or silent) and bool(self.stores(fleet))

    def stores(self, fleet: Fleet) -> list[str]:
        """Return the stores (HOST:PORT) whose silence means that it is gone."""
        paused = fleet.requested_pause is self.examined_pause and fleet.update is None
        return [master for master in trainer_stores(fleet) if not (paused and master in self.others)]

    def should_examine_pause(self, fleet: Fleet) -> bool:
        """Return True if it has just paused: now silent stores belong to other trainers."""
        pause = fleet.requested_pause
        begun = pause is not None and pause.cause is Cause.TRAINER and pause is not self.examined_pause and fleet.update is None
        there = not self.left and fleet.now - self.heard < JUST_HEARD_SECONDS
        return begun and there and not self.probing and bool(trainer_stores(fleet))

    def why_overdue(self, fleet: Fleet) -> str:
        """Return which deadline the pause or the update has exceeded, as a sentence; empty if none."""
        pause = fleet.requested_pause
        since = [pause.since if pause is not None else None, fleet.update.started if fleet.update is not None else None]
        started = min((moment for moment in since if moment is not None), default=fleet.now)
        limits = fleet.policy.deadlines
        if fleet.now - started > limits.total_seconds:
            return f"it had lasted {fleet.now - started:.0f} s (weights.deadlines.totalSeconds)"
        beating = fleet.now - self.beat < fleet.policy.trainer_lease.ttl_seconds
        if not beating and not self.waiting and fleet.now - self.heard > limits.idle_seconds:
            return f"nothing was heard of the trainer for {fleet.now - self.heard:.0f} s (weights.deadlines.idleSeconds)"
        return ""


def trainer_stores(fleet: Fleet) -> list[str]:
    """Return the stores (HOST:PORT) on which an update, a pause or the lease of the holder depends.

    The store of another trainer says nothing about the holder. A process group of an old record has no author.
    """
    if fleet.transaction.joining is not None:
        return [fleet.transaction.joining]
    pause = fleet.requested_pause
    is_paused = pause is not None and pause.cause is not Cause.TRAINER_LOST
    if fleet.update is not None or is_paused or (fleet.policy.trainer_lease.on_loss is OnLoss.PAUSE and pause is None):
        return list(dict.fromkeys(group.master for group in fleet.groups.values() if group.author in {"", fleet.holder}))
    return []


async def probe_stores(fleet: Fleet, stores: Iterable[str]) -> dict[str, str]:
    """Let engine pods probe stores. Returns why each is not reached; empty if one is reached, or if no pod could be asked."""
    reasons = {}
    for master in stores:
        reasons[master] = await probe_store(master, witnesses(fleet), PROBE_SECONDS)
        if not reasons[master]:
            return {}
    return reasons


def witnesses(fleet: Fleet) -> list[str]:
    """Return the peers that probe a trainer's store: some engines, or the weight store, which alone connects to trainers."""
    if fleet.is_staged:
        return [STORE] if fleet.is_up(STORE) else []
    return fleet.up()[:WITNESSES]


async def probe_store(master: str, peers: Collection[str], seconds: float) -> str:
    """Let the pods of these peers probe one store. Returns why it is not reached; empty if it is, or if no pod could be asked."""
    host, _, port = master.rpartition(":")
    body = PreflightRequest(host=host, port=int(port), deadline=seconds).model_dump(mode="json")
    results = await send(preflight_path(peers), same_body(peers, body), seconds + PREFLIGHT_MARGIN_SECONDS)
    asked = [result for result in results.values() if result.status]
    if not asked or any(result.ok for result in asked):
        return ""
    return f"the trainer is gone: its store at {master} takes no connection ({asked[0].message.rstrip('.')})"
