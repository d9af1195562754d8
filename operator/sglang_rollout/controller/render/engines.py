"""One StatefulSet per engine.

Each engine has its own StatefulSet, so that any engine can be removed or rolled alone. A StatefulSet never runs two pods of
one name, so no rank of a process group ever has two owners. The containers of a pod:

    gate (native sidecar)    haproxy, the pod's only port; passes requests for tokens while the agent keeps it open
    agent (native sidecar)   knows which weights the engine holds; receives every control call
    engine                   sglang.launch_server on 127.0.0.1

An engine that is larger than a node has several such pods. The head pod serves, and the gates of the other pods stay closed.
Their agents (:mod:`sglang_rollout.agent.launch.rank_lifecycle`) start and end all ranks together.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from sglang_rollout.api.limits_spec import limits_options
from sglang_rollout.api.pod_template import AGENT_CONTAINER, ENGINE_CONTAINER, GATE_CONTAINER
from sglang_rollout.api.v1alpha1 import SGLangRollout
from sglang_rollout.controller.render import common, names, plugin, staging, tls
from sglang_rollout.controller.render.common import Object, Settings, http_probe
from sglang_rollout.controller.render.engine_arguments import agent_args, agent_environment, engine_environment, server_args, server_ranks
from sglang_rollout.controller.render.hashing import revisions
from sglang_rollout.controller.render.names import EnginePorts, engine_ports
from sglang_rollout.controller.render.overlay import merge
from sglang_rollout.controller.render.placement import CLAIM, keep_near, keep_off, pod_labels, pod_placement, queue_labels
from sglang_rollout.controller.render.preflight import preflight
from sglang_rollout.controller.render.resources import own_resources
from sglang_rollout.controller.render.start import DRAIN_SCRIPT, DRAIN_SECONDS, start_script
from sglang_rollout.controller.render.storage import downloads, mounts, volumes, with_hub_cache, with_shared_mounts
from sglang_rollout.wire.ports import AGENT_ENGINE, AGENT_HEALTH, GATE_HEALTH

WAIT_SECONDS = 24 * 3600
"""How long a pod may wait for the other pods of its engine, which may pull images for hours or wait for a node.

The agent of the head pod limits the start itself, because it knows when the start began.
"""
PROBE_SECONDS = 5
GRACE_SECONDS = DRAIN_SECONDS + 30
"""Time for the drain, and for SGLang's own exit, which checks every 5 s if the engine is idle."""
KILL_GRACE_SECONDS = 3
"""Grace after a failed liveness probe. An engine that the agent wants killed does not react to SIGTERM."""

RUN_MOUNT: Object = {"name": "run", "mountPath": names.RUN_DIR}
GATE_MOUNT: Object = {"name": "rollout-gate", "mountPath": names.GATE_DIR}
AGENT_MOUNT: Object = {"name": "rollout-agent", "mountPath": names.AGENT_STATE_DIR}


def engine_statefulsets(rollout: SGLangRollout, settings: Settings, avoided: Sequence[str] = ()) -> list[Object]:
    """Return the StatefulSets of all wanted engines. Their pods keep off the nodes ``avoided``."""
    statefulsets = [_statefulset(rollout, settings, index, current) for index, current in enumerate(revisions(rollout).values())]
    for statefulset in statefulsets:
        # After the user's overlay, because it adds to the overlay's affinity. Running pods do not change.
        keep_off(statefulset["spec"]["template"]["spec"], avoided)
    return statefulsets


def engine_template(rollout: SGLangRollout, settings: Settings, index: int, revision: str) -> Object:
    """Return the pod template of an engine: the operator's, with the user's overlay over it."""
    own, overlay = _pod_template(rollout, settings, index, revision), rollout.spec.pod_template
    if overlay is None:
        return with_hub_cache(with_shared_mounts(own), rollout)
    # exclude_unset, not exclude_none: a null that the user wrote removes a key.
    merged = merge(own, overlay.model_dump(mode="json", by_alias=True, exclude_unset=True))
    merged = merge(merged, {"metadata": {"labels": own["metadata"]["labels"]}})
    keep_near(merged["spec"], rollout, index)
    return with_hub_cache(with_shared_mounts(merged), rollout)


