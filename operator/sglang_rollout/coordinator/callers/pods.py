"""The pods of the cluster by address, as a watch reports them. Pure.

The table never forgets an address because the watch fails: known pods stay known, and an unknown address stays unknown.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from ipaddress import IPv6Address, ip_address
from typing import Any

from sglang_rollout.kube.resources import find_mounted_secrets

ROLLOUT_LABEL = "rollout.sglang.io/rollout"
"""Label of every pod that belongs to a rollout."""
ENDED_AFTER_SECONDS = 30.0
"""A deleted pod counts for this time after its grace period. The kubelet ends it earlier, but a lost node reports nothing."""
SILENT_SECONDS = 90.0
"""A working watch reports something every minute. After this silence an address may belong to another pod."""
MAX_PAST_ADDRESSES = 65_536
"""Addresses of pods that are gone, of which the oldest are forgotten: as many as the pods of a large cluster have."""
_ENDED = ("Succeeded", "Failed")
_LWS_NAME = "leaderworkerset.sigs.k8s.io/name"
_JOBSET_NAME = "jobset.sigs.k8s.io/jobset-name"
_KUBEFLOW_NAME = "training.kubeflow.org/job-name"
_TEMPLATE_HASH = "pod-template-hash"
_KIND = re.compile(r"[A-Z][A-Za-z0-9]{0,62}")
_NAME = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*")
"""A DNS subdomain, as most objects of Kubernetes are named."""
_MAX_NAME_CHARACTERS = 253
MAX_OWNER_CHARACTERS = 63 + 1 + _MAX_NAME_CHARACTERS
"""Longest ``Kind/name``. Record, status and audit log name owners."""
_SLASHES_OF_PODS = 2
"""Slashes in the name of a caller that is pods: ``namespace/Kind/name``. Addresses and tokens have none."""


@dataclass(frozen=True, slots=True)
class Caller:
    """Who sends a call. All pods of one owner are one caller.

    The user who creates a pod chooses its owner. So the owner separates trainers, and proves nothing about them.
    """

    namespace: str = ""
    """Namespace of the pod; empty for an address outside of pods, and for a token."""
    service_account: str = ""
    """ServiceAccount of the pod. Pods of one owner may have several: KubeRay gives the head pod one of its own."""
    owner: str = ""
    """``Kind/name`` of the object that the pod belongs to; for other callers, the address or the kind of token."""

    def __str__(self) -> str:
        """Return the name that distinguishes trainers."""
        return f"{self.namespace}/{self.owner}" if self.namespace else self.owner


def is_pods(caller: str) -> bool:
    """Return True if a caller is the pods of one owner.

    Args:
        caller: Name of the caller (``str(Caller)``).
    """
    return caller.count("/") == _SLASHES_OF_PODS


@dataclass(frozen=True, slots=True)
class Pod:
    """What the decision needs of a pod."""

    uid: str
    namespace: str
    name: str
    service_account: str
    owner: str
    """``Kind/name`` of the object that the pod belongs to (:func:`find_owner`)."""
    addresses: frozenset[str]
    """Addresses that only this pod has; none with ``hostNetwork``, because every process of the node has the same address."""
    labels: Mapping[str, str] = field(default_factory=dict, hash=False)
    secrets: frozenset[str] = frozenset()
    """Secrets that the pod mounts."""
    ends_at: float = math.inf
    """Unix time from which the pod no longer counts, because it was deleted."""

    @property
    def caller(self) -> Caller:
        """The caller that the pod is part of."""
        return Caller(self.namespace, self.service_account, self.owner)

    @property
    def rollout(self) -> str | None:
        """Name of the rollout that the pod belongs to; None for any other pod."""
        return self.labels.get(ROLLOUT_LABEL)

    def __str__(self) -> str:
        return f"pod {self.namespace}/{self.name} (ServiceAccount {self.service_account})"


def normalize_address(text: str) -> str | None:
    """Return an address in its shortest form, IPv4 without its IPv6 mapping; None if the text is no address."""
    try:
        address = ip_address(text.strip().strip("[]").partition("%")[0])
    except ValueError:
        return None
    if isinstance(address, IPv6Address) and address.ipv4_mapped is not None:
        return str(address.ipv4_mapped)
    return str(address)


def parse_pod(obj: Mapping[str, Any]) -> Pod | None:
    """Return the pod of a Kubernetes object; None for a pod that has ended, whose address another pod may have."""
    metadata, spec, status = obj["metadata"], obj.get("spec") or {}, obj.get("status") or {}
    if status.get("phase") in _ENDED:
        return None
    texts = [status.get("podIP") or "", *(item.get("ip") or "" for item in status.get("podIPs") or [])]
    addresses = frozenset(address for text in texts if (address := normalize_address(text)))
    return Pod(
        uid=metadata["uid"],
        namespace=metadata["namespace"],
        name=metadata["name"],
        service_account=spec.get("serviceAccountName") or "default",
        owner=find_owner(metadata),
        addresses=frozenset() if spec.get("hostNetwork") else addresses,
        labels=metadata.get("labels") or {},
        secrets=find_mounted_secrets(obj),
        ends_at=_find_end(metadata),
    )


def _find_end(metadata: Mapping[str, Any]) -> float:
    """Return the Unix time from which a pod no longer counts. ``deletionTimestamp`` is the end of its grace period."""
    deleted = metadata.get("deletionTimestamp")
    return datetime.fromisoformat(deleted).timestamp() + ENDED_AFTER_SECONDS if deleted else math.inf


def find_owner(metadata: Mapping[str, Any]) -> str:
    """Return ``Kind/name`` of the object that a pod belongs to: its controller, or the object that created several controllers.

    The user who creates a pod chooses its owner references and labels, and the API server hardly checks them. If they name no possible
    object, the pod belongs to itself.

    Args:
        metadata: Metadata of the pod.
    """
    kind, name = _read_owner(metadata)
    is_possible = _KIND.fullmatch(kind) and len(name) <= _MAX_NAME_CHARACTERS and _NAME.fullmatch(name)
    return f"{kind}/{name}" if is_possible else f"Pod/{metadata['name']}"


def _read_owner(metadata: Mapping[str, Any]) -> tuple[str, str]:
    """Return kind and name of the owner as the pod's metadata give them."""
    labels = metadata.get("labels") or {}
    kind, name = next(
        ((str(owner["kind"]), str(owner["name"])) for owner in metadata.get("ownerReferences") or [] if owner.get("controller")),
        ("Pod", str(metadata["name"])),
    )
    if _LWS_NAME in labels:  # the leaders, and the workers of each group, have StatefulSets of their own
        return "LeaderWorkerSet", labels[_LWS_NAME]
    if kind == "Job" and _JOBSET_NAME in labels:
        return "JobSet", labels[_JOBSET_NAME]
    if kind == "Job" and _KUBEFLOW_NAME in labels:  # the launcher; the MPIJob itself controls the workers
        return "MPIJob", labels[_KUBEFLOW_NAME]
    if kind == "ReplicaSet" and _TEMPLATE_HASH in labels:
        return "Deployment", name.removesuffix(f"-{labels[_TEMPLATE_HASH]}")
    return kind, name


