"""One StatefulSet per engine.

A StatefulSet of its own, although most have one pod: any engine can then be scaled away or rolled alone, and Kubernetes
never runs two pods of one name, so no rank of a weight-update group ever has two owners. The pod:

    gate (native sidecar)    haproxy, the pod's only port; lets generation pass while the agent says so
    agent (native sidecar)   knows which weights the engine holds; takes every control call
    engine                   sglang.launch_server on 127.0.0.1

An engine that is larger than a machine has several such pods. Pod 0 serves; the gates of the others stay closed, and their agents
(:mod:`sglang_rollout.agent.launch.rank_lifecycle`) see to it that all ranks start together and end together.
"""

from __future__ import annotations

from collections.abc import Sequence

from sglang_rollout.api.pod_template import AGENT_CONTAINER, ENGINE_CONTAINER, GATE_CONTAINER
from sglang_rollout.api.sharing_spec import Mode
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
    container_ports,
    container_resources,
    control_volume,
    http_probe,
    requests,
    restricted,
    tcp_probe,
)
from sglang_rollout.controller.render.engine_arguments import (
    WAIT_SECONDS,
    agent_env,
    agent_ranks,
    capabilities,
    engine_variables,
    rank_env,
    server_args,
    server_ranks,
)
from sglang_rollout.controller.render.hashing import revisions
from sglang_rollout.controller.render.names import EnginePorts, engine_ports
from sglang_rollout.controller.render.overlay import merge
from sglang_rollout.controller.render.placement import CLAIM, keep_near, keep_off, pod_labels, pod_placement, queue_labels
from sglang_rollout.controller.render.preflight import all_reduce, node_env, preflight
from sglang_rollout.controller.render.start import DRAIN_SCRIPT, DRAIN_SECONDS, start_script
from sglang_rollout.controller.render.storage import downloads, mounts, volumes, with_shared_mounts
from sglang_rollout.wire.ports import AGENT_ENGINE, AGENT_HEALTH, FRONT_PORT

START_SECONDS = 1800
"""How long an engine may take from its start until it is up: a large model comes over the network at first."""
PROBE_SECONDS = 5
GRACE_SECONDS = DRAIN_SECONDS + 30
"""The drain, and then SGLang's own exit, which looks every 5 s whether it is idle."""
KILL_GRACE_SECONDS = 3
"""A process that the agent wants killed does not react to SIGTERM."""

RUN_MOUNT: Object = {"name": "run", "mountPath": names.RUN_DIR}


def engine_statefulsets(rollout: SGLangRollout, settings: Settings, avoided: Sequence[str] = ()) -> list[Object]:
    """Return the StatefulSets of all wanted engines, with pods that are kept off the nodes ``avoided``."""
    made = [_statefulset(rollout, settings, index, current) for index, current in enumerate(revisions(rollout).values())]
    for statefulset in made:
        # Over the user's overlay, whose affinity it adds to. It changes no pod that runs: templates count when a pod is made.
        keep_off(statefulset["spec"]["template"]["spec"], avoided)
    return made


def engine_template(rollout: SGLangRollout, settings: Settings, index: int, current: str) -> Object:
    """Return how the pods of an engine are made: ours, and the user's overlay over it. ``current`` is the revision that they carry."""
    ours, overlay = _pod_template(rollout, settings, index, current), rollout.spec.pod_template
    if overlay is None:
        return with_shared_mounts(ours)
    # exclude_unset, not exclude_none: a null that the user wrote removes a key.
    made = merge(ours, overlay.model_dump(mode="json", by_alias=True, exclude_unset=True))
    made = merge(made, {"metadata": {"labels": ours["metadata"]["labels"]}})
    keep_near(made["spec"], rollout, index)
    return with_shared_mounts(made)


def _statefulset(rollout: SGLangRollout, settings: Settings, index: int, current: str) -> Object:
    name = names.engine_name(rollout.name, index)
    made = child(rollout, api_version="apps/v1", kind="StatefulSet", name=name, component=names.COMPONENT_ENGINE, engine=name)
    made["metadata"]["labels"] |= queue_labels(rollout)
    made["spec"] = {
        "replicas": rollout.spec.engine.pods,
        "serviceName": names.engines_service(rollout.name),
        "podManagementPolicy": "Parallel",
        # The operator decides when an engine restarts: one at a time, and only while the others serve.
        "updateStrategy": {"type": "OnDelete"},
        "revisionHistoryLimit": 2,
        "selector": {"matchLabels": names.selector(rollout.name, names.COMPONENT_ENGINE, name)},
        "template": engine_template(rollout, settings, index, current),
    }
    return made