def _statefulset(rollout: SGLangRollout, settings: Settings, index: int, revision: str) -> Object:
    name = names.engine_name(rollout.name, index)
    statefulset = common.child(rollout, "apps/v1", "StatefulSet", name, names.COMPONENT_ENGINE, engine=name)
    statefulset["metadata"]["labels"] |= queue_labels(rollout)
    statefulset["spec"] = {
        "replicas": rollout.spec.engine.pods,
        "serviceName": names.engines_service(rollout.name),
        "podManagementPolicy": "Parallel",
        # The operator restarts engines itself: one at a time, and only while the other engines serve.
        "updateStrategy": {"type": "OnDelete"},
        "revisionHistoryLimit": 2,
        "selector": {"matchLabels": names.selector(rollout.name, names.COMPONENT_ENGINE, name)},
        "template": engine_template(rollout, settings, index, revision),
    }
    return statefulset


def _pod_template(rollout: SGLangRollout, settings: Settings, index: int, revision: str) -> Object:
    name, ports = names.engine_name(rollout.name, index), engine_ports(rollout, index)
    labels = names.labels(rollout.name, names.COMPONENT_ENGINE, name)
    return {
        "metadata": {
            "labels": {**labels, **pod_labels(rollout, index), names.LABEL_REVISION: revision},
            "annotations": {"kubectl.kubernetes.io/default-container": ENGINE_CONTAINER},
        },
        "spec": {
            "serviceAccountName": names.engine_account(rollout.name),
            "automountServiceAccountToken": False,
            "enableServiceLinks": False,
            "terminationGracePeriodSeconds": GRACE_SECONDS,
            "securityContext": {"seccompProfile": {"type": "RuntimeDefault"}},
            # In the node's network, cluster names resolve only with this policy.
            **({"hostNetwork": True, "dnsPolicy": "ClusterFirstWithHostNet"} if ports.on_node else {}),
            **pod_placement(rollout, index),
            "initContainers": [*downloads(rollout), _gate(rollout, settings, ports), _agent(rollout, settings, name, ports)],
            "containers": [_engine(rollout, name, ports)],
            "volumes": [
                *(common.memory_volume(mount["name"]) for mount in (RUN_MOUNT, GATE_MOUNT, AGENT_MOUNT)),
                *plugin.VOLUMES,
                {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": rollout.spec.engine.shm}},
                common.TMP_VOLUME,
                common.control_volume(names.credentials_name(rollout.name), name),
                *tls.agent_volumes(rollout),
                *volumes(rollout),
                *staging.pod_volumes(rollout),
            ],
        },
    }


def _gate(rollout: SGLangRollout, settings: Settings, ports: EnginePorts) -> Object:
    """Return the first sidecar. Its probes must not depend on the agent, which starts after they pass."""
    engine = rollout.spec.engine
    return common.own_container(
        GATE_CONTAINER,
        settings.router_image,
        settings,
        command=("proxy", "gate"),
        mounts=[GATE_MOUNT, common.TMP_MOUNT],
        restartPolicy="Always",
        args=[
            *("--listen", f"[::]:{ports.gate}"),
            *("--engine", f"127.0.0.1:{ports.engine}"),
            *("--agent", f"unix@{names.AGENT_SOCKET}"),
            *("--socket", names.GATE_SOCKET),
            *("--metrics-listen", f"[::]:{ports.metrics}"),
            *("--probes-listen", f"[::]:{ports.probes}"),
            *limits_options(engine.limits),
        ],
        ports=common.container_ports(on_node=ports.on_node, http=ports.gate),
        startupProbe=http_probe(GATE_HEALTH, ports.probes, periodSeconds=1, timeoutSeconds=3, failureThreshold=60),
        livenessProbe=http_probe(GATE_HEALTH, ports.probes, periodSeconds=10, timeoutSeconds=3, failureThreshold=3),
        resources=own_resources(GATE_CONTAINER, rollout.spec.engine.gate_resources),
    )


def _agent(rollout: SGLangRollout, settings: Settings, name: str, ports: EnginePorts) -> Object:
    """Return the second sidecar. Probes go through the gate, which alone reaches its socket."""
    return common.own_container(
        AGENT_CONTAINER,
        settings.coordinator_image,
        settings,
        command=("agent",),
        mounts=[
            *(RUN_MOUNT, GATE_MOUNT, AGENT_MOUNT, common.TMP_MOUNT, common.CONTROL_MOUNT, *tls.agent_mounts(rollout)),
            *plugin.AGENT_MOUNTS,
            *staging.agent_mounts(rollout),
        ],
        restartPolicy="Always",
        args=agent_args(rollout, name, ports),
        env=agent_environment(rollout),
        **staging.agent_ports(rollout),
        startupProbe=http_probe(AGENT_HEALTH, ports.probes, periodSeconds=1, timeoutSeconds=3, failureThreshold=120),
        livenessProbe=http_probe(AGENT_HEALTH, ports.probes, periodSeconds=10, timeoutSeconds=5, failureThreshold=6),
        resources=staging.add_staged_bytes(
            own_resources(AGENT_CONTAINER, rollout.spec.engine.agent_resources), staging.staging_of(rollout)
        ),
    )


def _engine(rollout: SGLangRollout, name: str, ports: EnginePorts) -> Object:
    engine, resources = rollout.spec.engine, _engine_resources(rollout)
    script = start_script(rollout, preflight(rollout, resources, ports))
    attempts = math.ceil((engine.start_seconds + (WAIT_SECONDS if engine.pods > 1 else 0)) / PROBE_SECONDS)
    return {
        "name": ENGINE_CONTAINER,
        "image": engine.image,
        "command": ["/bin/sh", "-c", script, ENGINE_CONTAINER],
        "args": ["python3", "-m", "sglang.launch_server", *server_args(rollout, server_ranks(rollout, name, ports), ports)],
        "env": engine_environment(rollout),
        "ports": _engine_ports(ports),
        "startupProbe": http_probe(AGENT_ENGINE, ports.probes, periodSeconds=PROBE_SECONDS, timeoutSeconds=3, failureThreshold=attempts),
        "readinessProbe": http_probe(AGENT_ENGINE, ports.probes, periodSeconds=PROBE_SECONDS, timeoutSeconds=3, failureThreshold=3),
        # Only the agent's file fails this probe, so an absent or confused agent never ends a healthy engine.
        "livenessProbe": {
            "exec": {"command": ["test", "!", "-e", names.KILL_FILE]},
            "periodSeconds": PROBE_SECONDS,
            "timeoutSeconds": 3,
            "failureThreshold": 1,
            "terminationGracePeriodSeconds": KILL_GRACE_SECONDS,
        },
        "lifecycle": {"preStop": {"exec": {"command": ["/bin/sh", "-c", DRAIN_SCRIPT]}}},
        "resources": resources,
        "securityContext": common.unprivileged(*(["IPC_LOCK"] if engine.rdma else [])),  # RDMA pins memory
        # The kubelet copies the last lines of a crashed engine's log into the pod's status, where the operator reads them.
        "terminationMessagePolicy": "FallbackToLogsOnError",
        "volumeMounts": [
            RUN_MOUNT,
            {"name": "shm", "mountPath": "/dev/shm"},  # noqa: S108 - the engine's own volume
            *mounts(rollout),
            *plugin.ENGINE_MOUNTS,
            *staging.engine_mounts(rollout),
        ],
    }


def _engine_ports(ports: EnginePorts) -> list[Object]:
    """Return the ports that this container names for the gate, which listens on the ports of metrics and probes.

    Older schedulers ignore host ports of sidecars, and many scrape configurations ignore init containers such as the gate.
    """
    own = {"engine": ports.engine} if ports.on_node else {}
    return common.container_ports(on_node=ports.on_node, **own, metrics=ports.metrics, probes=ports.probes)


def _engine_resources(rollout: SGLangRollout) -> Object:
    engine, sharing = rollout.spec.engine, rollout.spec.sharing
    resources = common.container_resources(engine.resources)
    # An extended resource must be a limit; Kubernetes copies it to the requests.
    devices = {engine.gpu_resource: str(engine.pod_gpus)} if engine.gpu_resource else {}
    if engine.rdma:
        devices[engine.rdma.resource] = str(engine.rdma.count)
    if devices:
        resources["limits"] = {**resources.get("limits", {}), **devices}
    if sharing is not None and sharing.resource_claim_name:
        resources["claims"] = [{"name": CLAIM}]
    return resources
