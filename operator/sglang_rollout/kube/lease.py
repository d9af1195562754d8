"""A ``coordination.k8s.io`` Lease held by one process at a time, with ``leaseTransitions`` as a number that only grows."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime

from sglang_rollout.kube.client import Kube
from sglang_rollout.kube.errors import Conflict, KubeError, NotFound
from sglang_rollout.kube.resources import CONFIGMAPS, LEASES, Object

log = logging.getLogger(__name__)

DURATION_SECONDS = 10.0
"""A holder that does not renew for this time counts as gone."""
RENEW_SECONDS = 2.0
"""Interval of renewals, and of reads of a Lease that another process holds."""


class LeaseTakenError(Exception):
    """Another process holds the Lease."""


class Lease:
    """One candidate for a Lease.

    Args:
        kube: Client of the API server.
        namespace: Namespace of the Lease.
        name: Name of the Lease.
        identity: Name of this candidate in ``holderIdentity``.
        find_owners: Returns the owner references that the Lease gets when it is created, so that Kubernetes deletes it with its last
            owner. Without owners no Lease is created.
        duration: Seconds after which a holder that does not renew counts as gone.
        renew: Seconds between renewals, and between reads of a Lease that another process holds.
    """

    def __init__(
        self,
        kube: Kube,
        *,
        namespace: str,
        name: str,
        identity: str,
        find_owners: Callable[[], Awaitable[list[Object]]],
        duration: float | None = None,
        renew: float | None = None,
    ) -> None:
        self._kube = kube
        self._namespace = namespace
        self._name = name
        self._identity = identity
        self._find_owners = find_owners
        self._duration = DURATION_SECONDS if duration is None else duration
        self._renewal_period = RENEW_SECONDS if renew is None else renew
        self._lease: Object = {}
        self._seen, self._seen_since = "", 0.0
        self._last_warning = ""
        self.live_holder = ""
        """Another process that holds the Lease, and has renewed it while this process waited; empty if none has."""

    async def acquire(self) -> int:
        """Wait until the Lease is free, held by this identity, or expired. Take it and return the new ``leaseTransitions``."""
        while True:
            try:
                transitions = await self.try_acquire()
            except Conflict:
                continue  # another candidate wrote the Lease first: read it again
            except KubeError as error:
                self._warn_once(f"the Lease {self._name} cannot be acquired: {error}")
            else:
                if transitions is not None:
                    return transitions
            await asyncio.sleep(self._renewal_period)

    async def try_acquire(self) -> int | None:
        """Take the Lease if it is free, held by this identity, or expired. Return the new ``leaseTransitions``, or None.

        Raises:
            KubeError: The Lease cannot be read or written, or another candidate wrote it first.
        """
        found = await self._get_or_create()
        holder, now = _holder(found), asyncio.get_running_loop().time()
        renewed = f"{holder} {found['spec'].get('renewTime')}"
        if renewed != self._seen:
            self.live_holder = holder if self._seen.startswith(f"{holder} ") else ""
            self._seen, self._seen_since = renewed, now
        # Our own clock measures the expiry, from our first sight of this renewal, because clocks of two nodes may differ.
        if holder in ("", self._identity) or now - self._seen_since >= self._duration:
            transitions = _transitions(found) + 1
            await self._write(found, {**self._renewal(), "leaseTransitions": transitions, "acquireTime": _now()})
            self.live_holder = ""
            return transitions
        self._warn_once(f"{holder} leads: waiting for its Lease {self._name}")
        return None

    async def raise_transitions(self, minimum: int) -> None:
        """Raise ``leaseTransitions`` to at least ``minimum``, retrying while the API server is away.

        Raises:
            LeaseTakenError: Another process holds the Lease.
        """
        while _transitions(self._lease) < minimum:
            try:
                await self._renew({"leaseTransitions": minimum})
            except KubeError as error:
                self._warn_once(f"the Lease {self._name} cannot be written: {error}")
                await asyncio.sleep(self._renewal_period)

    async def keep_renewing(self) -> None:
        """Renew the Lease forever. An API server that is away is only logged.

        Raises:
            LeaseTakenError: Another process holds the Lease.
        """
        while True:
            await asyncio.sleep(self._renewal_period)
            try:
                await self._renew({})
                self._warn_once("")
            except KubeError as error:
                self._warn_once(f"the Lease {self._name} is not renewed: {error}")

    async def release(self) -> None:
        """Remove this process as the holder, so that the next candidate need not wait."""
        if self._lease.get("spec", {}).get("holderIdentity") == self._identity:
            with contextlib.suppress(KubeError):  # the Lease expires by itself
                await self._write(self._lease, {"holderIdentity": ""})

    async def _renew(self, changes: Object) -> None:
        try:
            await self._write(self._lease, {**self._renewal(), **changes})
        except (Conflict, NotFound):
            found = await self._get_or_create()
            holder = _holder(found)
            if holder not in ("", self._identity):
                raise LeaseTakenError(f"{holder} has taken the Lease {self._name}") from None
            transitions = max(_transitions(found), _transitions(self._lease))
            await self._write(found, {**self._renewal(), "leaseTransitions": transitions, **changes})

    async def _get_or_create(self) -> Object:
        try:
            return await self._kube.get(LEASES, self._namespace, self._name)
        except NotFound:
            owners = await self._find_owners()
            if not owners:
                raise
        metadata = {"name": self._name, "namespace": self._namespace, "ownerReferences": owners}
        return await self._kube.create({"apiVersion": LEASES.api_version, "kind": LEASES.kind, "metadata": metadata, "spec": {}})

    async def _write(self, found: Object, spec: Object) -> None:
        version = found["metadata"]["resourceVersion"]
        self._lease = await self._kube.merge_patch(LEASES, self._namespace, self._name, {"spec": spec}, resource_version=version)

    def _renewal(self) -> Object:
        return {"holderIdentity": self._identity, "leaseDurationSeconds": int(self._duration), "renewTime": _now()}

    def _warn_once(self, warning: str) -> None:
        if warning and warning != self._last_warning:
            log.warning("%s", warning)
        self._last_warning = warning


async def find_owners_of(kube: Kube, namespace: str, config_map: str) -> list[Object]:
    """Return the owner references of a ConfigMap, for a Lease that is deleted together with it.

    Without "controller" and "blockOwnerDeletion": some clusters demand rights over the owner for those.
    """
    references = (await kube.get(CONFIGMAPS, namespace, config_map))["metadata"].get("ownerReferences") or []
    return [{key: owner[key] for key in ("apiVersion", "kind", "name", "uid")} for owner in references]


def _holder(lease: Object) -> str:
    return str(lease["spec"].get("holderIdentity") or "")


def _transitions(lease: Object) -> int:
    return int(lease["spec"].get("leaseTransitions") or 0)


def _now() -> str:
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
