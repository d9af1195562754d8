"""The weight store of a rollout with transport Staged: a StatefulSet of one pod, its Service, and its PodDisruptionBudget. Pure.

The pod runs the operator's Python package with the image of the engines, because torch and NCCL must be those that the trainer's process
groups know from the engines. An init container copies the package from the operator's own image.
"""

from __future__ import annotations

from sglang_rollout.api.network_spec import NETWORK_VARIABLES
from sglang_rollout.api.pod_template import ENGINE_CONTAINER, STAGED_VOLUME
from sglang_rollout.api.v1alpha1 import SGLangRollout
from sglang_rollout.api.weights_spec import Staging, Store
from sglang_rollout.controller.render import common, names
from sglang_rollout.controller.render.common import Object, Settings, http_probe
from sglang_rollout.controller.render.engine_arguments import engine_variables
from sglang_rollout.controller.render.engines import engine_template
from sglang_rollout.controller.render.hashing import digest
from sglang_rollout.controller.render.placement import store_placement
from sglang_rollout.controller.render.resources import own_resources
from sglang_rollout.controller.render.staging import add_staged_bytes, staged_volume, staging_of
from sglang_rollout.controller.render.storage import volume_source
from sglang_rollout.wire.ports import METRICS_PORT, STAGING_PORT, STORE_HEALTH, STORE_PORT

GRACE_SECONDS = 10
"""The store has nothing to end in order: the agents have copies, and the trainer sends an unfinished version again."""

_COPIED_FIELDS = (
    *("serviceAccountName", "automountServiceAccountToken", "enableServiceLinks", "imagePullSecrets"),
    *("securityContext", "runtimeClassName", "dnsConfig"),
)
"""Fields of an engine's pod that the store copies, because it pulls and runs the same image."""
_COPIED_USER = ("runAsNonRoot", "runAsUser", "runAsGroup")
"""Fields of the security context of the engine's container that the store copies."""

_STATE_MOUNT: Object = {"name": "rollout-store", "mountPath": names.STORE_STATE_DIR}
_SNAPSHOTS_MOUNT: Object = {"name": "rollout-snapshots", "mountPath": names.SNAPSHOTS_DIR}
_PACKAGE_MOUNT: Object = {"name": "rollout-package", "mountPath": names.PACKAGE_DIR}

_COPY_PACKAGE = (
    "import shutil, sglang_rollout; "
    f"shutil.copytree(sglang_rollout.__path__[0], '{names.PACKAGE_DIR}/sglang_rollout', dirs_exist_ok=True,"
    " ignore=shutil.ignore_patterns('__pycache__'))"
)

_START = f'export PYTHONPATH="{names.PACKAGE_DIR}${{PYTHONPATH:+:$PYTHONPATH}}"; exec python3 -m sglang_rollout.cli "$@"'
"""Start of the store. The image may have folders of its own in the variable."""


def store_objects(rollout: SGLangRollout, settings: Settings, *, is_protected: bool = False) -> list[Object]:
    """Return the objects of the weight store; none with another transport.

    Args:
        rollout: The rollout.
        settings: Settings of the operator.
        is_protected: True if a drain must wait for the store's pod.
    """
    staging = staging_of(rollout)
    if staging is None:
        return []
    return [_service(rollout), _disruption_budget(rollout, is_protected=is_protected), _statefulset(rollout, settings, staging)]


def _service(rollout: SGLangRollout) -> Object:
    """Return the Service. It has an address of its own, because the address of the pod changes, and clients keep resolved addresses."""
    service = common.child(rollout, "v1", "Service", names.store_name(rollout.name), names.COMPONENT_STORE)
    ports = {"control": STORE_PORT, "data": STAGING_PORT}
    service["spec"] = {
        "type": "ClusterIP",
        "publishNotReadyAddresses": True,
        "selector": names.selector(rollout.name, names.COMPONENT_STORE),
        "ports": [{"name": name, "port": port, "targetPort": port, "protocol": "TCP"} for name, port in ports.items()],
    }
    return service


def _disruption_budget(rollout: SGLangRollout, *, is_protected: bool) -> Object:
    """Return the budget, which holds up the drain of a node only while the loss of the pod would fail an update or end a process group.

    A budget that always kept the one pod would hold up every drain until a person deletes the pod.
    """
    budget = common.child(rollout, "policy/v1", "PodDisruptionBudget", names.store_name(rollout.name), names.COMPONENT_STORE)
    budget["spec"] = {
        "minAvailable": 1 if is_protected else 0,
        "unhealthyPodEvictionPolicy": "AlwaysAllow",
        "selector": {"matchLabels": names.selector(rollout.name, names.COMPONENT_STORE)},
    }
    return budget


def _statefulset(rollout: SGLangRollout, settings: Settings, staging: Staging) -> Object:
    name = names.store_name(rollout.name)
    statefulset = common.child(rollout, "apps/v1", "StatefulSet", name, names.COMPONENT_STORE)
    spec = _pod_spec(rollout, settings, staging)
    statefulset["spec"] = {
        "replicas": 1,
        "serviceName": name,
        # The operator replaces the pod itself, while the store is not in use.
        "updateStrategy": {"type": "OnDelete"},
        "revisionHistoryLimit": 2,
        "selector": {"matchLabels": names.selector(rollout.name, names.COMPONENT_STORE)},
        "template": {
            "metadata": {"labels": {**names.labels(rollout.name, names.COMPONENT_STORE), names.LABEL_REVISION: digest(spec)}},
            "spec": spec,
        },
    }
    return statefulset


