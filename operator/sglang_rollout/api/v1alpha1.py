"""``rollout.sglang.io/v1alpha1`` SGLangRollout: names of the API, the root model and ``spec``.

Each CEL rule stands beside the field that it checks.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Any

from pydantic import Field

from sglang_rollout.api.engine_spec import ENGINE_ENV, AccountAnnotations, Engine, Resources
from sglang_rollout.api.flag_families import MAX_ACCEPTED, ROUTER_FAMILIES, AcceptedFlag, rules_of_families
from sglang_rollout.api.model_spec import Model
from sglang_rollout.api.network_spec import OFFLINE_VARIABLES, rules_against_overlaid_variables, rules_of_fleet_ports
from sglang_rollout.api.pod_template import PodTemplate, RouterPodTemplate, overlay_sets
from sglang_rollout.api.scheduling_spec import POD_GROUP_LABEL, Elastic, Placement, Scheduling
from sglang_rollout.api.schema import ApiModel, argument, rule, with_rules
from sglang_rollout.api.security_spec import Security
from sglang_rollout.api.sharing_spec import Mode, Sharing, rules_of_modes
from sglang_rollout.api.status import RolloutStatus
from sglang_rollout.api.weights_spec import Weights, rules_of_transports

MAX_ENGINES = 1000
"""With a four-digit index the longest engine name fits the 63 characters of a StatefulSet's revision label."""

ROUTER_FLAGS = (
    "--host",
    "--port",
    "--policy",
    "--worker-urls",
    "--service-discovery",
    "--discovery-provider",
    "--selector",
    "--prometheus-host",
    "--prometheus-port",
    "--model-alias",
    "--disable-retries",
)
"""Flags of smg that the operator sets, or that would change the list of engines, which the coordinator owns."""

RouterArgument = Annotated[
    str,
    argument(
        ROUTER_FLAGS,
        "router.args must not set a flag that the operator owns: use router.policy, and leave addresses, retries and"
        " the list of engines to the operator.",
    ),
]


class RouterPolicy(StrEnum):
    """Distribution of requests over the engines."""

    CACHE_AWARE = "CacheAware"
    ROUND_ROBIN = "RoundRobin"
    POWER_OF_TWO = "PowerOfTwo"
    CONSISTENT_HASH = "ConsistentHash"
    RANDOM = "Random"


class Router(ApiModel):
    """The pod behind the fleet's URL: haproxy, the SGLang router (smg), the coordinator and the batch server."""

    model_config = with_rules(*rules_of_families("router", ROUTER_FAMILIES, ROUTER_FLAGS))

    policy: RouterPolicy = RouterPolicy.CACHE_AWARE
    """Distribution of requests over the engines. With every policy the headers `x-smg-routing-key` and `x-session-id` make
    requests sticky."""
    resources: Resources = Resources()
    """CPU and memory of the container smg. Values that are set replace the defaults of docs/operations/sizing.md."""
    front_resources: Resources = Resources()
    """CPU and memory of the container front."""
    coordinator_resources: Resources = Resources()
    """CPU and memory of the container coordinator."""
    batches_resources: Resources = Resources()
    """CPU and memory of the container batches, the batch server. Batches and their answers may take a sixth of the memory limit."""
    args: list[RouterArgument] = Field(default_factory=list, max_length=64)
    """Further arguments of `smg`, one word per item."""
    accept_flags: list[AcceptedFlag] = Field(default_factory=list, max_length=MAX_ACCEPTED)
    """Flags in `args` that are risky or new, without their values. Known families of flags need no entry
    (docs/reference/engine-settings.md). Flags that the operator owns stay refused."""
    scheduling: Placement = Placement()
    """Nodes of the router. `spec.scheduling` does not apply to it, because a router needs no GPU."""
    service_account_annotations: AccountAnnotations | None = None
    """Annotations of the router's ServiceAccount `<name>-router`. A change restarts the router."""
    pod_template: RouterPodTemplate | None = None
    """Overlay over the router pod for everything that has no field, for example `imagePullSecrets`. It is merged like
    `spec.podTemplate`. A change restarts the router."""


class State(StrEnum):
    """Desired state of the fleet."""

    ACTIVE = "Active"
    PAUSED = "Paused"
    ASLEEP = "Asleep"
    SUSPENDED = "Suspended"


class Sleep(ApiModel):
    """Settings of `state: Asleep`."""

    drain_seconds: int = Field(default=300, ge=0, le=86400)
    """Seconds that running requests have to end when `state` becomes `Asleep`. Then they are aborted. 0: abort at once."""


