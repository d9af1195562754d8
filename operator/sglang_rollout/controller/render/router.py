"""The router: one pod with the front (haproxy, the fleet's one URL), smg and the coordinator."""

from __future__ import annotations

from sglang_rollout.api.v1alpha1 import SGLangRollout
from sglang_rollout.controller.render import names
from sglang_rollout.controller.render.common import (
    CONTROL_MOUNT,
    HOME_ENV,
    INIT,
    TMP_MOUNT,
    TMP_VOLUME,
    Object,
    Settings,
    child,
    container_resources,
    control_volume,
    http_probe,
    requests,
    restricted,
)
from sglang_rollout.controller.render.hashing import digest
from sglang_rollout.controller.render.overlay import merge
from sglang_rollout.controller.render.placement import router_placement
from sglang_rollout.wire.ports import COORDINATOR_PORT, FLEET_HEALTH, FRONT_PORT, METRICS_PORT, SMG_METRICS_PORT, SMG_PORT

FRONT_HEALTH = "/front/health"
GRACE_SECONDS = 190
"""smg serves 5 s more after SIGTERM and then waits up to 180 s for requests that are running. An idle router is gone
after 5 s; the whole time is used only by requests that would be lost otherwise."""
ACCOUNT_DIR = "/var/run/secrets/kubernetes.io/serviceaccount"

SOFT_STOP_SCRIPT = "while kill -USR1 1 2>/dev/null; do sleep 1; done"
"""SIGTERM would make haproxy cut every connection at once. SIGUSR1 lets running requests end; the hook lasts as long as
they do. Again and again, because one that comes before haproxy is up is lost, and the pod would linger for its whole grace."""


def router_deployment(rollout: SGLangRollout, settings: Settings) -> Object:
    """Return the router's Deployment."""
    made = child(
        rollout,
        api_version="apps/v1",
        kind="Deployment",
        name=names.router_name(rollout.name),
        component=names.COMPONENT_ROUTER,
    )
    made["spec"] = {
        "replicas": 1,
        # Never two coordinators at once. Their terms would fence the older one, but there is no reason to try.
        "strategy": {"type": "Recreate"},
        "revisionHistoryLimit": 2,
        "selector": {"matchLabels": names.selector(rollout.name, names.COMPONENT_ROUTER)},
        "template": _pod_template(rollout, settings),
    }
    return made


def _pod_template(rollout: SGLangRollout, settings: Settings) -> Object:
    """Return the operator's pod template with the user's overlay over it."""
    metadata: Object = {"labels": names.labels(rollout.name, names.COMPONENT_ROUTER)}
    if annotations := rollout.spec.router.service_account_annotations:
        # Clouds inject credentials when a pod is made, so changed annotations need a new pod.
        metadata["annotations"] = {names.ANNOTATION_ACCOUNT: digest(annotations)}
    made: Object = {"metadata": metadata, "spec": _pod_spec(rollout, settings)}
    overlay = rollout.spec.router.pod_template
    if overlay is None:
        return made
    # exclude_unset, not exclude_none: a null that the user wrote removes a key.
    made = merge(made, overlay.model_dump(mode="json", by_alias=True, exclude_unset=True))
    return merge(made, {"metadata": metadata})


def _pod_spec(rollout: SGLangRollout, settings: Settings) -> Object:
    return {
        "serviceAccountName": names.router_name(rollout.name),
        # The account's token goes into the coordinator alone, by the volume below.
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "terminationGracePeriodSeconds": GRACE_SECONDS,
        "securityContext": {"runAsNonRoot": True, "seccompProfile": {"type": "RuntimeDefault"}},
        **router_placement(rollout),
        "containers": [_front(rollout, settings), _smg(rollout, settings), _coordinator(rollout, settings)],
        "volumes": [TMP_VOLUME, control_volume(rollout), _account_volume()],
    }


