"""The kinds that the operator and the coordinator use, and requests for them as data. Pure."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import quote

Object = dict[str, Any]
"""A Kubernetes object as JSON."""


@dataclass(frozen=True)
class Resource:
    """A kind of object, as URLs name it."""

    api_version: str
    """Group and version; only a version in the core group."""
    plural: str
    kind: str

    def path(self, namespace: str | None = None, name: str | None = None, subresource: str | None = None) -> str:
        """Return the URL path of the collection, of one object or of one subresource."""
        parts = ["apis" if "/" in self.api_version else "api", self.api_version]
        if namespace is not None:
            parts += ["namespaces", quote(namespace, safe="")]
        parts.append(self.plural)
        parts += [quote(part, safe="") for part in (name, subresource) if part is not None]
        return "/" + "/".join(parts)


def find_mounted_secrets(pod: Mapping[str, Any]) -> frozenset[str]:
    """Return the names of the Secrets that are volumes of a pod."""
    volumes = (pod.get("spec") or {}).get("volumes") or []
    return frozenset(volume["secret"]["secretName"] for volume in volumes if (volume.get("secret") or {}).get("secretName"))


ROLLOUTS = Resource("rollout.sglang.io/v1alpha1", "sglangrollouts", "SGLangRollout")
STATEFULSETS = Resource("apps/v1", "statefulsets", "StatefulSet")
DEPLOYMENTS = Resource("apps/v1", "deployments", "Deployment")
PODS = Resource("v1", "pods", "Pod")
CONFIGMAPS = Resource("v1", "configmaps", "ConfigMap")
SERVICES = Resource("v1", "services", "Service")
SECRETS = Resource("v1", "secrets", "Secret")
SERVICEACCOUNTS = Resource("v1", "serviceaccounts", "ServiceAccount")
ROLES = Resource("rbac.authorization.k8s.io/v1", "roles", "Role")
ROLEBINDINGS = Resource("rbac.authorization.k8s.io/v1", "rolebindings", "RoleBinding")
DISRUPTION_BUDGETS = Resource("policy/v1", "poddisruptionbudgets", "PodDisruptionBudget")
NETWORK_POLICIES = Resource("networking.k8s.io/v1", "networkpolicies", "NetworkPolicy")
ENDPOINTSLICES = Resource("discovery.k8s.io/v1", "endpointslices", "EndpointSlice")
LEASES = Resource("coordination.k8s.io/v1", "leases", "Lease")
EVENTS = Resource("v1", "events", "Event")
NODES = Resource("v1", "nodes", "Node")
NAMESPACES = Resource("v1", "namespaces", "Namespace")
POD_GROUPS = Resource("scheduling.x-k8s.io/v1alpha1", "podgroups", "PodGroup")

_ALL = (
    ROLLOUTS,
    PODS,
    STATEFULSETS,
    DEPLOYMENTS,
    CONFIGMAPS,
    SERVICES,
    SECRETS,
    SERVICEACCOUNTS,
    ROLES,
    ROLEBINDINGS,
    NETWORK_POLICIES,
    DISRUPTION_BUDGETS,
    ENDPOINTSLICES,
    LEASES,
    EVENTS,
    NODES,
    NAMESPACES,
    POD_GROUPS,
)
_BY_KIND = {(resource.api_version, resource.kind): resource for resource in _ALL}


def find_resource(api_version: str, kind: str) -> Resource:
    """Return the resource of a kind.

    Raises:
        ValueError: This module does not list the kind.
    """
    try:
        return _BY_KIND[api_version, kind]
    except KeyError:
        raise ValueError(f"{kind} of {api_version} is not listed: add it to kube/resources.py") from None


def resource_of(obj: Mapping[str, Any]) -> Resource:
    """Return the resource of an object, from its apiVersion and kind. Raises ValueError like :func:`find_resource`."""
    return find_resource(str(obj.get("apiVersion")), str(obj.get("kind")))


def name_of(obj: Mapping[str, Any]) -> str:
    """Return ``metadata.name``."""
    return str(obj["metadata"]["name"])


_HTTP = {
    "get": ("GET", "application/json"),
    "list": ("GET", "application/json"),
    "watch": ("GET", "application/json"),
    "apply": ("PATCH", "application/apply-patch+yaml; charset=utf-8"),
    "patch": ("PATCH", "application/merge-patch+json"),
    "create": ("POST", "application/json"),
    "delete": ("DELETE", "application/json"),
}
"""HTTP method and content type of the body, by verb."""


@dataclass(frozen=True, kw_only=True)
class Call:
    """One request to the API server."""

    verb: str
    """Verb in metrics: get, list, watch, apply, patch, create or delete."""
    description: str
    """Verb and object, for messages: ``get pods ns/name``."""
    path: str
    plural: str = ""
    """Plural name of the kind, for metrics."""
    query: Mapping[str, str] = field(default_factory=dict)
    body: Object | str | None = None

    @property
    def method(self) -> str:
        """HTTP method."""
        return _HTTP[self.verb][0]

    @property
    def content_type(self) -> str:
        """Content type of the body."""
        return _HTTP[self.verb][1]


def build_call(
    verb: str,
    resource: Resource,
    namespace: str | None,
    name: str | None = None,
    *,
    subresource: str | None = None,
    query: Mapping[str, str] | None = None,
    body: Object | str | None = None,
) -> Call:
    """Return a request for objects of a resource."""
    where = "/".join(part for part in (namespace, name) if part)
    return Call(
        verb=verb,
        description=f"{verb} {resource.plural} {where}".rstrip(),
        path=resource.path(namespace, name, subresource),
        plural=resource.plural,
        query=query or {},
        body=body,
    )


def build_selectors(labels: Mapping[str, str | None] | None, fields: Mapping[str, str] | None) -> dict[str, str]:
    """Return the query that selects objects by labels and fields. A label with None as value must only exist."""
    selectors = {"labelSelector": _join_selector(labels or {}), "fieldSelector": _join_selector(fields or {})}
    return {key: value for key, value in selectors.items() if value}


def _join_selector(wanted: Mapping[str, str | None]) -> str:
    return ",".join(key if value is None else f"{key}={value}" for key, value in sorted(wanted.items()))


_NOT_IN_YAML = re.compile("[\x7f-\x9f\ud800-\udfff\ufeff\ufffe\uffff]")


def to_yaml(obj: Object) -> str:
    """Return ``obj`` as JSON that is YAML too, because the API server reads the body of a server-side apply as YAML.

    YAML has no surrogate pairs, and refuses some characters that are not escaped. A lone surrogate becomes U+FFFD.
    """

    def escape(found: re.Match[str]) -> str:
        code = ord(found.group())
        return "\\ufffd" if 0xD800 <= code <= 0xDFFF else f"\\u{code:04x}"

    return _NOT_IN_YAML.sub(escape, json.dumps(obj, ensure_ascii=False))