def _rules_of_overlay() -> list[dict[str, str]]:
    """Return the rules on ``spec``: the overlay sets no value that another field sets."""
    labels = "self.podTemplate.metadata.labels"
    return [
        rule(
            f"!{overlay_sets(ENGINE_ENV)}",
            f"podTemplate must not set {' or '.join(ENGINE_ENV)} in the container engine: health checks and weight updates depend on them.",
            field=".podTemplate",
        ),
        rule(
            "!has(self.engine.serviceAccountAnnotations) || !has(self.podTemplate) || !has(self.podTemplate.spec)"
            " || !has(self.podTemplate.spec.serviceAccountName)",
            "engine.serviceAccountAnnotations annotate the ServiceAccount that the operator makes, but podTemplate.spec.serviceAccountName"
            " names another ServiceAccount: annotate that ServiceAccount yourself, or leave serviceAccountName out.",
            field=".podTemplate",
        ),
        rule(
            f"!self.model.offline || !{overlay_sets(OFFLINE_VARIABLES)}",
            f"model.offline sets {', '.join(OFFLINE_VARIABLES)}: leave them out of the container engine of podTemplate.",
            field=".podTemplate",
        ),
        rule(
            f"!has(self.scheduling.gang) || !has(self.podTemplate) || !has(self.podTemplate.metadata) || !has({labels})"
            f" || !('{POD_GROUP_LABEL}' in {labels})",
            f"scheduling.gang sets the label {POD_GROUP_LABEL} of the pods: leave it out of podTemplate.",
            field=".podTemplate",
        ),
    ]


class RolloutSpec(ApiModel):
    """Desired state of the fleet."""

    model_config = with_rules(
        rule(
            "!self.engine.eplb || (has(self.weights) && has(self.weights.verify) && self.weights.verify == 'Off')",
            "engine.eplb moves experts between ranks, so that engines with the same weights differ rank by rank: set"
            " weights.verify to Off.",
            field=".engine",
        ),
        rule(
            "self.state == 'Suspended' || oldSelf.state == 'Suspended' || self.replicas == 0 || oldSelf.replicas == 0"
            " || (has(self.scheduling.queueName) ? self.scheduling.queueName : '')"
            " == (has(oldSelf.scheduling.queueName) ? oldSelf.scheduling.queueName : '')",
            "scheduling.queueName can only change while no engine runs, because Kueue counts engines where they were admitted:"
            " set state to Suspended first.",
            field=".scheduling",
        ),
        rule(
            f"!self.model.offline || !has(self.engine.env) || !self.engine.env.exists(e, e.name in {list(OFFLINE_VARIABLES)})",
            f"model.offline sets {', '.join(OFFLINE_VARIABLES)}: leave them out of engine.env.",
            field=".engine",
        ),
        rule(
            "self.state != 'Asleep' || self.engine.memorySaver",
            "state Asleep needs engine.memorySaver: without it SGLang releases nothing. Set it to true (engines restart for that),"
            " or use Paused or Suspended.",
            field=".state",
        ),
        rule(
            "self.state != 'Asleep' || !self.engine.eplb",
            "state Asleep cannot be used with engine.eplb: it moves experts between ranks, and an engine that wakes serves only with"
            " the checksum that it fell asleep with. Use Suspended, or set eplb to false.",
            field=".state",
        ),
        rule(
            "!has(self.elastic) || self.replicas == 0 || self.elastic.base <= self.replicas",
            "elastic.base must not exceed replicas, unless replicas is 0: lower elastic.base first, or keep more engines.",
            field=".elastic",
        ),
        rule(
            "has(self.elastic) || !has(self.scheduling.gang) || self.scheduling.gang.scope != 'Base'",
            "scheduling.gang.scope Base needs elastic.base: set it to the number of engines that start together.",
            field=".scheduling",
        ),
        *_rules_of_overlay(),
        *rules_against_overlaid_variables(),
        *rules_of_fleet_ports(),
        *rules_of_modes(),
        *rules_of_transports(),
    )

    replicas: int = Field(default=1, ge=0, le=MAX_ENGINES)
    """Number of engines. `kubectl scale` sets it."""
    elastic: Elastic | None = None
    """A base of engines that the fleet needs; further engines are optional. Default: it needs all engines."""
    mode: Mode = Mode.STANDALONE
    """`Standalone`: the engines have their own GPUs and receive weights from a trainer. `Hybrid`: they share the trainer's GPUs, sleep
    until the trainer wakes them, and receive its weights at their own URLs. `Colocated`: they share the trainer's GPUs and keep the
    weights of `model.path` (docs/how-to/share-gpus.md). The mode cannot change."""
    sharing: Sharing | None = None
    """GPUs and nodes that engines share with the trainer, with `mode: Hybrid` or `Colocated`."""
    state: State = State.ACTIVE
    """`Active`: engines serve. `Paused`: no engine generates, but weight updates continue. `Asleep`: engines release their memory;
    needs `engine.memorySaver` (docs/how-to/pause-and-sleep.md). `Suspended`: no engine runs and no GPU is used; the object, its URL,
    run and committed version are kept. Engines that start afterwards hold the weights of `model.path`. If another version is committed,
    they wait for the next push, or catch up from `weights.catchUp.disk` or from the weight store."""
    sleep: Sleep = Sleep()
    """Settings of `state: Asleep`."""
    model: Model
    """The model that engines serve before the first weight update."""
    engine: Engine
    """The SGLang servers."""
    router: Router = Router()
    """The pod behind the fleet's URL."""
    weights: Weights = Weights()
    """Transfer of a trainer's weights to the engines."""
    scheduling: Scheduling = Scheduling()
    """Nodes of the engines."""
    security: Security = Security()
    """Callers of the fleet's URL, and what their requests may name."""
    pod_template: PodTemplate | None = None
    """Overlay over the engine pods for everything that has no field: volumes, annotations, further containers. It is merged like a
    strategic merge patch: maps by key; containers, volumes and environment by name. `null` removes a key."""

    @property
    def engines(self) -> int:
        """Number of engines that should run now."""
        return 0 if self.state is State.SUSPENDED else self.replicas

    @property
    def base(self) -> int:
        """Number of engines, from the first on, that the fleet needs."""
        return self.engines if self.elastic is None else min(self.elastic.base, self.engines)


