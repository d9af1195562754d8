"""Names, labels, paths, keys and ports of everything that the operator creates."""

from __future__ import annotations

import re
from typing import NamedTuple

from sglang_rollout.api import v1alpha1 as api
from sglang_rollout.api.network_spec import BLOCK
from sglang_rollout.api.scheduling_spec import POD_GROUP_LABEL
from sglang_rollout.kube.resources import (
    CONFIGMAPS,
    DEPLOYMENTS,
    DISRUPTION_BUDGETS,
    NETWORK_POLICIES,
    POD_GROUPS,
    ROLEBINDINGS,
    ROLES,
    SECRETS,
    SERVICEACCOUNTS,
    SERVICES,
    STATEFULSETS,
)
from sglang_rollout.wire import ports as wire

FIELD_MANAGER = "sglang-rollout-operator"
"""Owner of fields in server-side apply, and value of ``app.kubernetes.io/managed-by``."""

LABEL_ROLLOUT = f"{api.GROUP}/rollout"
"""On every child and pod: name of the SGLangRollout. Watches and lists select by it."""
LABEL_ENGINE = f"{api.GROUP}/engine"
"""On the objects of one engine: name of its StatefulSet."""
LABEL_REVISION = f"{api.GROUP}/revision"
"""Hash of the spec that a pod was created from. On engine pods: of the user's spec. On the weight store's pod: of the pod's own spec."""
LABEL_COMPONENT = "app.kubernetes.io/component"
LABEL_QUEUE = "kueue.x-k8s.io/queue-name"
"""On StatefulSets of engines: name of the LocalQueue of Kueue."""
LABEL_POD_GROUP = POD_GROUP_LABEL
"""On engine pods of a gang: name of their PodGroup."""
ANNOTATION_APPLIED = f"{api.GROUP}/applied"
"""On every child: hash of the rendered object. The hash reveals that a field was removed, which the live object does not show."""

ANNOTATION_ACCOUNT = f"{api.GROUP}/service-account"
"""On router pods: hash of ``router.serviceAccountAnnotations``, so that a change recreates the pod."""

LABEL_POD_INDEX = "apps.kubernetes.io/pod-index"
"""On every pod of a StatefulSet, set by its controller: index of the pod in its engine."""

NODES_FLAG = "--nnodes"
"""SGLang's flag for the number of pods. The operator reads an engine's number of pods from it."""

COMPONENT_ENGINE = "engine"
COMPONENT_ROUTER = "router"
COMPONENT_STORE = "store"

INTENT_KEY = "intent.json"
WEIGHTS_KEY = "weights.json"
TOKEN_KEY = "token"  # noqa: S105 - the name of a key, not a token

RUN_DIR = "/run/rollout"
"""Folder in memory that engine and agent of a pod share. It holds nothing that another container trusts."""
BOOT_FILE = f"{RUN_DIR}/boot"
"""Boot ID of the engine, written by the start script before SGLang starts."""
NCCL_FILE = f"{RUN_DIR}/nccl"
"""Version and settings of NCCL in the engine's container, written by the start script before SGLang starts."""
GO_FILE = f"{RUN_DIR}/go"
"""Boot ID that may start SGLang now, written by the agent of an engine with several pods."""
KILL_FILE = f"{RUN_DIR}/kill"
"""Reason for a restart, written by the agent. The engine's liveness probe fails while the file exists."""
DRAIN_FILE = f"{RUN_DIR}/drain"
"""Written by the engine's preStop hook when the pod is being deleted."""
DRAINED_FILE = f"{RUN_DIR}/drained"
"""Written by the agent when the last running request has ended."""
GATE_DIR = "/run/rollout-gate"
"""Folder in memory that gate and agent share: haproxy's configuration, and the sockets through which they reach each other."""
GATE_SOCKET = f"{GATE_DIR}/gate.sock"
AGENT_SOCKET = f"{GATE_DIR}/agent.sock"
AGENT_STATE_DIR = "/run/rollout-agent"
"""Folder in memory of the agent alone: its records."""
COORDINATOR_DIR = "/run/rollout-coordinator"
"""Folder in memory that front and coordinator share: the socket of the coordinator."""
COORDINATOR_SOCKET = f"{COORDINATOR_DIR}/coordinator.sock"
STAGED_DIR = "/run/rollout-staged"
"""Folder with the staged versions of an engine pod, which the agent writes and the engine reads; also that of the weight store."""
PLUGIN_DIR = "/run/rollout-plugin"
"""Folder in memory with the plug-in, which the agent writes and SGLang imports."""
REPORTS_DIR = "/run/rollout-reports"
"""Folder in which the plug-in reports to the agent: its proof, and the tensors of the checkpoint."""
VERDICTS_DIR = "/run/rollout-verdicts"
"""Folder in memory in which the loader of each rank reports its result to the agent."""
STORE_STATE_DIR = "/run/rollout-store"
"""Folder in memory of the weight store alone: its tickets."""
SNAPSHOTS_DIR = "/run/rollout-snapshots"
"""Mount path of the volume of the weight store's snapshots."""
PACKAGE_DIR = "/run/rollout-package"
"""Folder of the weight store with the operator's Python package, because its image is that of the engines."""
CONTROL_DIR = "/etc/sglang-rollout/control"
TOKEN_FILE = f"{CONTROL_DIR}/{TOKEN_KEY}"


