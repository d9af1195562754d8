"""The router: one pod with the front (haproxy, the fleet's URL), smg, the coordinator and the batch server."""

from __future__ import annotations

from sglang_rollout.api.limits_spec import limits_options
from sglang_rollout.api.security_spec import GenerateAccess
from sglang_rollout.api.v1alpha1 import SGLangRollout
from sglang_rollout.controller.render import common, names, tls
from sglang_rollout.controller.render.common import Object, Settings, http_probe
from sglang_rollout.controller.render.hashing import digest
from sglang_rollout.controller.render.overlay import merge
from sglang_rollout.controller.render.placement import router_placement
from sglang_rollout.controller.render.resources import own_resources
from sglang_rollout.wire.ports import (
    BATCHES_HEALTH,
    BATCHES_PORT,
    COORDINATOR_PORT,
    FLEET_HEALTH,
    FRONT_HEALTH,
    FRONT_PORT,
    GENERATE_PORT,
    MEMORY_VARIABLE,
    METRICS_PORT,
    PROBES_PORT,
    SMG_METRICS_PORT,
    SMG_PORT,
    STAGING_PORT,
)

GRACE_SECONDS = 190
"""After SIGTERM the batch server runs until its batches have ended, for up to 180 s. Only then smg gets SIGTERM, and serves 5 s more.

An idle router ends after 6 s.
"""
ACCOUNT_DIR = "/var/run/secrets/kubernetes.io/serviceaccount"
TRAINER_TOKEN_DIR = "/etc/sglang-rollout/trainer-token"  # noqa: S105 - a folder
TRAINER_TOKEN_KEY = "token"  # noqa: S105 - a key

SOFT_STOP_SCRIPT = "while kill -USR1 1 2>/dev/null; do sleep 1; done"
"""preStop hook of the front: let running requests end.

At SIGTERM haproxy closes every connection at once; at SIGUSR1 it waits. The signal is repeated, because haproxy loses one that
comes before its start.
"""

WAIT_FOR_BATCHES_SCRIPT = f"while grep -Eq ': 0100007F:{BATCHES_PORT:04X} [0-9A-F:]+ (01|0A) ' /proc/net/tcp; do sleep 1; done"
"""preStop hook of smg: wait until the batch server has ended.

smg refuses new requests 5 s after SIGTERM, and prompts of a batch that are not sent yet would fail. While batches run, the batch server
has established connections (01); while it does not end, it listens (0A).
"""


def router_deployment(rollout: SGLangRollout, settings: Settings) -> Object:
    """Return the router's Deployment."""
    deployment = common.child(rollout, "apps/v1", "Deployment", names.router_name(rollout.name), names.COMPONENT_ROUTER)
    deployment["spec"] = {
        "replicas": 1,
        # Never two coordinators at once. Terms would fence the older one, but an overlap has no use.
        "strategy": {"type": "Recreate"},
        "revisionHistoryLimit": 2,
        "selector": {"matchLabels": names.selector(rollout.name, names.COMPONENT_ROUTER)},
        "template": _pod_template(rollout, settings),
    }
    return deployment


def _pod_template(rollout: SGLangRollout, settings: Settings) -> Object:
    """Return the operator's pod template with the user's overlay over it."""
    metadata: Object = {"labels": names.labels(rollout.name, names.COMPONENT_ROUTER)}
    if annotations := rollout.spec.router.service_account_annotations:
        # Clouds inject credentials into new pods only, so changed annotations need a new pod.
        metadata["annotations"] = {names.ANNOTATION_ACCOUNT: digest(annotations)}
    template: Object = {"metadata": metadata, "spec": _pod_spec(rollout, settings)}
    overlay = rollout.spec.router.pod_template
    if overlay is None:
        return template
    # exclude_unset, not exclude_none: a null that the user wrote removes a key.
    template = merge(template, overlay.model_dump(mode="json", by_alias=True, exclude_unset=True))
    return merge(template, {"metadata": metadata})


