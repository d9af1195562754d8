"""Whether the trainer is still there. Pure: what is known, and the operation that asks.

Its calls and heartbeats prove that it lives. An unmodified trainer sends no heartbeats: after a silence the store that it
hosts is asked for, from engine pods. A store that takes no connection means that the process is gone. One that does
proves little (a stopped process still accepts), so silence has an absolute limit, too: ``deadlines.idleSeconds``, or
``deadlines.totalSeconds`` while heartbeats arrive or a call of its is under way.

Groups outlive trainers, and nothing in a call tells which trainer sends it. So the stores are asked for when a trainer has just
paused, too: one that takes no connection then is another's, and its silence later tells nothing of this one.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from sglang_rollout.api.weights_spec import OnLoss
from sglang_rollout.coordinator.update.interruption import Cause, Interruption
from sglang_rollout.coordinator.update.model import Fleet
from sglang_rollout.coordinator.update.steps import same, send
from sglang_rollout.wire.agent import PreflightRequest
from sglang_rollout.wire.ports import AGENT_PREFLIGHT

PROBE = 2.0
"""Seconds that an engine's pod tries to reach the store: a live one is reached within milliseconds."""
MARGIN = 2.0
WITNESSES = 2
"""So many engines are asked, so that one with a broken network does not bear witness alone."""
JUST = 1.0
"""A trainer that was heard so many seconds ago is there now."""


@dataclass
class Trainer:
    """What is known of the trainer."""

    heard: float
    """When its last call arrived."""
    beat: float = float("-inf")
    """When its last heartbeat arrived."""
    presumed: float = float("-inf")
    """When its store was last reached."""
    left: bool = False
    """It closed the connection of a call that was under way."""
    waiting: bool = False
    """It waits for the answer to a call."""
    looked: Interruption | None = None
    """The last pause for which it was asked which stores are another trainer's."""
    others: frozenset[str] = frozenset()
    """These, until a group is opened: they took no connection while the trainer of that pause was there."""
    probing: bool = False
    proofs: int = 0
    """How often something spoke for its life."""
    gone: str = ""
    """Why it counts as lost, as a sentence; empty while it does not."""

    @property
    def alive(self) -> float:
        """When something last spoke for its life."""
        return max(self.heard, self.beat, self.presumed)

    def proved(self, now: float) -> None:
        """Something spoke for its life."""
        self.presumed, self.left, self.gone, self.proofs = now, False, "", self.proofs + 1

    def suspicious(self, fleet: Fleet) -> bool:
        """Whether its store should be asked for now."""
        silent = fleet.now - self.alive >= fleet.policy.trainer_lease.ttl_seconds
        if self.waiting and fleet.update is None and fleet.transaction.joining is None:
            return False  # nothing waits for it in a collective, and its call is proof enough
        return not self.probing and not self.gone and (self.left or silent) and bool(self.stores(fleet))

    def stores(self, fleet: Fleet) -> list[str]:
        """Stores (HOST:PORT) that tell whether it is there."""
        paused = fleet.pause is self.looked and fleet.update is None
        return [master for master in masters(fleet) if not (paused and master in self.others)]

    def unsure(self, fleet: Fleet) -> bool:
        """Whether it has just paused, and it should be asked now which stores are another trainer's."""
        hold = fleet.pause
        begun = hold is not None and hold.cause is Cause.TRAINER and hold is not self.looked and fleet.update is None
        there = not self.left and fleet.now - self.heard < JUST
        return begun and there and not self.probing and bool(masters(fleet))

    def overdue(self, fleet: Fleet) -> str:
        """Why a pause or an update is given up, whether or not anybody is there; empty if it is not."""
        since = [fleet.pause.since if fleet.pause is not None else None, fleet.update.started if fleet.update is not None else None]
        started = min((moment for moment in since if moment is not None), default=fleet.now)
        limits = fleet.policy.deadlines
        if fleet.now - started > limits.total_seconds:
            return f"it had lasted {fleet.now - started:.0f} s (weights.deadlines.totalSeconds)"
        beating = fleet.now - self.beat < fleet.policy.trainer_lease.ttl_seconds
        if not beating and not self.waiting and fleet.now - self.heard > limits.idle_seconds:
            return f"nothing was heard of the trainer for {fleet.now - self.heard:.0f} s (weights.deadlines.idleSeconds)"
        return ""


def masters(fleet: Fleet) -> list[str]:
    """Stores (HOST:PORT) of the trainer that something depends on now."""
    if fleet.transaction.joining is not None:
        return [fleet.transaction.joining]
    held = fleet.pause is not None and fleet.pause.cause is not Cause.TRAINER_LOST
    if fleet.update is not None or held or (fleet.policy.trainer_lease.on_loss is OnLoss.PAUSE and fleet.pause is None):
        return list(dict.fromkeys(group.master for group in fleet.groups.values()))
    return []


async def unreached(fleet: Fleet, stores: Iterable[str]) -> dict[str, str]:
    """Ask engine pods for stores. Empty if any is reached, or if nobody could be asked; else why each is not."""
    reasons = {}
    for master in stores:
        reasons[master] = await knock(master, fleet.up()[:WITNESSES], PROBE)
        if not reasons[master]:
            return {}
    return reasons


async def knock(master: str, witnesses: Iterable[str], seconds: float) -> str:
    """Ask the pods of these engines for one store. Empty if it is reached, or if none of them could be asked; else why not."""
    host, _, port = master.rpartition(":")
    body = PreflightRequest(host=host, port=int(port), deadline=seconds).model_dump(mode="json")
    results = await send(AGENT_PREFLIGHT, same(witnesses, body), seconds + MARGIN)
    asked = [result for result in results.values() if result.status]
    if not asked or any(result.ok for result in asked):
        return ""
    return f"the trainer is gone: its store at {master} takes no connection ({asked[0].message.rstrip('.')})"