CHILD_KINDS = (
    *(SERVICEACCOUNTS, ROLES, ROLEBINDINGS, NETWORK_POLICIES, SECRETS, CONFIGMAPS),
    *(SERVICES, DEPLOYMENTS, STATEFULSETS, DISRUPTION_BUDGETS),
)
"""Kinds of children, which are healed. PodGroups are children, too, but only clusters with coscheduling know the kind."""

LISTED_KINDS = tuple(kind for kind in CHILD_KINDS if kind is not SECRETS)
"""Kinds that the operator lists by label and watches. It reads its Secrets by their names, and has no right to list Secrets."""

PRUNED_KINDS = frozenset(kind.kind for kind in (NETWORK_POLICIES, SERVICES, STATEFULSETS, DISRUPTION_BUDGETS, POD_GROUPS))
"""Kinds of children that a changed spec no longer wants. The operator has no right to delete children of other kinds."""


def engine_name(rollout: str, index: int) -> str:
    """Return the name of engine ``index``: its StatefulSet."""
    return f"{rollout}-engine-{index}"


def engine_index(rollout: str, name: str) -> int | None:
    """Return the index in an engine's name; None for other names."""
    found = re.fullmatch(re.escape(rollout) + r"-engine-(\d+)", name)
    return int(found.group(1)) if found else None


def engine_pod(engine: str, index: int = 0) -> str:
    """Return the name of a pod of an engine. Pod 0 is the head pod."""
    return f"{engine}-{index}"


def base_group(rollout: str) -> str:
    """Return the name of the PodGroup of all engines of the base."""
    return f"{rollout}-base"


def engines_service(rollout: str) -> str:
    """Return the name of the headless Service of all engines."""
    return f"{rollout}-engines"


def engine_account(rollout: str) -> str:
    """Return the name of the engines' ServiceAccount."""
    return f"{rollout}-engine"


def account_of(rollout: str, component: str) -> str:
    """Return the name of the only ServiceAccount that pods of a component have without a flag. All but the router have the engines'."""
    return router_name(rollout) if component == COMPONENT_ROUTER else engine_account(rollout)


def router_name(rollout: str) -> str:
    """Return the name of the router's Deployment, Service, ServiceAccount, Role and RoleBinding."""
    return f"{rollout}-router"


def generate_service(rollout: str) -> str:
    """Return the name of the Service that serves data paths only."""
    return f"{rollout}-generate"


def store_name(rollout: str) -> str:
    """Return the name of the weight store's StatefulSet, Service, PodDisruptionBudget and credential."""
    return f"{rollout}-store"


def store_host(rollout: str, namespace: str) -> str:
    """Return the host name of the weight store's Service."""
    return f"{store_name(rollout)}.{namespace}.svc"


def intent_name(rollout: str) -> str:
    """Return the name of the ConfigMap with the coordinator's intent."""
    return f"{rollout}-intent"