def _pod_spec(rollout: SGLangRollout, settings: Settings) -> Object:
    return {
        "serviceAccountName": names.router_name(rollout.name),
        # Only the coordinator gets the token, through a volume.
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "terminationGracePeriodSeconds": GRACE_SECONDS,
        "securityContext": {"runAsNonRoot": True, "seccompProfile": {"type": "RuntimeDefault"}},
        **router_placement(rollout),
        "containers": [_front(rollout, settings), _smg(rollout, settings), _coordinator(rollout, settings), _batches(rollout, settings)],
        "volumes": [
            *(
                common.TMP_VOLUME,
                common.memory_volume("rollout-coordinator"),
                common.control_volume(names.control_name(rollout.name)),
                _account_volume(),
            ),
            *_token_volumes(rollout),
            *tls.front_volumes(rollout),
        ],
    }


def _front(rollout: SGLangRollout, settings: Settings) -> Object:
    return common.own_container(
        "front",
        settings.router_image,
        settings,
        command=("proxy", "front"),
        mounts=[common.TMP_MOUNT, common.COORDINATOR_MOUNT, *tls.front_mounts(rollout)],
        args=[
            *("--listen", f"[::]:{FRONT_PORT}"),
            *("--smg", f"127.0.0.1:{SMG_PORT}"),
            *("--coordinator", f"unix@{names.COORDINATOR_SOCKET}"),
            *("--batches", f"127.0.0.1:{BATCHES_PORT}"),
            *("--generate-listen", f"[::]:{GENERATE_PORT}"),
            *("--metrics-listen", f"[::]:{METRICS_PORT}"),
            *("--probes-listen", f"[::]:{PROBES_PORT}"),
            *("--smg-metrics", f"127.0.0.1:{SMG_METRICS_PORT}"),
            *tls.front_arguments(rollout),
            *_store_arguments(rollout),
            *limits_options(rollout.spec.engine.limits),
            *_data_callers(rollout),
        ],
        ports=common.container_ports(http=FRONT_PORT, generate=GENERATE_PORT, metrics=METRICS_PORT, probes=PROBES_PORT),
        startupProbe=http_probe(FRONT_HEALTH, PROBES_PORT, periodSeconds=1, timeoutSeconds=3, failureThreshold=60),
        readinessProbe=http_probe(FRONT_HEALTH, PROBES_PORT, periodSeconds=5, timeoutSeconds=3, failureThreshold=3),
        livenessProbe=http_probe(FRONT_HEALTH, PROBES_PORT, periodSeconds=10, timeoutSeconds=5, failureThreshold=3),
        lifecycle={"preStop": {"exec": {"command": ["/bin/sh", "-c", SOFT_STOP_SCRIPT]}}},
        resources=own_resources("front", rollout.spec.router.front_resources),
    )


def _store_arguments(rollout: SGLangRollout) -> list[str]:
    """Return the address to which the front sends uploads of versions."""
    if not rollout.spec.weights.is_staged:
        return []
    return ["--store", f"{names.store_host(rollout.name, rollout.namespace)}:{STAGING_PORT}"]


def _smg(rollout: SGLangRollout, settings: Settings) -> Object:
    """Return the container of smg, without probes, because the kubelet cannot reach 127.0.0.1 of a pod.

    After a restart of smg the coordinator registers the engines again.
    """
    router, model = rollout.spec.router, rollout.spec.model
    return common.own_container(
        "smg",
        settings.router_image,
        settings,
        command=("proxy", "smg"),
        mounts=[common.TMP_MOUNT],
        args=[
            *("--listen", f"127.0.0.1:{SMG_PORT}"),
            *("--metrics-listen", f"127.0.0.1:{SMG_METRICS_PORT}"),
            *("--policy", router.policy.value),
            *("--served-name", model.served_name or model.path),
            *limits_options(rollout.spec.engine.limits),
            *(("--", *router.args) if router.args else ()),
        ],
        lifecycle={"preStop": {"exec": {"command": ["/bin/sh", "-c", WAIT_FOR_BATCHES_SCRIPT]}}},
        resources=own_resources("smg", router.resources),
    )