def _pod_template(rollout: SGLangRollout, settings: Settings, index: int, current: str) -> Object:
    name, ports = names.engine_name(rollout.name, index), engine_ports(rollout, index)
    labels = names.labels(rollout.name, names.COMPONENT_ENGINE, name)
    return {
        "metadata": {
            "labels": {**labels, **pod_labels(rollout, index), names.LABEL_REVISION: current},
            "annotations": {"kubectl.kubernetes.io/default-container": ENGINE_CONTAINER},
        },
        "spec": {
            "serviceAccountName": names.engine_account(rollout.name),
            "automountServiceAccountToken": False,
            "enableServiceLinks": False,
            "terminationGracePeriodSeconds": GRACE_SECONDS,
            "securityContext": {"seccompProfile": {"type": "RuntimeDefault"}},
            **_network(ports),
            **pod_placement(rollout, index),
            "initContainers": [*downloads(rollout), _gate(settings, ports), _agent(rollout, settings, name, ports)],
            "containers": [_engine(rollout, name, ports)],
            "volumes": [
                {"name": "run", "emptyDir": {"medium": "Memory", "sizeLimit": "16Mi"}},
                {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": rollout.spec.engine.shm}},
                TMP_VOLUME,
                control_volume(rollout),
                *volumes(rollout),
            ],
        },
    }


def _network(ports: EnginePorts) -> Object:
    """The cluster's names are not known in the network of a node unless they are asked for."""
    return {"hostNetwork": True, "dnsPolicy": "ClusterFirstWithHostNet"} if ports.on_node else {}


def _gate(settings: Settings, ports: EnginePorts) -> Object:
    """The first of the sidecars, so its own probes must not depend on the agent, which starts when they pass."""
    return {
        "name": GATE_CONTAINER,
        "image": settings.router_image,
        "imagePullPolicy": settings.image_pull_policy,
        "restartPolicy": "Always",
        "command": [*INIT, "sglang-rollout", "proxy", "gate"],
        "args": [
            *("--listen", f"[::]:{ports.gate}"),
            *("--engine", f"127.0.0.1:{ports.engine}"),
            *("--agent", f"127.0.0.1:{ports.agent}"),
            *("--socket", names.GATE_SOCKET),
            *("--metrics-listen", f"[::]:{ports.metrics}"),
        ],
        "env": [HOME_ENV],
        "ports": container_ports(ports, http=ports.gate),
        "startupProbe": tcp_probe(ports.gate, periodSeconds=1, failureThreshold=60),
        "livenessProbe": tcp_probe(ports.gate, periodSeconds=10, timeoutSeconds=3, failureThreshold=3),
        "resources": requests("50m", "64Mi"),
        "securityContext": restricted(),
        "terminationMessagePolicy": "FallbackToLogsOnError",
        "volumeMounts": [RUN_MOUNT, TMP_MOUNT],
    }


def _agent(rollout: SGLangRollout, settings: Settings, name: str, ports: EnginePorts) -> Object:
    """Asked through the gate: the kubelet cannot reach 127.0.0.1 of a pod, and what is asked this way is what others
    reach too."""
    return {
        "name": AGENT_CONTAINER,
        "image": settings.coordinator_image,
        "imagePullPolicy": settings.image_pull_policy,
        "restartPolicy": "Always",
        "command": [*INIT, "sglang-rollout", "agent"],
        "args": [
            *("--name", name),
            *("--engine-url", f"http://127.0.0.1:{ports.engine}"),
            *("--listen", f"127.0.0.1:{ports.agent}"),
            *("--gate-socket", names.GATE_SOCKET),
            *("--state-dir", names.AGENT_STATE_DIR),
            *("--token-file", names.TOKEN_FILE),
            *("--boot-file", names.BOOT_FILE),
            *("--tensor-size", str(rollout.spec.engine.parallelism.tensor)),
            *("--model-path", rollout.spec.model.path),
            *agent_ranks(rollout, name, ports),
            *_fleet_url(rollout),
        ],
        "env": [HOME_ENV, *agent_env(rollout)],
        **({"ports": container_ports(ports, agent=ports.agent)} if ports.on_node else {}),
        "startupProbe": http_probe(AGENT_HEALTH, ports.gate, periodSeconds=1, timeoutSeconds=3, failureThreshold=120),
        "livenessProbe": http_probe(AGENT_HEALTH, ports.gate, periodSeconds=10, timeoutSeconds=5, failureThreshold=6),
        "resources": requests("100m", "128Mi"),
        "securityContext": restricted(),
        "terminationMessagePolicy": "FallbackToLogsOnError",
        "volumeMounts": [RUN_MOUNT, TMP_MOUNT, CONTROL_MOUNT],
    }


def _fleet_url(rollout: SGLangRollout) -> list[str]:
    """A trainer that shares the engines' GPUs calls each engine by itself; the agent hands such calls to the coordinator."""
    if rollout.spec.mode is Mode.STANDALONE:
        return []
    return ["--fleet-url", names.public_url(rollout.name, rollout.namespace, FRONT_PORT)]


def _engine(rollout: SGLangRollout, name: str, ports: EnginePorts) -> Object:
    spec, resources = rollout.spec.engine, _engine_resources(rollout)
    script = start_script(rollout, preflight(rollout, resources, ports) + all_reduce(rollout))
    start_seconds = START_SECONDS if spec.pods == 1 else WAIT_SECONDS
    return {
        "name": ENGINE_CONTAINER,
        "image": spec.image,
        "command": ["/bin/sh", "-c", script, ENGINE_CONTAINER],
        "args": ["python3", "-m", "sglang.launch_server", *server_args(rollout, server_ranks(rollout, name, ports), ports)],
        "env": _environment(rollout),
        "ports": _engine_ports(ports),
        "startupProbe": http_probe(
            AGENT_ENGINE,
            ports.gate,
            periodSeconds=PROBE_SECONDS,
            timeoutSeconds=3,
            failureThreshold=start_seconds // PROBE_SECONDS,
        ),
        "readinessProbe": http_probe(AGENT_ENGINE, ports.gate, periodSeconds=PROBE_SECONDS, timeoutSeconds=3, failureThreshold=3),
        # Only the agent's file kills: an absent or confused agent never ends a healthy engine.
        "livenessProbe": {
            "exec": {"command": ["test", "!", "-e", names.KILL_FILE]},
            "periodSeconds": PROBE_SECONDS,
            "timeoutSeconds": 3,
            "failureThreshold": 1,
            "terminationGracePeriodSeconds": KILL_GRACE_SECONDS,
        },
        "lifecycle": {"preStop": {"exec": {"command": ["/bin/sh", "-c", DRAIN_SCRIPT]}}},
        "resources": resources,
        "securityContext": {"allowPrivilegeEscalation": False, **capabilities(rollout)},
        # Puts the last lines of a crashed engine's log into the pod's status, where the operator reads them.
        "terminationMessagePolicy": "FallbackToLogsOnError",
        "volumeMounts": [RUN_MOUNT, {"name": "shm", "mountPath": "/dev/shm"}, *mounts(rollout)],  # noqa: S108 - the engine's own volume
    }


def _engine_ports(ports: EnginePorts) -> list[Object]:
    """Return the ports that are named here and not at the gate, which listens on the second.

    On a node older schedulers do not look at the ports of sidecars. Many scrape configurations do not look at init containers, of which
    the gate is one.
    """
    own = {"engine": ports.engine} if ports.on_node else {}
    return container_ports(ports, **own, metrics=ports.metrics)


def _environment(rollout: SGLangRollout) -> list[Object]:
    """Health checks that generate tokens would fail while the engine is paused, which every weight update does."""
    ours: list[Object] = [{"name": "SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION", "value": "false"}]
    theirs = [variable.model_dump(mode="json", by_alias=True, exclude_none=True) for variable in rollout.spec.engine.env]
    return [*ours, *rank_env(rollout), *node_env(rollout), *engine_variables(rollout), *theirs]


def _engine_resources(rollout: SGLangRollout) -> Object:
    spec = rollout.spec.engine
    made = container_resources(spec.resources)
    if spec.gpu_resource:
        gpus = str(spec.pod_gpus)
        # An extended resource must be asked for as a limit; the request follows from it.
        made["limits"] = {**made.get("limits", {}), spec.gpu_resource: gpus}
    sharing = rollout.spec.sharing
    if sharing is not None and sharing.resource_claim_name:
        made["claims"] = [{"name": CLAIM}]
    if spec.rdma:
        made["limits"] = {**made.get("limits", {}), spec.rdma.resource: str(spec.rdma.count)}
    return made