def weights_name(rollout: str) -> str:
    """Return the name of the ConfigMap with the coordinator's record."""
    return f"{rollout}-weights"


def control_name(rollout: str) -> str:
    """Return the name of the Secret with the rollout's key, from which the credentials of its engines are derived."""
    return f"{rollout}-control"


def credentials_name(rollout: str) -> str:
    """Return the name of the Secret with the credentials of each engine and of the weight store."""
    return f"{rollout}-credentials"


def labels(rollout: str, component: str, engine: str | None = None) -> dict[str, str]:
    """Return the labels of a child; ``engine`` for the objects of one engine."""
    return {
        "app.kubernetes.io/name": "sglang-rollout",
        "app.kubernetes.io/instance": rollout,
        LABEL_COMPONENT: component,
        "app.kubernetes.io/managed-by": FIELD_MANAGER,
        **selector(rollout, component, engine),
    }


def selector(rollout: str, component: str, engine: str | None = None) -> dict[str, str]:
    """Return the labels that select the pods of a component, or of one engine."""
    selected = {LABEL_ROLLOUT: rollout, LABEL_COMPONENT: component}
    return selected if engine is None else {**selected, LABEL_ENGINE: engine}


def selector_string(rollout: str, *, pods: int = 1) -> str:
    """Return ``status.selector``, which selects the head pod of each engine."""
    wanted = selector(rollout, COMPONENT_ENGINE)
    if pods > 1:
        wanted[LABEL_POD_INDEX] = "0"
    return ",".join(f"{key}={value}" for key, value in sorted(wanted.items()))


def public_url(rollout: str, namespace: str, *, tls: bool) -> str:
    """Return the fleet's one URL."""
    return f"{_scheme(tls)}://{router_name(rollout)}.{namespace}.svc:{wire.FRONT_PORT}"


def generate_url(rollout: str, namespace: str, *, tls: bool) -> str:
    """Return the URL that serves data paths only."""
    return f"{_scheme(tls)}://{generate_service(rollout)}.{namespace}.svc:{wire.GENERATE_PORT}"


def _scheme(tls: bool) -> str:
    return "https" if tls else "http"


_RENDEZVOUS_PORTS = 14
"""Ports that SGLang 0.5.23 uses from ``--dist-init-addr`` on: 1 to 6 for its processes, 13 for attention groups."""


class EnginePorts(NamedTuple):
    """Ports of one engine, the same in each of its pods."""

    gate: int
    engine: int
    rendezvous: int
    metrics: int
    probes: int
    nccl: int | None = None
    """``--nccl-port``. None: SGLang picks a free port, which is safe in a network of the pod's own."""

    @property
    def on_node(self) -> bool:
        """True if these are ports of the node, which other programs may use, too."""
        return self.nccl is not None

    @property
    def of_sglang(self) -> tuple[int, ...]:
        """Ports on which SGLang may listen."""
        own = (self.engine,) if self.nccl is None else (self.engine, self.nccl)
        return (*own, *range(self.rendezvous, self.rendezvous + _RENDEZVOUS_PORTS))


OF_POD = EnginePorts(wire.GATE_PORT, wire.ENGINE_PORT, wire.RENDEZVOUS_PORT, wire.METRICS_PORT, wire.PROBES_PORT)
"""Ports of every engine whose pods have networks of their own."""


def engine_ports(rollout: api.SGLangRollout, index: int) -> EnginePorts:
    """Return the ports of engine ``index``.

    With ``hostNetwork`` each engine has a block of the node's ports::

        basePort + 20 * index  +0 gate  +1 SGLang  +3 torch's rendezvous
                               +4 … +17 rendezvous of several pods, attention groups  +18 metrics  +19 probes

    Blocks begin at multiples of their size. So blocks of two fleets are equal, which the scheduler detects, or disjoint.
    """
    network = rollout.spec.engine.network
    if network is None or not network.host_network:
        return OF_POD
    first = network.first_port + BLOCK * index
    return EnginePorts(gate=first, engine=first + 1, nccl=first + 3, rendezvous=first + 4, metrics=first + 18, probes=first + 19)
