"""What a rollout may ask of its nodes and namespace, as the operator's flags say. Pure.

A user who can write an SGLangRollout chooses its pods. The rendered pods are checked, not the spec, so that no field is forgotten.
The chart's ValidatingAdmissionPolicy has the same limits, for an operator that is taken over.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from sglang_rollout.api.v1alpha1 import SGLangRollout
from sglang_rollout.controller.render import names
from sglang_rollout.kube.resources import DEPLOYMENTS, STATEFULSETS, Object

HARMLESS_CAPABILITIES = frozenset(
    {
        *("AUDIT_WRITE", "CHOWN", "DAC_OVERRIDE", "FOWNER", "FSETID", "KILL", "MKNOD"),
        *("NET_BIND_SERVICE", "SETFCAP", "SETGID", "SETPCAP", "SETUID", "SYS_CHROOT"),
        "IPC_LOCK",
    }
)
"""Capabilities that need no flag: those of the Pod Security level "baseline", and ``IPC_LOCK``, which ``engine.rdma`` adds."""

_WORKLOADS = frozenset({STATEFULSETS.kind, DEPLOYMENTS.kind})
SYSTEM_PREFIX = "kube-"
"""Kubernetes reserves namespaces with this prefix (kube-system, kube-public, kube-node-lease)."""
_CONFINED_TYPES = frozenset({"", "container_t", "container_init_t", "container_kvm_t", "container_engine_t"})
"""Types of SELinux that the level "baseline" admits."""
_SAFE_SYSCTLS = frozenset(
    {
        *("kernel.shm_rmid_forced", "net.ipv4.ip_local_port_range", "net.ipv4.ip_local_reserved_ports"),
        *("net.ipv4.ip_unprivileged_port_start", "net.ipv4.ping_group_range", "net.ipv4.tcp_fin_timeout", "net.ipv4.tcp_keepalive_intvl"),
        *("net.ipv4.tcp_keepalive_probes", "net.ipv4.tcp_keepalive_time", "net.ipv4.tcp_syncookies"),
    }
)
"""Sysctls that the level "baseline" admits."""
_PROBES = ("livenessProbe", "readinessProbe", "startupProbe")
_HOOKS = ("postStart", "preStop")
_APPARMOR = "container.apparmor.security.beta.kubernetes.io/"


@dataclass(frozen=True)
class Allowed:
    """What rollouts may ask for beyond ordinary pods: by default nothing. Each field is a flag of the operator."""

    host_paths: tuple[str, ...] = ()
    """Folders of nodes that pods may mount, with everything below them."""
    service_accounts: tuple[str, ...] = ()
    """ServiceAccounts that engine pods may have beside their own: ``namespace/name``, or ``name`` in every namespace."""
    host_network: bool = False
    """True if pods may use the network or ports of their node."""
    host_ipc: bool = False
    """True if pods may use the IPC namespace of their node."""
    privileged: bool = False
    """True if containers may be privileged, unconfined, or see the processes of their node."""


NOTHING = Allowed()
"""The limits of an operator without such flags."""


@dataclass(frozen=True)
class Need:
    """Something that a rollout asks for and the flags do not allow."""

    what: str
    """What the rollout asks for, as a clause."""
    flag: str
    """Flag of the operator that allows it."""
    value: str
    """Value of the chart that sets the flag."""

    def __str__(self) -> str:
        return f"{self.what} (flag {self.flag}, chart value {self.value})"


def find_refusal(rollout: SGLangRollout, children: Sequence[Object], allowed: Allowed) -> str:
    """Return why the operator must not create ``children``, as sentences that name the flags; empty if it may."""
    if rollout.namespace.startswith(SYSTEM_PREFIX):
        return (
            f"Namespaces whose names begin with {SYSTEM_PREFIX} are Kubernetes' own, so nothing is created in {rollout.namespace}."
            " Create the SGLangRollout in another namespace."
        )
    found: dict[Need, None] = {}
    for child in children:
        if child["kind"] in _WORKLOADS:
            found |= dict.fromkeys(_find_needs(rollout, child, allowed))
    if not found:
        return ""
    needs = "; ".join(map(str, found))
    return f"The operator does not allow this spec: {needs}. It creates and changes nothing until the spec or its flags change."


def _find_needs(rollout: SGLangRollout, child: Object, allowed: Allowed) -> Iterator[Need]:
    template = child["spec"]["template"]
    metadata, spec = template.get("metadata") or {}, template["spec"]
    component = metadata["labels"][names.LABEL_COMPONENT]
    pods = f"{component} pods"
    containers = [*(spec.get("initContainers") or []), *(spec.get("containers") or [])]
    for path in _host_paths(spec):
        if not is_below(path, allowed.host_paths):
            yield Need(f"{pods} mount {path} of their node", f"--allow-host-path={path}", "allow.hostPaths")
    account = spec.get("serviceAccountName") or spec.get("serviceAccount") or "default"
    full = f"{rollout.namespace}/{account}"
    if account != names.account_of(rollout.name, component) and not {account, full} & set(allowed.service_accounts):
        yield Need(f"{pods} have the ServiceAccount {account}", f"--allow-service-account={full}", "allow.serviceAccounts")
    if not allowed.host_network and (spec.get("hostNetwork") or any(map(_has_host_port, containers))):
        yield Need(f"{pods} use the network of their node", "--allow-host-network", "allow.hostNetwork")
    if not allowed.host_ipc and spec.get("hostIPC"):
        yield Need(f"{pods} use the IPC namespace of their node", "--allow-host-ipc", "allow.hostIPC")
    if not allowed.privileged:
        for setting in _find_privileges(metadata, spec, containers):
            yield Need(f"{pods} set {setting}", "--allow-privileged", "allow.privileged")


def is_below(path: str, folders: Sequence[str]) -> bool:
    """Return True if ``path`` is one of ``folders`` or lies below one. The API server refuses ``..`` in a hostPath."""
    parts = _split_path(path)
    return ".." not in parts and any(parts[: len(_split_path(folder))] == _split_path(folder) for folder in folders)


def _split_path(path: str) -> list[str]:
    return [part for part in path.split("/") if part not in {"", "."}]


def _host_paths(spec: Object) -> Iterator[str]:
    for volume in spec.get("volumes") or []:
        if "hostPath" in volume:
            yield str((volume["hostPath"] or {}).get("path", ""))


def _has_host_port(container: Object) -> bool:
    return any(port.get("hostPort") for port in container.get("ports") or [])


def _find_privileges(metadata: Object, spec: Object, containers: Sequence[Object]) -> Iterator[str]:
    """Yield settings that the Pod Security level "baseline" forbids for their privileges."""
    if spec.get("hostPID"):
        yield "hostPID: true"
    for key, value in (metadata.get("annotations") or {}).items():
        if key.startswith(_APPARMOR) and value == "unconfined":
            yield f"the annotation {key}: unconfined"
    for sysctl in _get(spec, "securityContext", "sysctls") or []:
        if sysctl.get("name") not in _SAFE_SYSCTLS:
            yield f"the sysctl {sysctl.get('name')}"
    for part in (spec, *containers):
        yield from _find_privileges_in(part.get("securityContext") or {})
    for container in containers:
        yield from _find_foreign_hosts(container)


def _find_foreign_hosts(container: Object) -> Iterator[str]:
    """Yield probes and hooks with which the kubelet calls a host of the user's choice, in the network of the node."""
    calls = {probe: container.get(probe) for probe in _PROBES} | {hook: _get(container, "lifecycle", hook) for hook in _HOOKS}
    for name, call in calls.items():
        for way in ("httpGet", "tcpSocket"):
            if _get(call or {}, way, "host"):
                yield f"{name}.{way}.host"


def _find_privileges_in(context: Object) -> Iterator[str]:
    if context.get("privileged"):
        yield "privileged: true"
    for name in _get(context, "capabilities", "add") or []:
        if name not in HARMLESS_CAPABILITIES:
            yield f"the capability {name}"
    if context.get("procMount") == "Unmasked":
        yield "procMount: Unmasked"
    for profile in ("seccompProfile", "appArmorProfile"):
        if _get(context, profile, "type") == "Unconfined":
            yield f"{profile}.type: Unconfined"
    if _get(context, "windowsOptions", "hostProcess"):
        yield "windowsOptions.hostProcess: true"
    if (_get(context, "seLinuxOptions", "type") or "") not in _CONFINED_TYPES:
        yield f"seLinuxOptions.type: {_get(context, 'seLinuxOptions', 'type')}"
    for key in ("user", "role"):
        if _get(context, "seLinuxOptions", key):
            yield f"seLinuxOptions.{key}"


def _get(context: Object, part: str, key: str) -> Any:
    return (context.get(part) or {}).get(key)
