"""One operator for each namespace: Leases, and what an operator without the Lease does.

The operator takes a Lease in each namespace that has rollouts. A second operator with the same scope finds the Lease taken. It changes
nothing there, tells the users with an Event, and takes over when the first operator ends.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial

from sglang_rollout.controller.decide.transitions import EventToPost
from sglang_rollout.controller.events import EventPoster
from sglang_rollout.controller.metrics import Key, Metrics
from sglang_rollout.controller.reconcile import Result
from sglang_rollout.controller.render.names import FIELD_MANAGER
from sglang_rollout.kube.client import Kube
from sglang_rollout.kube.errors import KubeError, NotFound
from sglang_rollout.kube.lease import Lease, LeaseTakenError
from sglang_rollout.kube.resources import ROLLOUTS, Object

log = logging.getLogger(__name__)

LEASE_NAME = FIELD_MANAGER
DURATION_SECONDS = 30.0
"""An operator that does not renew for this time counts as gone. Fleets work without an operator, so there is no hurry."""
RENEW_SECONDS = 10.0
"""One write per namespace with rollouts in this time."""
REPORT_SECONDS = 300.0
"""Delay before the same Event again. The API server deletes Events after an hour."""


@dataclass
class _Claim:
    """This operator's claim to one namespace."""

    lease: Lease
    keys: set[Key] = field(default_factory=set)
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    is_held: bool = False
    task: asyncio.Task[None] | None = None


class Standing:
    """Reconciles a rollout if this operator holds the Lease of its namespace."""

    def __init__(
        self,
        kube: Kube,
        reconcile: Callable[[Key], Awaitable[Result]],
        *,
        identity: str,
        wake: Callable[[Key], None],
        events: EventPoster,
        metrics: Metrics,
    ) -> None:
        self._kube = kube
        self._reconcile = reconcile
        self._identity = identity
        self._wake = wake
        self._events = events
        self._metrics = metrics
        self._claims: dict[str, _Claim] = {}
        self._reported: dict[Key, float] = {}

    async def reconcile(self, key: Key) -> Result:
        """Reconcile the rollout, or report that another operator does.

        Raises:
            KubeError: The API server is away, or another writer was faster. Try again.
        """
        try:
            claim = await self._claim(key)
        except NotFound:
            # No rollout of the namespace is left, and no Lease.
            if (left := self._claims.get(key[0])) is not None:
                await self._forget(key, left)
            return await self._reconcile(key)
        if not claim.is_held:
            return await self._stand_by(key, claim)
        result = await self._reconcile(key)
        if result.name == "gone":
            await self._forget(key, claim)
        return result

    async def close(self) -> None:
        """Release all Leases, so that the next operator need not wait."""
        await asyncio.gather(*(self._release(claim) for claim in self._claims.values()))
        self._claims.clear()

    async def _claim(self, key: Key) -> _Claim:
        namespace, _ = key
        claim = self._claims.get(namespace)
        if claim is None:
            lease = Lease(
                self._kube,
                namespace=namespace,
                name=LEASE_NAME,
                identity=self._identity,
                duration=DURATION_SECONDS,
                renew=RENEW_SECONDS,
                find_owners=partial(self._find_owners, namespace),
            )
            claim = self._claims[namespace] = _Claim(lease)
        claim.keys.add(key)
        async with claim.lock:
            if claim.task is None:
                claim.is_held = await claim.lease.try_acquire() is not None
                claim.task = asyncio.create_task(self._keep(claim), name=f"Lease of {namespace}")
        return claim

    async def _find_owners(self, namespace: str) -> list[Object]:
        """Return owner references to the known rollouts of a namespace, so that Kubernetes deletes the Lease with the last of them."""
        found: list[Object] = []
        for key in sorted(self._claims[namespace].keys):
            with suppress(NotFound):
                rollout = await self._kube.get(ROLLOUTS, *key)
                found.append({"apiVersion": ROLLOUTS.api_version, "kind": ROLLOUTS.kind, "name": key[1], "uid": rollout["metadata"]["uid"]})
        return found

    async def _keep(self, claim: _Claim) -> None:
        """Renew the Lease while it is held, and take it when it is free."""
        while True:
            if claim.is_held:
                try:
                    await claim.lease.keep_renewing()
                except LeaseTakenError as error:
                    log.warning("%s", error)
                    claim.is_held = False
            await asyncio.sleep(RENEW_SECONDS)
            try:
                claim.is_held = await claim.lease.try_acquire() is not None
            except KubeError as error:
                log.debug("the Lease %s cannot be acquired: %s", LEASE_NAME, error)
            if claim.is_held:
                for key in claim.keys:
                    self._wake(key)

    async def _stand_by(self, key: Key, claim: _Claim) -> Result:
        self._metrics.set_ready(key, None)
        other, now = claim.lease.live_holder, asyncio.get_running_loop().time()
        if not other:
            return Result("standby", 2 * RENEW_SECONDS)
        if now - self._reported.get(key, -REPORT_SECONDS) >= REPORT_SECONDS:
            self._reported[key] = now
            if not await self._report(key, other):
                await self._forget(key, claim)
                return Result("gone")
        return Result("standby", REPORT_SECONDS)

    async def _report(self, key: Key, other: str) -> bool:
        """Return False if the rollout no longer exists."""
        message = (
            f"Operator {self._identity} watches this namespace, too, and changes nothing here, because operator {other} holds the Lease"
            f" {LEASE_NAME}. Give each namespace one operator: set the chart's value watchNamespaces, or uninstall one of them."
        )
        try:
            rollout = await self._kube.get(ROLLOUTS, *key)
        except NotFound:
            return False
        await self._events.post(rollout, EventToPost("Warning", "AnotherOperator", message, "AnotherOperator"))
        return True

    async def _forget(self, key: Key, claim: _Claim) -> None:
        """Give up the namespace with its last rollout."""
        claim.keys.discard(key)
        self._reported.pop(key, None)
        if not claim.keys:
            self._claims.pop(key[0], None)
            await self._release(claim)

    async def _release(self, claim: _Claim) -> None:
        if claim.task is not None:
            claim.task.cancel()
            await asyncio.gather(claim.task, return_exceptions=True)
        if claim.is_held:
            await claim.lease.release()
