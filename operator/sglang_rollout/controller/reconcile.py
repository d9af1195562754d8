"""One reconcile: observe → plan → apply → status → Events. It only connects; what to do is decided in ``core``."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass

from sglang_rollout.api.conditions import Reason
from sglang_rollout.controller.apply import Outcome, execute
from sglang_rollout.controller.decide.facts import Failure
from sglang_rollout.controller.decide.node_avoidance import expires_in
from sglang_rollout.controller.decide.plan import Plan, plan
from sglang_rollout.controller.decide.sentences import sentence
from sglang_rollout.controller.decide.status import build_status
from sglang_rollout.controller.decide.transitions import transitions
from sglang_rollout.controller.decide.view import World
from sglang_rollout.controller.events import EventPoster
from sglang_rollout.controller.metrics import Key, Metrics
from sglang_rollout.controller.observe import observe
from sglang_rollout.controller.render.settings import Settings
from sglang_rollout.kube.client import Kube
from sglang_rollout.kube.errors import Conflict, NotFound, Refused
from sglang_rollout.kube.resources import ROLLOUTS, Object

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Result:
    """How a reconcile ended, for the worker that called it."""

    name: str
    """``ok``, ``gone`` or ``refused``."""
    requeue_after: float | None = None
    """Look again after so many seconds, also if nothing happens until then."""
    retry: bool = False
    """Something was refused that may be accepted later: look again with growing delays."""


class Reconciler:
    """Makes one rollout's world as its spec says. Keeps nothing between calls: a restart changes nothing."""

    def __init__(self, kube: Kube, settings: Settings, *, events: EventPoster, metrics: Metrics, now: Callable[[], str]) -> None:
        self._kube = kube
        self._settings = settings
        self._events = events
        self._metrics = metrics
        self._now = now

    async def reconcile(self, key: Key) -> Result:
        """Bring the rollout ``key`` one step nearer to its spec; raises KubeError when it should be tried again."""
        namespace, name = key
        world = await observe(self._kube, namespace, name)
        if world is None or world.cr["metadata"].get("deletionTimestamp"):
            # Children go by their owner references; making new ones now would only be in the way.
            self._metrics.ready(key, None)
            return Result("gone")
        steps, unplanned = self._plan(world)
        outcome = await execute(self._kube, namespace, steps) if unplanned is None else Outcome(0, unplanned)
        if outcome.writes:
            # Status speaks of what is there now. With the old picture it could call a fleet of the previous
            # generation ready under the new observedGeneration.
            fresh = await observe(self._kube, namespace, name)
            if fresh is None:
                self._metrics.ready(key, None)
                return Result("gone")
            world = fresh
        status = await self._report(world, outcome)
        self._metrics.ready(key, ready_of(status))
        if outcome.failure:
            log.warning("%s/%s: %s", namespace, name, outcome.failure.sentence)
        waits = [seconds for seconds in (steps.requeue_after, expires_in(status, self._now())) if seconds is not None]
        return Result("refused" if outcome.failure else "ok", min(waits, default=None), retry=bool(outcome.failure))

    def _plan(self, world: World) -> tuple[Plan, Failure | None]:
        """What to do, or why nobody can say: a person must learn of a defect from the object that it concerns, not only from our log."""
        try:
            return plan(world, self._settings, self._now()), None
        except Exception as error:
            metadata = world.cr["metadata"]
            log.exception("%s/%s: a defect in the operator: nothing can be planned", metadata["namespace"], metadata["name"])
            said = sentence(f"The children of this rollout cannot be made ({type(error).__name__}: {error})")
            advice = "Look first at spec.podTemplate and spec.scheduling.affinity: are they as in a Pod?"
            return Plan(), Failure(Reason.APPLY_FAILED, f"{said} {advice} The operator's log has more; please report it.")

    async def _report(self, world: World, outcome: Outcome) -> Object:
        """Write the status if it differs, then tell people what changed."""
        rollout = world.cr
        old = rollout.get("status")
        status = build_status(world, self._settings, self._now(), failure=outcome.failure)
        if status == old:
            return status
        if not await self._write_status(rollout, status):
            return status
        for event in transitions(old, status):
            metadata = rollout["metadata"]
            log.info("%s/%s: %s: %s", metadata["namespace"], metadata["name"], event.reason, event.message)
            await self._events.post(rollout, event)
        return status

    async def _write_status(self, rollout: Object, status: Object) -> bool:
        """Whether the rollout was still there to take it."""
        metadata = rollout["metadata"]
        body = {
            "apiVersion": rollout["apiVersion"],
            "kind": rollout["kind"],
            # The uid is a precondition: never a status for a new rollout of the same name.
            "metadata": {"name": metadata["name"], "namespace": metadata["namespace"], "uid": metadata["uid"]},
            "status": status,
        }
        try:
            # Apply, not patch: fields that are in no status any more vanish, because nobody else owns them.
            await self._kube.apply(body, subresource="status")
        except (NotFound, Conflict):
            # Deleted (and perhaps made anew) since it was read: its event is on the way.
            log.debug("%s/%s is gone, its status is not needed", metadata["namespace"], metadata["name"])
            return False
        except Refused as error:
            # Our own status does not fit our own schema: a defect, or a CRD of another release.
            raise Refused(f"{error} (is the installed CRD of this release?)", code=error.code) from error
        return True


def ready_of(status: Object) -> str:
    """Status of the Ready condition: True, False or Unknown."""
    for condition in status.get("conditions") or []:
        if condition.get("type") == "Ready":
            return str(condition.get("status"))
    return "Unknown"


__all__ = ["ROLLOUTS", "Reconciler", "Result", "ready_of"]