def _front(rollout: SGLangRollout, settings: Settings) -> Object:
    return {
        "name": "front",
        "image": settings.router_image,
        "imagePullPolicy": settings.image_pull_policy,
        "command": [*INIT, "sglang-rollout", "proxy", "front"],
        "args": [
            *("--listen", f"[::]:{FRONT_PORT}"),
            *("--smg", f"127.0.0.1:{SMG_PORT}"),
            *("--coordinator", f"127.0.0.1:{COORDINATOR_PORT}"),
            *("--metrics-listen", f"[::]:{METRICS_PORT}"),
            *("--smg-metrics", f"127.0.0.1:{SMG_METRICS_PORT}"),
            # The folder for temporary files is shared by the containers of this pod.
            *("--runtime-dir", "/tmp/front"),  # noqa: S108
        ],
        "env": [HOME_ENV],
        "ports": [
            {"name": "http", "containerPort": FRONT_PORT, "protocol": "TCP"},
            {"name": "metrics", "containerPort": METRICS_PORT, "protocol": "TCP"},
        ],
        "startupProbe": http_probe(FRONT_HEALTH, FRONT_PORT, periodSeconds=1, timeoutSeconds=3, failureThreshold=60),
        "readinessProbe": http_probe(FRONT_HEALTH, FRONT_PORT, periodSeconds=5, timeoutSeconds=3, failureThreshold=3),
        "livenessProbe": http_probe(FRONT_HEALTH, FRONT_PORT, periodSeconds=10, timeoutSeconds=5, failureThreshold=3),
        "lifecycle": {"preStop": {"exec": {"command": ["/bin/sh", "-c", SOFT_STOP_SCRIPT]}}},
        "resources": container_resources(rollout.spec.router.front_resources) or requests("100m", "128Mi"),
        "securityContext": restricted(),
        "terminationMessagePolicy": "FallbackToLogsOnError",
        "volumeMounts": [TMP_MOUNT],
    }


def _smg(rollout: SGLangRollout, settings: Settings) -> Object:
    """No probe: the kubelet cannot reach 127.0.0.1 of a pod. The front rides over a restart, the coordinator registers
    engines again."""
    spec = rollout.spec.router
    served = rollout.spec.model.served_name or rollout.spec.model.path
    return {
        "name": "smg",
        "image": settings.router_image,
        "imagePullPolicy": settings.image_pull_policy,
        "command": [*INIT, "sglang-rollout", "proxy", "smg"],
        "args": [
            *("--listen", f"127.0.0.1:{SMG_PORT}"),
            *("--metrics-listen", f"127.0.0.1:{SMG_METRICS_PORT}"),
            *("--policy", spec.policy.value),
            *("--served-name", served),
            *(("--", *spec.args) if spec.args else ()),
        ],
        "env": [HOME_ENV],
        "resources": container_resources(spec.resources) or requests("250m", "256Mi"),
        "securityContext": restricted(),
        "terminationMessagePolicy": "FallbackToLogsOnError",
        "volumeMounts": [TMP_MOUNT],
    }


def _coordinator(rollout: SGLangRollout, settings: Settings) -> Object:
    """Asked through the front, like everything in this pod that listens on 127.0.0.1."""
    return {
        "name": "coordinator",
        "image": settings.coordinator_image,
        "imagePullPolicy": settings.image_pull_policy,
        "command": [*INIT, "sglang-rollout", "coordinator"],
        "args": [
            *("--name", rollout.name),
            *("--namespace", rollout.namespace),
            *("--listen", f"127.0.0.1:{COORDINATOR_PORT}"),
            *("--smg-url", f"http://127.0.0.1:{SMG_PORT}"),
            *("--policy", rollout.spec.router.policy.value),
            *("--token-file", names.TOKEN_FILE),
            "--kubernetes",
            *("--public-url", names.public_url(rollout.name, rollout.namespace, FRONT_PORT)),
        ],
        "env": [HOME_ENV],
        "startupProbe": http_probe(FLEET_HEALTH, FRONT_PORT, periodSeconds=1, timeoutSeconds=3, failureThreshold=120),
        "readinessProbe": http_probe(FLEET_HEALTH, FRONT_PORT, periodSeconds=5, timeoutSeconds=3, failureThreshold=3),
        "livenessProbe": http_probe(FLEET_HEALTH, FRONT_PORT, periodSeconds=10, timeoutSeconds=5, failureThreshold=6),
        "resources": container_resources(rollout.spec.router.coordinator_resources) or requests("100m", "128Mi"),
        "securityContext": restricted(),
        "terminationMessagePolicy": "FallbackToLogsOnError",
        "volumeMounts": [
            TMP_MOUNT,
            CONTROL_MOUNT,
            {"name": "account", "mountPath": ACCOUNT_DIR, "readOnly": True},
        ],
    }


def _account_volume() -> Object:
    """What the kubelet would mount into every container of the pod."""
    namespace = {"path": "namespace", "fieldRef": {"apiVersion": "v1", "fieldPath": "metadata.namespace"}}
    return {
        "name": "account",
        "projected": {
            "defaultMode": 0o444,
            "sources": [
                {"serviceAccountToken": {"path": "token", "expirationSeconds": 3607}},
                {"configMap": {"name": "kube-root-ca.crt", "items": [{"key": "ca.crt", "path": "ca.crt"}]}},
                {"downwardAPI": {"items": [namespace]}},
            ],
        },
    }
