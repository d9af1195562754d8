"""The kinds that the operator and the coordinator touch, and how their URLs are built. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self
from urllib.parse import quote

Object = dict[str, Any]
"""A Kubernetes object as JSON."""


@dataclass(frozen=True)
class Resource:
    """One kind of object: what a URL needs to know of it."""

    group: str
    """"" is the core group."""
    version: str
    plural: str
    kind: str

    @classmethod
    def of(cls, api_version: str, kind: str, plural: str | None = None) -> Self:
        """From apiVersion and kind; kinds of this module need no ``plural``."""
        group, _, version = api_version.rpartition("/")
        if plural is None:
            plural = resource_of({"apiVersion": api_version, "kind": kind}).plural
        return cls(group, version, plural, kind)

    @property
    def api_version(self) -> str:
        """``apiVersion`` of its objects."""
        return f"{self.group}/{self.version}" if self.group else self.version

    def path(self, namespace: str | None = None, name: str | None = None, subresource: str | None = None) -> str:
        """URL path of the collection, of one object or of one of its subresources."""
        parts = ["apis", self.group, self.version] if self.group else ["api", self.version]
        if namespace is not None:
            parts += ["namespaces", quote(namespace, safe="")]
        parts.append(self.plural)
        parts += [quote(part, safe="") for part in (name, subresource) if part is not None]
        return "/" + "/".join(parts)


ROLLOUTS = Resource("rollout.sglang.io", "v1alpha1", "sglangrollouts", "SGLangRollout")
STATEFULSETS = Resource("apps", "v1", "statefulsets", "StatefulSet")
DEPLOYMENTS = Resource("apps", "v1", "deployments", "Deployment")
DAEMONSETS = Resource("apps", "v1", "daemonsets", "DaemonSet")
PODS = Resource("", "v1", "pods", "Pod")
CONFIGMAPS = Resource("", "v1", "configmaps", "ConfigMap")
SERVICES = Resource("", "v1", "services", "Service")
SECRETS = Resource("", "v1", "secrets", "Secret")
SERVICEACCOUNTS = Resource("", "v1", "serviceaccounts", "ServiceAccount")
ROLES = Resource("rbac.authorization.k8s.io", "v1", "roles", "Role")
ROLEBINDINGS = Resource("rbac.authorization.k8s.io", "v1", "rolebindings", "RoleBinding")
ENDPOINTSLICES = Resource("discovery.k8s.io", "v1", "endpointslices", "EndpointSlice")
LEASES = Resource("coordination.k8s.io", "v1", "leases", "Lease")
EVENTS = Resource("", "v1", "events", "Event")
NODES = Resource("", "v1", "nodes", "Node")
POD_GROUPS = Resource("scheduling.x-k8s.io", "v1alpha1", "podgroups", "PodGroup")

_ALL = (
    ROLLOUTS,
    PODS,
    STATEFULSETS,
    DEPLOYMENTS,
    DAEMONSETS,
    CONFIGMAPS,
    SERVICES,
    SECRETS,
    SERVICEACCOUNTS,
    ROLES,
    ROLEBINDINGS,
    ENDPOINTSLICES,
    LEASES,
    EVENTS,
    NODES,
    POD_GROUPS,
)
_BY_KIND = {(resource.api_version, resource.kind): resource for resource in _ALL}


def resource_of(obj: Mapping[str, Any]) -> Resource:
    """The resource of an object, from its apiVersion and kind."""
    key = (str(obj.get("apiVersion")), str(obj.get("kind")))
    try:
        return _BY_KIND[key]
    except KeyError:
        raise ValueError(f"{key[1]} of {key[0]} is no kind of ours: add it to runtime/resources.py") from None


def selector(labels: Mapping[str, str | None]) -> str:
    """A label selector; None as value means that the label exists, whatever its value."""
    return ",".join(key if value is None else f"{key}={value}" for key, value in sorted(labels.items()))


def name_of(obj: Mapping[str, Any]) -> str:
    """``metadata.name``."""
    return str(obj["metadata"]["name"])


def describe(resource: Resource, namespace: str | None, name: str | None) -> str:
    """``statefulsets ns/name`` for messages."""
    where = "/".join(part for part in (namespace, name) if part)
    return f"{resource.plural} {where}".rstrip()