def _pod_spec(rollout: SGLangRollout, settings: Settings, staging: Staging) -> Object:
    engine, store = engine_template(rollout, settings, 0, "")["spec"], rollout.spec.weights.store or Store()
    return {
        **{key: engine[key] for key in _COPIED_FIELDS if key in engine},
        "terminationGracePeriodSeconds": GRACE_SECONDS,
        **store_placement(rollout),
        "initContainers": [_package(settings, store)],
        "containers": [{**_store(rollout, staging, store), "securityContext": _security_context(engine)}],
        "volumes": [
            staged_volume(staging),
            common.memory_volume(_STATE_MOUNT["name"]),
            {"name": _PACKAGE_MOUNT["name"], "emptyDir": {"sizeLimit": "64Mi"}},
            common.TMP_VOLUME,
            common.control_volume(names.credentials_name(rollout.name), names.store_name(rollout.name)),
            *_snapshot_volumes(store),
        ],
    }


def _package(settings: Settings, store: Store) -> Object:
    """Return the init container that copies the operator's Python package."""
    return {
        "name": "package",
        "image": settings.coordinator_image,
        "imagePullPolicy": settings.image_pull_policy,
        "command": ["python3", "-c", _COPY_PACKAGE],
        "resources": own_resources("package", store.resources),  # an init container adds nothing to what its pod requests
        "securityContext": common.restricted(),
        "terminationMessagePolicy": "FallbackToLogsOnError",
        "volumeMounts": [_PACKAGE_MOUNT],
    }


def _store(rollout: SGLangRollout, staging: Staging, store: Store) -> Object:
    name = names.store_name(rollout.name)
    return {
        "name": "store",
        "image": rollout.spec.engine.image,
        "command": ["/bin/sh", "-c", _START, "store"],
        "args": [
            "store",
            *("--name", name),
            *("--listen", f"[::]:{STORE_PORT}"),
            *("--data-listen", f"[::]:{STAGING_PORT}"),
            *("--metrics-listen", f"[::]:{METRICS_PORT}"),
            *("--volume", names.STAGED_DIR),
            *("--state-dir", names.STORE_STATE_DIR),
            *("--token-file", names.TOKEN_FILE),
            *_snapshot_arguments(rollout, store),
        ],
        "env": [common.HOME_ENV, {"name": "PYTHONUNBUFFERED", "value": "1"}, *_network_variables(rollout)],
        "ports": common.container_ports(control=STORE_PORT, data=STAGING_PORT, metrics=METRICS_PORT),
        "startupProbe": http_probe(STORE_HEALTH, STORE_PORT, periodSeconds=2, timeoutSeconds=3, failureThreshold=150),
        "readinessProbe": http_probe(STORE_HEALTH, STORE_PORT, periodSeconds=5, timeoutSeconds=3, failureThreshold=3),
        "livenessProbe": http_probe(STORE_HEALTH, STORE_PORT, periodSeconds=10, timeoutSeconds=5, failureThreshold=6),
        "resources": _resources(store, staging),
        "terminationMessagePolicy": "FallbackToLogsOnError",
        "volumeMounts": [
            {"name": STAGED_VOLUME, "mountPath": names.STAGED_DIR},
            _STATE_MOUNT,
            {**_PACKAGE_MOUNT, "readOnly": True},
            common.TMP_MOUNT,
            common.CONTROL_MOUNT,
            *([_SNAPSHOTS_MOUNT] if store.snapshots is not None else []),
        ],
    }


def _resources(store: Store, staging: Staging) -> Object:
    """Return the resources of the store. An extended resource must be a limit; Kubernetes copies it to the requests."""
    resources = add_staged_bytes(own_resources("store", store.resources), staging)
    if store.gpu is not None:
        resources["limits"] = {**resources["limits"], store.gpu.resource: "1"}
    return resources


def _snapshot_volumes(store: Store) -> list[Object]:
    """Return the volume of the snapshots; none if the store writes none."""
    if store.snapshots is None:
        return []
    volume = store.snapshots.volume
    return [{"name": _SNAPSHOTS_MOUNT["name"], **volume_source(volume.claim, volume.host_path, "DirectoryOrCreate")}]


def _snapshot_arguments(rollout: SGLangRollout, store: Store) -> list[str]:
    """Return the arguments about snapshots. Each rollout has a folder of its own, because volumes may be shared."""
    if store.snapshots is None:
        return []
    return [
        *("--snapshots", f"{names.SNAPSHOTS_DIR}/{rollout.namespace}/{rollout.name}"),
        *("--snapshots-every", str(store.snapshots.every)),
        *("--snapshots-keep", str(store.snapshots.keep_last)),
    ]


def _security_context(engine: Object) -> Object:
    """Return the security context of the store, with the user of the engine's container."""
    container: Object = next((one for one in engine["containers"] if one["name"] == ENGINE_CONTAINER), {})
    own = container.get("securityContext") or {}
    user = {field: own[field] for field in _COPIED_USER if field in own}
    return {**common.unprivileged(), "readOnlyRootFilesystem": True, **user}


def _network_variables(rollout: SGLangRollout) -> list[Object]:
    """Return the variables of ``engine.network``, because the store is a rank of the trainer's process group in place of the engines."""
    wanted = {variable for variables in NETWORK_VARIABLES.values() for variable in variables}
    return [variable for variable in engine_variables(rollout) if variable["name"] in wanted]