GROUP = "rollout.sglang.io"
VERSION = "v1alpha1"
API_VERSION = f"{GROUP}/{VERSION}"
KIND = "SGLangRollout"
LIST_KIND = "SGLangRolloutList"
PLURAL = "sglangrollouts"
SINGULAR = "sglangrollout"
SHORT_NAME = "sglr"

MAX_NAME = 40
"""Longest name of an SGLangRollout: ``<name>-engine-<4 digits>`` and a StatefulSet's hash must fit a label (63)."""

PRINTER_COLUMNS: tuple[dict[str, Any], ...] = (
    {"name": "READY", "type": "string", "jsonPath": ".status.ready", "description": "Serving and wanted engines."},
    {
        "name": "UP-TO-DATE",
        "type": "integer",
        "jsonPath": ".status.updatedReplicas",
        "description": "Engines whose pods were created from the current spec.",
    },
    {
        "name": "VERSION",
        "type": "string",
        "jsonPath": ".status.weights.committedVersion",
        "description": "Weight version that the fleet serves.",
    },
    {"name": "STALE", "type": "integer", "jsonPath": ".status.weights.stale", "description": "Engines that are up without that version."},
    {"name": "STATE", "type": "string", "jsonPath": ".spec.state", "description": "Desired state of the fleet."},
    {
        "name": "STATUS",
        "type": "string",
        "jsonPath": '.status.conditions[?(@.type=="Ready")].reason',
        "description": "Reason of the condition Ready.",
    },
    {"name": "AGE", "type": "date", "jsonPath": ".metadata.creationTimestamp"},
    {"name": "BASE", "type": "integer", "jsonPath": ".status.base", "priority": 1},
    {"name": "RUN", "type": "integer", "jsonPath": ".status.weights.run", "priority": 1},
    {"name": "SKEW", "type": "integer", "jsonPath": ".status.weights.skew", "priority": 1},
    {"name": "EPOCH", "type": "integer", "jsonPath": ".status.weights.epoch", "priority": 1},
    {"name": "URL", "type": "string", "jsonPath": ".status.endpoints.url", "priority": 1},
)
"""Columns of ``kubectl get``; those of priority 1 only with ``-o wide``."""


class ObjectMeta(ApiModel):
    """The part of ``metadata`` that the operator uses."""

    name: str
    """Name of the object."""
    namespace: str = "default"
    """Namespace of the object."""
    uid: str = ""
    """Unique identity of the object."""
    generation: int = 0
    """Number that grows with every change of ``spec``."""


class SGLangRollout(ApiModel):
    """A fleet of SGLang engines for reinforcement learning, with one URL for generating and for pushing policy weights."""

    model_config = with_rules(
        rule(
            f"self.metadata.name.size() <= {MAX_NAME}",
            f"metadata.name must have at most {MAX_NAME} characters, because the names of engines are derived from it.",
        ),
        rule(
            "self.metadata.name.matches('^[a-z]([-a-z0-9]*[a-z0-9])?$')",
            "metadata.name must begin with a letter and consist of lower-case letters, digits and hyphens, because"
            " Services are named after it.",
        ),
    )

    api_version: str = API_VERSION
    """Always `rollout.sglang.io/v1alpha1`."""
    kind: str = KIND
    """Always `SGLangRollout`."""
    metadata: ObjectMeta
    """Name, namespace and the rest of every Kubernetes object's metadata."""
    spec: RolloutSpec
    """Desired state of the fleet."""
    status: RolloutStatus | None = Field(default=None)
    """Observed state of the fleet, written by the operator."""

    @property
    def name(self) -> str:
        """Name of the object."""
        return self.metadata.name

    @property
    def namespace(self) -> str:
        """Namespace of the object."""
        return self.metadata.namespace
