"""DaemonSet that downloads the model on nodes before engines need it there (``model.prefetch``).

Its pods run the download of an engine's pod, on the nodes that an engine may use. Then a container that only waits keeps each pod
running. So nodes that join later download the model, too, and the engine's image stays on its nodes.
"""

from __future__ import annotations

from sglang_rollout.api.pod_template import DOWNLOAD_CONTAINER
from sglang_rollout.api.v1alpha1 import SGLangRollout
from sglang_rollout.controller.render import names
from sglang_rollout.controller.render.common import Object, Settings, child, restricted
from sglang_rollout.controller.render.engines import engine_template
from sglang_rollout.controller.render.hashing import digest
from sglang_rollout.controller.render.resources import own_resources

_COPIED_FIELDS = (
    "serviceAccountName",
    "automountServiceAccountToken",
    "enableServiceLinks",
    "imagePullSecrets",
    "securityContext",
    "runtimeClassName",
    "hostNetwork",
    "dnsPolicy",
    "dnsConfig",
    "nodeSelector",
    "tolerations",
)
"""Fields of an engine's pod that the prefetch copies.

Not the priority, which would preempt other pods, and not fields about other pods: spreading, gangs, affinity to pods.
"""

_STAY = "trap 'exit 0' TERM; sleep infinity & wait"
"""The handler is necessary, because a container's first process otherwise ignores SIGTERM."""


def prefetch(rollout: SGLangRollout, settings: Settings) -> list[Object]:
    """Return the DaemonSet; none without ``model.prefetch``."""
    if not rollout.spec.model.prefetch:
        return []
    engine = engine_template(rollout, settings, 0, "")["spec"]
    containers = engine.get("initContainers") or []
    download = next((container for container in containers if container["name"] == DOWNLOAD_CONTAINER), None)
    if download is None:  # spec.podTemplate removed it
        return []
    name, component = names.prefetch_name(rollout.name), names.COMPONENT_PREFETCH
    daemonset = child(rollout, "apps/v1", "DaemonSet", name, component)
    spec = _pod_spec(engine, download)
    # Clouds inject credentials into new pods only, so changed annotations need new pods.
    annotations = rollout.spec.engine.service_account_annotations
    made_from = [spec, annotations] if annotations else spec
    daemonset["spec"] = {
        "selector": {"matchLabels": names.selector(rollout.name, component)},
        # These pods serve nothing, so all nodes download a changed model at once.
        "updateStrategy": {"type": "RollingUpdate", "rollingUpdate": {"maxUnavailable": "100%"}},
        "revisionHistoryLimit": 2,
        "template": {
            "metadata": {"labels": {**names.labels(rollout.name, component), names.LABEL_REVISION: digest(made_from)}},
            "spec": spec,
        },
    }
    return [daemonset]


def _pod_spec(engine: Object, download: Object) -> Object:
    mounted = {mount.get("name") for mount in download.get("volumeMounts") or []}
    nodes = (engine.get("affinity") or {}).get("nodeAffinity")
    return {
        **{key: engine[key] for key in _COPIED_FIELDS if key in engine},
        **({"affinity": {"nodeAffinity": nodes}} if nodes else {}),
        "initContainers": [download],
        "containers": [
            {
                "name": names.COMPONENT_PREFETCH,
                "image": download["image"],
                "command": ["/bin/sh", "-c", _STAY],
                "resources": own_resources(names.COMPONENT_PREFETCH),
                "securityContext": restricted(),
            }
        ],
        "volumes": [volume for volume in engine.get("volumes") or [] if volume["name"] in mounted],
    }
