"""Which coordinator leads: a Lease in Kubernetes, a locked file elsewhere.

The Lease keeps two coordinators from working against each other; it is not the fence. That is the term, which every
agent remembers: a coordinator that was believed dead and comes back is refused by all of them. So a leader that cannot
reach the API server goes on leading: it stops when it sees another holder, or when an agent follows a higher term.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import logging
import os
from datetime import UTC, datetime
from pathlib import Path
from typing import Protocol

from sglang_rollout.kube.client import Kube
from sglang_rollout.kube.errors import Conflict, KubeError, NotFound
from sglang_rollout.kube.resources import CONFIGMAPS, LEASES, Object

log = logging.getLogger(__name__)

DURATION = 10.0
"""Seconds after which a holder that does not renew counts as gone."""
EVERY = 2.0
"""Between two renewals, and between two looks at somebody else's Lease."""


class DeposedError(Exception):
    """Another coordinator leads: this process must end."""


class Leadership(Protocol):
    """The right to lead."""

    async def acquire(self) -> int:
        """Wait until this process leads; returns the highest term that the Lease knows of."""

    async def claim(self, term: int) -> None:
        """Write down the term that is led. Raises DeposedError."""

    async def hold(self) -> None:
        """Keep the right, for ever. Raises DeposedError when it is lost."""

    async def release(self) -> None:
        """Give the right back, so that the next one need not wait."""


class FileLeadership:
    """One process at a time on one machine: the kernel drops the lock with the process."""

    def __init__(self, record: Path) -> None:
        self._path = record.with_name(f"{record.name}.lock")
        self._handle: int | None = None

    async def acquire(self) -> int:
        """Wait for the lock. Terms are counted by the record alone."""
        self._path.parent.mkdir(parents=True, exist_ok=True)
        handle = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        said = False
        while True:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if not said:
                    log.warning("another coordinator holds %s: waiting until it ends", self._path)
                said = True
                await asyncio.sleep(EVERY / 4)
            else:
                self._handle = handle
                return 0

    async def claim(self, term: int) -> None:
        """The record says it."""

    async def hold(self) -> None:
        """Nobody can take it."""
        await asyncio.Event().wait()

    async def release(self) -> None:
        """Unlock."""
        if self._handle is not None:
            os.close(self._handle)
            self._handle = None


class LeaseLeadership:
    """Lease ``<name>-router`` of the rollout's namespace; ``leaseTransitions`` is the term."""

    def __init__(self, kube: Kube, *, namespace: str, name: str, identity: str) -> None:
        self._kube = kube
        self._namespace = namespace
        self._rollout = name
        self._name = f"{name}-router"
        self._identity = identity
        self._lease: Object = {}
        self._complaint = ""

    async def acquire(self) -> int:
        """Wait until the Lease is free, ours from an earlier life, or not renewed for its duration."""
        seen, since = "", 0.0
        loop = asyncio.get_running_loop()
        while True:
            try:
                found = await self._get()
                holder = str(found["spec"].get("holderIdentity") or "")
                stamp = str(found["spec"].get("renewTime"))
                if stamp != seen:
                    seen, since = stamp, loop.time()
                # Judged by our own clock, from when we first saw this renewal: clocks of two nodes need not agree.
                if holder in ("", self._identity) or loop.time() - since >= DURATION:
                    term = int(found["spec"].get("leaseTransitions") or 0) + 1
                    await self._write(found, {**self._mine(), "leaseTransitions": term, "acquireTime": _now()})
                    return term
                self._complain(f"{holder} leads: waiting for its Lease {self._name}")
            except Conflict:
                continue  # somebody was faster: look again
            except KubeError as error:
                self._complain(f"the Lease {self._name} cannot be had: {error}")
            await asyncio.sleep(EVERY)

    async def claim(self, term: int) -> None:
        """Raise the Lease's number to the term, so that the next leader's is higher whatever becomes of the record."""
        while int(self._lease["spec"]["leaseTransitions"]) < term:
            try:
                await self._renew({"leaseTransitions": term})
            except KubeError as error:
                self._complain(f"the Lease {self._name} cannot be written: {error}")
                await asyncio.sleep(EVERY)

    async def hold(self) -> None:
        """Renew. An API server that is away changes nothing: the agents' terms decide."""
        while True:
            await asyncio.sleep(EVERY)
            try:
                await self._renew({})
                self._complain("")
            except KubeError as error:
                self._complain(f"the Lease {self._name} is not renewed: {error}")

    async def release(self) -> None:
        """Leave it without a holder."""
        if self._lease.get("spec", {}).get("holderIdentity") == self._identity:
            with contextlib.suppress(KubeError):  # it runs out by itself
                await self._write(self._lease, {"holderIdentity": ""})

    async def _renew(self, more: Object) -> None:
        try:
            await self._write(self._lease, {**self._mine(), **more})
        except (Conflict, NotFound):
            found = await self._get()
            holder = str(found["spec"].get("holderIdentity") or "")
            if holder not in ("", self._identity):
                raise DeposedError(f"{holder} has taken the Lease {self._name}") from None
            term = max(int(found["spec"].get("leaseTransitions") or 0), int(self._lease["spec"].get("leaseTransitions") or 0))
            await self._write(found, {**self._mine(), "leaseTransitions": term, **more})

    async def _get(self) -> Object:
        """The Lease; made when it is not there, with the rollout as its owner."""
        try:
            return await self._kube.get(LEASES, self._namespace, self._name)
        except NotFound:
            weights = await self._kube.get(CONFIGMAPS, self._namespace, f"{self._rollout}-weights")
        metadata = {
            "name": self._name,
            "namespace": self._namespace,
            # Without "controller" and "blockOwnerDeletion": those need rights over the owner in some clusters.
            "ownerReferences": [
                {key: owner[key] for key in ("apiVersion", "kind", "name", "uid")}
                for owner in weights["metadata"].get("ownerReferences") or []
            ],
        }
        return await self._kube.create({"apiVersion": LEASES.api_version, "kind": LEASES.kind, "metadata": metadata, "spec": {}})

    async def _write(self, found: Object, spec: Object) -> None:
        version = found["metadata"]["resourceVersion"]
        self._lease = await self._kube.merge_patch(LEASES, self._namespace, self._name, {"spec": spec}, resource_version=version)

    def _mine(self) -> Object:
        return {"holderIdentity": self._identity, "leaseDurationSeconds": int(DURATION), "renewTime": _now()}

    def _complain(self, complaint: str) -> None:
        if complaint and complaint != self._complaint:
            log.warning("%s", complaint)
        self._complaint = complaint


def _now() -> str:
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
