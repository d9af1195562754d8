"""One reconcile: observe → plan → apply → status → Events. This module only connects the steps; ``decide`` makes the decisions."""

from __future__ import annotations

import logging
import secrets
from collections.abc import Callable
from dataclasses import dataclass, replace

from sglang_rollout.api.status import ConditionType, Reason, find
from sglang_rollout.controller.apply import Outcome, execute_plan
from sglang_rollout.controller.decide.allowed import NOTHING, Allowed
from sglang_rollout.controller.decide.contest import Memory, seconds_until_peace
from sglang_rollout.controller.decide.node_avoidance import seconds_until_expiry
from sglang_rollout.controller.decide.plan import Failure, Plan, make_plan
from sglang_rollout.controller.decide.status import build_status
from sglang_rollout.controller.decide.transitions import find_events
from sglang_rollout.controller.decide.view import FleetView
from sglang_rollout.controller.events import EventPoster
from sglang_rollout.controller.metrics import Key, Metrics
from sglang_rollout.controller.observe import observe
from sglang_rollout.controller.render.common import Settings
from sglang_rollout.kube.client import Kube
from sglang_rollout.kube.errors import Conflict, NotFound, Refused
from sglang_rollout.kube.resources import Object
from sglang_rollout.wire.reasons import end_sentence

log = logging.getLogger(__name__)

KEY_BYTES = 32
"""256 bits cannot be guessed."""


@dataclass(frozen=True)
class Result:
    """Result of a reconcile, for the worker that called it."""

    name: str
    """``ok``, ``gone``, ``refused``, or ``standby``: another operator acts."""
    requeue_after: float | None = None
    """Seconds after which to reconcile again even if no event arrives; None: wait for an event."""
    retry: bool = False
    """True if the API server refused something that it may accept later: reconcile again with growing delays."""


class Reconciler:
    """Brings rollouts to their specs.

    Between calls the reconciler keeps only which fields its last applies own, and the failures that it has logged. After a restart it
    applies each child once, which changes nothing if no child differs.
    """

    def __init__(
        self,
        kube: Kube,
        settings: Settings,
        allowed: Allowed = NOTHING,
        *,
        events: EventPoster,
        metrics: Metrics,
        now: Callable[[], str],
    ) -> None:
        self._kube = kube
        self._allowed = allowed
        self._settings = settings
        self._events = events
        self._metrics = metrics
        self._now = now
        self._memory: dict[Key, Memory] = {}
        self._logged: dict[Key, Failure | None] = {}

    async def reconcile(self, key: Key) -> Result:
        """Bring the rollout ``key`` one step nearer to its spec.

        Raises:
            KubeError: The API server is away, or another writer was faster. Try again.
        """
        namespace, name = key
        fleet = await observe(self._kube, namespace, name)
        if fleet is None or fleet.is_being_deleted:
            # Owner references remove the children. New children would only be in the way.
            return self._forget(key)
        memory = self._recall(key, fleet)
        plan, defect = self._plan(replace(fleet, ownership=memory.ownership, restores=memory.restores))
        unplanned = defect or plan.refusal
        outcome = Outcome(0, unplanned) if unplanned else await execute_plan(self._kube, namespace, plan, memory, self._now())
        if outcome.writes:
            # The status must describe the objects as they are now. With the earlier view it could report a fleet of the
            # previous generation as ready under the new observedGeneration.
            fleet = await observe(self._kube, namespace, name)
            if fleet is None:
                return self._forget(key)
        status = await self._update_status(replace(fleet, restores=memory.restores), outcome)
        self._metrics.set_ready(key, ready_status(status))
        self._log_failure(key, outcome.failure)
        now = self._now()
        delays = (plan.requeue_after, seconds_until_expiry(status, now), seconds_until_peace(memory.restores, now))
        soonest = min((delay for delay in delays if delay is not None), default=None)
        return Result("refused" if outcome.failure else "ok", soonest, retry=bool(outcome.failure and not plan.refusal))

    def _recall(self, key: Key, fleet: FleetView) -> Memory:
        """Return what is remembered of the rollout, without the ownership of objects that no longer exist."""
        memory = self._memory.setdefault(key, Memory())
        uids = {child["metadata"].get("uid") for child in fleet.children.values()}
        memory.ownership = {uid: owned for uid, owned in memory.ownership.items() if uid in uids}
        return memory

    def _forget(self, key: Key) -> Result:
        """Drop the state of a rollout that no longer exists."""
        self._memory.pop(key, None)
        self._logged.pop(key, None)
        self._metrics.set_ready(key, None)
        return Result("gone")

    def _log_failure(self, key: Key, failure: Failure | None) -> None:
        """Log a failure once, not at each retry."""
        if failure is not None and failure != self._logged.get(key):
            log.warning("%s/%s: %s", *key, failure.message)
        self._logged[key] = failure

    def _plan(self, fleet: FleetView) -> tuple[Plan, Failure | None]:
        """Return the plan, or the defect that prevents a plan, so that the status reports the defect as well as the log."""
        try:
            return make_plan(fleet, self._settings, self._now(), self._allowed, new_key=secrets.token_urlsafe(KEY_BYTES)), None
        except Exception as error:
            metadata = fleet.cr["metadata"]
            log.exception("%s/%s: defect in the operator: no plan can be made", metadata["namespace"], metadata["name"])
            problem = end_sentence(f"The children of this rollout cannot be rendered ({type(error).__name__}: {error})")
            advice = "Check spec.podTemplate and spec.scheduling.affinity first: do they have the shape of a Pod's fields?"
            return Plan(), Failure(Reason.APPLY_FAILED, f"{problem} {advice} The operator's log has more; please report this defect.")

    async def _update_status(self, fleet: FleetView, outcome: Outcome) -> Object:
        """Write the status if it differs, then post Events about the change. Return the status."""
        rollout = fleet.cr
        old = rollout.get("status")
        status = build_status(fleet, self._now(), failure=outcome.failure)
        if status == old or not await self._write_status(rollout, status):
            return status
        for event in find_events(old, status):
            metadata = rollout["metadata"]
            log.info("%s/%s: %s: %s", metadata["namespace"], metadata["name"], event.reason, event.message)
            await self._events.post(rollout, event)
        return status

    async def _write_status(self, rollout: Object, status: Object) -> bool:
        """Return False if the rollout no longer exists."""
        metadata = rollout["metadata"]
        body = {
            "apiVersion": rollout["apiVersion"],
            "kind": rollout["kind"],
            # The uid is a precondition: a new rollout of the same name must not get this status.
            "metadata": {"name": metadata["name"], "namespace": metadata["namespace"], "uid": metadata["uid"]},
            "status": status,
        }
        try:
            # Apply, not patch: fields that are missing from the status are removed, because no other writer owns them.
            await self._kube.apply(body, subresource="status")
        except (NotFound, Conflict):
            # The rollout was deleted, and perhaps recreated, since it was read. A watch event about this change will follow.
            log.debug("%s/%s is gone, its status is not needed", metadata["namespace"], metadata["name"])
            return False
        except Refused as error:
            # The status does not fit the schema: a defect, or the CRD of another release.
            raise Refused(f"{error} (is the installed CRD of this release?)", code=error.code) from error
        return True


def ready_status(status: Object) -> str:
    """Return the status of the Ready condition: True, False or Unknown."""
    return str(find(status, ConditionType.READY).get("status") or "Unknown")