@dataclass
class Feed:
    """The state of one watch of pods."""

    namespace: str
    """Namespace of the rollout."""
    is_own: bool
    """True for the pods of this namespace, False for those of all other namespaces."""
    is_current: bool = False
    """True while the watch runs, so that a live pod that is not in the table does not exist."""
    heard_at: float = -math.inf
    """Unix time of the last report."""
    forbidden: set[str] = field(default_factory=set)
    """Kinds that the coordinator may not watch."""

    def covers(self, pod: Mapping[str, Any]) -> bool:
        """Return True if this watch, and not the other, reports a pod."""
        return bool(pod["metadata"]["namespace"] == self.namespace) == self.is_own


class PodTable:
    """Live pods by address and by UID."""

    def __init__(self, namespace: str, now: Callable[[], float]) -> None:
        """Create an empty table.

        Args:
            namespace: Namespace of the rollout, whose pods are always watched.
            now: Returns the Unix time.
        """
        self._now = now
        self._pods: dict[str, Pod] = {}
        self._by_address: dict[str, set[str]] = {}
        self._by_secret: dict[str, set[str]] = {}
        self._namespaces: dict[str, Mapping[str, str]] = {}
        self._past_addresses: dict[str, str] = {}
        """Namespaces of pods that are gone, by their addresses, the oldest first."""
        self.own = Feed(namespace, is_own=True)
        self.others: Feed | None = None
        """Watch of the pods of all other namespaces; None: they are no callers."""

    @property
    def is_current(self) -> bool:
        """True while the watches run, so that a live pod that is not in the table does not exist."""
        return self.own.is_current and (self.others is None or self.others.is_current)

    @property
    def is_forbidden(self) -> bool:
        """True if the coordinator lacks the right to watch pods or namespaces of the cluster, which may be callers."""
        return self.others is not None and bool(self.others.forbidden)

    def is_silent_at(self, address: str) -> bool:
        """Return True if an address belongs or belonged to a pod, and the watch of this pod has been silent.

        Another pod may have the address now. An address that no pod has had is one of a node, or outside of the cluster.
        """
        namespaces = {self._pods[uid].namespace for uid in self._by_address.get(address, ())}
        if not namespaces and address in self._past_addresses:
            namespaces = {self._past_addresses[address]}
        return any(self._is_silent(namespace) for namespace in namespaces)

    def _is_silent(self, namespace: str) -> bool:
        """Return True if the watch of the pods of a namespace has reported nothing for so long that pods may have changed."""
        feed = self.own if namespace == self.own.namespace else self.others
        return feed is None or self._now() - feed.heard_at > SILENT_SECONDS

    def replace(self, feed: Feed, pods: Iterable[Mapping[str, Any]]) -> None:
        """Take the result of a list: pods that it lacks are gone."""
        found = {pod.uid: pod for obj in pods if feed.covers(obj) and (pod := parse_pod(obj)) is not None}
        known = {uid for uid, pod in self._pods.items() if (pod.namespace == feed.namespace) == feed.is_own}
        for uid in known - found.keys():
            self._forget(uid)
        for pod in found.values():
            self._store(pod)
        feed.is_current = True
        self.note_report(feed)

    def update(self, feed: Feed, obj: Mapping[str, Any]) -> None:
        """Take a new or changed pod."""
        self.note_report(feed)
        if not feed.covers(obj):
            return
        pod = parse_pod(obj)
        if pod is None:
            self._forget(obj["metadata"]["uid"])
        else:
            self._store(pod)

    def remove(self, feed: Feed, obj: Mapping[str, Any]) -> None:
        """Take the deletion of a pod."""
        self.note_report(feed)
        if feed.covers(obj):
            self._forget(obj["metadata"]["uid"])

    def note_report(self, feed: Feed) -> None:
        """Note that a watch has reported something."""
        feed.heard_at = self._now()

    def watch_others(self) -> Feed:
        """Begin with the pods of all other namespaces, and return the state of their watch."""
        self.others = Feed(self.own.namespace, is_own=False)
        return self.others

    def forget_others(self) -> None:
        """Forget the pods of all other namespaces."""
        if self.others is not None:
            self.replace(self.others, ())
        self.others = None
        self._namespaces = {}
        self._past_addresses = {found: namespace for found, namespace in self._past_addresses.items() if namespace == self.own.namespace}

    def set_namespaces(self, labels: Mapping[str, Mapping[str, str]]) -> None:
        """Take the labels of all namespaces."""
        self._namespaces = dict(labels)

    def at(self, address: str) -> tuple[Pod, ...]:
        """Return the live pods with an address; more than one while an address changes hands."""
        found = (self._pods[uid] for uid in sorted(self._by_address.get(address, ())))
        return tuple(pod for pod in found if self._now() < pod.ends_at)

    def is_gone(self, caller: str) -> bool:
        """Return True if a caller was pods and none of them lives.

        Args:
            caller: Name of the caller (``str(Caller)``).
        """
        return (
            is_pods(caller)
            and self.is_current
            and all(str(pod.caller) != caller or pod.ends_at <= self._now() for pod in self._pods.values())
        )

    def find(self, uid: str | None) -> Pod | None:
        """Return the live pod with a UID."""
        pod = self._pods.get(uid) if uid is not None else None
        return pod if pod is not None and self._now() < pod.ends_at else None

    def mounts(self, name: str, secret: str) -> bool:
        """Return True if a pod of the rollout's namespace mounts a Secret."""
        found = (self._pods[uid] for uid in self._by_secret.get(secret, ()))
        return any((pod.namespace, pod.name) == (self.own.namespace, name) for pod in found)

    def namespace_labels(self, namespace: str) -> Mapping[str, str] | None:
        """Return the labels of a namespace; None while they are not known."""
        return self._namespaces.get(namespace)

    def _store(self, pod: Pod) -> None:
        self._forget(pod.uid)
        self._pods[pod.uid] = pod
        for address in pod.addresses:
            self._by_address.setdefault(address, set()).add(pod.uid)
        for secret in pod.secrets:
            self._by_secret.setdefault(secret, set()).add(pod.uid)

    def _forget(self, uid: str) -> None:
        pod = self._pods.pop(uid, None)
        if pod is not None:
            _drop(self._by_address, pod.addresses, uid)
            _drop(self._by_secret, pod.secrets, uid)
            for address in pod.addresses:
                self._past_addresses.pop(address, None)
                self._past_addresses[address] = pod.namespace
            while len(self._past_addresses) > MAX_PAST_ADDRESSES:
                del self._past_addresses[next(iter(self._past_addresses))]


def _drop(index: dict[str, set[str]], keys: Iterable[str], uid: str) -> None:
    """Remove a pod from an index, and keys that no pod has."""
    for key in keys:
        index[key].discard(uid)
        if not index[key]:
            del index[key]