def _coordinator(rollout: SGLangRollout, settings: Settings) -> Object:
    """Return the container of the coordinator. Probes go through the front, which alone reaches its socket."""
    return common.own_container(
        "coordinator",
        settings.coordinator_image,
        settings,
        command=("coordinator",),
        mounts=[
            *(common.TMP_MOUNT, common.COORDINATOR_MOUNT, common.CONTROL_MOUNT),
            {"name": "account", "mountPath": ACCOUNT_DIR, "readOnly": True},
            *({"name": volume["name"], "mountPath": TRAINER_TOKEN_DIR, "readOnly": True} for volume in _token_volumes(rollout)),
        ],
        args=[
            *("--name", rollout.name),
            *("--namespace", rollout.namespace),
            *("--listen", f"unix@{names.COORDINATOR_SOCKET}"),
            *("--pod-listen", f"127.0.0.1:{COORDINATOR_PORT}"),
            *("--smg-url", f"http://127.0.0.1:{SMG_PORT}"),
            *("--batches-url", f"http://127.0.0.1:{BATCHES_PORT}"),
            *("--policy", rollout.spec.router.policy.value),
            *("--token-file", names.TOKEN_FILE),
            "--kubernetes",
            *("--public-url", names.public_url(rollout.name, rollout.namespace, tls=tls.is_encrypted(rollout))),
            *("--generate-url", names.generate_url(rollout.name, rollout.namespace, tls=tls.is_encrypted(rollout))),
            *(("--trainer-token-file", f"{TRAINER_TOKEN_DIR}/{TRAINER_TOKEN_KEY}") if _token_volumes(rollout) else ()),
        ],
        startupProbe=http_probe(FLEET_HEALTH, PROBES_PORT, periodSeconds=1, timeoutSeconds=3, failureThreshold=120),
        readinessProbe=http_probe(FLEET_HEALTH, PROBES_PORT, periodSeconds=5, timeoutSeconds=3, failureThreshold=3),
        livenessProbe=http_probe(FLEET_HEALTH, PROBES_PORT, periodSeconds=10, timeoutSeconds=5, failureThreshold=6),
        resources=own_resources("coordinator", rollout.spec.router.coordinator_resources),
    )


def _batches(rollout: SGLangRollout, settings: Settings) -> Object:
    """Return the container of the batch server. Its probe goes through the front, because it listens on 127.0.0.1.

    It has no credentials. A container of its own keeps a batch that takes all memory from ending the coordinator. It has no readiness
    probe, because requests with one prompt do not need it. Parsing large bodies may delay the answer to a liveness probe.
    """
    return common.own_container(
        "batches",
        settings.coordinator_image,
        settings,
        command=("batches",),
        mounts=[common.TMP_MOUNT],
        args=[
            *("--listen", f"127.0.0.1:{BATCHES_PORT}"),
            *("--smg-url", f"http://127.0.0.1:{SMG_PORT}"),
            *("--coordinator-url", f"http://127.0.0.1:{COORDINATOR_PORT}"),
            *limits_options(rollout.spec.engine.limits),
            *_data_callers(rollout),
        ],
        env=[common.HOME_ENV, {"name": MEMORY_VARIABLE, "valueFrom": {"resourceFieldRef": {"resource": "limits.memory"}}}],
        livenessProbe=http_probe(BATCHES_HEALTH, PROBES_PORT, periodSeconds=10, timeoutSeconds=5, failureThreshold=12),
        resources=own_resources("batches", rollout.spec.router.batches_resources),
    )


def _data_callers(rollout: SGLangRollout) -> tuple[str, ...]:
    """Return the argument of front and batch server for a fleet with restricted data paths."""
    return () if rollout.spec.security.generate is GenerateAccess.OPEN else ("--check-data-callers",)


def _token_volumes(rollout: SGLangRollout) -> list[Object]:
    """Return the volume with the token of trainers, if the spec names one. The router starts without the Secret, too."""
    token = rollout.spec.security.token
    if token is None or token.secret_name is None:
        return []
    items = [{"key": TRAINER_TOKEN_KEY, "path": TRAINER_TOKEN_KEY}]
    return [{"name": "trainer-token", "secret": {"secretName": token.secret_name, "items": items, "optional": True, "defaultMode": 0o444}}]


def _account_volume() -> Object:
    """Return the volume that the kubelet would otherwise mount into every container of the pod."""
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
